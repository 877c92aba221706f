"""Run the pipeline: decide each step when its turn comes, reuse or run it, and record what happened.

A step runs as a process on this machine or as a Job on a cluster. If it fails, `failure` finds out why.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from pipeline.continuation import StartingPoint, recorded_starting_point
from pipeline.contract.bundle import OVERRIDDEN
from pipeline.contract.config import Config, override_config, parse_config
from pipeline.contract.restarts import GiveUp, ProcessEnd, restart_after
from pipeline.contract.run import Acceptance, Run, RunFile, StepRecord, own_identity
from pipeline.contract.settings.stages import Train
from pipeline.data_checks.champion import CHAMPION_PART
from pipeline.display import Display, count_processes
from pipeline.history import (
    History,
    Project,
    changed_outputs,
    create_run,
    is_locked,
    link_outputs,
    load_history,
    lock_owner,
    lock_run,
    lock_service,
    now,
    seal_step,
    write_record,
    write_run,
)
from pipeline.override import copy_override, outputs_with_override, reuse_override
from pipeline.plan import (
    CLUSTER_STEPS,
    DEPLOYMENT_SETTINGS,
    RESTARTED_FLAG,
    START,
    STEP_KINDS,
    UNKNOWN,
    Step,
    decide_step,
    describe_changes,
    digest_key,
    key_parts,
    processes_per_node,
    run_argument,
    step_command,
)
from pipeline.processes import (
    LocalLauncher,
    count_gpus,
    find_killed_process,
    prepare_log,
    read_log_end,
    step_environment,
    training_server,
)
from pipeline.system.errors import (
    BundleError,
    ConfigError,
    PipelineError,
    Pruned,
    ResourceError,
    StageError,
    clear_error,
    missing_module_in_log,
    read_error,
)
from pipeline.system.files import empty_folders
from pipeline.system.fork_server import has_server
from pipeline.system.processes import describe_exit
from pipeline.tracking.process import TRACKED_STEPS, Tracking, check_trackers, track_run
from pipeline.training.launchers import check_launcher, uses_agent
from pipeline.user.readers import changed_read_files

MANIFEST = "bundle/manifest.json"  # of the export step: its digest is that of the bundle
REDEPLOYED = "deployed again"  # reason in the records of `pipe deploy`, whose steps are those of another run

# Settings of the train section that a resumed run may change. Not `checkpoints`: the run's own are there;
# not `device`: it changes the arithmetic.
RESUMABLE_SETTINGS = (
    "processes", "nodes", "rendezvous", "launcher", "image", "workers", "threads", "restarts", "timeout_seconds",
    "checkpoint_every", "keep_checkpoints", "log_every", "trace",
)  # fmt: skip


# What a terminal shows of the steps that have no metrics.
_ACTIVITIES = {
    "prepare": "reading and checking the data",
    "evaluate": "scoring the model and the baseline",
    "export": "converting to ONNX and comparing with PyTorch",
    "package": "making the image",
    "deploy": "starting the service and testing it",
}
LONG_TRAINING_SECONDS = 600  # a training that took longer is not replaced without a question
OnChanges = Literal["stop", "accept", "restart"]


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
    start: StartingPoint | None = None  # the checkpoint of another run from which training continues


@dataclass
class PipelineRun:
    """One run over the steps; `outputs` grows as they complete."""

    project: Project
    config: Config
    request: RunRequest
    history: History  # runs whose outputs may be reused, newest first
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    key_config: Config | None = None  # configuration of the steps' keys, where it is not `config`
    tracking: Tracking | None = None  # while its steps run
    server: Mapping[str, str] = field(default_factory=dict)  # variable that names the fork server of training
    _changed: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # so that each file is hashed only once

    def parts(self, step: str, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return the parts of a step's key."""
        parts = key_parts(step, self.key_config or self.config, self.project, outputs)
        return {**parts, START: str(self.request.start)} if step == "train" and self.request.start else parts

    def decide(self, step: str) -> Step:
        parts = self.parts(step, self.outputs)
        past = [(run.id, body.steps[step]) for run, body in self.history if step in body.steps]
        decision = decide_step(step, parts, past, step in self.request.force, self._changed_outputs)
        if step == "prepare" and decision.action == "reuse":
            decision = self._check_read_files(decision)
        if step == "train" and decision.action == "run":
            decision = replace(decision, reason=decision.reason + _last_duration(self.history))
        if decision.action == "run" and step in self.request.reuse_only:
            raise ConfigError(f"--from starts after {step}, but {step} has to run: {decision.reason}")
        return decision

    def _check_read_files(self, decision: Step) -> Step:
        """Run prepare where a data file changed that a reader of `pipeline` has read; the key cannot name it."""
        run, _ = self.reused_record(decision)
        changed = changed_read_files(self.project.root, run.output("prepare"))
        if not changed:
            return decision
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return replace(decision, action="run", reason=f"{changed[0]}{more} changed", source="")

    def reused_record(self, step: Step) -> tuple[Run, StepRecord]:
        return next((run, body.steps[step.name]) for run, body in self.history if run.id == step.source)

    def preview(self) -> tuple[Step, ...]:
        """Return what would run, without running anything."""
        check_config(self.config)
        steps = []
        for name in self.request.steps:
            step = self.decide(name)
            steps.append(step)
            if step.action == "reuse":
                self.outputs[name] = outputs_with_override(*self.reused_record(step))
        self.outputs.clear()
        return tuple(steps)

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
    from pipeline.system.html import seconds  # slow to load

    return f"; the last training took {seconds(last)}"


