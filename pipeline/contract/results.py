"""Read the result files of a run, complete or not, for the report, the model card and lists of runs.

Every file and every key is optional: a run of an older version has fewer. A damaged file is named, not read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from pipeline.contract.bundle import NOT_EVALUATED, OVERRIDDEN, OVERRIDE_FILE
from pipeline.contract.run import STEPS, Run, RunFile, StepRecord
from pipeline.system.files import digest_file

Body = dict[str, Any]

VARIANTS, FORMATS = "variants.json", "formats.json"  # of the export step
NEAR_COPIES = "near_copies.json"  # of the prepare step: test samples that are copies, exact or near
WORST, FIGURES = "worst.json", "figures.json"  # of the evaluate step
# Of the evaluate step, if the baseline was a champion: who promoted it, and where its bundle was.
CHAMPION = "champion.json"


@dataclass(frozen=True)
class Facts:
    """The results of a run; an empty mapping or list means that the file does not exist yet."""

    file: RunFile
    summary: Body = field(default_factory=dict)  # train/summary.json
    steps: tuple[Body, ...] = ()  # train/metrics.jsonl, the lines of optimizer steps
    validations: tuple[Body, ...] = ()  # and those of validations
    batch_size: Body = field(default_factory=dict)  # train/batch_size.json, where `auto` chose
    communication: Body = field(default_factory=dict)  # train/communication.json, from a timeline
    timeline: str = ""  # where that is, below the run directory
    data: Body = field(default_factory=dict)
    checked: Body = field(default_factory=dict)  # prepare/checks.json
    profile: Body = field(default_factory=dict)  # prepare/profile.json
    metrics: Body = field(default_factory=dict)
    verdict: Body = field(default_factory=dict)
    worst: Body = field(default_factory=dict)
    figures: Body = field(default_factory=dict)  # of the predictions: curves and distributions
    champion: Body = field(default_factory=dict)
    override: Body = field(default_factory=dict)
    parity: Body = field(default_factory=dict)
    variants: tuple[Body, ...] = ()
    formats: tuple[Body, ...] = ()
    manifest: Body = field(default_factory=dict)
    image: Body = field(default_factory=dict)
    deploy: Body = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # of data.json, verdict.json and manifest.json as found
    signed: bool = False
    damaged: tuple[str, ...] = ()

    @property
    def classes(self) -> list[str]:
        """Return the classes in the task's order; per_class is sorted by name, with "10" before "2"."""
        classes = self.metrics.get("classes") or self.metrics.get("per_class")
        return [str(name) for name in classes] if isinstance(classes, list | dict) else []

    @property
    def candidate(self) -> Body:
        """Return the metrics of the candidate on the test set."""
        return mapping(self.metrics.get("candidate"))

    @property
    def baseline(self) -> Body:
        """Return the metrics of what it is compared with, if there is any."""
        return mapping(self.metrics.get("baseline"))

    @property
    def latency(self) -> Body:
        """Return the latency of the deployed service in milliseconds, by quantile."""
        return mapping(self.deploy.get("latency_ms"))

    @property
    def name(self) -> str:
        return str(self.file.config.get("name", self.file.id))

    @property
    def effective_verdict(self) -> str:
        """Return the verdict, or `overridden` if a person has overridden exactly this one."""
        verdict = str(self.verdict.get("verdict", ""))
        overridden_digest = self.override.get("verdict")
        return (
            OVERRIDDEN
            if verdict in ("fail", NOT_EVALUATED)
            and overridden_digest
            and overridden_digest == self.digests.get("verdict.json")
            else verdict
        )

    @property
    def pass_reason(self) -> str:
        """Return why a rejected candidate passed, if it did."""
        if self.effective_verdict == OVERRIDDEN:
            by, at, reason = (str(self.override.get(key) or "?") for key in ("by", "at", "reason"))
            return f"overridden by {by}, {at}: {reason}"
        return ""

    @property
    def accepted_changes(self) -> list[str]:
        """Return where training did not begin anew, and what a person accepted although something had changed."""
        start = self.file.starting_point
        return ([f"train: continues run {start}"] if start else []) + [
            f"{step}: {acceptance.changes}, accepted by {acceptance.by}, {acceptance.at}"
            for step, record in self.file.steps.items()
            for acceptance in record.accepted
        ]

    @property
    def slices(self) -> list[Body]:
        return mappings(self.verdict.get("slices"))

    @property
    def checks(self) -> list[Body]:
        """Return the checks of the data before training."""
        return mappings(self.checked.get("checks") or self.data.get("checks"))

    @property
    def calibration(self) -> Body:
        return mapping(self.verdict.get("calibration"))

    @cached_property
    def splits(self) -> dict[str, Body]:
        return {name: split for name, split in mapping(self.data.get("splits")).items() if isinstance(split, dict)}

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return one value of metrics.jsonl by optimizer step, where it was logged."""
        return [(line["step"], line[name]) for line in self.steps if is_number(line.get(name))]

    def step(self, name: str) -> StepRecord | None:
        return self.file.steps.get(name)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON, which has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> Body:
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Body]:
    """Return the mappings of a list; none of anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, Sequence) else []


