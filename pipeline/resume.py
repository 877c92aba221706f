"""Resume an interrupted run: what may differ, what changed since, and what a person accepts nevertheless."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Acceptance, Run, RunFile, StepRecord
from pipeline.data_checks.champion import CHAMPION_PART
from pipeline.history import Project, changed_outputs, is_locked, load_history, lock_owner, now, write_record, write_run
from pipeline.override import outputs_with_override
from pipeline.plan import CHECK, STEP_KINDS, UNKNOWN, describe_changes, digest_key
from pipeline.system.errors import ConfigError, ResourceError
from pipeline.system.files import read_object, write_json
from pipeline.user.readers import changed_read_files
from pipeline.work import Work

# Settings of the train section that a resumed run may change. Not `checkpoints`: the run's own are there;
# not `device`: it changes the arithmetic.
RESUMABLE_SETTINGS = (
    "processes", "nodes", "rendezvous", "launcher", "image", "workers", "threads", "restarts", "timeout_seconds",
    "checkpoint_every", "keep_checkpoints", "log_every", "trace",
)  # fmt: skip

_TARGETS = "logs/targets.json"  # of some training samples, by their inputs, as the training had them


def describe_kept_settings(project: Project, run: Run) -> str:
    """Name the settings of a run that differ from `pipe.yaml`; empty if there are none, or no valid file."""
    try:
        now, kept = (_flat_settings(config) for config in (project.config(), run.original_config))
    except ConfigError:
        return ""
    return ", ".join(f"{name} {kept[name]} (pipe.yaml: {now[name]})" for name in now if now[name] != kept[name])


def _flat_settings(config: Config) -> dict[str, object]:
    settings: dict[str, object] = {}
    for section, body in config.model_dump(mode="json").items():
        settings |= (
            {f"{section}.{name}": value for name, value in body.items()} if isinstance(body, dict) else {section: body}
        )
    return settings


def check_changes(work: Work, run: Run) -> None:
    """Stop before anything runs where training began with other code, data, settings or packages."""
    records = run.read().steps
    if work.request.on_changes != "stop" or not has_progress(run, records.get("train")):
        return
    outputs = {name: record.outputs for name, record in records.items() if record.complete}
    for name in ("prepare", "train"):
        if name in records and name in work.request.steps:
            parts = work.parts(name, outputs)
            before = records[name].current_parts
            changed = {part for part in parts.keys() | before.keys() if parts.get(part) != before.get(part)}
            if changed != {CHAMPION_PART}:  # another champion only repeats the checks of the data
                settle_changes(work, run, records[name], parts)


def has_progress(run: Run, training: StepRecord | None) -> bool:
    """Return whether there is a model or a checkpoint to lose."""
    checkpoints = run.partial("train") / "checkpoints"
    has_checkpoints = bool(run.config.train.checkpoints) or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    return training is not None and (training.complete or has_checkpoints)


def settle_changes(
    work: Work, run: Run, record: StepRecord, parts: Mapping[str, str], ask: Callable[[str], bool] = lambda _: False
) -> None:
    """Accept what changed since a step of this run began, or stop; `--restart` begins it again."""
    if record.is_current(digest_key(parts)):
        return
    changes = describe_changes(record.current_parts, parts, most=20) or "the format of keys"
    if work.request.on_changes == "stop":
        raise ConfigError(
            f"since the training of run {run.id} began, this changed: {changes}; to go on with it nevertheless: "
            f"`pipe run --resume {run.id} --accept-changes`; to train from the beginning: add `--restart` instead"
        )
    if work.request.on_changes == "accept":
        if record.step == "train" and not work.request.sure and (changed := _changed_targets(run)):
            text = f"{changed}; the weights so far learned the old ones"
            if not ask(f"{text}. Go on from them? [y/N] "):
                raise ConfigError(
                    f"{text}; to go on from them nevertheless: add `--yes`; to train from the beginning: `--restart` "
                    "instead of `--accept-changes`"
                )
        accept(run, record, parts, changes)
        work.history[:] = [(run, run.read())]


def record_targets(run: Run) -> None:
    """Keep the targets that training begins or goes on with: prepare may replace its own record of them."""
    write_json(run.path / _TARGETS, _read(run.output("prepare") / "data.json").get("targets", {}))


def _changed_targets(run: Run) -> str:
    """Describe how the targets differ from those that the interrupted training had; empty where nothing is known."""
    before, now = _read(run.path / _TARGETS), _read(run.output("prepare") / "data.json").get("targets", {})
    differs = {name: before[name] != now[name] for name in before.keys() & now.keys()}
    if differs.pop("classes", False):
        return f"the classes were {before['classes']} and are {now['classes']}"
    changed = sum(differs.values())
    return f"{changed} of {len(differs)} compared training samples have other targets" if changed else ""


def _read(path: Path) -> dict[str, Any]:
    return {**read_object(path)} if path.exists() else {}


def accept_outputs(work: Work, named: Sequence[str]) -> list[tuple[str, Run, str]]:
    """Accept the newest outputs of the named steps, or of all up to one that was never complete.

    Return each accepted step, its run and what changed.
    """
    accepted = []
    for name in (name for name in work.request.steps if name != CHECK):  # it takes seconds, and no step reads it
        step = work.decide(name)
        if not named and not any(name in body.steps and body.steps[name].complete for _, body in work.history):
            break
        if (not named or name in named) and step.action == "run" and STEP_KINDS[name].cached:
            run, record = _newest_complete(work, name)
            if UNKNOWN in step.parts.values():
                raise ConfigError(
                    f"{name}: {step.reason} has run; `pipe accept` without a step accepts those before it"
                )
            accept(run, record, step.parts, describe_changes(record.current_parts, step.parts, most=20))
            accepted.append((name, run, step.reason))
            work.history[:] = [(run, run.read()) for run, _ in work.history]
            step = work.decide(name)
        if step.action == "reuse":
            work.outputs[name] = outputs_with_override(*work.reused_record(step))
    return accepted


def _newest_complete(work: Work, step: str) -> tuple[Run, StepRecord]:
    """Return the newest outputs of a step, which must be as they were recorded."""
    for run, body in work.history:
        if (record := body.steps.get(step)) is not None and record.complete:
            changed = changed_outputs(run, record)
            if step == "prepare":
                changed += changed_read_files(work.project.root, run.output(step))
            if changed:
                raise ConfigError(f"{step}: {changed[0]} of run {run.id} changed on disk; it cannot be accepted")
            return run, record
    raise ConfigError(f"{step}: has never been complete, so there is nothing to accept")


def accept(run: Run, record: StepRecord, parts: Mapping[str, str], changes: str) -> StepRecord:
    """Record that a step's outputs, or its checkpoints, stay current although these parts changed."""
    acceptance = Acceptance(key=digest_key(parts), parts=parts, changes=changes, by=getpass.getuser(), at=now())
    update = {"accepted": (*record.accepted, acceptance), "checkpoints_key": record.checkpoints_key or record.key}
    return write_record(run, record.model_copy(update=update))


