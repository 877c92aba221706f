"""The frame of every step's process: arguments in, a fresh partial directory, one clear error out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.spec import leash
from pipeline.spec.errors import PipelineError, write_error
from pipeline.spec.run import Run


def run_step(name: str, work: Callable[[Run, Path], None], argv: Sequence[str]) -> int:
    """Call `work(run, root)`, where root is the project; a PipelineError is left for the runner and printed."""
    parser = argparse.ArgumentParser(prog=name, description=f"the {name} step of one run")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder with task.py (default: here)")
    options = parser.parse_args(argv)
    leash.hold()
    run, root = Run(options.run.resolve()), options.root.resolve()
    run.partial(name).mkdir(parents=True, exist_ok=True)
    try:
        work(run, root)
    except PipelineError as error:
        write_error(error, run.partial(name))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
