"""One process and its checkpoints."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError, PipelineError, ResourceError, StageError
from pipeline.contract.processes import Rank
from pipeline.contract.settings.stages import Train
from train.optim import Precision, make_optimizer
from train.parallel.base import Objective, Strategy
from train.process_group import Group
from train.state import Progress

from .conftest import flip, names, save, state, store


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


def alone(model: nn.Module) -> Strategy:
    task: Any = None  # no loss is asked for
    objective = Objective(task, Precision("fp16", torch.device("cpu")))
    return Strategy(model, objective, Group(Rank(), torch.device("cpu")), Train())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_goes_on_bit_for_bit_from_what_was_saved_though_it_went_on_meanwhile(
    tmp_path: Path, kind: str
) -> None:
    model, optimizer = trained(kind)
    progress = Progress(3, 2, 0.1 + 0.2, {"loss": 0.1 + 0.2, "accuracy": 1 / 3}, 1)
    with store(tmp_path) as opened:
        opened.save(alone(model).state(optimizer, progress))
        step(model, optimizer)
    found = store(tmp_path).load(3)
    assert (found.progress, found.scaler["scale"]) == (progress, 65536.0)

    other, other_optimizer = trained(kind, steps=0)
    alone(other).restore(other_optimizer, found)
    step(other, other_optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_an_optimizer_that_never_stepped_is_saved_too(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", steps=0)
    with store(tmp_path) as opened:
        opened.save(alone(model).state(optimizer, Progress(step=1)))
    assert store(tmp_path).load(1).shapes("optimizer.") == {}


def test_a_model_of_another_shape_is_told_what_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(StageError, match=r"step 10 does not fit: weights.it is \(3, 2\) here, and it holds \(2, 2\)"):
        store(tmp_path).load(10).load({"weights.it": torch.zeros(3, 2)})


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert store(tmp_path / "none").newest() is None


def test_what_a_killed_attempt_left_half_written_has_no_real_name_and_is_thrown_away(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / ".step-00000020.0a0b0c0d").mkdir()
    (tmp_path / ".step-00000020.0a0b0c0d" / "0.safetensors").write_bytes(b"half")
    assert store(tmp_path).steps() == [10]
    save(tmp_path, 30)
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    order, may_go_on = [], threading.Event()

    def hold() -> None:
        assert may_go_on.wait(20)
        order.append("first is complete")

    with store(tmp_path) as opened:
        opened.save(state(10), hold)
        order.append("training goes on")
        assert opened.steps() == []
        threading.Timer(0.05, may_go_on.set).start()
        opened.save(state(20))
        order.append("second is taken")
    assert order == ["training goes on", "first is complete", "second is taken"]
    assert opened.steps() == [10, 20]


def test_what_must_be_done_before_a_checkpoint_counts_is_done_when_all_of_it_is_written(tmp_path: Path) -> None:
    seen = []
    with store(tmp_path) as opened:
        opened.save(state(10), lambda: seen.extend(sorted(path.name for path in tmp_path.glob(".step*/*"))))
    assert seen == ["0.safetensors", "manifest.json"]


def test_when_that_fails_there_is_no_checkpoint_and_the_error_is_raised_at_the_next_one(tmp_path: Path) -> None:
    def refuse() -> NoReturn:
        raise ConfigError("no room for the ledger")

    opened = store(tmp_path)
    opened.save(state(10), refuse)
    with pytest.raises(ConfigError, match="no room for the ledger"):
        opened.save(state(20))
    assert names(tmp_path) == []


def test_an_error_of_training_is_not_hidden_by_one_of_its_last_checkpoint(tmp_path: Path) -> None:
    def refuse() -> NoReturn:
        raise ConfigError("no room for the ledger")

    opened = store(tmp_path)
    opened.save(state(10), refuse)
    with pytest.raises(ValueError, match="the loss"), opened:
        raise ValueError("the loss is not finite")


def test_a_state_that_looks_different_is_saved_as_it_is(tmp_path: Path) -> None:
    with store(tmp_path, keep=3) as opened:
        for number, tensors in enumerate(({"a": (2,)}, {"a": (2,), "b": (3,)}, {"a": (4,)}), start=1):
            held = {name: torch.full(shape, float(number)) for name, shape in tensors.items()}
            opened.save(type(state(0))(Progress(number), held))
    found = [store(tmp_path).load(number).whole("") for number in (1, 2, 3)]
    assert [{name: tuple(tensor.shape) for name, tensor in one.items()} for one in found] == [
        {"a": (2,)},
        {"a": (2,), "b": (3,)},
        {"a": (4,)},
    ]
    assert [float(one["a"][0]) for one in found] == [1, 2, 3]


@pytest.mark.parametrize("change", [{"samples": 38}, {"batch_size": 4}, {"seed": 1}])
def test_one_of_another_order_of_samples_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    save(tmp_path, 10)
    assert store(tmp_path, **change).newest() is None
    assert "belongs to other data or another batch order" in capsys.readouterr().err


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    for number in range(10, 70, 10):
        save(tmp_path, number, best=20 if number >= 20 else 10)
    assert store(tmp_path).steps() == [20, 50, 60]


def test_the_best_of_an_older_one_that_is_kept_is_kept_with_it(tmp_path: Path) -> None:
    for number, best in ((10, 10), (20, 10), (30, 30)):
        save(tmp_path, number, best)
    assert store(tmp_path).steps() == [10, 20, 30]


def test_a_damaged_later_one_does_not_drive_out_what_is_saved_now(tmp_path: Path) -> None:
    for number in (10, 20):
        save(tmp_path, number)
    flip(tmp_path / "step-00000020" / "0.safetensors")
    save(tmp_path, 15, fill=1.0, keep=1)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 15
    save(tmp_path, 20, fill=2.0, keep=1)
    assert torch.equal(store(tmp_path).load(20).whole("weights.")["it"], torch.full((2, 2), 2.0))
    assert names(tmp_path) == ["step-00000020"]


def no_space(_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_host_and_the_last_good_one_and_leaves_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match=f"full on {os.uname().nodename} .*step 20; the last good one is step 10"):
        save(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010"]
    assert store(tmp_path).newest() is not None


def test_a_full_disk_at_the_first_one_says_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match="there is no earlier one"):
        save(tmp_path, 10)
    assert names(tmp_path) == []


def test_another_failure_of_the_disk_is_not_called_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ResourceError, match="input/output error"):
        save(tmp_path, 10)
    assert names(tmp_path) == []


def test_a_bug_is_told_with_its_cause(tmp_path: Path) -> None:
    def stumble() -> NoReturn:
        raise KeyError("ledger")

    opened = store(tmp_path)
    opened.save(state(10), stumble)
    with pytest.raises(PipelineError, match=r"cannot write the checkpoint of step 10 .* KeyError: 'ledger'"):
        opened.wait()
