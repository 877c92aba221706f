"""A race: contestants in processes of their own, warmed, run laps in turn while the others wait."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.system.errors import StageError


@dataclass(frozen=True)
class Lap:
    seconds: float  # until the last process was through
    cpu_seconds: float  # of all processes together


class Racer:
    """The processes of one contestant."""

    def __init__(self, name: str, argv: Sequence[str], processes: int, env: dict[str, str], errors: IO[bytes]) -> None:
        self.name, self._errors = name, errors
        common = {**os.environ, **env, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(_free_port()), "NODE_RANK": "0"}
        self._processes = [
            subprocess.Popen(
                argv,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank in range(processes)
        ]

    def lap(self) -> Lap:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        times = [self._answer(process) for process in self._processes]
        return Lap(max(wall for wall, _ in times), sum(cpu for _, cpu in times))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _answer(self, process: subprocess.Popen[str]) -> tuple[float, float]:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a library's greeting on standard output
                wall, cpu = json.loads(line)
                return wall, cpu
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        raise StageError(f"{self.name} gave up: {' / '.join(tail)}")


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield orders in which everyone has every position equally often, so that drifting noise favours none of them."""
    for i in range(rounds):
        start = i % len(names)
        order = [*names[start:], *names[:start]]
        yield order if i // len(names) % 2 == 0 else order[::-1]


@dataclass(frozen=True)
class Course:
    """What is raced, and how."""

    workload: str
    processes: int
    threads: int  # of each process
    lap: int  # steps
    warm_laps: int
    laps: int  # that count


@contextlib.contextmanager
def racers(course: Course, pythons: dict[str, Path]) -> Iterator[dict[str, Racer]]:
    """Start every contestant's processes, which wait for laps; they are ended in any case."""
    env = {"OMP_NUM_THREADS": str(course.threads), "PYTHONSAFEPATH": "1"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with contextlib.ExitStack() as stack:
        racers_by_name = {}
        for name, python in pythons.items():
            errors = stack.enter_context(tempfile.TemporaryFile())
            argv = [str(python), "-m", "benchmarks.train.racer", name, course.workload, str(course.lap)]
            racers_by_name[name] = Racer(name, argv, course.processes, env, errors)
            stack.callback(racers_by_name[name].close)
        yield racers_by_name


def race(course: Course, pythons: dict[str, Path]) -> dict[str, list[Lap]]:
    with racers(course, pythons) as racers_by_name:
        for name in pythons:
            for _ in range(course.warm_laps):
                racers_by_name[name].lap()
        times: dict[str, list[Lap]] = {name: [] for name in pythons}
        for order in rotations(list(pythons), course.laps):
            for name in order:
                times[name].append(racers_by_name[name].lap())
        return times


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