def run_pipeline(project: Project, config: Config, request: RunRequest, display: Display) -> Run:
    """Run the steps in a new run directory; the caller holds the lock of the runs, at least shared."""
    history = load_history(project.runs)
    if history and _is_unfinished(history[0][1]) and not history[0][1].study and not is_locked(history[0][0]):
        display.report(f"note: run {history[0][0].id} is unfinished; `pipe run --resume` continues it")
    pipeline_run = PipelineRun(project, config, request, history)
    _check_training(pipeline_run)  # raise mistakes before a run directory is made
    parent = history[0][0].id if history else ""
    start = str(request.start) if request.start else ""
    run = create_run(project.runs, config, request.steps, parent, request.study, request.trial, start)
    with lock_run(run):
        display.run = run
        _run_steps(pipeline_run, run, display)
    return run


def resume_run(project: Project, run: Run, request: RunRequest, display: Display, overrides: Sequence[str] = ()) -> Run:
    """Continue in the same run directory with the run's own configuration; overrides may change where it trains.

    The caller holds the lock of the run.
    """
    display.run = run
    run = override_resumed(run, overrides)
    if recorded := run.read().starting_point:
        request = replace(request, start=recorded_starting_point(project, recorded))
    pipeline_run = PipelineRun(project, run.config, request, [(run, run.read())], key_config=run.planned)
    if kept := describe_kept_settings(project, run):
        display.report(f"note: this run keeps its own settings: {kept}; `pipe run all` uses those of pipe.yaml")
    _check_changes(pipeline_run, run)
    _check_training(pipeline_run)
    _run_steps(pipeline_run, run, display)
    return run


def describe_kept_settings(project: Project, run: Run) -> str:
    """Name the settings of a run that differ from `pipe.yaml`; empty if there are none, or no valid file."""
    try:
        now, kept = (_flat_settings(config) for config in (project.config(), run.planned))
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


def _check_changes(pipeline_run: PipelineRun, run: Run) -> None:
    """Stop before anything runs where training began with other code, data, settings or packages."""
    records = run.read().steps
    if pipeline_run.request.on_changes != "stop" or not _has_progress(run, records.get("train")):
        return
    outputs = {name: record.outputs for name, record in records.items() if record.complete}
    for name in ("prepare", "train"):
        if name in records and name in pipeline_run.request.steps:
            parts = pipeline_run.parts(name, outputs)
            before = records[name].current_parts
            changed = {part for part in parts.keys() | before.keys() if parts.get(part) != before.get(part)}
            if changed != {CHAMPION_PART}:  # another champion only repeats the checks of the data
                _settle_changes(pipeline_run, run, records[name], parts)


def _has_progress(run: Run, training: StepRecord | None) -> bool:
    """Return whether there is a model or a checkpoint to lose."""
    checkpoints = run.partial("train") / "checkpoints"
    has_checkpoints = bool(run.config.train.checkpoints) or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    return training is not None and (training.complete or has_checkpoints)


