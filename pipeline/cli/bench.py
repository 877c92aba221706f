"""The command that measures: bench."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum
from typing import Annotated

import typer

from pipeline.cli.app import app


class Subject(StrEnum):
    train = "train"
    export = "export"
    faults = "faults"
    serve = "serve"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    subject: Annotated[Subject, typer.Argument(metavar="train|export|faults|serve", help="What is measured.")],
) -> None:
    """Measure on this machine: training, exported graphs, goodput under failures, or the service; options follow."""
    argv = [sys.executable, "-m", f"bench.{subject}", *context.args]
    sys.exit(subprocess.run(argv, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False).returncode)
