"""`pipe registry`: what the names mean and meant; giving one and taking it back, whatever serves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pipeline.champion import promote as give
from pipeline.champion import rollback as take_back
from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.cli.road import newest_bundle
from pipeline.history import find_run
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, PREVIOUS, Change, Entry, Registry, read_registry
from pipeline.spec.run import Run
from pipeline.spec.shelf import shelf_of

commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The model registry: names and their history.")
app.add_typer(commands, name="registry")

Name = Annotated[str, typer.Option("--name", help="Which name; candidates have to beat the champion.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the history.")]


@commands.command("list")
def list_names(context: typer.Context, output: OutputOption = Output.text) -> None:
    """What each name means now."""
    project = project_of(context)
    word = project.config().registry
    registry = read_registry(project.runs, word)
    rows = [_meaning(registry, name, entry) for name, entry in sorted(registry.names.items())]
    where = shelf_of(word, project.runs).where
    text = table([{**row, "bundle": row["bundle"][:12]} for row in rows]) if rows else f"{where}: no names yet"
    emit(output, {"registry": where, "names": rows}, text)


@commands.command()
def history(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Of this name alone.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """Every change there ever was, oldest first."""
    project = project_of(context)
    changes = enumerate(read_registry(project.runs, project.config().registry).history, start=1)
    rows = [_row(number, change) for number, change in changes if name in ("", change.name)]
    emit(output, rows, table([{**row, "bundle": row["bundle"][:12]} for row in rows]))


@commands.command()
def promote(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run with a bundle; the newest by default.")] = "",
    name: Name = CHAMPION,
    reason: Reason = "promoted by hand",
    output: OutputOption = Output.text,
) -> None:
    """Give a name to a run's bundle. What serves stays as it is: `pipe promote` and `pipe deploy` change that."""
    project = project_of(context)
    found = find_run(project.runs, run) if run else newest_bundle(project)
    _tell(output, name, give(found, bundle_of(found), reason, name, project.config().registry))


@commands.command()
def rollback(
    context: typer.Context, name: Name = CHAMPION, reason: Reason = "rolled back", output: OutputOption = Output.text
) -> None:
    """Let a name mean what it meant before. What serves stays as it is: `pipe rollback` changes that, too."""
    project = project_of(context)
    _tell(output, name, take_back(project.runs, project.config().registry, name, reason))


def bundle_of(run: Run) -> Any:
    if not (run.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` goes on to one")
    return run.bundle()


def _meaning(registry: Registry, name: str, entry: Entry) -> dict[str, Any]:
    """Who is `previous` became so with the champion's last change."""
    change = registry.last(CHAMPION if name == PREVIOUS else name)
    assert change is not None
    return {
        "name": name, "bundle": entry.bundle, "run": entry.run, "since": change.at, "by": change.by,
        "reason": change.reason,
    }  # fmt: skip


def _row(number: int, change: Change) -> dict[str, Any]:
    return {
        "change": number, "at": change.at, "name": change.name, "bundle": change.entry.bundle,
        "run": change.entry.run, "by": change.by, "reason": change.reason,
    }  # fmt: skip


def _tell(output: Output, name: str, entry: Entry) -> None:
    text = f"{name} is bundle {entry.bundle[:12]} of run {entry.run}"
    emit(output, {"name": name, **entry.model_dump(), "run": entry.run}, text)
