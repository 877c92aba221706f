from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from pipeline.spec.errors import ResourceError, StageError
from pipeline.spec.rank import Rank
from pipeline.spec.sections import Train
from train.checkpoint import CheckpointStore, Progress, State
from train.group import Group
from train.objective import Objective
from train.optimizer import make_optimizer
from train.precision import Precision
from train.strategy import Alone

IDENTITY = {"samples": 37, "batch_size": 8, "seed": 0}


def store(directory: Path, keep: int = 2, **identity: int) -> CheckpointStore:
    return CheckpointStore(directory, keep, {**IDENTITY, **identity})


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = make_optimizer(model, kind, weight_decay=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    loss: Tensor = model(torch.arange(12.0).reshape(4, 3)).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def alone(model: nn.Module) -> Alone:
    task: Any = None  # no loss is asked for
    objective = Objective(task, Precision("fp16", torch.device("cpu")))
    return Alone(model, objective, Group(Rank(), torch.device("cpu")), Train())


def state(step: int, best: int = 0, fill: float = 0.0) -> State:
    progress = Progress(step=step, best_step=best, best_loss=0.1 if best else None)
    optimizer = make_optimizer(nn.Linear(1, 1), "sgd", 0.0)
    return State(progress, {"weight": torch.full((2, 2), fill)}, optimizer.state_dict(), {})


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_goes_on_bit_for_bit_from_what_was_saved(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(kind)
    progress = Progress(3, 2, 0.1 + 0.2, {"loss": 0.1 + 0.2, "accuracy": 1 / 3}, 1)
    saved = alone(model).state(optimizer, progress)
    assert saved is not None
    store(tmp_path).save(saved)
    found = store(tmp_path).load(3)
    assert (found.progress, found.scaler["scale"]) == (progress, 65536.0)

    other, other_optimizer = trained(kind, steps=0)
    alone(other).restore(other_optimizer, found)
    for net, by in ((model, optimizer), (other, other_optimizer)):
        step(net, by)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_an_optimizer_that_never_stepped_is_saved_too(tmp_path: Path) -> None:
    _, optimizer = trained("adamw", steps=0)
    store(tmp_path).save(State(Progress(step=1), {"weight": torch.ones(1)}, optimizer.state_dict(), {}))
    assert store(tmp_path).load(1).optimizer["state"] == {}


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert store(tmp_path / "none").newest() is None


def test_a_half_written_one_has_no_real_name_and_is_written_over(tmp_path: Path) -> None:
    store(tmp_path).save(state(10))
    (tmp_path / ".step-00000020").mkdir()
    (tmp_path / ".step-00000020" / "state.safetensors").write_bytes(b"half")
    assert store(tmp_path).steps() == [10]
    store(tmp_path).save(state(20))
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("name", ["state.safetensors", "meta.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_one_is_passed_over_aloud_for_the_newest_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: str
) -> None:
    for number in (10, 20):
        store(tmp_path).save(state(number, fill=number))
    path = tmp_path / "step-00000020" / name
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:40])
    else:
        path.write_bytes(path.read_bytes().replace(b"}", b"]", 1))
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 10
    assert torch.equal(found.weights["weight"], torch.full((2, 2), 10.0))
    assert "warning: checkpoint step-00000020 is damaged" in capsys.readouterr().err


def test_one_flipped_bit_of_a_weight_is_damage(tmp_path: Path) -> None:
    store(tmp_path).save(state(10))
    flip(tmp_path / "step-00000010" / "state.safetensors")
    with pytest.raises(StageError, match="digest does not match"):
        store(tmp_path).load(10)


def test_one_whose_best_is_damaged_is_passed_over_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, best in ((5, 5), (10, 10), (20, 10)):
        store(tmp_path, keep=3).save(state(number, best))
    flip(tmp_path / "step-00000010" / "state.safetensors")
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 5
    assert "step-00000010 is damaged" in capsys.readouterr().err


def test_when_all_are_damaged_training_starts_anew(tmp_path: Path) -> None:
    store(tmp_path).save(state(10))
    flip(tmp_path / "step-00000010" / "state.safetensors")
    assert store(tmp_path).newest() is None


@pytest.mark.parametrize("change", [{"samples": 38}, {"batch_size": 4}, {"seed": 1}])
def test_one_of_another_order_of_samples_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    store(tmp_path).save(state(10))
    assert store(tmp_path, **change).newest() is None
    assert "belongs to other data or another batch order" in capsys.readouterr().err


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    for number in range(10, 70, 10):
        store(tmp_path).save(state(number, best=20 if number >= 20 else 10))
    assert store(tmp_path).steps() == [20, 50, 60]


def test_the_best_of_an_older_one_that_is_kept_is_kept_with_it(tmp_path: Path) -> None:
    for number, best in ((10, 10), (20, 10), (30, 30)):
        store(tmp_path).save(state(number, best))
    assert store(tmp_path).steps() == [10, 20, 30]


def test_a_damaged_later_one_does_not_drive_out_what_is_saved_now(tmp_path: Path) -> None:
    for number in (10, 20):
        store(tmp_path).save(state(number))
    flip(tmp_path / "step-00000020" / "state.safetensors")
    store(tmp_path, keep=1).save(state(15, fill=1.0))
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 15
    store(tmp_path, keep=1).save(state(20, fill=2.0))
    assert torch.equal(store(tmp_path).load(20).weights["weight"], torch.full((2, 2), 2.0))


def test_a_full_disk_names_the_last_good_one_and_leaves_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path).save(state(10))

    def no_space(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match="checkpoint of step 20; the last good one is step 10"):
        store(tmp_path).save(state(20))
    assert names(tmp_path) == ["step-00000010"]
    assert store(tmp_path).newest() is not None


def test_a_full_disk_at_the_first_one_says_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("train.checkpoint.save_weights", no_space)
    with pytest.raises(ResourceError, match="there is no earlier one"):
        store(tmp_path).save(state(10))
    assert names(tmp_path) == []


def test_another_failure_of_the_disk_is_not_called_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        store(tmp_path).save(state(10))
    assert names(tmp_path) == []


def test_the_meta_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    store(tmp_path).save(replace(state(10), scaler={"scale": 2.0}))
    meta = json.loads((tmp_path / "step-00000010" / "meta.json").read_text())
    assert (meta["progress"]["step"], meta["identity"], meta["scaler"]) == (10, IDENTITY, {"scale": 2.0})
