"""One step in a pod of a workflow: `python -m pipeline.pod STEP RUN -- ARGV…` keeps the books of what `pipe run` keeps.

The first step makes the run, of the configuration in PIPE_CONFIG. Pods that only take part run ARGV and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from k8s.workflow import CONFIG
from pipeline.display import Display
from pipeline.history import begin_run
from pipeline.lock import locked
from pipeline.node import POD_NUMBER
from pipeline.plan import with_upstream
from pipeline.project import Project
from pipeline.runner import Order, resume_road
from pipeline.spec.config import parse_config
from pipeline.spec.errors import ConfigError, PipelineError
from pipeline.spec.run import STEPS, Run
from pipeline.steps import argv_of


def main(argv: Sequence[str]) -> int:
    own, given = _split(argv)
    parser = argparse.ArgumentParser(prog="pipeline.pod", description="one step of a run, in a pod")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("run", type=Path, help="run directory, the same for all steps")
    options = parser.parse_args(own)
    if os.environ.get(POD_NUMBER, "0") != "0":
        os.execvp(given[0], given)  # the same process: signals reach it
    signal.signal(signal.SIGTERM, _leave)
    try:
        walk(options.step, Run(options.run.absolute()), given, os.environ.get(CONFIG, ""))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; another pod goes on from here", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def walk(step: str, run: Run, argv: Sequence[str], config: str) -> None:
    """The step alone: those before it are complete, or this is an error."""
    if not (run.path / "run.json").is_file():
        _begin(run, config)
    planned = argv_of(step, run.config, str(run.path))
    if tuple(argv) != planned:
        raise ConfigError(
            f"{step}: the workflow says `{' '.join(argv)}`, this image `{' '.join(planned)}`; render the workflow anew "
            "with the version of `pipe` that the image holds"
        )
    walked = with_upstream((step,))
    with locked(run.path):
        order = Order(walked, reuse_only=frozenset(walked) - {step})
        resume_road(Project(Path.cwd(), run.path.parent), run, order, Display(live=False))


def _begin(run: Run, text: str) -> None:
    if not text:
        raise ConfigError(f"{run.path}: no run here, and {CONFIG} does not say what one would be made of")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: not JSON: {error}") from error
    begin_run(run, parse_config(values, source=CONFIG), STEPS)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words or words[-1] == "--":
        raise SystemExit("usage: python -m pipeline.pod STEP RUN -- ARGV…")
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _leave(signal_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: the step is ended, with a checkpoint where it trains, and the run can go on."""
    raise KeyboardInterrupt(signal_number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
