"""One step in a pod of a workflow: `python -m pipeline.pod STEP RUN -- ARGV…` keeps the books of what `pipe run` keeps.

The first step makes the run, of the configuration in PIPE_CONFIG. Pods that only take part run ARGV and no more.
Where no workflow has walked the steps before, `--begin` does, and makes the run of the project's own pipe.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from k8s.objects.training import CONFIG, config_text
from pipeline.contract.config import parse_config
from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.run import STEPS, Run
from pipeline.display import Display
from pipeline.history import Project, begin_run, locked
from pipeline.plan import argv_of, with_upstream
from pipeline.runner import Order, resume_road
from pipeline.training.node import PASSING_EXIT_CODE, POD_NUMBER

_LOOK_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    own, given = _split(argv)
    parser = argparse.ArgumentParser(prog="pipeline.pod", description="one step of a run, in a pod")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("run", type=Path, help="run directory, the same for all steps")
    parser.add_argument("--begin", action="store_true", help="walk the steps before this one as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on top of pipe.yaml")
    options = parser.parse_args(own)
    run = Run(options.run.absolute())
    if os.environ.get(POD_NUMBER, "0") != "0":
        if options.begin:
            _wait_for_the_first(run, options.step)
        os.execvp(given[0], given)  # the same process: signals reach it
    signal.signal(signal.SIGTERM, _leave)
    try:
        config = os.environ.get(CONFIG, "") or (_own_config(options.set) if options.begin else "")
        walk(options.step, run, given, config, begin=options.begin)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return PASSING_EXIT_CODE if error.passing else error.exit_code
    except KeyboardInterrupt:
        print("interrupted; another pod goes on from here", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def walk(step: str, run: Run, argv: Sequence[str], config: str, *, begin: bool = False) -> None:
    """The step alone: those before it are complete, or this is an error unless it is to begin with them."""
    if not (run.path / "run.json").is_file():
        _begin(run, config)
    planned = argv_of(step, run.config, str(run.path))
    if tuple(argv) != planned:
        raise ConfigError(
            f"{step}: the workflow says `{' '.join(argv)}`, this image `{' '.join(planned)}`; render the workflow anew "
            "with the version of `pipe` that the image holds"
        )
    walked = with_upstream((step,))
    # Of a node that died, the volume may hold the lock for a while after its pod has been replaced.
    with locked(run.path, told=lambda text: print(text, file=sys.stderr, flush=True)):
        order = Order(walked, reuse_only=frozenset() if begin else frozenset(walked) - {step})
        resume_road(Project(Path.cwd(), run.path.parent), run, order, Display(live=False))


def _wait_for_the_first(run: Run, step: str) -> None:
    """Until the first pod has walked what comes before; whatever ends it ends this one, too."""
    wanted = [run.path / "run.json", *(run.output(name) for name in with_upstream((step,)) if name != step)]
    if not all(path.exists() for path in wanted):
        print(f"{run.path}: waiting until the first pod has made it ready", file=sys.stderr, flush=True)
    while not all(path.exists() for path in wanted):
        time.sleep(_LOOK_SECONDS)


def _own_config(words: Sequence[str]) -> str:
    return config_text(Project(Path.cwd(), Path.cwd() / "runs").config([*words, "jobs.executor=local"]))


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