def _settle_changes(pipeline_run: PipelineRun, run: Run, record: StepRecord, parts: Mapping[str, str]) -> None:
    """Accept what changed since a step of this run began, or stop; `--restart` begins it again."""
    if record.is_current(digest_key(parts)):
        return
    changes = describe_changes(record.current_parts, parts, most=20) or "the format of keys"
    if pipeline_run.request.on_changes == "stop":
        raise ConfigError(
            f"since the training of run {run.id} began, this changed: {changes}; to go on with it nevertheless: "
            f"`pipe run --resume {run.id} --accept-changes`; to train from the beginning: add `--restart` instead"
        )
    if pipeline_run.request.on_changes == "accept":
        accept(run, record, parts, changes)
        pipeline_run.history[:] = [(run, run.read())]


def accept_outputs(pipeline_run: PipelineRun, named: Sequence[str]) -> list[tuple[str, Run, str]]:
    """Accept the newest outputs of the named steps, or of all up to one that was never complete.

    Return each accepted step, its run and what changed.
    """
    accepted = []
    for name in pipeline_run.request.steps:
        step = pipeline_run.decide(name)
        if not named and not any(name in body.steps and body.steps[name].complete for _, body in pipeline_run.history):
            break
        if (not named or name in named) and step.action == "run" and STEP_KINDS[name].cached:
            run, record = _newest_complete(pipeline_run, name)
            if UNKNOWN in step.parts.values():
                raise ConfigError(
                    f"{name}: {step.reason} has run; `pipe accept` without a step accepts those before it"
                )
            accept(run, record, step.parts, describe_changes(record.current_parts, step.parts, most=20))
            accepted.append((name, run, step.reason))
            pipeline_run.history[:] = [(run, run.read()) for run, _ in pipeline_run.history]
            step = pipeline_run.decide(name)
        if step.action == "reuse":
            pipeline_run.outputs[name] = outputs_with_override(*pipeline_run.reused_record(step))
    return accepted


def _newest_complete(pipeline_run: PipelineRun, step: str) -> tuple[Run, StepRecord]:
    """Return the newest outputs of a step, which must be as they were recorded."""
    for run, body in pipeline_run.history:
        if (record := body.steps.get(step)) is not None and record.complete:
            changed = changed_outputs(run, record)
            if step == "prepare":
                changed += changed_read_files(pipeline_run.project.root, run.output(step))
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
        if _is_unfinished(body):
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


def _is_unfinished(body: RunFile) -> bool:
    records = [body.steps.get(step) for step in body.wanted]
    is_ended = any(record is not None and record.status in ("rejected", "pruned") for record in records)
    return not is_ended and not all(record is not None and record.complete for record in records)


def redeploy(project: Project, source: Run, config: Config, display: Display) -> Run:
    """Deploy the bundle of an earlier run unchanged, whatever has changed in the project since, as a new run."""
    records = check_deployable(source)
    request = RunRequest(tuple(record.step for record in records))
    pipeline_run = PipelineRun(project, config, request, [(source, source.read())])
    run = create_run(project.runs, config, (*request.steps, "deploy"), parent=source.id)
    with lock_run(run):
        display.run = run
        copy_override(source, run)
        for record in records:
            link_outputs(source, run, record)
            update = {"reused_from": record.reused_from or source.id, "reason": REDEPLOYED, "seconds": 0.0}
            linked_record = write_record(run, record.model_copy(update=update))
            pipeline_run.outputs[record.step] = outputs_with_override(run, linked_record)
        _run_step(pipeline_run, run, pipeline_run.decide("deploy"), display)
    return run


def deployment_config(project: Project, source: Run, overrides: Sequence[str]) -> Config:
    """Return the settings of a run's bundle, with those of deployments as pipe.yaml and the command line have them now.

    What an earlier deployment of the bundle was started with has no effect.
    """
    for override in overrides:
        if not _is_deployment_setting(override.partition("=")[0]):
            raise ConfigError(
                f"{override}: a deployment may change only deploy.*, rollout.* and "
                f"serve.{{{','.join(DEPLOYMENT_SETTINGS)}}}; use `pipe run` to change other settings"
            )
    values, current = source.config.model_dump(mode="json"), project.config(overrides).model_dump(mode="json")
    values |= {name: current[name] for name in ("registry", "deploy", "rollout")}
    values["serve"] |= {name: current["serve"][name] for name in DEPLOYMENT_SETTINGS}
    return parse_config(values, f"{project.root / 'pipe.yaml'} with the bundle of run {source.id}")


