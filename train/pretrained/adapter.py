"""Adapters of `model.adapter`: LoRA, QLoRA and DoRA layers of peft in a task's transformer.

They are added to the model before it is split over processes. After training they are merged into its weights, so that
all later steps know only the task's own model; the adapter itself is kept as peft writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.contract.pretrained import hub_id
from pipeline.contract.settings.stages import Model
from pipeline.contract.task import transformers_model
from pipeline.system.errors import ConfigError, ResourceError
from pipeline.system.files import sync_tree
from train.pretrained.materialize import BuildModel, MetaModel
from train.pretrained.qlora import adapter_layers, require_bitsandbytes, whole_weights
from train.pretrained.source import Initialized, RowNorms, Source
from train.state import LazyTensors

ADAPTER_FOLDER = "adapter"  # in the folder of the train step
ADAPTER_WEIGHTS = "*.lora_*"
_HEADS = ("score", "classifier", "qa_outputs")  # new layers of transformers' models, which are trained as well
_EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_PREFIX = "base_model.model."  # of names in peft's files


def add_adapter(model: nn.Module, settings: Model) -> nn.Module:
    """Add the adapters of the settings to the transformer in a model, which freezes its weights, but for new heads."""
    if settings.adapter == "none":
        return model
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ResourceError(
            f"model.adapter={settings.adapter}: `peft` is not installed; to fix it: `pip install pipe-road[deepseek]`"
        ) from None
    if settings.adapter == "qlora":
        require_bitsandbytes()
    located = transformers_model(model)
    if located is None:
        raise ConfigError(
            f"model.adapter={settings.adapter}: the task's model contains no model of transformers; "
            "to fix it: add the adapters in the task, and leave model.adapter out"
        )
    transformer = located[1]
    if adapter_layers(model):
        raise ConfigError(
            f"model.adapter={settings.adapter}: the task adds adapters of peft by itself; "
            "to fix it: remove them from the task, or leave model.adapter out"
        )
    targets = list(settings.targets) or _linear_layers(transformer)
    _check_targets(transformer, settings.adapter, targets)
    use_dora = settings.adapter == "dora"
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, use_dora=use_dora)
    inject_adapter_in_model(config, transformer)
    for head in _heads(transformer):
        transformer.get_submodule(head).requires_grad_(True)
    return model


def _heads(transformer: nn.Module) -> list[str]:
    return [name for name, _ in transformer.named_children() if name in _HEADS]


def _linear_layers(transformer: Any) -> list[str]:
    """Return the names of the linear layers, without the head."""
    output, heads = transformer.get_output_embeddings(), _heads(transformer)
    names = {
        name.rpartition(".")[2]
        for name, module in transformer.named_modules()
        if _is_linear(module) and module is not output and name not in heads
    }
    return sorted(names - _EXPERT_LAYERS if _has_experts(transformer) else names)


def _check_targets(transformer: nn.Module, kind: str, targets: list[str]) -> None:
    """Refuse layers whose adapter cannot be merged; peft itself adapts some of them, and ignores unknown names."""
    if (experts := _EXPERT_LAYERS.intersection(targets)) and _has_experts(transformer):
        raise ConfigError(
            f"model.targets: {min(experts)} is in the experts, which have no adapters; to fix it: leave it out"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in transformer.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for target in targets:
        layers = {n: m for n, m in transformer.named_modules() if n == target or n.endswith(f".{target}")}
        if not layers:
            raise ConfigError(
                f"model.targets: the transformer has no layer {target}; linear layers: {_linear_layers(transformer)}"
            )
        for name, layer in layers.items():
            if not _is_linear(layer) or (kind != "lora" and not isinstance(layer, nn.Linear)):
                raise ConfigError(
                    f"model.targets: {name} is of type {type(layer).__name__}, but model.adapter={kind} is for linear "
                    "layers; to fix it: leave it out"
                )
            if len(names[id(layer.weight)]) > 1:
                raise ConfigError(
                    f"model.targets: {name} shares its weights with another layer (tied embeddings), so its adapter "
                    "cannot be merged; to fix it: leave it out"
                )


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _has_experts(transformer: nn.Module) -> bool:
    """Return whether experts of a mixture are in one tensor; peft then adapts that tensor under their names."""
    return any(".experts." in name and parameter.ndim > 2 for name, parameter in transformer.named_parameters())


def adapter_sources(
    model: nn.Module, missing: Iterable[str], sources: Mapping[str, Source], seed: Callable[[], None]
) -> dict[str, Source]:
    """Return initial values of adapters, whose layers have the values of `sources`, as peft initializes them."""
    initial: dict[str, Source] = {}
    seed()
    for name in missing:
        layer, _, own_name = name.rpartition(".lora_")
        if own_name.startswith("magnitude_vector."):
            initial[name] = RowNorms(sources[f"{layer}.base_layer.weight"])
        elif own_name.startswith(("A.", "B.")):
            values = torch.zeros(model.get_parameter(name).shape)
            if own_name.startswith("A."):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5))
            initial[name] = Initialized(values)
    return initial


@torch.no_grad()
def merge_adapter(build: BuildModel, weights: LazyTensors, settings: Model, folder: Path, root: Path) -> LazyTensors:
    """Write the adapter to a folder as peft does; return the weights of the task's model, merged as they are read."""
    model = MetaModel(build).model
    if settings.adapter == "qlora":
        weights = whole_weights(weights, model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: weights[name] for name in model.state_dict().keys() - frozen}
    model.load_state_dict(trained, strict=False, assign=True)
    located = transformers_model(model)
    assert located is not None
    _write_adapter(located[1], settings, folder, root)
    layers = dict(adapter_layers(model))
    for path, layer in layers.items():
        parent, _, own_name = path.rpartition(".")
        setattr(model.get_submodule(parent), own_name, layer.get_base_layer())

    def below_adapter(name: str) -> str:
        path, _, own_name = name.rpartition(".")
        return f"{path}.base_layer.{own_name}" if path in layers else name

    @torch.no_grad()
    def read(name: str) -> Tensor:
        tensor, layer = weights[below_adapter(name)], layers.get(name.removesuffix(".weight"))
        if layer is None:
            return tensor
        base = layer.get_base_layer()
        placeholder, base.weight = base.weight, nn.Parameter(tensor, requires_grad=False)
        layer.merge(safe_merge=True)
        merged: Tensor = base.weight.data
        base.weight = placeholder
        layer.merged_adapters.clear()
        return merged

    return LazyTensors({name: weights.shapes[below_adapter(name)] for name in model.state_dict()}, read)


def _write_adapter(transformer: Any, settings: Model, folder: Path, root: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which PeftModel.from_pretrained reads."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(transformer, save_embedding_layers=False)
    heads = _heads(transformer)
    state |= {name: value for name, value in transformer.state_dict().items() if name.partition(".")[0] in heads}
    tensors = {_PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # as `write_tensors` does
    config = transformer.peft_config["default"]
    config.inference_mode, config.modules_to_save = True, heads or None
    identifier, revision = hub_id(settings, root)
    config.base_model_name_or_path, config.revision = identifier or settings.pretrained or None, revision or None
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    config.task_type = "CAUSAL_LM" if type(transformer).__name__.endswith("ForCausalLM") else None
    config.save_pretrained(str(folder))
    sync_tree(folder)
