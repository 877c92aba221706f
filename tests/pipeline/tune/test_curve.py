from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.tune.curve import Curve


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def line(epoch: int, value: float | None) -> str:
    found = {"loss": 0.5} if value is None else {"loss": 0.5, "accuracy": value}
    return json.dumps({"step": 10 * epoch + 10, "epoch": epoch, "validation": found}) + "\n"


def test_each_epochs_value_is_read_once_as_the_file_grows(path: Path) -> None:
    curve = Curve("accuracy")
    assert list(curve.read(path)) == []
    path.write_text('{"step": 5, "epoch": 0, "loss": 1.0}\n' + line(0, 0.5))
    assert list(curve.read(path)) == [(1, 0.5)]
    assert list(curve.read(path)) == []
    with path.open("a") as file:
        file.write(line(1, 0.75) + line(2, 0.875)[:20])
    assert list(curve.read(path)) == [(2, 0.75)], "a half line is not there yet"
    with path.open("a") as file:
        file.write(line(2, 0.875)[20:])
    assert list(curve.read(path)) == [(3, 0.875)]


def test_a_file_that_a_resumed_training_wrote_anew_is_read_from_its_start(path: Path) -> None:
    curve = Curve("accuracy")
    path.write_text(line(0, 0.5) + line(1, 0.75))
    assert len(list(curve.read(path))) == 2
    anew = path.with_name("anew")
    anew.write_text(line(0, 0.5) + line(1, 0.75) + line(2, 0.875))
    os.replace(anew, path)
    assert list(curve.read(path)) == [(3, 0.875)]


def test_a_metric_that_is_not_there_is_no_number(path: Path) -> None:
    path.write_text(line(0, None))
    assert list(Curve("accuracy").read(path)) == [(1, None)]
