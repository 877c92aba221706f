"""Commands about the gate: why a verdict is what it is, and going past it on record."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.contract.errors import BundleError, ConfigError
from pipeline.contract.run import Run
from pipeline.history import find_run, locked
from pipeline.override import override as override_run
from pipeline.override import verdict_digest

gate = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Why a verdict is what it is, and going past it.")
app.add_typer(gate, name="gate")

RunName = Annotated[str, typer.Argument(metavar="[RUN]", help="Run id, its beginning, its path, or `latest`.")]


@gate.command("explain")
def explain(
    context: typer.Context,
    run: RunName = "latest",
    against: Annotated[
        str, typer.Option("--against", metavar="RUN", help="Compare with this run, sample by sample.")
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Every rule of a run's verdict: its numbers, how they were computed, what would have changed it."""
    from pipeline.evaluate.results import explain as explain_verdict  # numpy is slow to load
    from pipeline.evaluate.results import sentences

    runs = project_of(context).runs
    found = judged(find_run(runs, run))
    if against:
        return _against(found, judged(find_run(runs, against)), output)
    given = found.override(verdict_digest(found))
    told = {"run": found.id, **explain_verdict(found.verdict(), given.model_dump() if given else None)}
    return emit(output, told, "\n".join([f"run {found.id}", *sentences(told)]))


def _against(found: Run, other: Run, output: Output) -> None:
    """Not the stored verdicts: these are about a baseline that may have been another."""
    from pipeline.evaluate.compare_runs import (
        against,
        sentences,  # numpy is slow to load
    )

    told = against(found, other, found.config.evaluate)
    emit(output, told, "\n".join(sentences(told)))


@gate.command("override")
def override(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run the gate rejected.")],
    reason: Annotated[str, typer.Option("--reason", metavar="WHY", help="Why it shall go on; on record for ever.")],
    output: OutputOption = Output.text,
) -> None:
    """Let a rejected model pass: who, when and why go with it, into its card and its service."""
    runs = project_of(context).runs
    found = find_run(runs, run)
    with locked(found.runs):
        given = override_run(found, reason)
    text = f"run {found.id} is {given}\n`pipe run --resume {found.id}` goes on"
    emit(output, {"run": found.id, **given.model_dump()}, text)


def judged(run: Run) -> Run:
    if not (run.output("evaluate") / "verdict.json").is_file():
        raise ConfigError(f"run {run.id} has no verdict yet; `pipe run --resume {run.id}` goes on to one")
    record = run.read().steps.get("evaluate")
    if record is not None and record.outputs.get("verdict.json") not in (None, verdict_digest(run)):
        raise BundleError(
            f"run {run.id}: evaluate/verdict.json changed on disk since it was judged; `pipe run --resume {run.id}` "
            "judges again"
        )
    return run