@dataclass(frozen=True)
class Evaluation:
    verdict: str  # `overridden` if a person has overridden it
    metric: str  # that the gate compares
    metrics: Mapping[str, float]  # of the model on the test set
    test_set: str  # its fingerprint


def read_evaluation(run: Run) -> Evaluation | None:
    """Return the results of a complete evaluation, for lists of runs; raise where a file is damaged."""
    record = run.read().steps.get("evaluate")
    if not (run.output("evaluate") / "verdict.json").is_file():
        return None
    verdict, metrics = run.verdict(), run.evaluation("metrics.json", "candidate")
    return Evaluation(
        OVERRIDDEN if record is not None and record.status == OVERRIDDEN else str(verdict["verdict"]),
        str(verdict.get("metric", "")),
        metrics["candidate"],
        str(metrics.get("test_fingerprint", "")),
    )


def read_facts(run: Run) -> Facts:
    reader = _Reader(run)
    journal = reader.lines("train", "metrics.jsonl")
    return Facts(
        file=run.read(),
        summary=reader.json("train", "summary.json"),
        steps=tuple(line for line in journal if "loss" in line),
        validations=tuple(line for line in journal if isinstance(line.get("validation"), dict)),
        batch_size=reader.json("train", "batch_size.json"),
        communication=reader.json("train", "communication.json"),
        timeline=reader.relative_path("train", "trace.json.gz"),
        data=reader.json("prepare", "data.json"),
        checked=reader.json("prepare", "checks.json"),
        profile=reader.json("prepare", "profile.json"),
        metrics=reader.json("evaluate", "metrics.json"),
        verdict=reader.json("evaluate", "verdict.json"),
        worst=reader.json("evaluate", WORST),
        figures=reader.json("evaluate", FIGURES),
        champion=reader.json("evaluate", CHAMPION),
        override=reader.run_file(OVERRIDE_FILE),
        parity=reader.json("export", "parity.json"),
        variants=reader.rows("export", VARIANTS),
        formats=reader.rows("export", FORMATS),
        manifest=reader.json("export", "bundle/manifest.json"),
        signed=bool(reader.relative_path("export", "bundle/manifest.sig.json")),
        image=reader.json("package", "image.json"),
        deploy=reader.json("deploy", "deploy.json"),
        digests=reader.digests(
            ("prepare", "data.json"), ("evaluate", "verdict.json"), ("export", "bundle/manifest.json")
        ),
        damaged=tuple(reader.damaged),
    )


# Values of a line of metrics.jsonl that are no curves: the same in every line, or too many.
_NO_CURVES = {"step", "epoch", "total_steps", "batch_size", "expert_loads"}


def curve_values(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line of metrics.jsonl by the names of their curves, as in `train/loss`."""
    curves: dict[str, Any] = {}
    for name, value in line.items():
        if name not in _NO_CURVES:
            group = value if isinstance(value, Mapping) else {"": value}
            curves |= {f"{name if inner else 'train'}/{inner or name}": number for inner, number in group.items()}
    return curves


class NewLines:
    """Reads the lines that were added to metrics.jsonl; all again if it was replaced, as a resumed training does."""

    def __init__(self) -> None:
        self._inode, self._offset = 0, 0

    def read(self, path: Path) -> list[Body]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset if inode == self._inode else 0)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # an incomplete line is read again later
            self._inode, self._offset = inode, file.tell() - len(data) + len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class _Reader:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.damaged: list[str] = []

    def json(self, step: str, name: str) -> Body:
        return mapping(self._load(self._find(step, name), f"{step}/{name}", dict))

    def rows(self, step: str, name: str) -> tuple[Body, ...]:
        return tuple(mappings(self._load(self._find(step, name), f"{step}/{name}", list)))

    def run_file(self, name: str) -> Body:
        """Read a file of the run itself, not of a step."""
        path = self._run.path / name
        return mapping(self._load(path if path.is_file() else None, name, dict))

    def lines(self, step: str, name: str) -> list[Body]:
        """Skip incomplete lines, which a killed process leaves."""
        path = self._find(step, name)
        rows = []
        for line in path.read_text(errors="replace").splitlines() if path else ():
            try:
                body = json.loads(line)
            except ValueError:
                continue
            if isinstance(body, dict) and is_number(body.get("step")):
                rows.append(body)
        return rows

    def relative_path(self, step: str, name: str) -> str:
        path = self._find(step, name)
        return path.relative_to(self._run.path).as_posix() if path else ""

    def digests(self, *files: tuple[str, str]) -> dict[str, str]:
        """Return the digests by file name."""
        paths = [self._find(step, name) for step, name in files]
        return {path.name: digest_file(path) for path in paths if path is not None}

    def _load(self, path: Path | None, name: str, kind: type) -> object:
        if path is None:
            return None
        try:
            body = json.loads(path.read_text())
        except ValueError:
            body = None
        if not isinstance(body, kind):
            self.damaged.append(name)
            return None
        return body

    def _find(self, step: str, name: str) -> Path | None:
        """Prefer the complete output, else what an unfinished step has written so far."""
        assert step in STEPS
        candidates = (self._run.output(step) / name, self._run.partial(step) / name)
        return next((path for path in candidates if path.is_file()), None)
