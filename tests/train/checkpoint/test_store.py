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

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, PipelineError, ResourceError, StageError
from pipeline.system.processes import Rank
from train.optim import Precision, make_optimizer
from train.parallel.base import Objective, Strategy
from train.process_group import ProcessGroup
from train.state import Progress

from .conftest import flip, names, save, state, store


def trained(optimizer_name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))  # has no gradient
    optimizer = make_optimizer(model, Train.model_validate({"optimizer": optimizer_name, "weight_decay": 0.1}))
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
    task: Any = None  # no loss is computed
    objective = Objective(task, Precision("fp16", torch.device("cpu")))
    return Strategy(model, objective, ProcessGroup(Rank(), torch.device("cpu")), Train())


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd", "muon"])
def test_training_resumes_bit_for_bit_from_a_checkpoint(tmp_path: Path, optimizer_name: str) -> None:
    model, optimizer = trained(optimizer_name)
    progress = Progress(3, 2, 0.1 + 0.2, {"loss": 0.1 + 0.2, "accuracy": 1 / 3}, 1)
    with store(tmp_path) as checkpoints:
        checkpoints.save(alone(model).state(optimizer, progress))
        step(model, optimizer)
    saved = store(tmp_path).load(3)
    assert (saved.progress, saved.scaler["scale"]) == (progress, 65536.0)

    other, other_optimizer = trained(optimizer_name, steps=0)
    alone(other).restore(other_optimizer, saved)
    step(other, other_optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_loss_scale_is_restored(tmp_path: Path) -> None:
    model, optimizer = trained("sgd")
    strategy, other = alone(model), alone(trained("sgd", steps=0)[0])
    scaler = strategy.objective.precision.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    with store(tmp_path) as checkpoints:
        checkpoints.save(strategy.state(optimizer, Progress(step=1)))
    other.restore(make_optimizer(other.model, Train(optimizer="sgd", weight_decay=0.1)), store(tmp_path).load(1))
    assert other.objective.precision.scaler.get_scale() == 32.0


def test_optimizer_that_never_stepped_is_saved(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", steps=0)
    with store(tmp_path) as checkpoints:
        checkpoints.save(alone(model).state(optimizer, Progress(step=1)))
    assert store(tmp_path).load(1).shapes("optimizer.") == {}


def test_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(
        StageError, match=r"step 10 does not fit the model: weights.it is \(3, 2\) in the model and \(2, 2\)"
    ):
        store(tmp_path).load(10).load({"weights.it": torch.zeros(3, 2)})


def test_nothing_is_found_if_nothing_was_saved(tmp_path: Path) -> None:
    assert store(tmp_path / "none").newest() is None


def test_incomplete_checkpoint_of_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / ".step-00000020.0a0b0c0d").mkdir()
    (tmp_path / ".step-00000020.0a0b0c0d" / "0.safetensors").write_bytes(b"half")
    assert store(tmp_path).steps() == [10]
    save(tmp_path, 30)
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


def test_checkpoint_is_written_while_training_continues(tmp_path: Path) -> None:
    order, may_continue = [], threading.Event()

    def hold() -> None:
        assert may_continue.wait(20)
        order.append("first is complete")

    with store(tmp_path) as checkpoints:
        checkpoints.save(state(10), hold)
        order.append("training goes on")
        assert checkpoints.steps() == []
        threading.Timer(0.05, may_continue.set).start()
        checkpoints.save(state(20))
        order.append("second is taken")
    assert order == ["training goes on", "first is complete", "second is taken"]
    assert checkpoints.steps() == [10, 20]


def test_before_callback_runs_when_all_files_are_written(tmp_path: Path) -> None:
    seen = []
    with store(tmp_path) as checkpoints:
        checkpoints.save(state(10), lambda: seen.extend(sorted(path.name for path in tmp_path.glob(".step*/*"))))
    assert seen == ["0.safetensors", "manifest.json"]


def test_failure_of_the_before_callback_is_raised_at_the_next_save(tmp_path: Path) -> None:
    def fail() -> NoReturn:
        raise ConfigError("no room for the ledger")

    checkpoints = store(tmp_path)
    checkpoints.save(state(10), fail)
    with pytest.raises(ConfigError, match="no room for the ledger"):
        checkpoints.save(state(20))
    assert names(tmp_path) == []


def test_error_of_training_takes_precedence_over_that_of_the_checkpoint(tmp_path: Path) -> None:
    def fail() -> NoReturn:
        raise ConfigError("no room for the ledger")

    checkpoints = store(tmp_path)
    checkpoints.save(state(10), fail)
    with pytest.raises(ValueError, match="the loss"), checkpoints:
        raise ValueError("the loss is not finite")


def test_state_with_other_shapes_is_saved_as_it_is(tmp_path: Path) -> None:
    with store(tmp_path, keep=3) as checkpoints:
        for number, tensors in enumerate(({"a": (2,)}, {"a": (2,), "b": (3,)}, {"a": (4,)}), start=1):
            held = {name: torch.full(shape, float(number)) for name, shape in tensors.items()}
            checkpoints.save(type(state(0))(Progress(number), held))
    saved = [store(tmp_path).load(number).tensors("") for number in (1, 2, 3)]
    assert [{name: tuple(tensor.shape) for name, tensor in one.items()} for one in saved] == [
        {"a": (2,)},
        {"a": (2,), "b": (3,)},
        {"a": (4,)},
    ]
    assert [float(one["a"][0]) for one in saved] == [1, 2, 3]


@pytest.mark.parametrize("change", [{"samples": 38}, {"batch_size": 4}, {"seed": 1}])
def test_checkpoint_of_another_batch_order_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    save(tmp_path, 10)
    assert store(tmp_path, **change).newest() is None
    assert "belongs to other data or another batch order" in capsys.readouterr().err


def test_newest_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    for number in range(10, 70, 10):
        save(tmp_path, number, best=20 if number >= 20 else 10)
    assert store(tmp_path).steps() == [20, 50, 60]


def test_checkpoint_that_a_kept_one_calls_best_is_kept(tmp_path: Path) -> None:
    for number, best in ((10, 10), (20, 10), (30, 30)):
        save(tmp_path, number, best)
    assert store(tmp_path).steps() == [10, 20, 30]


def test_damaged_later_checkpoint_does_not_displace_a_new_one(tmp_path: Path) -> None:
    for number in (10, 20):
        save(tmp_path, number)
    flip(tmp_path / "step-00000020" / "0.safetensors")
    save(tmp_path, 15, fill=1.0, keep=1)
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress.step == 15
    save(tmp_path, 20, fill=2.0, keep=1)
    assert torch.equal(store(tmp_path).load(20).tensors("weights.")["it"], torch.full((2, 2), 2.0))
    assert names(tmp_path) == ["step-00000020"]


def no_space(_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_names_host_and_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match=f"full on {os.uname().nodename} .*step 20; the last good one is step 10"):
        save(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010"]
    assert store(tmp_path).newest() is not None


def test_full_disk_at_the_first_checkpoint_has_no_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match="there is no earlier one"):
        save(tmp_path, 10)
    assert names(tmp_path) == []


def test_other_disk_error_is_not_called_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ResourceError, match="input/output error"):
        save(tmp_path, 10)
    assert names(tmp_path) == []


def test_unexpected_error_is_reported_with_its_type(tmp_path: Path) -> None:
    def fail() -> NoReturn:
        raise KeyError("ledger")

    checkpoints = store(tmp_path)
    checkpoints.save(state(10), fail)
    with pytest.raises(PipelineError, match=r"cannot write the checkpoint of step 10 .* KeyError: 'ledger'"):
        checkpoints.wait()
