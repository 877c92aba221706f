"""Run the pipeline: decide each step when its turn comes, reuse or run it, and record what happened."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.continuation import recorded_starting_point
from pipeline.contract.bundle import OVERRIDDEN
from pipeline.contract.config import Config
from pipeline.contract.run import CHECKED_FILES, Run, StepRecord, own_identity
from pipeline.display import Display, count_processes
from pipeline.executors.executor import choose_executor, needs_other_machines, runs_on_cluster
from pipeline.executors.local import (
    OF_ALL_STEPS,
    LocalLauncher,
    count_gpus,
    fork_server,
    prepare_log,
    read_log_end,
    training_environment,
)
from pipeline.failures import find_failure
from pipeline.history import (
    Project,
    begin_run,
    create_run,
    is_locked,
    link_outputs,
    load_history,
    lock_run,
    lock_service,
    now,
    publish_step,
    write_record,
)
from pipeline.override import copy_override, outputs_with_override, reuse_override
from pipeline.plan import CHECK, Decision, processes_per_node, run_argument, step_command
from pipeline.resume import (
    check_changes,
    describe_kept_settings,
    has_progress,
    is_unfinished,
    override_resumed,
    record_targets,
    settle_changes,
)
from pipeline.system.errors import PipelineError, Pruned, clear_error
from pipeline.system.files import empty_folders
from pipeline.system.fork_server import has_server
from pipeline.tracking.process import TRACKED_STEPS, check_trackers, track_run
from pipeline.training.launchers import POD_NUMBER, check_launcher, uses_agent
from pipeline.work import RunRequest, Work

# What a terminal shows of the steps that have no metrics.
_ACTIVITIES = {
    "prepare": "reading and checking the data",
    "check": "trying the whole pipeline with an untrained model",
    "evaluate": "scoring the model and the baseline",
    "export": "converting to ONNX and comparing with PyTorch",
    "package": "making the image",
    "deploy": "starting the service and testing it",
}


def run_pipeline(project: Project, config: Config, request: RunRequest, display: Display) -> Run:
    """Run the steps in a new run directory; the caller holds the lock of the runs, at least shared."""
    history = load_history(project.runs)
    newest, body = history[0] if history else (None, None)
    if newest and body and is_unfinished(body) and not body.study and not is_locked(newest):
        display.report(f"note: run {newest.id} is unfinished; `pipe run --resume` continues it")
    work = Work(project, config, request, history)
    _check_training(work)  # raise mistakes before a run directory is made
    parent = newest.id if newest else ""
    start = str(request.starting_point) if request.starting_point else ""
    run = create_run(project.runs, config, request.steps, parent, request.study, request.trial, start)
    with lock_run(run):
        display.run = run
        _run_steps(work, run, display)
    return run


def resume_run(project: Project, run: Run, request: RunRequest, display: Display, overrides: Sequence[str] = ()) -> Run:
    """Continue in the same run directory with the run's own configuration; overrides may change where it trains.

    The caller holds the lock of the run.
    """
    display.run = run
    run = override_resumed(run, overrides)
    if recorded := run.read().starting_point:
        request = replace(request, starting_point=recorded_starting_point(project, recorded))
    work = Work(project, run.config, request, [(run, run.read())], key_config=run.original_config)
    if kept := describe_kept_settings(project, run):
        display.report(f"note: this run keeps its own settings: {kept}; `pipe run all` uses those of pipe.yaml")
    check_changes(work, run)
    _check_training(work)
    _run_steps(work, run, display)
    return run


def _check_training(work: Work) -> None:
    steps = {step.name for step in work.preview() if step.action == "run"}
    if steps.intersection(TRACKED_STEPS):
        check_trackers(work.config)
    if "train" in steps and not runs_on_cluster("train", work.config):
        check_launcher(work.config.train)


def _run_steps(work: Work, run: Run, display: Display) -> None:
    request, tracked = work.request, track_run(work.project.root, run, display.report)
    with tracked as work.tracking, contextlib.ExitStack() as until_exported:
        for name in request.steps:
            decision = work.decide(name)
            earlier = run.read().steps.get(name)
            if name == "train" and decision.action == "run" and earlier is not None and has_progress(run, earlier):
                # prepare may have made other data meanwhile
                settle_changes(work, run, earlier, decision.parts, functools.partial(display.ask, default=False))
                decision = work.decide(name)
            if decision.action == "reuse":
                record = _reuse_step(work, run, decision)
                display.report(f"{name}: reused, {decision.reason}")
            else:
                if name in (CHECK, "prepare", "train") and "train" in request.steps and not work.fork_server:
                    server = start_fork_server(work.project.root, work.config, request.cores)
                    work.fork_server = until_exported.enter_context(server)
                is_local = name == "deploy" and not work.config.deploy.on_cluster  # a lease locks a place on a cluster
                with lock_service(run.runs, display.report) if is_local else contextlib.nullcontext():
                    record = run_step(work, run, decision, display)
            if name == "prepare":  # which has taken them, unless it was reused
                shutil.rmtree(run.path / CHECKED_FILES, ignore_errors=True)
            work.outputs[name] = outputs_with_override(run, record)
            if name == "export":
                until_exported.close()


def start_fork_server(root: Path, config: Config, cores: int) -> contextlib.AbstractContextManager[Mapping[str, str]]:
    """Start a fork server for the steps on this machine, unless one runs; yield the variable that names it."""
    environment = training_environment(config.train, cores)
    is_elsewhere = runs_on_cluster("train", config) or not uses_agent(config.train)
    if is_elsewhere or has_server({**os.environ, **environment}):
        return contextlib.nullcontext({})
    return fork_server(root, environment, config, OF_ALL_STEPS)


def _reuse_step(work: Work, run: Run, decision: Decision) -> StepRecord:
    source, record = work.reused_record(decision)
    source.check_seal()
    source.check_record(record)
    if source.id == run.id:  # a resumed run has it already
        return record
    link_outputs(source, run, record)
    if record.status == OVERRIDDEN:
        copy_override(source, run)
    update = {"reused_from": record.reused_from or source.id, "reason": decision.reason, "seconds": 0.0}
    return write_record(run, record.model_copy(update=update))


def run_step(work: Work, run: Run, decision: Decision, display: Display) -> StepRecord:
    root, config, request = work.project.root, work.config, work.request
    executor = choose_executor(decision.name, config, root, request.cores, work.fork_server, display)
    earlier = run.read().steps.get(decision.name)
    continues = (
        decision.name == "train" and earlier is not None and not earlier.complete and earlier.is_current(decision.key)
    )
    if not continues and not executor.is_running(run, decision):
        _put_earlier_attempt_aside(run, decision.name, display)
        if decision.name == "train" and request.starting_point:
            request.starting_point.copy_to(run)
    clear_error(run.partial(decision.name))
    log = run.log(decision.name)
    log_start = prepare_log(log)
    record = StepRecord(
        step=decision.name,
        status="running",
        owner=own_identity(),
        key=decision.key,
        parts=decision.parts,
        argv=step_command(decision.name, config, run_argument(root, run)),
        started=now(),
        reason=decision.reason,
        accepted=earlier.accepted if continues and earlier is not None else (),
        checkpoints_key=earlier.checkpoints_key if continues and earlier is not None else "",
    )

    def tick() -> None:
        display.tick()
        if work.tracking is not None:
            work.tracking.tick()

    display.start(run, decision.name, decision.reason, describe_activity(decision.name, config))
    started = time.monotonic()
    try:
        write_record(run, record)
        if decision.name == "train":
            record_targets(run)
        if decision.name == "train" and needs_other_machines(config) and POD_NUMBER not in os.environ:
            display.report(f"on each other machine, in this folder: pipe join {run.id}")
        if work.tracking is not None:
            work.tracking.begin(decision.name)
        status = executor.execute(run, record, tick)
    except BaseException as error:  # an interruption may come at any moment
        ending = "pruned" if isinstance(error, Pruned) else "interrupted"
        display.end(ending)
        write_record(run, record.model_copy(update={"status": ending, "seconds": time.monotonic() - started}))
        raise
    record = record.model_copy(update={"seconds": time.monotonic() - started})
    try:
        failure = find_failure(run, decision.name, status, read_log_end(log, log_start))
        return _finish_step(work, run, record, failure, display)
    finally:
        display.clear()  # also where the outputs cannot be recorded


def check_pipeline(project: Project, config: Config, server: Mapping[str, str]) -> None:
    """Run the check step in a folder that is then removed; raise what it finds."""
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        run = begin_run(Run(Path(folder) / "plan"), config, (CHECK,))
        argv, log = step_command(CHECK, config, str(run.path)), run.log(CHECK)
        launcher = LocalLauncher(project.root, lambda: None, forks=True)
        status = launcher.launch(argv, log, {**training_environment(config.train, 0), **server})
        text = log.read_text()
        if failure := find_failure(run, CHECK, status, text):
            raise failure
        print(text, end="", file=sys.stderr)


def describe_activity(step: str, config: Config) -> str:
    """Return what a terminal shows of a step before the step itself has written anything."""
    if runs_on_cluster(step, config):
        return "waiting for its Job on the cluster"
    if step != "train":
        return _ACTIVITIES[step]
    processes = count_processes(processes_per_node(config.train, count_gpus(os.environ)))
    others = " and waiting for other machines" if needs_other_machines(config) else ""
    return f"starting {processes}{others}"


def _finish_step(work: Work, run: Run, record: StepRecord, error: PipelineError | None, display: Display) -> StepRecord:
    update: dict[str, object] = {}
    if error is None or error.keeps_output:
        clear_error(run.partial(record.step))
        outputs, digest = publish_step(run, record.step)
        update |= {"outputs": outputs, "digest": digest, "empty_folders": empty_folders(run.output(record.step))}
        for replaced in run.path.glob(f"{record.step}.replaced-*"):
            shutil.rmtree(replaced)
    if error is None:
        display.end(f"done in {record.seconds:.1f} s")
        return write_record(run, record.model_copy(update={**update, "status": "done"}))
    if record.step == "evaluate" and error.keeps_output:
        override = reuse_override(run, [other for other, _ in work.history])
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
    # A summary in a damaged output would end the new training at once.
    for folder in filter(Path.is_dir, (partial, *([run.output(step)] if step == "train" else []))):
        replaced = next(path for n in itertools.count(1) if not (path := run.path / f"{step}.replaced-{n}").exists())
        folder.rename(replaced)
        display.report(f"{step}: starting over; earlier checkpoints are kept in {replaced} until it is complete")
