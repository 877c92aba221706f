"""`python -m benchmarks.faults`: how much of its time training spends on steps that count, when processes fail."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import get_args

from benchmarks.faults.failures import Victim
from benchmarks.faults.measure import Course, measure, text
from pipeline.system.errors import PipelineError


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    steps, intervals = (400, [15.0]) if options.quick else (options.steps, options.every or [60.0, 15.0])
    course = Course(steps, options.processes, options.checkpoint_every, options.victim, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = measure(course, intervals, Path(folder))
        except PipelineError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    print(json.dumps(results, indent=2) if options.output == "json" else text(results))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description="training that is killed again and again"
    )
    parser.add_argument("--every", action="append", type=float, help="mean seconds between failures: 60 and 15")
    parser.add_argument("--steps", type=int, default=4096, help="steps of each training; one takes about 50 ms")
    parser.add_argument("--victim", choices=get_args(Victim), default="worker", help="what is killed")
    parser.add_argument("--processes", type=int, default=2, help="of the training")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the times of failures")
    parser.add_argument("--quick", action="store_true", help="400 steps, to see that it works; the numbers mean little")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how results are printed")
    return parser.parse_args(argv)


def _leave(number: int, _frame: FrameType | None) -> None:
    """Handle the signal like Ctrl-C, so that processes are ended first."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
