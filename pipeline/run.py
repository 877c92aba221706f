"""Run the pipeline: decide each step when its turn comes, reuse or run it, and record what happened."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.continuation import recorded_starting_point
from pipeline.contract.bundle import OVERRIDDEN
from pipeline.contract.config import Config
from pipeline.contract.run import Run, StepRecord, own_identity
from pipeline.display import Display, count_processes
from pipeline.executors.executor import choose_executor, needs_other_machines, runs_on_cluster
from pipeline.executors.local import count_gpus, prepare_log, read_log_end, training_environment, training_server
from pipeline.failures import find_failure
from pipeline.history import (
    Project,
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
from pipeline.plan import Step, processes_per_node, run_argument, step_command
from pipeline.resume import (
    check_changes,
    describe_kept_settings,
    has_progress,
    is_unfinished,
    override_resumed,
    settle_changes,
)
from pipeline.system.errors import PipelineError, Pruned, clear_error
from pipeline.system.files import empty_folders
from pipeline.system.fork_server import has_server
from pipeline.tracking.process import TRACKED_STEPS, check_trackers, track_run
from pipeline.training.launchers import check_launcher, uses_agent
from pipeline.work import PipelineRun, RunRequest

# What a terminal shows of the steps that have no metrics.
_ACTIVITIES = {
    "prepare": "reading and checking the data",
    "evaluate": "scoring the model and the baseline",
    "export": "converting to ONNX and comparing with PyTorch",
    "package": "making the image",
    "deploy": "starting the service and testing it",
}


def run_pipeline(project: Project, config: Config, request: RunRequest, display: Display) -> Run:
    """Run the steps in a new run directory; the caller holds the lock of the runs, at least shared."""
    history = load_history(project.runs)
    newest, file = history[0] if history else (None, None)
    if newest and file and is_unfinished(file) and not file.study and not is_locked(newest):
        display.report(f"note: run {newest.id} is unfinished; `pipe run --resume` continues it")
    pipeline_run = PipelineRun(project, config, request, history)
    _check_training(pipeline_run)  # raise mistakes before a run directory is made
    parent = newest.id if newest else ""
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
    check_changes(pipeline_run, run)
    _check_training(pipeline_run)
    _run_steps(pipeline_run, run, display)
    return run


def _check_training(pipeline_run: PipelineRun) -> None:
    steps = {step.name for step in pipeline_run.preview() if step.action == "run"}
    if steps.intersection(TRACKED_STEPS):
        check_trackers(pipeline_run.config)
    if "train" in steps and not runs_on_cluster("train", pipeline_run.config):
        check_launcher(pipeline_run.config.train)


def _run_steps(pipeline_run: PipelineRun, run: Run, display: Display) -> None:
    request, tracked = pipeline_run.request, track_run(pipeline_run.project.root, run, display.report)
    with tracked as pipeline_run.tracking, contextlib.ExitStack() as until_trained:
        for name in request.steps:
            step = pipeline_run.decide(name)
            earlier = run.read().steps.get(name)
            if name == "train" and step.action == "run" and earlier is not None and has_progress(run, earlier):
                settle_changes(pipeline_run, run, earlier, step.parts)
                step = pipeline_run.decide(name)
            if step.action == "reuse":
                record = _reuse_step(pipeline_run, run, step)
                display.report(f"{name}: reused, {step.reason}")
            else:
                if name in ("prepare", "train") and "train" in request.steps and not pipeline_run.server:
                    training = serve_training(pipeline_run.project.root, pipeline_run.config, request.cores)
                    pipeline_run.server = until_trained.enter_context(training)
                changes_service = (
                    lock_service(run.runs, display.report) if name == "deploy" else contextlib.nullcontext()
                )
                with changes_service:
                    record = run_step(pipeline_run, run, step, display)
            pipeline_run.outputs[name] = outputs_with_override(run, record)
            if name == "train":
                until_trained.close()


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


def run_step(pipeline_run: PipelineRun, run: Run, step: Step, display: Display) -> StepRecord:
    root, config, request = pipeline_run.project.root, pipeline_run.config, pipeline_run.request
    executor = choose_executor(step.name, config, root, request.cores, pipeline_run.server, display)
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
        argv=step_command(step.name, config, run_argument(root, run)),
        started=now(),
        reason=step.reason,
        accepted=earlier.accepted if continues and earlier is not None else (),
        checkpoints_key=earlier.checkpoints_key if continues and earlier is not None else "",
    )

    def tick() -> None:
        display.tick()
        if pipeline_run.tracking is not None:
            pipeline_run.tracking.tick()

    display.start(run, step.name, step.reason, describe_activity(step.name, config))
    started = time.monotonic()
    try:
        write_record(run, record)
        if step.name == "train" and needs_other_machines(config):
            display.report(f"on each other machine, in this folder: pipe join {run.id}")
        if pipeline_run.tracking is not None:
            pipeline_run.tracking.begin(step.name)
        status = executor.execute(run, record, tick)
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
        outputs, digest = publish_step(run, record.step)
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
