"""What a run left on disk, as far as it came: every file is optional, a damaged one is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.spec.digest import digest_file
from pipeline.spec.run import STEPS, Run, RunFile, StepRecord

Body = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """An empty mapping or list stands for a file the run has not reached."""

    file: RunFile
    summary: Body = field(default_factory=dict)  # train/summary.json
    steps: tuple[Body, ...] = ()  # train/metrics.jsonl, the lines of optimizer steps
    validations: tuple[Body, ...] = ()  # and those of validations
    batch_size: Body = field(default_factory=dict)  # train/batch_size.json, where `auto` chose
    communication: Body = field(default_factory=dict)  # train/communication.json, from a timeline
    timeline: str = ""  # where that is, below the run directory
    data: Body = field(default_factory=dict)
    metrics: Body = field(default_factory=dict)
    verdict: Body = field(default_factory=dict)
    parity: Body = field(default_factory=dict)
    manifest: Body = field(default_factory=dict)
    image: Body = field(default_factory=dict)
    deploy: Body = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # of data.json, verdict.json and manifest.json as found
    damaged: tuple[str, ...] = ()

    @property
    def classes(self) -> list[str]:
        """In the task's order: the files are sorted by name, and "10" would stand before "2"."""
        return [str(name) for name in self.metrics.get("classes") or self.metrics.get("per_class") or ()]

    @property
    def name(self) -> str:
        return str(self.file.config.get("name", self.file.id))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """One number of the journal by optimizer step, where it was told."""
        return [(line["step"], line[name]) for line in self.steps if is_number(line.get(name))]

    def step(self, name: str) -> StepRecord | None:
        return self.file.steps.get(name)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_facts(run: Run) -> Facts:
    reader = _Reader(run)
    journal = reader.lines("train", "metrics.jsonl")
    return Facts(
        file=run.read(),
        summary=reader.json("train", "summary.json"),
        steps=tuple(line for line in journal if "loss" in line),
        validations=tuple(line for line in journal if "validation" in line),
        batch_size=reader.json("train", "batch_size.json"),
        communication=reader.json("train", "communication.json"),
        timeline=reader.place("train", "trace.json.gz"),
        data=reader.json("prepare", "data.json"),
        metrics=reader.json("evaluate", "metrics.json"),
        verdict=reader.json("evaluate", "verdict.json"),
        parity=reader.json("export", "parity.json"),
        manifest=reader.json("export", "bundle/manifest.json"),
        image=reader.json("package", "image.json"),
        deploy=reader.json("deploy", "deploy.json"),
        digests=reader.digests(
            ("prepare", "data.json"), ("evaluate", "verdict.json"), ("export/bundle", "manifest.json")
        ),
        damaged=tuple(reader.damaged),
    )


class _Reader:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.damaged: list[str] = []

    def json(self, step: str, name: str) -> Body:
        path = self._find(step, name)
        if path is None:
            return {}
        try:
            body = json.loads(path.read_text())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self.damaged.append(f"{step}/{name}")
            return {}
        return body

    def lines(self, step: str, name: str) -> list[Body]:
        """A line that is not whole is the one a killed process was writing, or one glued to it on resume."""
        path = self._find(step, name)
        found = []
        for line in path.read_text().splitlines() if path else ():
            try:
                body = json.loads(line)
            except ValueError:
                continue
            if isinstance(body, dict) and "step" in body:
                found.append(body)
        return found

    def place(self, step: str, name: str) -> str:
        path = self._find(step, name)
        return path.relative_to(self._run.path).as_posix() if path else ""

    def digests(self, *places: tuple[str, str]) -> dict[str, str]:
        files = {name: self._run.path / step / name for step, name in places}
        return {name: digest_file(path) for name, path in files.items() if path.is_file()}

    def _find(self, step: str, name: str) -> Path | None:
        """Complete if there, else what an unfinished step has written so far."""
        assert step in STEPS
        places = (self._run.output(step) / name, self._run.partial(step) / name)
        return next((path for path in places if path.is_file()), None)
