"""The command that kills: chaos."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table


@app.command()
def chaos(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="Overrides.")] = None,
    kills: Annotated[int, typer.Option("--kills", min=1, help="How many processes are killed.")] = 25,
    seed: Annotated[int, typer.Option("--seed", help="Of where and when.")] = 0,
    output: OutputOption = Output.text,
) -> None:
    """Kill your own training again and again, made small, and prove that nothing was lost."""
    from pipeline.chaos.campaign import Campaign  # numpy, which other commands do without
    from pipeline.chaos.verdict import Verdict

    project = project_of(context)
    campaign = Campaign.begin(project, context.obj, _say)
    with campaign.kept_when_broken():
        prepared = campaign.prepare(project.config(words or []))
        reference = campaign.undisturbed(prepared, campaign.small(prepared, kills, words or []))
        trainings = tuple(campaign.disturbed(prepared, reference, kills, seed))
    verdict = Verdict(kills, reference.steps, reference.processes, trainings)
    emit(output, verdict.as_json(), f"{table(verdict.table())}\n\n{verdict.text()}")
    if not verdict.held:
        raise typer.Exit(1)
    campaign.forget()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
