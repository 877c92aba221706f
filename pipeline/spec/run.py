"""One run directory: all its paths, its configuration and the record of each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.spec.config import Config, override_config, parse_recorded
from pipeline.spec.errors import PipelineError
from pipeline.spec.frozen import Frozen
from pipeline.spec.override import Override, read_override

if TYPE_CHECKING:
    from pipeline.spec.bundle import Bundle
    from pipeline.spec.signing import Trust

STEPS = ("prepare", "train", "evaluate", "export", "package", "deploy")


class StepRecord(Frozen):
    """What is known of one step of one run."""

    step: str
    # `overridden`: rejected, and let pass by a person
    status: Literal["running", "done", "failed", "rejected", "overridden", "interrupted", "pruned"]
    key: str
    parts: Mapping[str, str]  # the named parts the key is made of
    argv: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0
    outputs: Mapping[str, str] = {}  # relative path → SHA-256
    digest: str = ""  # of outputs
    reused_from: str = ""  # run whose files these are
    reason: str = ""  # why it ran, was reused or failed

    @property
    def complete(self) -> bool:
        """Its outputs may be used, in this run and in others."""
        return self.status in ("done", "overridden")


class RunFile(Frozen):
    """`run.json`."""

    schema_version: int = 1
    id: str
    created: str
    parent: str = ""
    wanted: tuple[str, ...]
    config: Mapping[str, object]
    continued: tuple[str, ...] = ()  # key=value: where and how carefully it went on, in place of what stands in config
    environment: Mapping[str, str]
    study: str = ""  # of `pipe tune`, which made this run as one of its trials
    trial: int | None = None
    steps: Mapping[str, StepRecord] = {}


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    def output(self, step: str) -> Path:
        """Where a step's complete output stands."""
        return self.path / step

    def partial(self, step: str) -> Path:
        """Where a step writes until it is complete."""
        return self.path / f"{step}.partial"

    def log(self, step: str) -> Path:
        return self.path / "logs" / f"{step}.log"

    @property
    def bundle_path(self) -> Path:
        return self.output("export") / "bundle"

    def bundle(self, trust: Trust | None = None) -> Bundle:
        from pipeline.spec.bundle import open_bundle  # brings numpy, which most commands do without

        return open_bundle(self.bundle_path, trust)

    @property
    def runs(self) -> Path:
        return self.path.parent

    def read(self) -> RunFile:
        path = self.path / "run.json"
        try:
            return RunFile.model_validate_json(path.read_text())
        except FileNotFoundError:
            raise PipelineError(f"{self.path}: not a run directory (no run.json)") from None
        except ValueError as error:
            raise PipelineError(f"{path}: damaged: {str(error).splitlines()[0]}") from error

    @cached_property
    def config(self) -> Config:
        """As it runs: a resume may have changed where."""
        return override_config(self.planned, self.read().continued, source=str(self.path / "run.json"))

    @cached_property
    def planned(self) -> Config:
        """As it was begun, which is what its results are known by."""
        return parse_recorded(self.read().config, source=str(self.path / "run.json"))

    def verdict(self) -> dict[str, object]:
        """The verdict of a complete evaluation."""
        body: dict[str, object] = json.loads((self.output("evaluate") / "verdict.json").read_text())
        return body

    def override(self, verdict_digest: str) -> Override | None:
        """A person's word on this very verdict; one on another counts for nothing."""
        found = read_override(self.path)
        return found if found is not None and found.verdict == verdict_digest else None
