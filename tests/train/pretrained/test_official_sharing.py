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
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.parallel.gradients import local
from train.pretrained.load import Beginning, from_files
from train.process_group import Group
from train.state import Progress
from train.trainer import Trainer

from ..together import together
from .official import write_official
from .test_architectures import Labelling, Labels, filled, ids
from .test_sharing import whole

pytestmark = pytest.mark.long
ALLOW = ("score.*", "lm_head.weight")


def fit(group: Group, folder: Path, words: dict[str, object]) -> tuple[dict[str, Tensor], int, int]:
    """The whole weights after two steps, the bytes this process asked the files for, and those it kept."""
    made: list[Beginning] = []

    def begin() -> Beginning:
        make = partial(Labels, folder)
        made.append(from_files(make, open_pretrained(folder), ALLOW, partial(seed_step, 0, -1, 0)))
        return made[0]

    given = {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu", **words}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": given}, source="test")
    task, group = Labelling(), Group(group.rank, group.device, config.train.tensor * config.train.pipeline)
    train, validation = (Samples(split, task.data(split)) for split in ("train", "validation"))
    trainer = Trainer(task, config, group, train, validation, 8, begin)  # type: ignore[arg-type]
    kept = sum(local(p).numel() * p.element_size() for p in trainer.strategy.model.parameters())
    trainer.fit(Progress(), CheckpointStore(folder / "checkpoints", 1, {}, group), None)
    weights = {name: whole(tensor) for name, tensor in trainer.strategy.model.state_dict().items()}
    return weights, made[0].filling.bytes_read, kept


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("deepseek_v3", {"parallel": "fsdp"}),
        ("llama", {"parallel": "fsdp"}),
        ("llama", {"tensor": 2}),
        ("qwen2", {"pipeline": 2, "accumulate": 4}),
    ],
)
def test_two_processes_train_what_one_does(tmp_path: Path, kind: str, words: dict[str, object]) -> None:
    folder = write_official(tmp_path / kind, kind)
    alone, asked, _ = fit(Group(Rank(), torch.device("cpu")), folder, {})
    found = together(fit, 2, folder, words, seconds=200)
    for weights, _, _ in found:
        mine = {name: tensor for name, tensor in weights.items() if not tensor.isnan().any()}
        torch.testing.assert_close(mine, {name: alone[name] for name in mine}, rtol=1e-3, atol=1e-4)
    assert alone.keys() == {name for weights, _, _ in found for name, t in weights.items() if not t.isnan().any()}
    if words == {"parallel": "fsdp"}:
        head = sum(tensor.numel() * 4 for name, tensor in alone.items() if name.startswith("score."))
        buffers = sum(tensor.numel() * 4 for name, tensor in alone.items() if name.endswith("correction_bias"))
        kept, read = sum(one[2] for one in found), sum(one[1] for one in found)
        assert kept - head == read - 2 * buffers == asked - buffers, "each asks for what it keeps"


def test_adapters_of_peft_are_put_around_weights_that_are_found_under_their_old_names(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = write_official(tmp_path / "qwen2", "qwen2")

    def make(folder: Path) -> nn.Module:
        words = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["score"], "lora_dropout": 0.1}
        found: nn.Module = get_peft_model(Labels(folder), LoraConfig(r=2, **words))
        return found

    adapted, plain = filled(make, folder, "*lora_*", "*score*"), filled(Labels, folder, "score.*")
    body = "base_model.model.body"
    with torch.no_grad():
        assert torch.equal(
            adapted.get_submodule(body)(ids()).last_hidden_state, plain.get_submodule("body")(ids()).last_hidden_state
        )
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert float(adapted.get_parameter(f"{body}.layers.0.self_attn.q_proj.lora_A.default.weight").detach().std()) > 0
