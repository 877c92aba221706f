"""Walking the road: decide each step when its turn comes, reuse or launch it, record what happened.

What may change when a run goes on: where and how carefully it trains, never what it computes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import BundleError, ConfigError, PipelineError, Pruned, clear_error
from pipeline.contract.override import OVERRIDDEN
from pipeline.contract.run import Run, RunFile, StepRecord
from pipeline.display import Display
from pipeline.executor import executor_of, failure, is_on_cluster
from pipeline.history import (
    History,
    Project,
    changed_outputs,
    create_run,
    link_outputs,
    load_history,
    now,
    seal,
    write_record,
    write_run,
)
from pipeline.override import adopt, carry, outputs_of
from pipeline.plan import DEPLOYED, Step, argv_of, decide, parts_of, run_argument
from pipeline.processes import prepare_log, said_since
from pipeline.training.launchers import check_launcher

AGAIN = "deployed again"  # why a step's outputs are those of another run


@dataclass(frozen=True)
class Order:
    """What one command asks for."""

    wanted: tuple[str, ...]
    force: frozenset[str] = frozenset()
    reuse_only: frozenset[str] = frozenset()  # steps before `--from`: they must not run
    study: str = ""  # the run is a trial of this study of `pipe tune`
    trial: int | None = None
    cores: int = 0  # for its steps, where others work on the machine too; 0: all


@dataclass
class Road:
    """One walk over the steps; `outputs` grows as they complete."""

    project: Project
    config: Config
    order: Order
    history: History  # whose outputs may be reused, newest first
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    known_by: Config | None = None  # what its steps' keys are made of, where that is not what they run with
    _checked: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # every byte is hashed once a command

    def decide(self, step: str) -> Step:
        """With the files known so far."""
        parts = parts_of(step, self.known_by or self.config, self.project, self.outputs)
        past = [(run.id, body.steps[step]) for run, body in self.history if step in body.steps]
        decision = decide(step, parts, past, step in self.order.force, self._damage)
        if decision.action == "run" and step in self.order.reuse_only:
            raise ConfigError(f"--from starts after {step}, but {step} has to run: {decision.reason}")
        return decision

    def record(self, step: Step) -> tuple[Run, StepRecord]:
        """The run and record a decision reuses."""
        return next((run, body.steps[step.name]) for run, body in self.history if run.id == step.source)

    def preview(self) -> tuple[Step, ...]:
        """The plan as it stands: what would run, without running anything."""
        check_config(self.config)
        steps = []
        for name in self.order.wanted:
            step = self.decide(name)
            steps.append(step)
            if step.action == "reuse":
                self.outputs[name] = outputs_of(*self.record(step))
        self.outputs.clear()
        return tuple(steps)

    def _damage(self, run_id: str, record: StepRecord) -> list[str]:
        place = (run_id, record.step)
        if place not in self._checked:
            run = next(run for run, _ in self.history if run.id == run_id)
            self._checked[place] = changed_outputs(run, record)
        return self._checked[place]


def run_road(project: Project, config: Config, order: Order, display: Display) -> Run:
    """A new run; the caller holds the lock."""
    history = load_history(project.runs)
    if history and _unfinished(history[0][1]) and not history[0][1].study:
        display.say(f"note: run {history[0][0].id} is unfinished; `pipe run --resume` continues it")
    road = Road(project, config, order, history)
    _foresee(road)  # a mistake is found before a run directory is made
    parent = history[0][0].id if history else ""
    run = create_run(project.runs, config, order.wanted, parent, order.study, order.trial)
    _walk(road, run, display)
    return run


def resume_road(project: Project, run: Run, order: Order, display: Display, words: Sequence[str] = ()) -> Run:
    """Go on in the same run directory with the run's own configuration; `words` say where it goes on."""
    run = continue_with(run, words)
    road = Road(project, run.config, order, [(run, run.read())], known_by=run.planned)
    _foresee(road)
    _walk(road, run, display)
    return run


def _is_of_a_deployment(word: str) -> bool:
    section, _, name = word.partition(".")
    return section in ("deploy", "rollout") or (section == "serve" and name in DEPLOYED)


