"""Contents of a run for trackers, read from its directory: params, curves, results, tags and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.config import flat_settings
from pipeline.contract.results import Facts, NewLines, curve_values, is_number
from pipeline.contract.run import Run, RunFile
from pipeline.history import COMMIT, WORKING_TREE
from pipeline.report.lineage import digest_chain
from pipeline.system.sources import code_digest

# The settings that decide the results; the others may name hosts, paths and secrets.
_PARAM_SECTIONS = ("name", "task", "codec", "model", "prepare", "train", "evaluate", "export")
_RESULT_FILES = (
    "prepare/checks.json",
    "train/summary.json",
    "evaluate/metrics.json",
    "evaluate/verdict.json",
    "export/parity.json",
    "export/variants.json",
)
_TRAINING_RESULTS = (
    *("steps", "seconds", "samples_per_second", "best_step", "world_size", "restarts"),
    *("memory_bytes", "resident_bytes"),  # of the largest process: on a GPU, and on a CPU
)
_BUNDLE = "export/bundle"
MODEL = f"{_BUNDLE}/model.onnx"
MAX_UPLOAD_BYTES = 100 << 20  # a larger model is linked

Ending = Literal["finished", "failed", "killed", "unfinished"]


@dataclass(frozen=True)
class Point:
    """One value of each of some curves, at an optimizer step."""

    step: int
    values: Mapping[str, float]


def read_params(run: Run) -> dict[str, str]:
    """Return every setting that decides the results, with its value, by its name, as in `train.lr`."""
    values = run.config.model_dump(mode="json")
    settings = flat_settings({name: values[name] for name in _PARAM_SECTIONS})
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings}


def training_key(body: RunFile) -> str:
    """Return what identifies the training of a run; empty where it has none of its own yet."""
    record = body.steps.get("train")
    return "" if record is None or record.reused_from else record.checkpoints_key or record.key


def read_points(lines: NewLines, run: Run, last: dict[str, int]) -> list[Point]:
    """Return the new points of the curves, and record the last step of each kind of line in `last`.

    A resumed training repeats steps; they give the same values and are dropped.
    """
    record = run.read().steps["train"]
    points = []
    for line in lines.read((run.output if record.complete else run.partial)("train") / "metrics.jsonl"):
        kind = "validation" if "validation" in line else "train"
        if line["step"] > last.get(kind, 0):
            last[kind] = line["step"]
            values = {name: value for name, value in curve_values(line).items() if is_number(value)}
            points.append(Point(line["step"], values))
    return points


def read_results(facts: Facts) -> dict[str, float]:
    """Return the numbers that a run ends with: of training, the test set, the gate and the export."""
    train = facts.step("train")
    results: dict[str, Any] = {}
    if train is not None and not train.reused_from:
        results |= {f"training/{name}": facts.summary.get(name) for name in _TRAINING_RESULTS}
    results |= _prefixed("best", facts.summary.get("best_validation"))
    results |= _prefixed("test", facts.metrics.get("candidate")) | _prefixed("baseline", facts.metrics.get("baseline"))
    results |= _prefixed("difference", facts.verdict.get("difference"))
    results["export/onnx_bytes"] = facts.parity.get("onnx_bytes")
    return {name: value for name, value in results.items() if is_number(value)}


def _prefixed(prefix: str, values: object) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in values.items()} if isinstance(values, Mapping) else {}


def read_tags(run: Run, root: Path, facts: Facts) -> dict[str, str]:
    """Return what a run is, how its steps went, its verdict and its lineage."""
    tags = {"run": run.id, "run_directory": str(run.path), "study": facts.file.study}
    tags["trial"] = "" if facts.file.trial is None else str(facts.file.trial)
    tags["settings_of_resume"] = " ".join(facts.file.continued)
    for name, record in facts.file.steps.items():
        reused = f", reused from {record.reused_from}" if record.reused_from else ""
        tags[f"step.{name}"] = record.current_status + reused
    tags |= {name: str(facts.summary.get(name, "")) for name in ("device", "precision")}
    tags |= {"verdict": facts.effective_verdict, "verdict.summary": str(facts.verdict.get("summary", ""))}
    digests = {artifact.name: " ≠ ".join(artifact.digests) for artifact in digest_chain(facts)}
    if not digests["code"]:
        digests["code"] = code_digest(root, run.config.task, run.config.codec)
    tags |= {f"digest.{name.lower().replace(' ', '_')}": digest for name, digest in digests.items()}
    tags["git.commit"] = facts.file.environment.get(COMMIT, "")
    tags["git.working_tree"] = facts.file.environment.get(WORKING_TREE, "")
    if (run.path / MODEL).is_file() and not is_uploaded(run.path / MODEL):
        tags["model.path"] = str(run.path / MODEL)
    return {name: value for name, value in tags.items() if value}


def is_uploaded(path: Path) -> bool:
    return path.stat().st_size <= MAX_UPLOAD_BYTES


def result_files(run: Run) -> dict[str, Path]:
    """Return the result files that exist, by their names at the tracker."""
    return {name: run.path / name for name in _RESULT_FILES if (run.path / name).is_file()}


def bundle_files(run: Run) -> dict[str, Path]:
    """Return the files of the bundle; its model may be too large to upload."""
    folder = run.path / _BUNDLE
    paths = (
        [path for path in sorted(folder.rglob("*")) if path.is_file()] if (folder / "manifest.json").is_file() else []
    )
    return {path.relative_to(run.path).as_posix(): path for path in paths}


def read_ending(body: RunFile) -> Ending:
    """Return how the run ended; `unfinished` where another command, such as a workflow's next pod, continues it."""
    statuses = {record.current_status for record in body.steps.values()}
    if "failed" in statuses:
        return "failed"
    if statuses & {"interrupted", "died", "pruned", "running"}:
        return "killed"
    records = [body.steps.get(name) for name in body.wanted]
    is_complete = all(record is not None and record.complete for record in records)
    return "finished" if is_complete or "rejected" in statuses else "unfinished"
