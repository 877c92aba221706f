"""A step as a Job: connected, started or found again, followed, and removed; Ctrl-C asks whether to cancel it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k8s.cluster.api import Connection, connect
from k8s.cluster.rollout_status import Ending
from k8s.objects.jobs import Work, work
from k8s.objects.manifests import label
from k8s.step_runner import Engine
from pipeline.contract.config import Config
from pipeline.contract.errors import PipelineError, StageError, read_error, write_error
from pipeline.contract.run import Run, StepRecord
from pipeline.plan import Step, argv_of, run_argument
from pipeline.processes import Ask, Say, pod_environment


class OnCluster:
    """The cluster of `deploy.context`, in `deploy.namespace`."""

    def __init__(self, root: Path, say: Say, ask: Ask) -> None:
        self._root, self._say, self._ask = root, say, ask
        self._connection: Connection | None = None

    def goes_on(self, run: Run, step: Step) -> bool:
        if step.name not in run.read().steps:
            return False
        return self._engine(run, step.name, step.key, _quiet).find() is not None

    def exit_status(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """What went wrong is left where a step's process leaves it, unless the step's own process did."""
        engine = self._engine(run, record.step, record.key, tick)
        try:
            found = self._run(engine, run)
        except PipelineError as error:
            found = Ending(error.exit_code, str(error))
            if read_error(run.partial(record.step)) is None:
                write_error(error, run.partial(record.step))
        if found.status and read_error(run.partial(record.step)) is None:
            write_error(StageError(found.reason), run.partial(record.step))
        if not found.status and not run.partial(record.step).is_dir():
            write_error(_unseen(run, engine.work), run.partial(record.step))
            return StageError.exit_code
        return found.status

    def _run(self, engine: Engine, run: Run) -> Ending:
        connection = engine.connection
        self._say(f"on context {connection.context}, server {connection.server}, namespace {engine.namespace}")
        try:
            if (job := engine.find()) is not None:
                self._say(f"{label(job)} was started before; following it")
            else:
                engine.start()
            found = self._follow(engine, run)
        except KeyboardInterrupt as interrupt:
            self._interrupted(engine, run, asked=not interrupt.args)
            raise
        try:
            engine.remove()
        except PipelineError as error:  # the step is over, however its Job may stay
            self._say(f"warning: {label(engine.work.job)} is left on the cluster: {error}")
        return found

    def _follow(self, engine: Engine, run: Run) -> Ending:
        try:
            return engine.follow()
        except PipelineError:
            self._say(f"{label(engine.work.job)} goes on without us; `pipe run --resume {run.id}` follows it again")
            raise

    def _interrupted(self, engine: Engine, run: Run, asked: bool) -> None:
        """SIGTERM has an argument, and nobody to answer a question."""
        name = label(engine.work.job)
        if asked and not self._ask(f"{name} runs on the cluster. Cancel it? [Y/n] "):
            self._say(f"{name} goes on without us; `pipe run --resume {run.id}` follows it again")
            return
        self._say(f"cancelling {name}; its pods end first (Ctrl-C again: do not wait for them)")
        engine.cancel()

    def _engine(self, run: Run, step: str, key: str, tick: Callable[[], None]) -> Engine:
        config = run.config
        if self._connection is None:
            self._connection = connect(config.deploy.context)
        found = _work(config, run, self._root, step, key)
        patience = config.jobs.timeout_seconds
        logs, log = run.path / "logs" / step, run.log(step)
        return Engine(self._connection, config.deploy.namespace, found, logs, log, patience, self._say, tick)


def check(config: Config) -> None:
    """Before a run directory is made: mistakes that need no cluster to be seen."""
    for step in config.jobs.steps:
        work(config, step, "run", "key", argv_of(step, config, "runs/run"), {})


def _work(config: Config, run: Run, root: Path, step: str, key: str) -> Work:
    argv = argv_of(step, config, run_argument(root, run))
    return work(config, step, run.id, key, argv, pod_environment())


def _unseen(run: Run, made: Work) -> StageError:
    return StageError(
        f"its pod ended well, but {run.path} has nothing of it: the volume claim {made.claim} must hold the folder of "
        f"runs of this machine, {run.runs}"
    )


def _quiet() -> None:
    """Nothing is shown while a Job is only looked for."""
