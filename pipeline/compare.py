"""Runs beside each other: which parts of their keys differ, and what came out."""

from __future__ import annotations

import json
from typing import Any

from pipeline.spec.run import STEPS, Run


def differences(first: Run, second: Run) -> list[dict[str, str]]:
    """Named parts of the keys (settings, sources, versions, inputs) that differ, step by step."""
    a, b = first.read().steps, second.read().steps
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
    row: dict[str, Any] = {"run": run.id, "verdict": None, "bundle": None}
    if (run.output("evaluate") / "verdict.json").exists():
        row["verdict"] = run.verdict()["verdict"]
    if (run.bundle_path / "manifest.json").exists():
        row["bundle"] = run.bundle().digest[:12]
    metrics = run.output("evaluate") / "metrics.json"
    candidate = json.loads(metrics.read_text())["candidate"] if metrics.exists() else {}
    return row | candidate | {"train_seconds": _worked(run)}


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
