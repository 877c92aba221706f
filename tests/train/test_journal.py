from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from pipeline.spec.errors import ResourceError
from train.journal import Journal


def write(directory: Path, resumed: int, steps: range) -> None:
    journal = Journal(directory, resumed)
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
    journal = Journal(tmp_path, 0)
    journal.record(1, 0, {"loss": 2.0})
    assert lines(tmp_path) == [{"step": 1, "epoch": 0, "loss": 2.0}]
    journal.close()


def test_tensorboard_shows_training_and_validation_apart(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    journal.record(1, 0, {"loss": 2.0})
    journal.record(1, 0, {"validation": {"loss": 3.0, "accuracy": 0.5}})
    journal.close()
    assert scalars(tmp_path, "train/loss") == [(1, 2.0)]
    assert scalars(tmp_path, "validation/loss") == [(1, 3.0)]
    assert scalars(tmp_path, "validation/accuracy") == [(1, 0.5)]


def test_steps_that_are_done_again_have_one_line_each_and_it_is_the_new_one(tmp_path: Path) -> None:
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


def test_the_half_line_that_a_kill_left_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "epo')
    write(tmp_path, 3, range(4, 5))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]


def test_training_from_the_start_forgets_everything(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 2))
    assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    """A directory where a file belongs, and a file where a directory does."""
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).touch()
    with pytest.raises(ResourceError, match=rf"cannot write {tmp_path / name}: .*; mend that, then"):
        Journal(tmp_path, 0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_rights_and_read_only_disks_are_told_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ResourceError, match=f"metrics.jsonl: {os.strerror(code).lower()}; mend that"):
        Journal(tmp_path, 0)
