"""Run steps as Kubernetes Jobs, and render training or the whole pipeline as manifests without running anything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from k8s import workflows
from k8s.cluster.api import Connection, connect
from k8s.cluster.rollout_status import JobResult
from k8s.objects.jobs import folder_user, step_job
from k8s.objects.manifests import kubectl_name, write_documents, write_manifests
from k8s.objects.overlay import overlay_folder
from k8s.objects.training import check_training_image, run_name, training_objects, volume_claims
from k8s.step_runner import StepRunner
from k8s.workflows import WorkflowTask
from pipeline.contract.config import Config, override_config
from pipeline.contract.restarts import newest_attempt, read_events, record_event
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.executors.local import Ask, Report, pod_environment, prepare_log, read_log_end
from pipeline.history import Project
from pipeline.plan import CLUSTER_STEPS, STEP_KINDS, Decision, run_argument, step_command
from pipeline.system.errors import (
    ConfigError,
    PipelineError,
    ResourceError,
    StageError,
    missing_module_in_log,
    read_error,
    write_error,
)

_PRINTED_ERROR = re.compile(r"^(?:\[\d+\] )?error: (.+)$", re.MULTILINE)  # with the pod's number
PENDING_TIMEOUT_SECONDS = 300  # for a pod whose image or volume the cluster cannot get


class ClusterExecutor:
    """Runs a step on the cluster of `deploy.context`, in `deploy.namespace`."""

    def __init__(self, root: Path, report: Report, ask: Ask) -> None:
        self._root, self._report, self._ask = root, report, ask
        self._connection: Connection | None = None

    def is_running(self, run: Run, decision: Decision) -> bool:
        """Return whether an earlier `pipe` started this step and it still runs: none of its files may be removed."""
        if decision.name not in run.read().steps:
            return False
        return self._step_runner(run, decision.name, decision.key, lambda: None).find() is not None

    def execute(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run or follow the Job and return its exit status; a failure leaves the error file a process would leave."""
        runner = self._step_runner(run, record.step, record.key, tick)
        partial, log = run.partial(record.step), run.log(record.step)
        log_start = prepare_log(log)
        try:
            result = self._run_job(runner, run)
        except PipelineError as error:
            result = JobResult(error.exit_code, str(error))
            if read_error(partial) is None:
                write_error(error, partial)
        if result.status and read_error(partial) is None:
            write_error(self._find_cause(result, run.config.train.image, read_log_end(log, log_start)), partial)
        if not result.status and not partial.is_dir():
            problem = (
                f"its pod succeeded, but wrote nothing to {run.path}; to fix it: the volume claim "
                f"{runner.step_job.claim} must hold this machine's folder of runs, {run.runs}"
            )
            write_error(StageError(problem), partial)
            return StageError.exit_code
        return result.status

    def _find_cause(self, result: JobResult, image: str, log: str) -> PipelineError:
        """Return why the pods failed: a module that the image lacks, the error they printed, or their exit status."""
        if (missing := missing_module_in_log(log)) is not None:
            what = str(missing).partition("; to fix it")[0]
            return ConfigError(
                f"{what} in {image}; to fix it: import it at the top of task.py or codec.py, whose packages the image "
                "gets, then `pipe package --train --push` and set train.image"
            )
        printed = _PRINTED_ERROR.findall(log)
        kind = StageError if result.status == StageError.exit_code else ResourceError
        return kind(printed[-1]) if printed else StageError(result.reason)

    def _run_job(self, runner: StepRunner, run: Run) -> JobResult:
        connection = runner.connection
        self._report(f"on context {connection.context}, server {connection.server}, namespace {runner.namespace}")
        try:
            if (job := runner.find()) is not None:
                self._report(f"{kubectl_name(job)} was started before; following it")
            else:
                if runner.step_job.step == "train":  # by a person: pods that replace others record no launch
                    record_event(run.path, event="launch", attempt=newest_attempt(read_events(run.path)))
                give_to_pods(run, runner.step_job.step)
                runner.start()
            result = self._follow(runner, run)
        except KeyboardInterrupt as interrupt:
            self._interrupt(runner, run, by_user=not interrupt.args)  # SIGTERM's has an argument
            raise
        try:
            runner.remove()
        except PipelineError as error:  # the step has ended, whether or not its Job can be removed
            self._report(f"warning: {kubectl_name(runner.step_job.job)} is left on the cluster: {error}")
        return result

    def _follow(self, runner: StepRunner, run: Run) -> JobResult:
        try:
            return runner.follow()
        except PipelineError:
            self._report(
                f"{kubectl_name(runner.step_job.job)} keeps running; `pipe run --resume {run.id}` follows it again"
            )
            raise

    def _interrupt(self, runner: StepRunner, run: Run, by_user: bool) -> None:
        name = kubectl_name(runner.step_job.job)
        if by_user and not self._ask(f"{name} runs on the cluster. Cancel it? [Y/n] "):
            self._report(f"{name} keeps running; `pipe run --resume {run.id}` follows it again")
            return
        self._report(f"cancelling {name} and waiting for its pods to end (Ctrl-C again: do not wait)")
        runner.cancel()

    def _step_runner(self, run: Run, step: str, key: str, tick: Callable[[], None]) -> StepRunner:
        config = run.config
        if self._connection is None:
            self._connection = connect(config.deploy.context)
        command = step_command(step, config, run_argument(self._root, run))
        overlay = overlay_folder(self._root, config, "cluster")
        return StepRunner(
            self._connection,
            config.deploy.namespace,
            step_job(config, step, run.id, key, command, pod_environment(), folder_user(run.path), overlay),
            run.path / "logs" / step,
            run.log(step),
            PENDING_TIMEOUT_SECONDS,
            self._report,
            tick,
        )