def find_deployable(project: Project, source: Run, report: Callable[[str], None]) -> Run:
    """Return the run, or the newest other one of the same bundle if only that has a finished package."""
    body = source.read()
    if not (missing := _missing_steps(body)):
        return source
    complete = [(run, other) for run, other in load_history(project.runs) if not _missing_steps(other)]
    hint = f"`pipe run --resume {source.id} package` finishes it"
    if "export" not in missing:
        bundle = body.steps["export"].outputs.get(MANIFEST)
        for run, other in complete:
            if other.steps["export"].outputs.get(MANIFEST) == bundle:
                report(f"run {source.id} has no finished package; run {run.id} has one of the same bundle")
                return run
    if complete:
        hint += f"; `pipe deploy {complete[0][0].id}` deploys another bundle, of the newest complete run"
    raise ConfigError(f"run {source.id} has no finished {' and no '.join(missing)}; {hint}")


def _missing_steps(body: RunFile) -> list[str]:
    """Return the steps that a deployment needs and that are not complete."""
    return [name for name in ("export", "package") if name not in body.steps or not body.steps[name].complete]


def check_deployable(source: Run) -> list[StepRecord]:
    """Return the records of a run to deploy, after checking every file."""
    records = [record for record in source.read().steps.values() if record.step != "deploy" and record.complete]
    source.check_seal()
    for record in records:
        source.check_record(record)
        if changed := changed_outputs(source, record):
            raise BundleError(f"run {source.id}: {record.step}/{changed[0]} changed on disk; it must not be deployed")
    return records