def deployable(source: Run, overrides: Sequence[str]) -> tuple[Config, list[StepRecord]]:
    """How a bundle of before would be deployed now, and the steps it is made of; each byte is as it was then."""
    if strange := [override for override in overrides if not _is_of_a_deployment(override.partition("=")[0])]:
        raise ConfigError(
            f"{strange[0]}: a deployment changes deploy.*, rollout.* and serve.{{{','.join(DEPLOYED)}}} alone; "
            "`pipe run` changes the others"
        )
    config, body = override_config(source.config, overrides), source.read()
    kept = [record for record in body.steps.values() if record.step != "deploy" and record.complete]
    if missing := sorted({"export", "package"} - {record.step for record in kept}):
        raise ConfigError(
            f"run {source.id} has no finished {' and no '.join(missing)}; `pipe run --resume` finishes it"
        )
    for record in kept:
        if changed := changed_outputs(source, record):
            raise BundleError(f"run {source.id}: {record.step}/{changed[0]} changed on disk; it must not be deployed")
    return config, kept


def redeploy(project: Project, source: Run, overrides: Sequence[str], display: Display) -> Run:
    """Deploy a bundle as it was made then, whatever has changed in the project since; a new, linked run."""
    config, kept = deployable(source, overrides)
    road = Road(project, config, Order(tuple(record.step for record in kept)), [(source, source.read())])
    run = create_run(project.runs, config, (*road.order.wanted, "deploy"), parent=source.id)
    carry(source, run)
    for record in kept:
        link_outputs(source, run, record)
        update = {"reused_from": record.reused_from or source.id, "reason": AGAIN, "seconds": 0.0}
        road.outputs[record.step] = outputs_of(run, write_record(run, record.model_copy(update=update)))
    _launch(road, run, road.decide("deploy"), display)
    return run


def latest_unfinished(project: Project) -> Run:
    for run, body in load_history(project.runs):
        if body.study:  # `pipe tune` goes on with its trials itself
            continue
        if _unfinished(body):
            return run
        if any(record.status == "rejected" for record in body.steps.values()):
            raise ConfigError(f"run {run.id} was rejected by the gate, not stopped; to resume an older one, name it")
    raise ConfigError(f"nothing to resume in {project.runs}: every run is complete")


def check_config(config: Config) -> None:
    """What one section cannot see of another."""
    if config.deploy.grpc_port == config.deploy.port:
        raise ConfigError(f"deploy.grpc_port and deploy.port are both {config.deploy.port}; give each its own")
    if config.jobs.executor == "kubernetes":
        from pipeline.cluster_executor import check  # others do without the manifests

        check(config)
    if waits_for_others(config) and not config.train.rendezvous:
        raise ConfigError(
            f"train.nodes={config.train.nodes} needs train.rendezvous=HOST:PORT, an address all nodes reach; "
            "on a cluster, `pipe run train --render DIR` writes the Job"
        )


def waits_for_others(config: Config) -> bool:
    """Whether training here is one machine of several, which people start; on a cluster pods are."""
    several = config.train.launcher == "torchrun" and config.train.most_nodes > 1
    return several and not is_on_cluster("train", config)


def _foresee(road: Road) -> None:
    here = not is_on_cluster("train", road.config)
    if any(step.name == "train" and step.action == "run" for step in road.preview()) and here:
        check_launcher(road.config.train)


def _unfinished(body: RunFile) -> bool:
    found = [body.steps.get(step) for step in body.wanted]
    ended = any(record is not None and record.status in ("rejected", "pruned") for record in found)
    return not ended and not all(record is not None and record.complete for record in found)


def _walk(road: Road, run: Run, display: Display) -> None:
    for name in road.order.wanted:
        step = road.decide(name)
        if step.action == "reuse":
            record = _reuse(road, run, step)
            display.say(f"{name}: reused, {step.reason}")
        else:
            record = _launch(road, run, step, display)
        road.outputs[name] = outputs_of(run, record)


def _reuse(road: Road, run: Run, step: Step) -> StepRecord:
    source, record = road.record(step)
    if source.id == run.id:  # a resumed run: it is there already
        return record
    link_outputs(source, run, record)
    if record.status == OVERRIDDEN:
        carry(source, run)
    update = {"reused_from": record.reused_from or source.id, "reason": step.reason, "seconds": 0.0}
    return write_record(run, record.model_copy(update=update))


