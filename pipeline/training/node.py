"""One machine of training: `python -m pipeline.training.node RUN` starts its processes, and again when some are lost.

The argv of the train step, here and in a pod. With `--join` another machine runs the road and says where to meet.

What a node tells of training: each new attempt in a line, and the log where nobody else shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.attempts import (
    ATTEMPTS_FILE,
    Stop,
    decide,
    newest,
    read_events,
    read_story,
    tell,
    tell_end,
    told,
)
from pipeline.contract.config import override_config
from pipeline.contract.errors import LostContact, PipelineError, StageError, clear_error, read_error, write_error
from pipeline.contract.processes import LEFT, AgentStatus, asked_to_go, ending, watch_parent
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.plan import AGAIN, processes_per_node
from pipeline.processes import (
    MEMORY,
    LocalLauncher,
    count_gpus,
    killed_process,
    leashed,
    prepare_log,
    said_since,
    step_environment,
)
from pipeline.training.launchers import Meeting, launched, launcher_environment
from pipeline.training.rendezvous import Presence, answers, interface, own_address, publish, published, withdraw

_PAUSE_SECONDS = 0.5  # before a launcher is started anew
_LOOK_SECONDS = 0.2
_STORE_SECONDS = 60
_GRACE_SECONDS = 40.0  # a checkpoint is made first; less than whoever ends this process gives it
PASSING_EXIT_CODE = 75  # what a batch system may try again
POD_NUMBER = "JOB_COMPLETION_INDEX"  # of an Indexed Job; the first pod leads


@dataclass
class Machine:
    """This one: its processes, its log, and what is told of the run."""

    run: Run
    root: Path
    env: Mapping[str, str]
    joined: bool
    train: Train

    def __post_init__(self) -> None:
        self.host = socket.gethostname()
        own = self.joined or POD_NUMBER in self.env  # whoever follows the pods of a Job keeps the log of them all
        self.log = self.run.log(f"train-{self.host}" if own else "train")
        self.per_node = processes_per_node(self.train, count_gpus(self.env))
        self.presence = Presence(self.run)
        self.news = News(self.run, self.log, self.train.restarts)

    def launch(self, meeting: Meeting | None = None) -> int:
        """Start the processes and wait for their end."""
        own = own_address(meeting.address) if meeting else ""
        python = ("python", "-m", "train", str(self.run.path))
        argv = launched(self.train, self.per_node, python, meeting, own)
        env = {**launcher_environment(self.train, os.geteuid()), **self.env}
        if own and (name := interface(own)):
            env.setdefault("GLOO_SOCKET_IFNAME", name)
        began = prepare_log(self.log)
        status = LocalLauncher(self.root, self._tick, _GRACE_SECONDS).launch(argv, self.log, env)
        self.news.tell()
        self._tell_end(status, said_since(self.log, began))
        return status

    def consider(self) -> None:
        """Processes have ended too early: begin again, or raise what ends training."""
        self._stop_on_error()
        decision = decide(read_story(self.run.path), self.train.restarts)
        if isinstance(decision, Stop):
            raise StageError(sentence(decision, self.train.restarts))
        time.sleep(_PAUSE_SECONDS)

    @contextlib.contextmanager
    def store(self) -> Iterator[Meeting]:
        """Where machines meet, kept by this one."""
        address = self.train.rendezvous
        withdraw(self.run)  # left by a lost machine: nobody must come to the new store under the old name
        argv = ("python", "-m", "train.elastic.store", str(self.run.path), address)
        with self.log.open("ab") as output, leashed(argv, self.root, self.env, output) as process:
            deadline = time.monotonic() + _STORE_SECONDS
            while not answers(address) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if process.poll() is not None:
                self._stop_on_error()
                raise StageError(f"train.rendezvous={address}: {ending('the store there', process.returncode)}")
            try:
                yield publish(self.run, address)
            finally:
                withdraw(self.run)

    def wait_for_meeting(self, took_part: bool) -> Meeting | None:
        """Where the others are, once somebody answers there; nowhere when they are through.

        Before the first meeting, an error is one of an earlier launch.
        """
        deadline, waits = time.monotonic() + self.train.timeout_seconds, False
        while time.monotonic() < deadline:
            meeting = published(self.run)
            if meeting is not None and answers(meeting.address) and meeting == published(self.run):
                return meeting
            if any(
                (place / "summary.json").exists() for place in (self.run.partial("train"), self.run.output("train"))
            ):
                return None
            if not waits:
                waits = True
                self.news.say(self._lonely(f"waiting {self.train.timeout_seconds} s for it"))
            self.presence.beat()
            if took_part:
                self._stop_on_error()
            time.sleep(_LOOK_SECONDS)
        raise LostContact(self._lonely(f"waited {self.train.timeout_seconds} s for it"))

    def too_few(self) -> StageError:
        count, fewest = self.presence.count(), self.train.fewest_nodes
        return StageError(
            f"train.nodes={self.train.nodes}: {count} of {fewest} machines came within {self.train.timeout_seconds} s; "
            f"on each other machine, in this folder: pipe join {self.run.id}"
        )

    def _lonely(self, waiting: str) -> str:
        return (
            f"nobody runs training of {self.run.id} at this moment; {waiting}; to bring it back, on any machine that "
            f"has this folder: pipe run --resume {self.run.id}"
        )

    def _tick(self) -> None:
        self.presence.beat()
        self.news.tell()
        self._stop_on_error()

    def _stop_on_error(self) -> None:
        error = read_error(self.run.partial("train"))
        if error is not None and not error.passing:
            raise error

    def _tell_end(self, status: int, said: str) -> None:
        """Where the launcher has not told of it itself."""
        if status in (AgentStatus.DONE, AgentStatus.TOO_FEW, AgentStatus.CLOSED):
            return
        agent = self.train.launcher == "torchrun" and self.train.backend == "torch"
        if agent and status == AgentStatus.FAILED:
            return
        error = read_error(self.run.partial("train"))
        killed = None if agent else killed_process(said)
        if killed is not None:
            tell_end(self.run.path, host=self.host, reason=killed.briefly)
        elif agent and status == AgentStatus.NO_STORE:
            tell_end(self.run.path, host=self.host, reason="the store where machines meet was lost", echo=True)
        elif error is not None:
            tell_end(self.run.path, host=self.host, reason=str(error), echo=error.echo, passing=error.passing)
        else:
            reason = ending(f"what starts the processes on {self.host}", status)
            tell_end(self.run.path, host=self.host, reason=reason, passing=status < 0 or asked_to_go(status))


def sentence(stop: Stop, allowed: int) -> str:
    """What ends training after all."""
    mend = MEMORY if stop.cause.endswith("(SIGKILL)") else ""
    if stop.times == 0 or allowed == 0:
        return f"{stop.cause}{mend}"
    place = f"the checkpoint of step {stop.step}" if stop.step else "the beginning"
    return (
        f"training was lost {stop.times} times in a row from {place} (train.restarts={allowed}), at last because "
        f"{stop.cause}{mend}"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.training.node", description="one machine of training")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder with task.py (default: here)")
    parser.add_argument("--join", action="store_true", help="take part in what another machine runs")
    parser.add_argument(AGAIN, action="store_true", help="whoever led it here was killed")
    for word in ("processes", "nodes", "rendezvous"):
        parser.add_argument(f"--{word}", help=f"in place of the run's own train.{word}")
    options = parser.parse_args(argv)
    watch_parent()
    signal.signal(signal.SIGTERM, _leave)
    run, joined = Run(options.run.resolve()), options.join or os.environ.get(POD_NUMBER, "0") != "0"
    given = {word: getattr(options, word) for word in ("processes", "nodes", "rendezvous")}
    words = [f"train.{word}={value}" for word, value in given.items() if value is not None]
    return serve(run, options.root.resolve(), joined, override_config(run.config, words).train, options.again)


def serve(run: Run, root: Path, joined: bool, train: Train, again: bool = False) -> int:
    """Until training is through, or cannot go on: the exit status."""
    env = {**step_environment(processes_per_node(train, count_gpus(os.environ)), os.cpu_count() or 1), **os.environ}
    run.partial("train").mkdir(parents=True, exist_ok=True)
    machine = Machine(run, root, env, joined, train)
    try:
        _join(machine) if joined else _lead(machine, again)
    except PipelineError as error:
        if not joined:
            write_error(error, run.partial("train"))
        print(f"error: {error}", file=sys.stderr)
        return PASSING_EXIT_CODE if error.passing else error.exit_code
    finally:
        machine.presence.leave()
    return 0


def _lead(machine: Machine, again: bool) -> None:
    """Training begins, or goes on: by somebody's command, or because a node was killed."""
    if not again:
        clear_error(machine.run.partial("train"))
        tell(machine.run.path, event="launch", attempt=newest(read_events(machine.run.path)))
    if machine.train.launcher != "torchrun" or machine.train.most_nodes == 1:
        while machine.launch() != AgentStatus.DONE:
            machine.consider()
        return
    while not _lead_many(machine):
        machine.consider()


