"""Pretrained weights on several real processes: everybody reads what it keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.parallel.gradients import local
from train.parallel.pipeline_split import Lent
from train.pretrained.load import Beginning, from_files
from train.process_group import Group
from train.state import Progress
from train.trainer import Trainer

from ..together import Wave, together
from .folders import Tower, tower_state, write_folder


class Climb(Wave):
    def model(self) -> nn.Module:
        raise AssertionError("what is pretrained is not built by the task's model()")


class Begun(NamedTuple):
    """What one process found."""

    weights: dict[str, Tensor]  # whole, as at the beginning
    trained: dict[str, Tensor]  # after an epoch
    asked: int  # bytes of the files
    kept: int  # bytes of parameters in its memory


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel": "fsdp"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "accumulate": 4},
}


def begin_each(group: Group, folder: Path) -> dict[str, Begun]:
    return {way: begin(group, folder, words) for way, words in WAYS.items()}


def begin(group: Group, folder: Path, words: dict[str, Any]) -> Begun:
    made: list[Beginning] = []
    found = open_pretrained(folder)

    def beginning() -> Beginning:
        made.append(from_files(Tower, found, ("extra.*",), partial(seed_step, 0, -1, 0)))
        return made[0]

    trainer = make(group, words, beginning)
    weights = {name: whole(tensor) for name, tensor in trainer.strategy.model.state_dict().items()}
    kept = sum(local(p).numel() * p.element_size() for p in trainer.strategy.model.parameters())
    asked = made[0].filling.bytes_read
    trainer.fit(Progress(), CheckpointStore(folder / "-".join(["checkpoints", *words]), 1, {}, group), None)
    trained = {name: whole(tensor) for name, tensor in trainer.strategy.model.state_dict().items()}
    return Begun(weights, trained, asked, kept)


def make(group: Group, words: dict[str, Any], beginning: Any) -> Trainer:
    given = {"epochs": 1, "batch_size": 50, "lr": 0.02, "device": "cpu", **words}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": given}, source="test")
    model_size = config.train.tensor * config.train.pipeline
    group = Group(group.rank, group.device, model_size)
    train, validation = (Samples(split, Climb().data(split)) for split in ("train", "validation"))
    return Trainer(Climb(), config, group, train, validation, 50, beginning)  # type: ignore[arg-type]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "tower", tower_state(), shards=3)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Begun:
    """What one process makes of it."""
    return begin(Group(Rank(), CPU), folder, {})


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Begun]]:
    """What two processes make of it, one way after the other: to start them costs more than what they do."""
    return together(begin_each, 2, folder)


def parameter_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in Tower().parameters())


BUFFER_BYTES = 8 * 4
CPU = torch.device("cpu")


def test_under_fsdp_each_process_asks_the_files_for_its_own_share_and_no_more(ranks: list[dict[str, Begun]]) -> None:
    found = [one["fsdp"] for one in ranks]
    assert [one.asked - BUFFER_BYTES for one in found] == [one.kept for one in found]
    assert sum(one.kept for one in found) == parameter_bytes()


@pytest.mark.long
def test_cut_layers_and_shards_of_them_are_read_as_they_are_kept(folder: Path, alone: Begun) -> None:
    """Before the cut all is looked at once, a block at a time; after it the pieces of a piece."""
    found = together(begin, 4, folder, {"parallel": "fsdp", "tensor": 2})
    assert_begun(found, alone)
    assert max(one.kept for one in found) < parameter_bytes() / 2


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tensor"])
def test_it_begins_with_the_weights_of_the_files(ranks: list[dict[str, Begun]], alone: Begun, way: str) -> None:
    assert_begun([one[way] for one in ranks], alone)


def test_a_stage_keeps_its_own_layers(ranks: list[dict[str, Begun]], alone: Begun) -> None:
    """Of the other's stage, one has nothing but placeholders."""
    found = [one["pipeline"] for one in ranks]
    begun = [{name: t for name, t in one.weights.items() if not t.isnan().any()} for one in found]
    assert_equal({**begun[0], **begun[1]}, tower_state())
    assert begun[0].keys() & begun[1].keys() == {"shift"}
    for one, names in zip(found, begun, strict=True):
        mine, theirs = ({name: made.trained[name] for name in names} for made in (one, alone))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_look_at_the_whole_holds_a_block_at_a_time_and_its_graph_none(folder: Path) -> None:
    model, filling = from_files(Tower, open_pretrained(folder), (), lambda: None)
    layers, held = list(model.get_submodule("layers").children()), list[list[bool]]()
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda *_: held.append([not p.is_meta for other in layers for p in other.parameters()])
        )
    with Lent(filling, CPU).passing(model):
        answer, offset = model(torch.ones(2, 3)), model.get_parameter("offset")
        ours = torch.autograd.grad(answer.sum(), offset)
    assert [sum(now) for now in held] == [6, 6, 6, 6], "of 24 weights those of one block"
    assert all(p.is_meta for p in model.parameters())
    filling.fill(model, CPU)
    whole = model(torch.ones(2, 3))
    assert torch.equal(answer, whole)
    assert torch.equal(*ours, *torch.autograd.grad(whole.sum(), model.get_parameter("offset")))


def assert_begun(found: list[Begun], alone: Begun) -> None:
    for one in found:
        assert_equal(one.weights, tower_state())
        torch.testing.assert_close(one.trained, alone.trained, rtol=1e-4, atol=1e-5)


def assert_equal(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, wanted[name]), name
