"""Runs beside each other: which parts of their keys differ, and what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.contract.override import OVERRIDDEN
from pipeline.contract.run import STEPS, Run, StepRecord


def differences(first: Run, second: Run) -> list[dict[str, str]]:
    """Named parts of the keys (settings, sources, versions, inputs) that differ, step by step."""
    return differing(first.read().steps, second.read().steps)


def differing(a: Mapping[str, StepRecord], b: Mapping[str, StepRecord]) -> list[dict[str, str]]:
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


def results(run: Run) -> dict[str, Any]:
    """One row of a comparison; what a run has not reached is None."""
    row: dict[str, Any] = {"run": run.id, "verdict": None, "bundle": None, "test": None}
    if (run.output("evaluate") / "verdict.json").exists():
        record = run.read().steps.get("evaluate")
        row["verdict"] = OVERRIDDEN if record and record.status == OVERRIDDEN else run.verdict()["verdict"]
    if (run.bundle_path / "manifest.json").exists():
        row["bundle"] = run.bundle().digest[:12]
    metrics = run.output("evaluate") / "metrics.json"
    found: dict[str, Any] = json.loads(metrics.read_text()) if metrics.exists() else {}
    row["test"] = str(found.get("test_fingerprint", ""))[:12] or None
    measured: dict[str, Any] = found.get("candidate", {})
    return row | measured | {"train_seconds": _worked(run)}


def unlike(rows: list[dict[str, Any]]) -> str:
    """Whose numbers must not be read against each other; empty where all were judged on the same samples."""
    tests: dict[str, list[str]] = {}
    for row in rows:
        if row["test"]:
            tests.setdefault(row["test"], []).append(row["run"])
    if len(tests) < 2:
        return ""
    told = "; ".join(f"{test}: {', '.join(runs)}" for test, runs in tests.items())
    return f"these runs were judged on different test data, so their numbers do not compare ({told})"


def aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column, in the order they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def outcome_digests(run: Run) -> dict[str, str]:
    """The digests that say whether two runs came to the same thing."""
    files = {"train": "model.safetensors", "evaluate": "verdict.json", "export": "bundle/model.onnx"}
    steps = run.read().steps
    return {
        f"{step}/{name}": steps[step].outputs[name]
        for step, name in files.items()
        if step in steps and name in steps[step].outputs
    }


def _worked(run: Run) -> float | None:
    """How long training took, in the run that did it."""
    record = run.read().steps.get("train")
    if record is not None and record.reused_from:
        origin = Run(run.runs / record.reused_from)
        record = origin.read().steps.get("train") if (origin.path / "run.json").is_file() else None
    return round(record.seconds, 1) if record is not None else None


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value[:12] if len(value) == 64 else value