def override_resumed(run: Run, overrides: Sequence[str]) -> Run:
    """Record overrides of a resumed run; its checkpoints stay valid and its keys the same."""
    for override in overrides:
        key = override.partition("=")[0]
        if not _is_resumable(key):
            raise ConfigError(
                f"{key} changes what the run computes, and part of it is computed already; a resumed run may "
                f"change only track, cluster.* and train.{', '.join(RESUMABLE_SETTINGS)}; "
                f"`pipe run --continue {run.id} {override}` starts a new one from its checkpoint, and "
                f"`pipe run {override}` one from the beginning"
            )
    if not overrides:
        return run
    body = run.read()
    override_config(run.config, overrides)  # raise wrong values before they are recorded
    overridden = {override.partition("=")[0] for override in overrides}
    earlier = [override for override in body.continued if override.partition("=")[0] not in overridden]
    write_run(run, body.model_copy(update={"continued": (*earlier, *overrides)}))
    return Run(run.path)


def _is_resumable(key: str) -> bool:
    section, _, name = key.partition(".")
    return (
        section == "cluster"
        or key in ("track", "deploy.context", "deploy.namespace")
        or (section == "train" and name in RESUMABLE_SETTINGS)
    )


def latest_unfinished(project: Project) -> Run:
    """Return the newest unfinished run that no command is working on."""
    busy: list[Run] = []
    for run, body in load_history(project.runs):
        if body.study:  # `pipe tune` continues its trials itself
            continue
        if is_unfinished(body):
            if is_locked(run):  # another command is working on it
                busy.append(run)
                continue
            return run
        if any(record.status == "rejected" for record in body.steps.values()):
            raise ConfigError(f"run {run.id} was rejected by the gate, not stopped; to resume an older one, name it")
    if busy:
        owner = lock_owner(busy[0].path / ".lock")
        raise ResourceError(f"nothing to resume: {owner} is working on run {busy[0].id}; wait until it ends, or end it")
    raise ConfigError(f"nothing to resume in {project.runs}: every run is complete")


def is_unfinished(body: RunFile) -> bool:
    records = [body.steps.get(step) for step in body.wanted]
    is_ended = any(record is not None and record.status in ("rejected", "pruned") for record in records)
    return not is_ended and not all(record is not None and record.complete for record in records)
