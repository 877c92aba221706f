"""`model.adapter: qlora`: frozen weights have 4 bits, and the adapter is merged into the dequantized ones."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.contract.config import parse_config
from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.settings.stages import Model
from pipeline.system.errors import ConfigError, ResourceError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.pretrained.adapter import add_adapter, merge_adapter
from train.pretrained.load import create_rounded, load_from_files, load_placeholder
from train.pretrained.qlora import FourBitLinear
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

from ..distributed import run_distributed, trainer
from .official import write_official
from .test_architectures import ids

CPU = torch.device("cpu")
SINGLE = ProcessGroup(Rank(), CPU)
SETTINGS = Model(pretrained="x", adapter="qlora", rank=4, alpha=8)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Words:
    """A task: the next token of random rows."""

    inputs = ("input_ids",)
    outputs = ("logits",)

    def data(self, split: str) -> dict[str, Any]:
        return {"input_ids": torch.cat([ids()] * 4).numpy()}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"size": outputs[:, 0, 0]}


def make(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return add_adapter(model, SETTINGS)


def read(folder: Path) -> Any:
    seed = partial(seed_step, 0, -1, 0)
    return load_from_files(partial(make, folder), open_pretrained(folder), (), seed, adapter=True)


def rounded_trainer(group: ProcessGroup, create_model: Any) -> Trainer:
    words: dict[str, Any] = {"epochs": 3, "batch_size": 4, "lr": 0.05, "checkpoint_every": 1, "keep_checkpoints": 99}
    return trainer(group, Words(), build=partial(create_rounded, create_model, group.device), **words)


def fit(group: ProcessGroup, folder: Path, output: Path) -> Trainer:
    made = rounded_trainer(group, partial(read, folder))
    made.fit(Progress(), CheckpointStore(output, 99, {}, group), None)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("official") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    output = tmp_path_factory.mktemp("whole")
    return fit(SINGLE, folder, output), output


def by_hand(folder: Path, adapters: dict[str, Tensor]) -> nn.Module:
    """Return the model as peft and bitsandbytes make it."""
    import bitsandbytes
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, layer in list(model.named_modules()):
        parent, _, own_name = name.rpartition(".")
        if own_name in targets:
            rounded = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None,
                compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            rounded.load_state_dict(layer.state_dict())
            setattr(model.get_submodule(parent), own_name, rounded.to("cpu"))
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=sorted(targets)), model)
    model.load_state_dict(adapters, strict=False)
    return model  # type: ignore[no-any-return]


def test_losses_are_those_of_peft_with_bitsandbytes(folder: Path) -> None:
    rounded, materializer = create_rounded(partial(read, folder), CPU)
    materializer.materialize(rounded, CPU)  # type: ignore[union-attr]
    adapters = {name: tensor.clone() for name, tensor in rounded.state_dict().items() if ".lora_" in name}
    assert adapters
    losses: list[list[float]] = []
    for model in (rounded, by_hand(folder, adapters)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        losses.append([])
        for _ in range(4):
            loss = Words().loss(model(ids()).logits, {"input_ids": ids()})
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_merged_weights_answer_as_the_trained_model(folder: Path, whole: tuple[Trainer, Path], tmp_path: Path) -> None:
    made, output = whole
    weights = CheckpointStore(output, 99, {}).load(made.total_steps).tensors("weights.")
    merged = merge_adapter(partial(make, folder), weights, SETTINGS, tmp_path, tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.load_state_dict(dict(merged))
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(ids()).logits, made.strategy.model.eval()(ids()).logits, rtol=1e-4, atol=1e-5
        )
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_frozen_layers_take_a_fifth_of_their_memory(whole: tuple[Trainer, Path]) -> None:
    layers = [module for module in whole[0].strategy.model.modules() if isinstance(module, FourBitLinear)]
    assert len(layers) == 14
    size = sum(tensor.nbytes for layer in layers for tensor in (layer.weight, layer.absmax))
    assert size < 0.2 * sum(4 * layer.in_features * layer.out_features for layer in layers)


def test_training_resumes_bit_for_bit_without_the_official_files(folder: Path, whole: tuple[Trainer, Path]) -> None:
    made, output = whole
    store = CheckpointStore(output, 99, {})
    resumed = rounded_trainer(SINGLE, partial(load_placeholder, partial(make, folder)))
    saved = store.load(2)
    resumed.restore(saved)
    resumed.fit(saved.progress, CheckpointStore(output / "resumed", 99, {}), None)
    expected, actual = made.strategy.model.state_dict(), resumed.strategy.model.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def fit_in_two(group: ProcessGroup, folder: Path, output: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fit(group, folder, output).strategy.model.state_dict().items()}


@pytest.mark.long
def test_two_processes_train_the_adapters_of_one(folder: Path, whole: tuple[Trainer, Path], tmp_path: Path) -> None:
    for state in run_distributed(fit_in_two, 2, folder, tmp_path):
        for name, tensor in whole[0].strategy.model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_missing_package_is_named_before_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ResourceError, match=r"pipe-road\[qlora\]"):
        make(folder)


@pytest.mark.parametrize("train", [{"strategy": "fsdp"}, {"tensor_parallel": 2}])
def test_strategies_that_split_weights_are_refused(train: dict[str, Any]) -> None:
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "model": {"adapter": "qlora"}, "train": train}
    with pytest.raises(ConfigError, match="qlora goes only with"):
        parse_config(values, source="test")
