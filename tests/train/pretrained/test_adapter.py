"""`model.adapter`: trained in one and several processes, merged, and read by peft and transformers."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.contract.config import parse_config
from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.settings.stages import Model
from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from train.checkpoint.format import write_tensors
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.pretrained.adapter import add_adapter, merge_adapter
from train.pretrained.load import PretrainedModel, load_from_files
from train.process_group import ProcessGroup
from train.state import LazyTensors, Progress
from train.trainer import Trainer

from ..distributed import run_distributed, trainer
from .official import write_official
from .test_architectures import Labelling, ids

CPU = torch.device("cpu")
SINGLE = ProcessGroup(Rank(), CPU)
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft reads it


def classifier(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=0)
    model: nn.Module = AutoModelForSequenceClassification.from_config(config)
    return model


class Task(Labelling):
    outputs = ("logits",)


def fit(group: ProcessGroup, folder: Path, adapter: Model, **settings: Any) -> tuple[Trainer, Any, LazyTensors]:
    """Return the trainer, the function that builds its model, and the weights of the last checkpoint."""

    def make() -> nn.Module:
        return add_adapter(classifier(folder), adapter)

    def build() -> PretrainedModel:
        allow = ("score.*", "lm_head.weight")
        return load_from_files(make, open_pretrained(folder), allow, partial(seed_step, 0, -1, 0), adapter=True)

    made = trainer(group, Task(), build=build, epochs=3, batch_size=8, lr=0.2, optimizer="sgd", **settings)
    name = "-".join(map(str, (adapter.adapter, group.size, *settings.values())))
    store = CheckpointStore(folder / name, 1, {}, group)
    progress = made.fit(Progress(), store, None)
    return made, make, store.load(progress.step).tensors("weights.")


@pytest.fixture(scope="module", params=["qwen2", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("official") / request.param, request.param)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_reads_the_adapter_and_merges_it_to_the_same_bits(folder: Path, tmp_path: Path, kind: Any) -> None:
    settings = Model(pretrained=str(folder), adapter=kind, rank=2, alpha=4)
    made, make, weights = fit(SINGLE, folder, settings)
    trained = {name for name, parameter in made.strategy.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name or name == "score.weight" for name in trained)
    merged = merge_adapter(make, weights, settings, tmp_path, tmp_path)
    assert base_of(tmp_path) == (str(folder), None)

    base = classifier(folder)
    base.load_state_dict(_original(weights))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with_adapter: Any = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(with_adapter(ids()).logits, made.strategy.model.eval()(ids()).logits)
    expected = with_adapter.merge_and_unload(safe_merge=True).state_dict()
    assert expected.keys() == merged.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(merged[name], before[name]) for name in before if name != "score.weight")


def base_of(folder: Path) -> tuple[str | None, str | None]:
    config = PeftConfig.from_pretrained(str(folder))
    return config.base_model_name_or_path, config.revision


@pytest.mark.parametrize("revision", [None, "refs/pr/1"])
def test_an_adapter_names_the_revision_of_a_hub_id_as_peft_does(
    folder: Path, revision: str | None, tmp_path: Path
) -> None:
    settings = Model(pretrained="org/tiny" + f"@{revision}" * bool(revision), adapter="lora", rank=2)

    def make() -> nn.Module:
        return add_adapter(classifier(folder), settings)

    weights = make().state_dict()
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    merge_adapter(make, LazyTensors(shapes, weights.__getitem__), settings, tmp_path, tmp_path)
    assert base_of(tmp_path) == ("org/tiny", revision)


def test_weights_are_merged_and_written_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    settings = Model(pretrained="org/tiny", adapter="lora", rank=2)
    weights, most = add_adapter(classifier(folder), settings).state_dict(), 0
    frozen = weakref.WeakSet[Tensor]()

    def read(name: str) -> Tensor:
        nonlocal most
        tensor: Tensor = weights[name].clone()
        if ".base_layer." in name:
            frozen.add(tensor)
        most = max(most, len(frozen))
        return tensor

    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    merged = merge_adapter(
        lambda: add_adapter(classifier(folder), settings), LazyTensors(shapes, read), settings, tmp_path, tmp_path
    )
    write_tensors(tmp_path / "model.safetensors", merged, {})
    assert most == 1
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), dict(merged), rtol=0, atol=0)


def _original(weights: LazyTensors) -> dict[str, Tensor]:
    return {name.replace(".base_layer", ""): tensor for name, tensor in weights.items() if ".lora_" not in name}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_is_initialized_like_pefts(folder: Path, kind: Any) -> None:
    settings = Model(pretrained=str(folder), adapter=kind, rank=2)
    make = partial(AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(folder))
    initial = load_from_files(
        lambda: add_adapter(make(), settings), open_pretrained(folder), (), partial(seed_step, 0, -1, 0), adapter=True
    )
    assert initial.materializer is not None
    initial.materializer.materialize(initial.model, CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(initial.model.eval()(ids()).logits, plain(ids()).logits, rtol=1e-5, atol=1e-5)
    expected = add_adapter(AutoModelForCausalLM.from_pretrained(folder), settings).state_dict()
    actual = initial.model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items() if ".lora_A." not in name)
    spread = {name: float(tensor.std()) for name, tensor in expected.items() if ".lora_A." in name}
    assert all(0.3 * value < float(actual[name].std()) < 3 * value for name, value in spread.items())


def fit_in_several_ways(group: ProcessGroup, folders: dict[str, Path], ways: list[Any]) -> list[dict[str, Tensor]]:
    results: list[dict[str, Tensor]] = []
    for kind, family, settings in ways:
        adapter = Model(pretrained="x", adapter=kind, rank=2, targets=("q_proj", "v_proj", "o_proj"))
        if family == "deepseek_v3":
            adapter = Model(pretrained="x", adapter=kind, rank=2)
        _, make, weights = fit(group, folders[family], adapter, **settings)
        name = f"adapter-{group.rank.rank}-{len(results)}"
        results.append(dict(merge_adapter(make, weights, adapter, folders[family] / name, folders[family])))
    return results


WAYS = [("dora", "qwen2", {"strategy": "fsdp"}), ("lora", "qwen2", {"tensor_parallel": 2})]
OTHER_WAYS = [
    ("lora", "qwen2", {"strategy": "ddp"}),
    ("lora", "qwen2", {"strategy": "fsdp"}),
    ("lora", "qwen2", {"pipeline_parallel": 2, "accumulate": 4}),
    ("dora", "qwen2", {"pipeline_parallel": 2, "accumulate": 4}),
    ("lora", "deepseek_v3", {"expert_parallel": 2}),
    ("dora", "deepseek_v3", {"expert_parallel": 2}),
    ("lora", "deepseek_v3", {"expert_parallel": 2, "strategy": "fsdp"}),
    ("lora", "deepseek_v3", {"tensor_parallel": 2}),
]


@pytest.mark.long  # ../parallel/test_together.py has adapters in each way to split
@pytest.mark.parametrize("ways", [WAYS, OTHER_WAYS])
def test_two_processes_train_the_adapters_of_one(tmp_path: Path, ways: list[Any]) -> None:
    folders = {family: write_official(tmp_path / family, family) for family in ("qwen2", "deepseek_v3")}
    single = fit_in_several_ways(SINGLE, folders, [(kind, family, {}) for kind, family, _ in ways])
    results = run_distributed(fit_in_several_ways, 2, folders, ways, seconds=200)
    for way, expected, actual in zip(ways, single, results[0], strict=True):
        assert expected.keys() == actual.keys()
        start = AutoModelForCausalLM.from_pretrained(folders[way[1]]).state_dict()
        changes = [(expected[n] - start[n]).abs().max() for n in expected if "o_proj" in n and n.endswith("weight")]
        assert all(change > 1e-4 for change in changes), f"{way}: adapters change nothing"
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6, msg=f"{way}: {name}")


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (("q_proj", "v_prj"), "no layer v_prj"),
        (("gate_proj",), "experts"),
        (("embed_tokens",), "Embedding"),
        (("lm_head",), "tied embeddings"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(tmp_path: Path, targets: Any, problem: str) -> None:
    kind = "deepseek_v3" if "gate_proj" in targets else "qwen2"
    config = AutoConfig.from_pretrained(write_official(tmp_path / kind, kind))
    with pytest.raises(ConfigError, match=problem):
        add_adapter(AutoModelForCausalLM.from_config(config), Model(adapter="lora", targets=targets))


def test_models_without_a_transformer_or_with_own_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model of transformers"):
        add_adapter(nn.Linear(2, 2), Model(adapter="lora"))
    model = add_adapter(classifier(write_official(tmp_path / "qwen2", "qwen2")), Model(adapter="lora"))
    with pytest.raises(ConfigError, match="by itself"):
        add_adapter(model, Model(adapter="lora"))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": {"rank": 4}}, "rank has no effect without `adapter`"),
        ({"model": {"adapter": "dora"}, "train": {"tensor_parallel": 2}}, "norms need whole layers"),
        ({"export": {"adapter": "separate"}}, "no effect without model.adapter"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", **values}, source="test")
