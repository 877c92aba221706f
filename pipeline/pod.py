"""Run one step of a workflow in a pod, and record it as `pipe run` does: `python -m pipeline.pod STEP RUN -- ARGV…`.

The first step creates the run from the configuration in PIPE_CONFIG. The other pods of a step only run ARGV.
With `--begin`, where no workflow has run the steps before, the pod runs them too, from the project's own pipe.yaml.
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

from k8s.objects.training import CONFIG_VARIABLE, config_text
from pipeline.contract.config import parse_config
from pipeline.contract.run import STEPS, Run
from pipeline.display import Display
from pipeline.history import Project, begin_run, lock_run
from pipeline.plan import step_command, with_upstream
from pipeline.run import resume_run
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.processes import raise_interrupt
from pipeline.training.launchers import POD_NUMBER
from pipeline.training.node import PASSING_EXIT_CODE
from pipeline.work import RunRequest

_POLL_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    own_arguments, command = _split_command(argv)
    parser = argparse.ArgumentParser(prog="pipeline.pod", description="run one step of a run in a pod")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("run", type=Path, help="run directory, the same for all steps")
    parser.add_argument("--begin", action="store_true", help="run the steps before this one as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    options = parser.parse_args(own_arguments)
    run = Run(options.run.absolute())
    if os.environ.get(POD_NUMBER, "0") != "0":
        if options.begin:
            _wait_for_first_pod(run, options.step)
        os.execvp(command[0], command)  # replaces this process, so that signals reach it
    signal.signal(signal.SIGTERM, raise_interrupt)  # ends the step, with a checkpoint where it trains
    try:
        config = os.environ.get(CONFIG_VARIABLE, "") or (_project_config(options.set) if options.begin else "")
        run_in_pod(options.step, run, command, config, begin=options.begin)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return PASSING_EXIT_CODE if error.passing else error.exit_code
    except KeyboardInterrupt:
        print("interrupted; another pod continues from here", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def run_in_pod(step: str, run: Run, command: Sequence[str], config: str, *, begin: bool = False) -> None:
    """Run one step; unless `begin` is set, those before it must be complete."""
    if not (run.path / "run.json").is_file():
        _create_run(run, config)
    planned = step_command(step, run.config, str(run.path))
    if tuple(command) != planned:
        raise ConfigError(
            f"{step}: the workflow runs `{' '.join(command)}`, but this image needs `{' '.join(planned)}`; to fix it: "
            "render the workflow again with the version of `pipe` in the image"
        )
    steps = with_upstream((step,))
    # The volume may keep the lock of a node that died for a while after its pod was replaced.
    with lock_run(run, on_wait=lambda text: print(text, file=sys.stderr, flush=True)):
        request = RunRequest(steps, reuse_only=frozenset() if begin else frozenset(steps) - {step})
        resume_run(Project(Path.cwd(), run.path.parent), run, request, Display(live=False))


def _wait_for_first_pod(run: Run, step: str) -> None:
    """Wait until the first pod has run the steps before; if that fails, the Job ends this pod, too."""
    required = [run.path / "run.json", *(run.output(name) for name in with_upstream((step,)) if name != step)]
    if not all(path.exists() for path in required):
        print(f"{run.path}: waiting for the first pod to run the steps before", file=sys.stderr, flush=True)
    while not all(path.exists() for path in required):
        time.sleep(_POLL_SECONDS)


def _project_config(overrides: Sequence[str]) -> str:
    return config_text(Project(Path.cwd(), Path.cwd() / "runs").config([*overrides, "cluster.executor=local"]))


def _create_run(run: Run, text: str) -> None:
    if not text:
        raise ConfigError(f"{run.path}: no run here, and {CONFIG_VARIABLE} has no configuration to create one from")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: not JSON: {error}") from error
    begin_run(run, parse_config(values, source=CONFIG_VARIABLE), STEPS)


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    arguments = list(argv)
    if "--" not in arguments or arguments[-1] == "--":
        raise SystemExit("usage: python -m pipeline.pod STEP RUN -- ARGV…")
    separator = arguments.index("--")
    return arguments[:separator], arguments[separator + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
