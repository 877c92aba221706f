from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from pipeline.system.errors import ResourceError
from pipeline.system.processes import Rank
from pipeline.verify import describe_ledger
from train.batch_order import BatchOrder
from train.data import BatchLoader
from train.ledger import read_lines, verify_ledger
from train.metrics import MetricsLog, StepMeter, StepWindow, gpu_utilization, peak_memory_bytes
from train.optim import Precision
from train.parallel.base import Stopwatch, Strategy, Traffic
from train.process_group import ProcessGroup

from .conftest import Project, journal, weights


def write(directory: Path, resumed: int, steps: range) -> None:
    journal = MetricsLog(directory, resumed)
    for step in steps:
        journal.record(step, 0, {"loss": step + resumed / 10, "lr": 0.5})
    journal.close()


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def scalars(directory: Path, tag: str) -> list[tuple[int, Any]]:
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    return [(event.step, pytest.approx(event.value)) for event in board.Scalars(tag)]


def test_every_step_has_its_line_as_soon_as_it_is_done(tmp_path: Path) -> None:
    journal = MetricsLog(tmp_path, 0)
    journal.record(1, 0, {"loss": 2.0})
    assert lines(tmp_path) == [{"step": 1, "epoch": 0, "loss": 2.0}]
    journal.close()


def test_tensorboard_is_switched_off(tmp_path: Path) -> None:
    journal = MetricsLog(tmp_path, 0, tensorboard=False)
    journal.record(1, 0, {"loss": 1.0})
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_shows_training_and_validation_apart(tmp_path: Path) -> None:
    journal = MetricsLog(tmp_path, 0)
    journal.record(1, 0, {"loss": 2.0})
    journal.record(1, 0, {"validation": {"loss": 3.0, "accuracy": 0.5}})
    journal.close()
    assert scalars(tmp_path, "train/loss") == [(1, 2.0)]
    assert scalars(tmp_path, "validation/loss") == [(1, 3.0)]
    assert scalars(tmp_path, "validation/accuracy") == [(1, 0.5)]


def test_repeated_steps_keep_only_their_new_line(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 7))
    write(tmp_path, 3, range(4, 7))
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.3),
        (5, 5.3),
        (6, 6.3),
    ]


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "epo')
    write(tmp_path, 3, range(4, 5))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]


def test_training_from_the_start_discards_all_lines(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 2))
    assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_path_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    """A directory where a file belongs, and a file where a directory does."""
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).touch()
    with pytest.raises(ResourceError, match=rf"cannot write {tmp_path / name}: .*; to fix it: correct that, then"):
        MetricsLog(tmp_path, 0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_missing_permission_and_read_only_disk_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ResourceError, match=f"metrics.jsonl: {os.strerror(code).lower()}; to fix it"):
        MetricsLog(tmp_path, 0)


CPU = torch.device("cpu")
LOSS = 'return nn.functional.mse_loss(outputs, batch["target"])'
# The loss of one batch is finite, but not if multiplied by the loss scale.
STEEP = LOSS + ' * (1e36 if torch.is_grad_enabled() and (batch["index"] == 5).any() else 1.0)'


class Three(ProcessGroup):
    """The first of three processes; the others lost 1 and 2, waited half of the time, and hold more memory."""

    def total(self, values: Any) -> list[float]:
        broken, loss, exposed, *memory = values
        return [broken + 0, loss + 3, exposed + 1.0, memory[0], 1e6, 2e6]


def meter(traffic: Traffic, together: bool = False) -> StepMeter:
    strategy = SimpleNamespace(traffic=traffic, stopwatch=Stopwatch(CPU, traffic), collective_forward=together)
    feed = SimpleNamespace(waited_seconds=0.0)
    return StepMeter(
        cast("Strategy", strategy), cast("BatchLoader", feed), Precision("fp32", CPU), Three(Rank(0, 0, 3), CPU)
    )


def window(*losses: float) -> StepWindow:
    made = StepWindow()
    for loss in losses:
        made.add(torch.tensor(loss), torch.tensor(0.5), samples=10)
    return made


def test_a_line_covers_all_processes_since_the_last_line() -> None:
    traffic = Traffic(sent_bytes=1000, exposed_seconds=5.0)
    made = meter(traffic)
    traffic.sent_bytes += 300
    found = made.measure(window(1.0, 2.0, 3.0))
    assert not found.is_nonfinite
    assert found.values["loss"] == pytest.approx(9 / 30), "sums over slices of all processes, by samples"
    assert found.values["sent_bytes_per_step"] == 100
    assert found.values["communication_share"] == pytest.approx(1 / 3)
    assert found.values["memory_mb"] == 2e6
    made.restart()
    assert made.measure(window(1.0)).values["sent_bytes_per_step"] == 0


def test_unmeasured_values_are_not_reported() -> None:
    found = meter(Traffic()).measure(window(1.0)).values
    assert "communication_share" in meter(Traffic(exposed_seconds=1.0)).measure(window(1.0)).values
    assert "communication_share" not in meter(Traffic(exposed_seconds=1.0), together=True).measure(window(1.0)).values
    assert not {"communication_share", "gpu_utilization", "loss_scale", "overflow_steps"} & found.keys()


def test_memory_is_the_most_this_process_has_held() -> None:
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident < peak_memory_bytes(CPU) < psutil.virtual_memory().total
    assert gpu_utilization(CPU) is None


def test_fp16_overflow_of_one_process_is_reported_on_all(project: Project) -> None:
    project.replace(LOSS, STEEP)
    run = project.run(epochs=1, precision="fp16", log_every=1)
    done = project.train(run, processes=2)
    assert done.returncode == 0, done.stderr
    steep = next(step for step in range(5) if 5 in BatchOrder(37, 8, 0).batch(step))
    lines = [line for line in journal(run) if "loss" in line]
    counts = [0, *(line["overflow_steps"] for line in lines)]
    assert counts[steep + 1] == counts[steep] + 1
    assert all(line["loss_scale"] == 2.0**16 / 2 ** line["overflow_steps"] for line in lines)
    records = read_lines(run.partial("train") / "ledger.jsonl")
    assert [record.step for record in records if record.skipped] == [
        i for i in range(1, 6) if counts[i] > counts[i - 1]
    ]
    proof = verify_ledger(records, BatchOrder(37, 8, 0), 5)
    assert (proof.fault, proof.lost, proof.skipped_steps) == ("", 0, counts[-1])
    assert "that fp16 skipped after an overflow) in each" in describe_ledger(proof)
    summary = json.loads((run.partial("train") / "summary.json").read_text())
    assert (summary["overflow_steps"], summary["loss_scale"]) == (counts[-1], lines[-1]["loss_scale"])
    assert "memory_bytes" not in summary  # which is of GPUs
    assert 50e6 < summary["resident_bytes"] < psutil.virtual_memory().total  # torch alone needs more
    assert "skipped for overflow, loss scale" in done.stdout
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    board = EventAccumulator(str(run.partial("train") / "tensorboard"))
    board.Reload()
    measured = {"loss", "lr", "grad_norm", "samples_per_second", "communication_share", "memory_mb", "overflow_steps"}
    found = set(board.Tags()["scalars"])
    assert found >= {f"train/{name}" for name in measured} | {"validation/loss", "validation/closeness"}
    assert "train/total_steps" not in found
