"""Commands that name the champion by hand: promote, rollback."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.champion import promote as make_champion
from pipeline.champion import rollback as go_back
from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.road import newest_bundle
from pipeline.history import find_run
from pipeline.lock import locked
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import Entry


@app.command()
def promote(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="A run with a bundle; the newest by default.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """Make a run's bundle the champion that candidates have to beat."""
    project = project_of(context)
    run = find_run(project.runs, name) if name else newest_bundle(project)
    if not (run.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` goes on to one")
    with locked(project.runs):
        _tell(output, make_champion(run, run.bundle(), "promoted by hand"))


@app.command()
def rollback(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Make the champion before the champion again; `pipe deploy RUN` serves it."""
    runs = project_of(context).runs
    with locked(runs):
        _tell(output, go_back(runs))


def _tell(output: Output, entry: Entry) -> None:
    run = entry.path.partition("/")[0]
    emit(output, entry.model_dump() | {"run": run}, f"champion is bundle {entry.bundle[:12]} of run {run}")
