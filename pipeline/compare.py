"""Compare runs: the parts of their keys that differ, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.contract.results import read_evaluation
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.system.errors import PipelineError


def differences(first: Run, second: Run) -> list[dict[str, str]]:
    """Return the parts of the keys (settings, sources, versions, inputs) that differ, step by step."""
    return record_differences(first.read().steps, second.read().steps)


def record_differences(a: Mapping[str, StepRecord], b: Mapping[str, StepRecord]) -> list[dict[str, str]]:
    rows = []
    for step in STEPS:
        before = a[step].parts if step in a else {}
        after = b[step].parts if step in b else {}
        rows += [
            {"step": step, "part": name, "before": _short(before.get(name)), "after": _short(after.get(name))}
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
    return rows


def result_row(run: Run) -> dict[str, Any]:
    """Return one row of a comparison; None for what a run does not have yet."""
    row: dict[str, Any] = {"run": run.id, "verdict": None, "bundle": None, "test": None}
    scores: Mapping[str, float] = {}
    try:
        if evaluation := read_evaluation(run):
            row |= {"verdict": evaluation.verdict, "test": evaluation.test_set[:12] or None}
            scores = evaluation.metrics
    except PipelineError:  # `pipe status` names the file
        row["verdict"] = "damaged"
    if (run.bundle_path / "manifest.json").exists():
        row["bundle"] = run.bundle().digest[:12]
    return row | dict(scores) | {"train_seconds": _train_seconds(run)}


def describe_different_tests(rows: list[dict[str, Any]]) -> str:
    """Return a warning where runs were evaluated on different test samples; empty where on the same."""
    tests: dict[str, list[str]] = {}
    for row in rows:
        if row["test"]:
            tests.setdefault(row["test"], []).append(row["run"])
    if len(tests) < 2:
        return ""
    groups = "; ".join(f"{test}: {', '.join(runs)}" for test, runs in tests.items())
    return f"these runs were evaluated on different test data, so their numbers cannot be compared ({groups})"


def align_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every row every column, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def result_digests(run: Run) -> dict[str, str]:
    """Return the digests that are equal for two runs with the same result."""
    files = {"train": "model.safetensors", "evaluate": "verdict.json", "export": "bundle/model.onnx"}
    steps = run.read().steps
    return {
        f"{step}/{name}": steps[step].outputs[name]
        for step, name in files.items()
        if step in steps and name in steps[step].outputs
    }


def _train_seconds(run: Run) -> float | None:
    """Return how long training took in the run that did it."""
    record = run.read().steps.get("train")
    if record is not None and record.reused_from:
        original_run = Run(run.runs / record.reused_from)
        record = None if original_run.problem else original_run.read().steps.get("train")
    return round(record.seconds, 1) if record is not None else None


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value[:12] if len(value) == 64 else value