def _launch(road: Road, run: Run, step: Step, display: Display) -> StepRecord:
    root = road.project.root
    executor = executor_of(step.name, root, run.config, road.order.cores, display.say, display.ask)
    if not executor.goes_on(run, step):
        _clear(run, step, display)
    log = run.log(step.name)
    began = prepare_log(log)
    argv = argv_of(step.name, road.config, run_argument(root, run))
    record = StepRecord(
        step=step.name,
        status="running",
        key=step.key,
        parts=step.parts,
        argv=argv,
        started=now(),
        reason=step.reason,
    )
    write_record(run, record)
    display.start(run, step.name, step.reason)
    if step.name == "train" and waits_for_others(road.config):
        display.say(f"on each other machine, in this folder: pipe join {run.id}")
    started = time.monotonic()
    try:
        status = executor.exit_status(run, record, display.tick)
    except BaseException as error:
        ending = "pruned" if isinstance(error, Pruned) else "interrupted"
        display.end(ending)
        write_record(run, record.model_copy(update={"status": ending, "seconds": time.monotonic() - started}))
        raise
    found = failure(run, step.name, status, said_since(log, began))
    return _finish(road, run, record.model_copy(update={"seconds": time.monotonic() - started}), found, display)


def _finish(road: Road, run: Run, record: StepRecord, error: PipelineError | None, display: Display) -> StepRecord:
    if error is None or error.complete:
        clear_error(run.partial(record.step))
        outputs, digest = seal(run, record.step)
        update: dict[str, object] = {"outputs": outputs, "digest": digest}
    else:
        update = {}
    if error is None:
        display.end(f"done in {record.seconds:.1f} s")
        return write_record(run, record.model_copy(update={**update, "status": "done"}))
    if record.step == "evaluate" and error.complete and (given := adopt(run, [other for other, _ in road.history])):
        display.end(f"rejected, and {given}")
        return write_record(run, record.model_copy(update={**update, "status": OVERRIDDEN, "reason": str(error)}))
    display.end(error.ending)
    display.failed(error)
    update |= {"status": error.ending, "reason": str(error)}
    write_record(run, record.model_copy(update=update))
    raise error


def _clear(run: Run, step: Step, display: Display) -> None:
    """Throw away what an earlier attempt left, except checkpoints made under this very key."""
    partial = run.partial(step.name)
    clear_error(partial)
    earlier = run.read().steps.get(step.name)
    if step.name == "train" and earlier is not None and earlier.key == step.key and earlier.status != "done":
        return
    if (partial / "checkpoints").is_dir():
        display.say(f"{step.name}: starting over, its checkpoints were made under other settings or sources")
    shutil.rmtree(partial, ignore_errors=True)


# Words of the train section. Not `checkpoints`, where the run's own are; not `device`, whose arithmetic differs.
WHERE = (
    "processes", "nodes", "rendezvous", "launcher", "image", "workers", "restarts", "timeout_seconds",
    "checkpoint_every", "keep_checkpoints", "snapshot", "snapshot_every", "log_every", "trace", "trace_steps",
)  # fmt: skip


def continue_with(run: Run, words: Sequence[str]) -> Run:
    """The run, with `key=value` words on record; its checkpoints and its keys stay what they were."""
    for word in words:
        key = word.partition("=")[0]
        section, _, name = key.partition(".")
        if section != "jobs" and key not in ("deploy.context", "deploy.namespace") and not _is_where(section, name):
            raise ConfigError(
                f"{key} says what the run computes, and it has computed with another value; a run that goes on may "
                f"change where it trains, by jobs.* and train.{', '.join(WHERE)}; `pipe run {word}` starts a new one"
            )
    if not words:
        return run
    body = run.read()
    override_config(run.config, words)  # a value that is none is refused before it is on record
    changed = {word.partition("=")[0] for word in words}
    kept = [word for word in body.continued if word.partition("=")[0] not in changed]
    write_run(run, body.model_copy(update={"continued": (*kept, *words)}))
    return Run(run.path)


def _is_where(section: str, name: str) -> bool:
    return section == "train" and name in WHERE
