"""`pipe chaos`: train once without kills, then with kills, and compare the two trainings.

The user's training is reduced to few steps. The schedule of kills depends only on their number, the seed, the number of
steps and of processes. The training with kills repeats `pipe run --resume` until it is done.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_args

import psutil

from pipeline.chaos.verdict import KillResult, Training, compare_training, kill_results, training_log
from pipeline.contract.chaos import CHAOS_VARIABLE, ChaosEvent, ChaosLog, Kill, KillPoint, StorageFault
from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run
from pipeline.executors.local import child_process
from pipeline.history import Project, create_run, link_outputs, write_record
from pipeline.system.errors import ConfigError, ResourceError, StageError
from pipeline.system.files import read_object
from pipeline.system.fork_server import Process

_POLL_SECONDS = 0.01
_LOG_LINES = 3

DueKill: TypeAlias = tuple[float, Kill] | None  # time and kill
NextKill: TypeAlias = Callable[[Sequence[ChaosEvent], float], DueKill]  # of the events and the start of the command


@dataclass(frozen=True)
class ReferenceTiming:
    """Durations of a training without kills; the times of random kills are derived from them."""

    start_seconds: float  # from the command to the first step
    hold_seconds: float  # duration of the steps in which a random kill can happen


@dataclass
class Attack:
    """The processes of one run; `on_events` is called after every event."""

    folder: Path  # of the project
    run: Run
    log: ChaosLog
    next_kill: NextKill
    hang_seconds: float
    kills: Sequence[Kill]
    on_events: Callable[[Sequence[ChaosEvent]], None]
    by_hand: list[str] = field(default_factory=list)  # why training ended each time, without need
    _events: list[ChaosEvent] = field(default_factory=list)
    _paused: list[tuple[float, psutil.Process]] = field(default_factory=list)  # until when, and who
    _read: int = 0  # bytes of the log

    def train(self) -> None:
        """Train to the end through all kills; raise if that is impossible."""
        kill: Kill | None = None
        while True:
            kills_before = len(kill_events(self._events))
            status, excused = self._run_two() if kill and kill.fault == "resume" else self._run_command()
            if status == 0:
                return
            if len(kill_events(self._events)) == kills_before:
                raise StageError(f"training ended without a kill: {last_lines(self._output)}")
            kill = self.kills[kill_events(self._events)[-1].number]
            if not excused and kill.fault != "disk":  # a person must free the disk
                self.by_hand.append(last_lines(self._output))
            damage_storage(self.run, kill)

    def _run_command(self) -> tuple[int, bool]:
        """Run one command; return its exit status and whether one of our kills explains it."""
        with self._start(self._output) as process:
            return self._watch(process)

    def _run_two(self) -> tuple[int, bool]:
        """Run two commands at once; one must refuse to work, and the other does."""
        second_output = self.log.folder / "pipe-second.log"
        with self._start(self._output) as first, self._start(second_output) as second:
            started = time.time()
            while first.poll() is None and second.poll() is None:
                self._check_alive(started)
                time.sleep(_POLL_SECONDS)
            first_ended = first.poll() is not None
            ended, output, other = (first, self._output, second) if first_ended else (second, second_output, first)
            text = last_lines(output)
            if ended.wait() != ResourceError.exit_code or "is working on it" not in text:
                raise StageError(f"one of two commands that resumed at once ended otherwise than by refusing: {text}")
            return self._watch(other)

    @contextlib.contextmanager
    def _start(self, log: Path) -> Iterator[Process]:
        argv = ("python", "-m", "pipeline", "-C", str(self.folder), "run", "--resume", str(self.run.path))
        env = {"PYTHONSAFEPATH": "1", CHAOS_VARIABLE: str(self.log.folder)}
        with log.open("ab") as output, child_process(argv, self.folder, env, output) as process:
            yield process

    def _watch(self, process: Process) -> tuple[int, bool]:
        started, excused = time.time(), False
        command_process = psutil.Process(process.pid)
        while process.poll() is None:
            self._read_events()
            excused |= self._kill(command_process, started)
            self._end_pauses(time.time())
            self._check_alive(started)
            time.sleep(_POLL_SECONDS)
        self._end_pauses(math.inf)
        self._read_events()
        return process.wait(), excused

    def _end_pauses(self, now: float) -> None:
        for until, process in self._paused:
            if until <= now:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        self._paused = [(until, process) for until, process in self._paused if until > now]

    def _read_events(self) -> None:
        if (size := self.log.size()) > self._read:  # parsing a hundred times per second would slow down training
            self._read, self._events = size, self.log.events()
            self.on_events(self._events)

    def _kill(self, command_process: psutil.Process, started: float) -> bool:
        """Make the next kill from outside if it is due; return whether it ends the command."""
        due_time, kill = self.next_kill(self._events, started) or (math.inf, None)
        if kill is None or time.time() < due_time:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself; retried after the restart
            descendants = command_process.children(recursive=True)
            process, kill_time = choose_victim(kill, self._events, command_process, descendants), time.time()
            if process is not None:
                if kill.fault == "pause":
                    process.suspend()
                    self._paused.append((kill_time + kill.seconds, process))
                else:
                    process.send_signal(signal.SIGKILL)
                if kill.fault == "store":
                    worker = choose_victim(_FIRST_WORKER, self._events, command_process, descendants)
                    if worker is not None:
                        worker.send_signal(signal.SIGKILL)
                number = len(kill_events(self._events))
                self.log.claim(number)
                self.log.append(ChaosEvent(event="kill", time=kill_time, number=number, pid=process.pid))
                self._read_events()
                return process == command_process and kill.fault != "pause"
        return False

    def _check_alive(self, started: float) -> None:
        last_activity = max([started, self._last_write(), *(event.time for event in self._events)])
        if time.time() - last_activity > self.hang_seconds:
            raise StageError(f"training has hung for {self.hang_seconds:.0f} s: {last_lines(self._output)}")

    def _last_write(self) -> float:
        """Return when the training log was last written."""
        try:
            return (self.run.partial("train") / "metrics.jsonl").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @property
    def _output(self) -> Path:
        return self.log.folder / "pipe.log"


_FIRST_WORKER = Kill(place="moment", step=1)


def last_lines(output: Path) -> str:
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LOG_LINES:]) or "no output"


def damage_storage(run: Run, kill: Kill) -> None:
    """Damage the file that the fault names, if there is one: training is resumed with what is left."""
    if kill.fault == "unreadable":
        other = run.path.with_name("99991231-235959-0000")  # the newest
        other.mkdir(exist_ok=True)
        (other / "run.json").touch()
    elif kill.fault == "zeroed":
        if files := replaceable_files(run):
            _damage(random.Random(kill.share).choice(files), kill.fault)
    elif kill.fault in get_args(StorageFault):
        checkpoints = run.partial("train") / "checkpoints"
        folder = max((path for path in checkpoints.glob("step-*") if path.is_dir()), default=checkpoints)
        if kill.fault == "best" and folder != checkpoints:
            step = read_object(folder / "manifest.json", "content", "progress", "best_step")
            folder = checkpoints / f"step-{step:08d}"
        if shards := sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size):
            _damage(shards[-1], kill.fault)


def replaceable_files(run: Run) -> list[Path]:
    """Return the files of training without which it resumes, unlike the ledger, which is verified."""
    files = [*run.partial("train").glob("*"), *(run.path / "logs").rglob("*")]
    return sorted(path for path in files if path.is_file() and path.stat().st_size and path.name != "ledger.jsonl")


def _damage(path: Path, fault: str) -> None:
    """Cut the file in half, change its last byte, or overwrite all of it by NULs."""
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 0xFF])
    damaged = {"truncated": content[: len(content) // 2], "flipped": flipped}
    path.write_bytes(damaged.get(fault, bytes(len(content))))


def kill_events(events: Sequence[ChaosEvent]) -> list[ChaosEvent]:
    return [event for event in events if event.event == "kill"]


def no_kill(_events: Sequence[ChaosEvent], _started: float) -> DueKill:
    """Kill no process from outside."""
    return None


def next_scheduled_kill(
    kills: Sequence[Kill], timing: ReferenceTiming, events: Sequence[ChaosEvent], started: float
) -> DueKill:
    """Return the next kill if it comes from outside and its time is known."""
    past_kills = kill_events(events)
    if len(past_kills) >= len(kills):
        return None
    kill = kills[len(past_kills)]
    if kill.place == "start":
        return max([started, *(event.time for event in past_kills)]) + kill.share * timing.start_seconds, kill
    ready_events = [event for event in events if event.event == "ready" and event.number == len(past_kills)]
    if kill.place == "moment" and ready_events:
        return ready_events[0].time + kill.share * timing.hold_seconds, kill
    return None


def choose_victim(
    kill: Kill, events: Sequence[ChaosEvent], command_process: psutil.Process, descendants: Sequence[psutil.Process]
) -> psutil.Process | None:
    """Return the process to kill, always a descendant of the command."""
    if kill.who == "pipe":
        return command_process
    if kill.place == "start":
        return max(descendants, key=lambda process: process.create_time(), default=None)
    starts = [event for event in events if event.event == "born" and event.rank == kill.rank]
    if not starts:
        return None
    if kill.who == "worker":
        return next((process for process in descendants if process.pid == starts[-1].pid), None)
    found = [process for process in descendants if ("-m", _MODULES[kill.who]) in pairwise(process.cmdline())]
    parents = [process for process in descendants if process.pid == starts[-1].parent]  # mpirun, srun
    return next(iter(found or parents), None)


_MODULES = {"launcher": "train.elastic.agent", "server": "pipeline.system.fork_server"}


_EPOCHS = 2  # so that one ends during the training
_BATCH_SIZE = 64  # instead of `auto`, which may choose another size each time
_MAX_RESTARTS = 1000  # many kills happen without a new checkpoint in between


def reduced_config(config: Config, samples: int, kills: int, overrides: list[str]) -> Config:
    """Return a short training with a checkpoint at every step; `overrides` of the user are applied last."""
    train = config.train
    batch_size = _BATCH_SIZE if train.batch_size == "auto" else train.batch_size
    steps_per_epoch = max(MIN_STEPS, count_step_kills(kills)) // _EPOCHS
    sample_count = steps_per_epoch * batch_size - (batch_size > 1)  # so that batches differ in size
    epochs = _EPOCHS if sample_count <= samples else -(-_EPOCHS * steps_per_epoch * batch_size // samples)
    reduced = override_config(
        config,
        [
            f"train.batch_size={batch_size}",
            f"train.max_samples={sample_count if sample_count < samples else 0}",
            f"train.epochs={max(_EPOCHS, epochs)}",
            f"train.restarts={_MAX_RESTARTS}",
            "train.checkpoint_every=1",
            "train.checkpoints=",
            "train.log_every=1",
            "train.nodes=1",
            "train.rendezvous=",
            "train.early_stopping_patience=0",
            "train.trace=false",
            "train.balance=equal",
            "train.deterministic=true",
            "track=[]",
            *overrides,
        ],
    )
    _check_comparable(reduced)
    return reduced


def _check_comparable(config: Config) -> None:
    """Check that two trainings without kills end with the same bits."""
    train = config.train
    if train.strategy == "parameter_server":
        raise ConfigError(
            "pipe chaos compares weights to the bit, and with train.strategy=parameter_server they depend on the "
            "speed of the processes; to fix it: add train.strategy=ddp"
        )
    if train.balance == "auto" or not train.deterministic:
        raise ConfigError(
            "pipe chaos compares weights to the bit; to fix it: use train.balance=equal and train.deterministic=true"
        )


MIN_STEPS = 8  # of a training, so that there are steps before and after a kill
HOLD_STEPS = 3  # during which a kill from outside can happen

# Repeated until there are as many kills as requested.
KILL_KINDS = (
    "step", "write", "rename", "renamed", "ledger", "pipe", "other worker", "launcher", "step", "first worker",
    "start", "step", "write", "step", "step", "renamed", "step", "rename", "step", "step",
    "pause", "disk", "truncated", "flipped", "clock", "store", "resume", "server", "best", "zeroed", "unreadable",
    "half-open",
)  # fmt: skip
_PAUSE_SECONDS = (5.0, 30.0, 90.0)  # in turn
_CLOCK_SECONDS = (3600.0, -3600.0)
_PLACES: tuple[KillPoint, ...] = (
    "start",
    "moment",
    "step",
    "ledger",
    "write",
    "rename",
    "renamed",
)  # in the order of a step


def schedule(kills: int, seed: int, steps: int, processes: int) -> tuple[Kill, ...]:
    """Return the kills in order. With enough kills at step ends, every step has one."""
    kinds = [KILL_KINDS[i % len(KILL_KINDS)] for i in range(kills)]
    if processes == 1 or sys.platform != "linux":  # no connections, or no minimum TTL for them
        kinds = ["write" if kind == "half-open" else kind for kind in kinds]
    kind_counts, kinds_scheduled = Counter(kinds), Counter[str]()
    random_numbers = random.Random(f"{kills} {seed} {steps} {processes}")
    scheduled_kills = []
    for kind in kinds:
        index = kinds_scheduled[kind]
        kinds_scheduled[kind] += 1
        scheduled_kills.append(_kill(kind, index, kind_counts[kind], steps, processes, random_numbers))
    return tuple(sorted(scheduled_kills, key=lambda kill: (kill.step, _PLACES.index(kill.place))))


def _kill(kind: str, index: int, total: int, steps: int, processes: int, generator: random.Random) -> Kill:
    if kind == "step":
        return Kill(place="step", step=1 + (index * steps + steps // 2) // total, rank=index % processes)
    if kind == "start":
        return Kill(place="start", step=generator.randint(1, steps), share=generator.random())
    if kind in ("ledger", "write", "rename", "renamed"):
        place: Any = kind
        return Kill(place=place, step=generator.randint(1, steps), rank=generator.randrange(processes))
    if kind == "disk":
        return Kill(place="write", step=generator.randint(1, steps), rank=generator.randrange(processes), fault="disk")
    if kind in ("clock", "half-open"):
        fault: Any = kind
        seconds = _CLOCK_SECONDS[index % len(_CLOCK_SECONDS)] if kind == "clock" else 0
        step = generator.randint(1, max(1, steps - 1))  # one follows, which shows that it goes on
        return Kill(place="step", step=step, rank=index % processes, fault=fault, seconds=seconds)
    last = max(1, steps - (1 if kind == "best" else HOLD_STEPS))
    first = min(last, steps // _EPOCHS + 3) if kind == "best" else 1  # then a checkpoint after the best is complete
    step = generator.randint(first, last)
    kill = Kill(place="moment", step=step, hold=min(step + HOLD_STEPS, steps), share=generator.random())
    if kind in ("launcher", "server", "pipe"):
        return kill.model_copy(update={"who": kind})
    if kind in (*get_args(StorageFault), "resume"):
        return kill.model_copy(update={"who": "pipe", "fault": kind})
    if kind == "store":
        return kill.model_copy(update={"who": "launcher", "fault": kind})
    if kind == "pause":
        seconds = _PAUSE_SECONDS[index % len(_PAUSE_SECONDS)]
        return kill.model_copy(update={"fault": kind, "rank": generator.randrange(processes), "seconds": seconds})
    rank = generator.randrange(1, processes) if kind == "other worker" and processes > 1 else 0
    return kill.model_copy(update={"rank": rank})


def count_step_kills(kills: int) -> int:
    """Return how many of the kills are at the end of a step."""
    return sum(KILL_KINDS[i % len(KILL_KINDS)] == "step" for i in range(kills))


Print = Callable[[str], None]


class KillReporter:
    """Prints a line for each kill once it is known how long the recovery took."""

    def __init__(self, kills: Sequence[Kill], kills_before: int, total: int, report: Print) -> None:
        self._kills, self._before, self._total, self._report = kills, kills_before, total, report
        self._reported = 0

    def __call__(self, events: Sequence[ChaosEvent]) -> None:
        results = list(kill_results(self._kills, events, None))
        count = len(kill_events(events))
        while self._reported < count and (results[self._reported].seconds is not None or self._reported + 1 < count):
            self._report(describe_kill(results[self._reported], self._before + self._reported + 1, self._total))
            self._reported += 1


def describe_kill(kill: KillResult, number: int, total: int) -> str:
    recovery = "the next kill came first" if kill.seconds is None else f"next step after {kill.seconds:.1f} s"
    return f"kill {number} of {total}: {kill.place}, from step {kill.step} on: {recovery}"


_EXTRA_HANG_SECONDS = 120.0  # beyond train.timeout_seconds, after which training detects a hang itself
_SHORT_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Reference:
    """The training without kills."""

    run: Run
    steps: int
    processes: int
    timing: ReferenceTiming

    @property
    def config_with_kills(self) -> Config:
        """Return the configuration in which processes wait shorter for each other: a half-open link costs all of it."""
        seconds = max(_SHORT_TIMEOUT_SECONDS, math.ceil(10 * self.timing.start_seconds))
        seconds = min(self.run.config.train.timeout_seconds, seconds)
        return override_config(self.run.config, [f"train.timeout_seconds={seconds}"])


@dataclass(frozen=True)
class Campaign:
    """One `pipe chaos`; `project_folder` is the folder given on the command line."""

    project: Project
    project_folder: Path
    folder: Path
    report: Print

    @classmethod
    def begin(cls, project: Project, project_folder: Path, report: Print) -> Campaign:
        folder = project.runs / "chaos" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        folder.mkdir(parents=True)
        return cls(project, project_folder.resolve(), folder, report)

    def prepare(self, config: Config) -> Run:
        """Run prepare once for all trainings."""
        run = create_run(self.folder, config, ("prepare",), parent="")
        self.attack(run, [], no_kill, lambda _: None).train()
        return run

    def reduced_config(self, prepared: Run, kills: int, overrides: Sequence[str]) -> Config:
        samples = read_object(prepared.output("prepare") / "data.json", "splits", "train", "samples")
        return reduced_config(prepared.config, samples, kills, list(overrides))

    def train_reference(self, prepared: Run, config: Config) -> Reference:
        run = self.new_run(prepared, config)
        attack, started = self.attack(run, [], no_kill, lambda _: None), time.time()
        attack.train()
        summary = read_object(run.output("train") / "summary.json")
        first_step = next(event for event in attack.log.events() if event.event == "step")
        seconds = statistics.median(row["step_seconds"] for row in training_log(run) if "step_seconds" in row)
        self.report(f"without kills: {summary['steps']} steps, the first after {first_step.time - started:.1f} s")
        timing = ReferenceTiming(first_step.time - started, HOLD_STEPS * seconds)
        return Reference(run, summary["steps"], summary["world_size"], timing)

    def train_with_kills(self, prepared: Run, reference: Reference, kills: int, seed: int) -> Iterator[Training]:
        """Yield trainings until all kills were made or one does not finish."""
        remaining_kills = schedule(kills, seed, reference.steps, reference.processes)
        kill_count = 0
        while remaining_kills:
            training = self._train_with_kills(prepared, reference, remaining_kills, kill_count)
            yield training
            if training.fault or not training.made:
                return
            remaining_kills, kill_count = remaining_kills[len(training.made) :], kill_count + len(training.made)

    def _train_with_kills(
        self, prepared: Run, reference: Reference, kills: Sequence[Kill], kills_before: int
    ) -> Training:
        run = self.new_run(prepared, reference.config_with_kills)
        reporter = KillReporter(kills, kills_before, kills_before + len(kills), self.report)
        attack, fault = (
            self.attack(run, kills, functools.partial(next_scheduled_kill, kills, reference.timing), reporter),
            "",
        )
        try:
            attack.train()
        except StageError as error:
            fault = str(error)
        events = attack.log.events()
        results = tuple(kill_results(kills, events, None if fault else time.time()))
        return compare_training(run, reference.run, results, tuple(attack.by_hand), fault)

    def new_run(self, prepared: Run, config: Config) -> Run:
        run = create_run(self.folder, config, ("prepare", "train"), parent=prepared.id)
        record = prepared.read().steps["prepare"]
        link_outputs(prepared, run, record)
        write_record(run, record.model_copy(update={"reused_from": prepared.id, "reason": "shared by all trainings"}))
        return run

    def attack(
        self, run: Run, kills: Sequence[Kill], next_kill: NextKill, on_events: Callable[[Sequence[ChaosEvent]], None]
    ) -> Attack:
        log = ChaosLog(run.path / "chaos")
        log.write_schedule(kills)
        hang_seconds = run.config.train.timeout_seconds + _EXTRA_HANG_SECONDS
        return Attack(self.project_folder, run, log, next_kill, hang_seconds, kills, on_events)
