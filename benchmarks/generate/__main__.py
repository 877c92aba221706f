"""`python -m benchmarks.generate`: tokens a second of one decoder, by the service's engine and by other libraries."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generate.loops import LOOPS
from benchmarks.generate.models import SIZES, write_models
from benchmarks.serve.environment import python_of
from pipeline.system.errors import PipelineError

LENGTH, TOKENS = 128, 64
LLAMA = "llama.cpp"


@dataclass(frozen=True)
class Lap:
    seconds: float
    cpu: float
    answers: list[list[int]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate", description="greedy decoding of one decoder by several libraries"
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, default=("28m", "100m"))
    parser.add_argument("--texts", nargs="+", type=int, default=(1, 4), help="decoded at the same time")
    parser.add_argument("--threads", type=int, default=2, help="of each contender")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-llama", action="store_true", help="llama.cpp is compiled when it is installed")
    options = parser.parse_args(argv)
    try:
        for size in options.size:
            _race(size, options.threads, options.texts, options.rounds, llama=not options.without_llama)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _race(size: str, threads: int, texts: Sequence[int], rounds: int, *, llama: bool) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        weights = write_models(size, folder, threads)
        print(f"{weights / 1e6:.1f} million weights, {threads} threads, prompts of {LENGTH} tokens, {TOKENS} more")
        arguments = (name, str(threads))
        commands = {loop: [sys.executable, "-m", "benchmarks.generate.loops", loop, *arguments] for loop in LOOPS}
        if llama:
            commands[LLAMA] = [str(python_of("llama")), str(Path(__file__).with_name("llama.py")), *arguments]
        processes = {loop: stack.enter_context(_started(command)) for loop, command in commands.items()}
        for rows in texts:
            print(_table(rows, _laps(processes, rows, SIZES[size]["vocab_size"], rounds)), flush=True)


@contextmanager
def _started(command: Sequence[str]) -> Iterator[Any]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process  # its input is closed then, which ends it


def _laps(processes: Mapping[str, Any], rows: int, vocabulary: int, rounds: int) -> dict[str, list[Lap]]:
    """Return the laps of each contender, in turns and each time with other prompts. The first, unmeasured, warms up."""
    random, laps = np.random.default_rng(0), {loop: list[Lap]() for loop in processes}
    for _ in range(rounds + 1):
        prompts = random.integers(0, vocabulary, (rows, LENGTH)).tolist()
        for loop, process in processes.items():
            process.stdin.write(json.dumps({"prompts": prompts, "tokens": TOKENS}) + "\n")
            process.stdin.flush()
            laps[loop].append(Lap(**json.loads(process.stdout.readline())))
    return {loop: each[1:] for loop, each in laps.items()}


def _table(rows: int, laps: Mapping[str, Sequence[Lap]]) -> str:
    lines = [
        f"| {rows} at once | tokens/s (range) | CPU ms per token | same tokens as transformers |",
        "|" + "---|" * 4,
    ]
    tokens, expected = rows * TOKENS, [lap.answers for lap in laps["transformers"]]
    for loop, each in laps.items():
        rates = sorted(tokens / lap.seconds for lap in each)
        cpu = statistics.median(lap.cpu / tokens for lap in each)
        equal = sum(
            answer == other
            for lap, others in zip(each, expected, strict=True)
            for answer, other in zip(lap.answers, others, strict=True)
        )
        lines.append(
            f"| {loop} | {statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f}) | {1000 * cpu:.2f} "
            f"| {equal} of {rows * len(each)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