def _lead_many(machine: Machine) -> bool:
    """With others, for as long as the store lives; whether training is through."""
    with machine.store() as meeting:
        status = machine.launch(meeting)
        while status < 0 or status in (AgentStatus.FAILED, LEFT):
            machine.consider()
            status = machine.launch(meeting)
    if status == AgentStatus.TOO_FEW:
        raise machine.too_few()
    return status in (AgentStatus.DONE, AgentStatus.CLOSED)


def _join(machine: Machine) -> None:
    """Take part until training is through, wherever those who lead it come back."""
    took_part = False
    while (meeting := machine.wait_for_meeting(took_part)) is not None:
        status = machine.launch(meeting)
        took_part = True
        if status in (AgentStatus.DONE, AgentStatus.CLOSED):
            return
        if status == AgentStatus.TOO_FEW:
            raise machine.too_few()
        if status != AgentStatus.NO_STORE:
            machine.consider()


def _leave(signal_number: int, _frame: object) -> None:
    sys.exit(128 + signal_number)


class News:
    def __init__(self, run: Run, log: Path, restarts: int) -> None:
        self._run, self._log, self._restarts = run, log, restarts
        self._record = run.path / ATTEMPTS_FILE
        self._seen = self._size()
        self._known = len(read_story(run.path).attempts)
        self._shown = log.stat().st_size if log.exists() else 0

    def tell(self) -> None:
        """What is new since the last call."""
        self._show_log()
        if self._size() == self._seen:
            return
        self._seen = self._size()
        story = read_story(self._run.path)
        if len(story.attempts) > self._known:
            self._known = len(story.attempts)
            if sentence := told(story, self._restarts):
                self.say(sentence)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def _size(self) -> int:
        return self._record.stat().st_size if self._record.exists() else 0

    def _show_log(self) -> None:
        if not self._log.exists() or os.path.samestat(os.fstat(1), self._log.stat()):
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        self._shown += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