def _is_deployment_setting(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in ("deploy", "rollout") or (section == "serve" and name in DEPLOYMENT_SETTINGS)


def check_config(config: Config) -> None:
    """Raise mistakes that concern more than one section."""
    if config.cluster.executor == "kubernetes":
        from pipeline.cluster_executor import check_jobs  # the manifests are slow to load

        check_jobs(config)
    if needs_other_machines(config) and not config.train.rendezvous:
        raise ConfigError(
            f"train.nodes={config.train.nodes} needs train.rendezvous=HOST:PORT, an address all nodes can connect to; "
            "on a cluster, `pipe run train --render DIR` writes the Job"
        )


def needs_other_machines(config: Config) -> bool:
    """Return True where other machines must join by `pipe join`; on a cluster their pods do it."""
    several = config.train.launcher == "torchrun" and config.train.most_nodes > 1
    return several and not runs_on_cluster("train", config)


def _check_training(pipeline_run: PipelineRun) -> None:
    steps = {step.name for step in pipeline_run.preview() if step.action == "run"}
    if steps.intersection(TRACKED_STEPS):
        check_trackers(pipeline_run.config)
    if "train" in steps and not runs_on_cluster("train", pipeline_run.config):
        check_launcher(pipeline_run.config.train)


def _run_steps(pipeline_run: PipelineRun, run: Run, display: Display) -> None:
    with track_run(pipeline_run.project.root, run, display.report) as pipeline_run.tracking:
        _run_each_step(pipeline_run, run, display)


def _run_each_step(pipeline_run: PipelineRun, run: Run, display: Display) -> None:
    request = pipeline_run.request
    with contextlib.ExitStack() as server:
        for name in request.steps:
            step = pipeline_run.decide(name)
            earlier = run.read().steps.get(name)
            if name == "train" and step.action == "run" and earlier is not None and _has_progress(run, earlier):
                _settle_changes(pipeline_run, run, earlier, step.parts)
                step = pipeline_run.decide(name)
            if step.action == "reuse":
                record = _reuse_step(pipeline_run, run, step)
                display.report(f"{name}: reused, {step.reason}")
            else:
                if name in ("prepare", "train") and "train" in request.steps and not pipeline_run.server:
                    training = serve_training(pipeline_run.project.root, pipeline_run.config, request.cores)
                    pipeline_run.server = server.enter_context(training)
                changes_service = (
                    lock_service(run.runs, display.report) if name == "deploy" else contextlib.nullcontext()
                )
                with changes_service:
                    record = _run_step(pipeline_run, run, step, display)
            pipeline_run.outputs[name] = outputs_with_override(run, record)
            if name == "train":
                server.close()


def serve_training(root: Path, config: Config, cores: int) -> contextlib.AbstractContextManager[Mapping[str, str]]:
    """Let a fork server import what training on this machine needs, unless one has; return the variable that names it.

    Meanwhile the data may be prepared.
    """
    environment = training_environment(config.train, cores)
    is_elsewhere = runs_on_cluster("train", config) or not uses_agent(config.train)
    if is_elsewhere or has_server({**os.environ, **environment}):
        return contextlib.nullcontext({})
    return training_server(root, environment, config)


def _reuse_step(pipeline_run: PipelineRun, run: Run, step: Step) -> StepRecord:
    source, record = pipeline_run.reused_record(step)
    source.check_seal()
    source.check_record(record)
    if source.id == run.id:  # a resumed run has it already
        return record
    link_outputs(source, run, record)
    if record.status == OVERRIDDEN:
        copy_override(source, run)
    update = {"reused_from": record.reused_from or source.id, "reason": step.reason, "seconds": 0.0}
    return write_record(run, record.model_copy(update=update))


def _run_step(pipeline_run: PipelineRun, run: Run, step: Step, display: Display) -> StepRecord:
    root, request = pipeline_run.project.root, pipeline_run.request
    executor = choose_executor(pipeline_run, step.name, run.config, display)
    earlier = run.read().steps.get(step.name)
    continues = step.name == "train" and earlier is not None and not earlier.complete and earlier.is_current(step.key)
    if not continues and not executor.is_running(run, step):
        _put_earlier_attempt_aside(run, step.name, display)
        if step.name == "train" and request.start:
            request.start.copy_to(run)
    clear_error(run.partial(step.name))
    log = run.log(step.name)
    log_start = prepare_log(log)
    record = StepRecord(
        step=step.name,
        status="running",
        owner=own_identity(),
        key=step.key,
        parts=step.parts,
        argv=step_command(step.name, pipeline_run.config, run_argument(root, run)),
        started=now(),
        reason=step.reason,
        accepted=earlier.accepted if continues and earlier is not None else (),
        checkpoints_key=earlier.checkpoints_key if continues and earlier is not None else "",
    )

    def tick() -> None:
        display.tick()
        if pipeline_run.tracking is not None:
            pipeline_run.tracking.tick()

    display.start(run, step.name, step.reason, describe_activity(step.name, pipeline_run.config))
    started = time.monotonic()
    try:
        write_record(run, record)
        if step.name == "train" and needs_other_machines(pipeline_run.config):
            display.report(f"on each other machine, in this folder: pipe join {run.id}")
        if pipeline_run.tracking is not None:
            pipeline_run.tracking.begin(step.name)
        status = executor.run_step(run, record, tick)
    except BaseException as error:  # an interruption may come at any moment
        ending = "pruned" if isinstance(error, Pruned) else "interrupted"
        display.end(ending)
        write_record(run, record.model_copy(update={"status": ending, "seconds": time.monotonic() - started}))
        raise
    record = record.model_copy(update={"seconds": time.monotonic() - started})
    try:
        failure = find_failure(run, step.name, status, read_log_end(log, log_start))
        return _finish_step(pipeline_run, run, record, failure, display)
    finally:
        display.clear()  # also where the outputs cannot be recorded


def describe_activity(step: str, config: Config) -> str:
    """Return what a terminal shows of a step before the step itself has written anything."""
    if runs_on_cluster(step, config):
        return "waiting for its Job on the cluster"
    if step != "train":
        return _ACTIVITIES[step]
    processes = count_processes(processes_per_node(config.train, count_gpus(os.environ)))
    others = " and waiting for other machines" if needs_other_machines(config) else ""
    return f"starting {processes}{others}"


def _finish_step(
    pipeline_run: PipelineRun, run: Run, record: StepRecord, error: PipelineError | None, display: Display
) -> StepRecord:
    update: dict[str, object] = {}
    if error is None or error.complete:
        clear_error(run.partial(record.step))
        outputs, digest = seal_step(run, record.step)
        update |= {"outputs": outputs, "digest": digest, "empty_folders": empty_folders(run.output(record.step))}
        for replaced in run.path.glob(f"{record.step}.replaced-*"):
            shutil.rmtree(replaced)
    if error is None:
        display.end(f"done in {record.seconds:.1f} s")
        return write_record(run, record.model_copy(update={**update, "status": "done"}))
    if record.step == "evaluate" and error.complete:
        override = reuse_override(run, [other for other, _ in pipeline_run.history])
        if override is not None:
            display.end(f"rejected, and {override}")
            update |= {"status": OVERRIDDEN, "reason": str(error)}
            return write_record(run, record.model_copy(update=update))
    display.end(error.ending)
    display.failed(error)
    update |= {"status": error.ending, "reason": str(error)}
    write_record(run, record.model_copy(update=update))
    raise error


def _put_earlier_attempt_aside(run: Run, step: str, display: Display) -> None:
    """Remove what an earlier attempt left; checkpoints are kept until the step is complete."""
    partial = run.partial(step)
    if not (partial / "checkpoints").is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        return
    replaced = next(path for n in itertools.count(1) if not (path := run.path / f"{step}.replaced-{n}").exists())
    partial.rename(replaced)
    display.report(f"{step}: starting over; earlier checkpoints are kept in {replaced} until it is complete")


_DISK_FULL_BYTES = 1 << 20


class Executor(Protocol):
    def is_running(self, run: Run, step: Step) -> bool:
        """True if an earlier `pipe` started this step and it still runs: then none of its files may be removed."""

    def run_step(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the step to its end and return its exit status; output goes to its log, `tick` is called meanwhile."""


class LocalExecutor:
    """Runs a step as a process that ends with this one."""

    def __init__(self, root: Path, cores: int, server: Mapping[str, str]) -> None:
        self._root, self._cores, self._server = root, cores, server

    def is_running(self, run: Run, step: Step) -> bool:  # noqa: ARG002 - the protocol's signature
        return False

    def run_step(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the process; training is started again where its node was killed, as it starts its workers again."""
        train, log, launcher = run.config.train, run.log(record.step), LocalLauncher(self._root, tick)
        if record.step != "train":
            return launcher.launch(record.argv, log, step_environment(1, count_cores(self._cores)))
        environment = {**training_environment(train, self._cores), **self._server}
        status = launcher.launch(record.argv, log, environment)
        while status == -signal.SIGKILL:
            host = socket.gethostname()
            end = ProcessEnd(host, describe_exit(f"the node on {host}", status))
            if isinstance(restart_after(run.path, end, train.restarts), GiveUp):
                break
            status = launcher.launch((*record.argv, RESTARTED_FLAG), log, environment)
        return status


def training_environment(train: Train, cores: int) -> dict[str, str]:
    return step_environment(processes_per_node(train, count_gpus(os.environ)), count_cores(cores), train.threads)


def count_cores(cores: int) -> int:
    return cores or os.cpu_count() or 1


def choose_executor(pipeline_run: PipelineRun, step: str, config: Config, display: Display) -> Executor:
    root = pipeline_run.project.root
    if not runs_on_cluster(step, config):
        return LocalExecutor(root, pipeline_run.request.cores, pipeline_run.server)
    from pipeline.cluster_executor import ClusterExecutor  # the manifests are slow to load

    return ClusterExecutor(root, display.report, display.ask)


def runs_on_cluster(step: str, config: Config) -> bool:
    return config.cluster.executor == "kubernetes" and step in CLUSTER_STEPS


def find_failure(run: Run, step: str, status: int, log: str) -> PipelineError | None:
    """Return the cause of a failure, or None where the step succeeded.

    A process that lost contact with another one (`echo`) leaves an error, too; a killed process, which leaves none,
    is the cause then.
    """
    if status == 0:
        return _missing_model(run, step)
    error = read_error(run.partial(step))
    if (error is None or error.echo) and (killed := find_killed_process(log)):
        return StageError(f"{step}: {killed}")
    if error is None:
        error = missing_module_in_log(log)
    if error is not None:
        return type(error)(f"{step}: {error}")
    if shutil.disk_usage(run.path).free < _DISK_FULL_BYTES:
        return ResourceError(f"{step}: disk full under {run.path}; free some space, then `pipe run --resume`")
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return StageError(f"{step}: its process {ending} and left no reason; its output is in {run.log(step)}")


def _missing_model(run: Run, step: str) -> PipelineError | None:
    """Return the error of a machine that trained with others but has its own run directory, with no model in it."""
    if step != "train" or (run.partial(step) / "model.safetensors").is_file():
        return None
    return StageError(
        "train: this machine has no model, the first process ran on another one; all machines must share the run "
        "directory, and only one of them runs `pipe` (docs/training.md, Launching)"
    )
