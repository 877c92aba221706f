"""`python -m tests.nodes.recovery`: the time from the death of a process to the next step, with 1 GB of state.

Three machines (network namespaces) share the project folder by one bindfs (FUSE) each: every access goes through
another process, and each machine has its own cache, as with NFS; the rate is that of this machine's disk and cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.faults.measure import percentile
from pipeline.contract.restarts import Attempt, Event, read_attempts

from ..e2e.project_folder import wait_for
from .cluster import Cluster, cluster, lines_of
from .machine import Machine

_WIDTH = 6464  # 83.6 million weights, with two moments of AdamW each: 1.003 GB
_LAYER = f"nn.Linear({_WIDTH}, {_WIDTH}), nn.ReLU()"
_MODEL = f"return nn.Sequential(nn.Linear(2, {_WIDTH}), nn.ReLU(), {_LAYER}, {_LAYER}, nn.Linear({_WIDTH}, 2))"
_PATCH = """from train.trainer import Trainer

restore = Trainer.restore


def stamp(name):
    with open("stamps", "a") as file:
        file.write(f"{name} {time.time()}\\n")


def restore_with_stamp(trainer, saved):
    stamp("restore")
    restore(trainer, saved)


Trainer.restore = restore_with_stamp


class Sides:"""
_PHASES = (
    "the end is recorded", "the machines meet", "processes start and check the checkpoint",
    "model and warm-up, with two passes", "the checkpoint is read", "first step", "all",
)  # fmt: skip
_WORDS = ("train.elastic_shards=0", "train.max_samples=72", "train.timeout_seconds=60")  # a checkpoint in three steps


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.recovery", description="recovery with 1 GB of state")
    parser.add_argument("--kills", type=int, default=10, help="kill -9 of a worker, each in another epoch")
    parser.add_argument("words", nargs="*", help="further settings, such as train.strategy=fsdp")
    options = parser.parse_args(argv)
    words = (*_WORDS, f"train.epochs={options.kills + 2}", *options.words)
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder) / "sides", *words) as three:
        three.pace(0)
        three.project.replace(
            "task.py",
            "return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 2))",
            f'stamp("model")\n        {_MODEL}',
        )
        three.project.replace("task.py", "class Sides:", _PATCH)
        for machine in three.machines:
            share(machine, three.project.folder)
        three.start_all()
        rows = [recover(three, number % len(three.machines)) for number in range(options.kills)]
        for command in three.commands.values():
            command.ends()
        metrics = lines_of(three.run.output("train") / "metrics.jsonl")
        print(three.project.pipe("verify", three.run.id).stdout)
    print(f"{'seconds':<42}{'p50':>6}{'p90':>6}{'max':>6}")
    for phase, seconds in zip(_PHASES, zip(*rows, strict=True), strict=True):
        print(f"{phase:<42}{statistics.median(seconds):>6.1f}{percentile(seconds, 0.9):>6.1f}{max(seconds):>6.1f}")
    steps = [line["step_seconds"] for line in metrics if "step_seconds" in line]
    print(f"a step takes {statistics.median(steps):.1f} s")
    return 0


def share(machine: Machine, folder: Path) -> None:
    machine.do("bindfs", "--multithreaded", "-o", "nonempty", str(folder), str(folder))


def recover(three: Cluster, number: int) -> list[float]:
    """Kill a worker two steps after the first checkpoint of an attempt; return the seconds of each phase."""
    wait_for(lambda: newest(three).has_checkpoint, 600)
    step, before = three.step, newest(three)
    wait_for(lambda: three.step >= step + 2)
    killed = time.time()
    worker(three.machines[number]).kill()
    end: Event = wait_for(lambda: [event for event in three.events if event.event == "end" and event.time > killed])[0]
    wait_for(lambda: newest(three).number > before.number and newest(three).first_step_time)
    attempt = newest(three)
    begun = max(started(worker(machine).pid) for machine in three.machines)
    built, restores = (max(stamps(three, name, killed, attempt.started)) for name in ("model", "restore"))
    moments = [killed, end.time, begun, built, restores, attempt.started, attempt.first_step_time or 0.0]
    seconds = [after - before for before, after in itertools.pairwise(moments)]
    print([round(value, 2) for value in [*seconds, moments[-1] - killed]], file=sys.stderr, flush=True)
    return [*seconds, moments[-1] - killed]


def newest(three: Cluster) -> Attempt:
    wait_for(lambda: read_attempts(three.run.path).attempts)
    return read_attempts(three.run.path).attempts[-1]


def stamps(three: Cluster, name: str, begin: float, end: float) -> list[float]:
    """Return when the processes first built their models, or began to read a checkpoint, between two moments."""
    rows = [line.split() for line in (three.project.folder / "stamps").read_text().splitlines()]
    moments = sorted(float(moment) for kind, moment in rows if kind == name and begin < float(moment) < end)
    return moments[: len(three.machines)]


def worker(machine: Machine) -> psutil.Process:
    return next(one for one in machine.processes("-m", "train") if one.cmdline()[2] == "train")


def started(pid: int) -> float:
    """Return when a process was started, by the clock of `time`: the kernel counts hundredths of a second from boot."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / 100


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