def give_to_pods(run: Run, step: str) -> None:
    """Make the pods' user the owner of what they write to, where that belongs to root: their pods are not root."""
    if os.geteuid() != 0:
        return
    user = folder_user(run.path)
    folders = (run.path / "logs", run.partial(step))
    try:
        for path in (run.path, *folders, *(path for folder in folders for path in folder.rglob("*"))):
            if path.exists() and path.lstat().st_uid == 0:
                os.chown(path, user.uid, user.gid, follow_symlinks=False)
    except OSError as error:
        raise ResourceError(
            f"{error.filename}: cannot be given to user {user.uid}, as which pods write to {run.path} "
            f"({os.strerror(error.errno or 0).lower()}); to fix it: run `pipe` as the user who owns {run.runs}"
        ) from error


def check_jobs(config: Config) -> None:
    """Raise the mistakes that can be found without a cluster, before a run directory is made."""
    for step in CLUSTER_STEPS:
        step_job(config, step, "run", "key", step_command(step, config, "runs/run"), {})


def render_training(project: Project, config: Config, directory: str) -> list[Path]:
    """Write the manifests that train this project on a cluster without `pipe run`."""
    check_training_image(config)
    overlay = overlay_folder(project.root, config, "cluster")
    objects = training_objects(config, f"runs/{run_name(config)}", standalone=True, overlay=overlay)
    return list(write_manifests(objects, _target(project, directory, "train")))


def render_workflow(project: Project, config: Config, engine: str, directory: str) -> list[Path]:
    """Write all steps as a workflow for an engine, and the claim for the volume of the runs."""
    check_training_image(config)
    if config.cluster.overlay:
        raise ConfigError(
            "cluster.overlay: changes Jobs, and a workflow has none; leave it empty, and change the files"
        )
    config = override_config(config, _pod_overrides(config))
    target = _target(project, directory, engine)
    claims = volume_claims(config)
    files = {"claim.yaml": claims} if claims else {}
    if engine == "argo":
        tasks = workflow_tasks(config, workflows.ARGO_RUN)
        files["workflow.yaml"] = [workflows.argo_workflow(config, tasks)]
    else:
        tasks = workflow_tasks(config, workflows.KFP_RUN)
        files["pipeline.yaml"] = workflows.kfp_documents(config, tasks)
    return write_documents(files, target)


def missing_image(config: Config) -> str:
    """Return why the last step of a workflow would have nothing to deploy; empty where it has."""
    if config.package.builder not in ("auto", "none") or (config.deploy.image and config.deploy.storage_uri):
        return ""
    return (
        "pods have no container builder, so the workflow's deploy step finds no image of its bundle: set deploy.image, "
        "deploy.target=kserve and deploy.storage_uri (docs/kubernetes-training.md, Argo and Kubeflow Pipelines), or "
        "deploy the run from a machine with a builder"
    )


def workflow_tasks(config: Config, run: str) -> tuple[WorkflowTask, ...]:
    """Return the steps as a graph: each after those it reads from.

    `pipeline.pod` keeps the run's records and runs the step's own command, after `--`.
    """
    return tuple(
        WorkflowTask(
            step,
            ("python", "-m", "pipeline.pod", step, run, "--", *step_command(step, config, run)),
            tuple(name for name in STEPS if name in STEP_KINDS[step].upstream),
        )
        for step in STEPS
    )


def _pod_overrides(config: Config) -> list[str]:
    """Return the settings of steps in pods: no local service, no Jobs of their own, no builder unless one is named."""
    build = [] if config.package.builder not in ("auto", "none") else ["package.builder=none"]
    target = [] if config.deploy.on_cluster else ["deploy.target=kubernetes"]
    return [*target, "cluster.executor=local", *build]


def _target(project: Project, directory: str, name: str) -> Path:
    target = project.runs / "manifests" / name if directory == "default" else Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    return target
