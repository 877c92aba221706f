"""The command by which other machines take part in training."""

from __future__ import annotations

import sys

import typer

from pipeline.cli.app import app, project_of
from pipeline.cli.look import RunName
from pipeline.history import find_run
from pipeline.spec.errors import ConfigError, Interrupted
from pipeline.spec.run import Run


@app.command()
def join(context: typer.Context, run: RunName = "latest") -> None:
    """Train along with the machine that runs `pipe run`, until training is through."""
    from pipeline.node import serve  # other commands do without what starts processes

    project = project_of(context)
    found = find_run(project.runs, run)
    check(found)
    try:
        status = serve(found, project.root, joined=True, train=found.config.train)
    except KeyboardInterrupt:
        raise Interrupted(f"this machine has left training; `pipe join {found.id}` brings it back") from None
    sys.exit(status)


def check(run: Run) -> None:
    """There is something to take part in."""
    train, record = run.config.train, run.read().steps.get("train")
    if train.launcher != "torchrun" or train.most_nodes == 1:
        raise ConfigError(
            f"run {run.id} has train.nodes={train.nodes} and train.launcher={train.launcher}; machines join where "
            "nodes is above 1, as in train.nodes=2:4, and the launcher is torchrun"
        )
    if record is not None and record.complete:
        raise ConfigError(f"run {run.id} has trained to its end; there is nothing to join")
