"""Real models of transformers on several processes, and with peft's adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.pretrained import open_pretrained
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.parallel.base import local_shard
from train.pretrained.load import PretrainedModel, load_from_files
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

from ..distributed import run_distributed
from .official import write_official
from .test_architectures import Labelling, Labels, ids, load
from .test_sharing import own_weights

pytestmark = pytest.mark.long
ALLOW = ("score.*", "lm_head.weight")


def fit(group: ProcessGroup, folder: Path, settings: dict[str, object]) -> tuple[dict[str, Tensor], int, int]:
    """Return this process's whole weights after two steps, the bytes read from files, and those of its parameters."""
    built: list[PretrainedModel] = []

    def build() -> PretrainedModel:
        make = partial(Labels, folder)
        built.append(load_from_files(make, open_pretrained(folder), ALLOW, partial(seed_step, 0, -1, 0)))
        return built[0]

    values = {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu", **settings}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": values}, source="test")
    model_size = config.train.tensor_parallel * config.train.pipeline_parallel
    task, group = Labelling(), ProcessGroup(group.rank, group.device, model_size)
    train, validation = (Samples(split, task.data(split)) for split in ("train", "validation"))
    trainer = Trainer(task, config, group, train, validation, 8, build)  # type: ignore[arg-type]
    kept = sum(local_shard(p).numel() * p.element_size() for p in trainer.strategy.model.parameters())
    trainer.fit(Progress(), CheckpointStore(folder / "checkpoints", 1, {}, group), None)
    return own_weights(trainer.strategy.model), built[0].materializer.bytes_read, kept


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deepseek_v3", {"strategy": "fsdp"}),
        ("llama", {"strategy": "fsdp"}),
        ("llama", {"tensor_parallel": 2}),
        ("qwen2", {"pipeline_parallel": 2, "accumulate": 4}),
    ],
)
def test_two_processes_train_the_weights_of_one(tmp_path: Path, kind: str, settings: dict[str, object]) -> None:
    folder = write_official(tmp_path / kind, kind)
    single, bytes_read, _ = fit(ProcessGroup(Rank(), torch.device("cpu")), folder, {})
    results = run_distributed(fit, 2, folder, settings, seconds=200)
    for weights, _, _ in results:
        torch.testing.assert_close(weights, {name: single[name] for name in weights}, rtol=1e-3, atol=1e-4)
    assert single.keys() == {name for weights, _, _ in results for name in weights}
    if settings == {"strategy": "fsdp"}:
        head = sum(tensor.numel() * 4 for name, tensor in single.items() if name.startswith("score."))
        buffers = sum(tensor.numel() * 4 for name, tensor in single.items() if name.endswith("correction_bias"))
        kept, read = sum(one[2] for one in results), sum(one[1] for one in results)
        assert kept - head == read - 2 * buffers == bytes_read - buffers, "each reads what it keeps"


def test_peft_adapters_load_weights_by_their_original_names(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = write_official(tmp_path / "qwen2", "qwen2")

    def make(folder: Path) -> nn.Module:
        settings = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["score"], "lora_dropout": 0.1}
        results: nn.Module = get_peft_model(Labels(folder), LoraConfig(r=2, **settings))
        return results

    adapted, plain = load(make, folder, "*lora_*", "*score*"), load(Labels, folder, "score.*")
    body = "base_model.model.body"
    with torch.no_grad():
        assert torch.equal(
            adapted.get_submodule(body)(ids()).last_hidden_state, plain.get_submodule("body")(ids()).last_hidden_state
        )
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert float(adapted.get_parameter(f"{body}.layers.0.self_attn.q_proj.lora_A.default.weight").detach().std()) > 0
