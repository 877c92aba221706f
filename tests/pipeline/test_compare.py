from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.compare import describe_different_tests, differences, result_digests, result_row
from pipeline.contract.run import Run, StepRecord
from pipeline.history import write_record
from pipeline.system.files import write_json

from .conftest import NewRun

LONG = "a" * 64


def trained(run: Run, parts: Mapping[str, str], seconds: float = 2.0) -> Run:
    outputs = {"model.safetensors": LONG, "metrics.jsonl": "b" * 64}
    record = StepRecord(step="train", status="done", key="k", parts=parts, outputs=outputs, seconds=seconds)
    write_record(run, record)
    return run


def test_differing_parts_are_reported_by_step(new_run: NewRun) -> None:
    first = trained(new_run(), {"config:train.lr": "0.1", "source:task.py": LONG, "version:torch": "2.13.0"})
    second = trained(new_run(), {"config:train.lr": "0.2", "source:task.py": LONG, "source:new.py": LONG})
    assert differences(first, second) == [
        {"step": "train", "part": "config:train.lr", "before": "0.1", "after": "0.2"},
        {"step": "train", "part": "source:new.py", "before": "absent", "after": "a" * 12},
        {"step": "train", "part": "version:torch", "before": "2.13.0", "after": "absent"},
    ]
    assert differences(first, first) == []


def test_row_has_verdict_and_metrics_if_the_run_has_them(new_run: NewRun) -> None:
    run = new_run()
    assert result_row(run) == {"run": run.id, "verdict": None, "bundle": None, "test": None, "train_seconds": None}
    assert result_digests(run) == {}
    trained(run, {})
    run.output("evaluate").mkdir()
    write_json(run.output("evaluate") / "verdict.json", {"verdict": "pass"})
    write_json(run.output("evaluate") / "metrics.json", {"candidate": {"accuracy": 0.98765}, "test_fingerprint": LONG})
    assert result_row(run) == {
        "run": run.id, "verdict": "pass", "bundle": None, "test": LONG[:12], "accuracy": 0.98765, "train_seconds": 2.0,
    }  # fmt: skip
    assert result_digests(run) == {"train/model.safetensors": LONG}


def test_runs_with_different_test_data_are_reported_as_not_comparable() -> None:
    rows: list[dict[str, Any]] = [
        {"run": "one", "test": "a"},
        {"run": "two", "test": None},
        {"run": "three", "test": "a"},
    ]
    assert describe_different_tests(rows) == ""
    assert "cannot be compared (a: one, three; b: four)" in describe_different_tests(
        [*rows, {"run": "four", "test": "b"}]
    )
