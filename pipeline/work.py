"""What one command is to run, and the decision for each step when its turn comes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.continuation import StartingPoint
from pipeline.contract.config import Config
from pipeline.contract.run import Run, StepRecord
from pipeline.executors.executor import check_config
from pipeline.history import History, Project, changed_outputs
from pipeline.override import outputs_with_override
from pipeline.plan import JUDGED, START, Decision, decide_step, key_parts
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.wording import join_names, seconds
from pipeline.tracking.process import Tracking
from pipeline.user.readers import changed_read_files

OnChanges = Literal["stop", "accept", "restart"]
LONG_TRAINING_SECONDS = 600  # a training that took longer is not replaced without a question


@dataclass(frozen=True)
class RunRequest:
    """What one command is to run."""

    steps: tuple[str, ...]
    force: frozenset[str] = frozenset()
    reuse_only: frozenset[str] = frozenset()  # steps before `--from`: they must not run
    study: str = ""  # the run is a trial of this study of `pipe tune`
    trial: int | None = None
    cores: int = 0  # CPU cores for its steps, where other runs share the machine; 0: all
    on_changes: OnChanges = "stop"  # since an interrupted training began
    sure: bool = False  # accept changes without a question
    starting_point: StartingPoint | None = None  # the checkpoint of another run from which training continues


@dataclass
class Work:
    """Steps to plan, run or accept; `outputs` grows as they complete."""

    project: Project
    config: Config
    request: RunRequest
    history: History  # runs whose outputs may be reused, newest first
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    key_config: Config | None = None  # configuration of the steps' keys, where it is not `config`
    tracking: Tracking | None = None  # while its steps run
    fork_server: Mapping[str, str] = field(default_factory=dict)  # the variable that names it
    _changed: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # so that each file is hashed only once

    def parts(self, step: str, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return the parts of a step's key."""
        start = self.request.starting_point
        parts = key_parts(step, self.key_config or self.config, self.project, outputs)
        return {**parts, START: str(start)} if step == "train" and start else parts

    def decide(self, step: str) -> Decision:
        parts = self.parts(step, self.outputs)
        past = [(run.id, body.steps[step]) for run, body in self.history if step in body.steps]
        decision = decide_step(step, parts, past, step in self.request.force, self._changed_outputs)
        if step == "prepare" and decision.action == "reuse":
            decision = self._check_read_files(decision)
        if step == "train" and decision.action == "reuse" and self.request.study:
            decision = self._check_judged(decision)
        if step == "train" and decision.action == "run":
            decision = replace(decision, reason=decision.reason + _last_duration(self.history))
        if decision.action == "run" and step in self.request.reuse_only:
            raise ConfigError(f"--from starts after {step}, but {step} has to run: {decision.reason}")
        if decision.action == "reuse" and (changed := self._without_effect(decision)):
            hint = f"; {join_names(changed, 3)} would have an effect with --force {step}"
            decision = replace(decision, reason=decision.reason + hint)
        return decision

    def _without_effect(self, decision: Decision) -> list[str]:
        """Return the changed settings of how a reused step runs, as `train.trace=true`; no result depends on them."""
        with contextlib.suppress(PipelineError, AttributeError):  # settings of another version, or none of the step's
            old, new = (
                getattr(config, decision.name) for config in (self.reused_record(decision)[0].config, self.config)
            )
            names = (name for name in sorted(new.OPERATIONAL) if getattr(old, name) != getattr(new, name))
            return [f"{decision.name}.{name}={json.dumps(getattr(new, name), default=str)}" for name in names]
        return []

    def _check_read_files(self, decision: Decision) -> Decision:
        """Run prepare where a data file changed that a reader of `pipeline` has read; the key cannot name it."""
        run, _ = self.reused_record(decision)
        changed = changed_read_files(self.project.root, run.output("prepare"))
        if not changed:
            return decision
        return replace(decision, action="run", reason=f"{join_names(changed, 1)} changed", source="")

    def _check_judged(self, decision: Decision) -> Decision:
        """Train a trial again where its validation would have other metrics; the key of training has none of them."""
        _, record = self.reused_record(decision)
        if record.current_parts.get(JUDGED) == decision.parts[JUDGED]:
            return decision
        return replace(decision, action="run", reason="metrics() changed", source="")

    def reused_record(self, decision: Decision) -> tuple[Run, StepRecord]:
        return next((run, body.steps[decision.name]) for run, body in self.history if run.id == decision.source)

    def preview(self) -> tuple[Decision, ...]:
        """Return what would run, without running anything."""
        check_config(self.config)
        decisions = []
        for name in self.request.steps:
            decision = self.decide(name)
            decisions.append(decision)
            if decision.action == "reuse":
                self.outputs[name] = outputs_with_override(*self.reused_record(decision))
        self.outputs.clear()
        return tuple(decisions)

    def _changed_outputs(self, run_id: str, record: StepRecord) -> list[str]:
        key = (run_id, record.step)
        if key not in self._changed:
            run = next(run for run, _ in self.history if run.id == run_id)
            self._changed[key] = changed_outputs(run, record)
        return self._changed[key]


def last_training_seconds(history: History) -> float:
    """Return how long the newest complete training took; 0 without one. Runs that reuse it have no duration."""
    records = (body.steps["train"] for _, body in history if "train" in body.steps and not body.study)
    return next((record.seconds for record in records if record.complete and not record.reused_from), 0.0)


def _last_duration(history: History) -> str:
    last = last_training_seconds(history)
    if last < LONG_TRAINING_SECONDS:
        return ""
    return f"; the last training took {seconds(last)}"
