"""The command that searches: tune.

The command that kills: chaos.

The command that measures: bench.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.cli.run import finish, make_order, run_facts, split_words
from pipeline.contract.errors import ConfigError
from pipeline.display import Display
from pipeline.history import load_history, locked
from pipeline.tune.record import StudyFile, folder_of, read_study, trials_of

if TYPE_CHECKING:
    from pipeline.tune.search import Search


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[status] [KEY=VALUE…]", help="`status` lists the trials; overrides are for all of them."),
]


@app.command()
def tune(
    context: typer.Context,
    words: Words = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Trials under way at once; without it, tune.workers.")
    ] = None,
    until: Annotated[str, typer.Option("--until", help="Last step of the best trial's run.")] = "evaluate",
    output: OutputOption = Output.text,
) -> None:
    """Search for better settings; the best trial becomes a run."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("pipe tune needs Optuna; pip install 'pipe-road[tune]'")
    from pipeline.tune.search import (
        best_run,
        search,  # Optuna is slow to load
    )

    names, overrides = split_words(words)
    if unknown := [name for name in names if name != "status"]:
        raise ConfigError(f"{unknown[0]!r}: `pipe tune` takes `status` and key=value; its steps are set by --until")
    steps = make_order([], None, until, None).wanted
    order = _order(context, overrides, workers)
    display = Display(live=sys.stderr.isatty())
    if names:
        return emit_study(output, order, order.known_study(display), {})
    study = search(order, display)
    with locked(order.project.runs, told=display.say):
        run = finish(order.project, lambda: best_run(order, study, steps, display))
    return emit_study(output, order, read_study(order.project.runs, study.name), run_facts(run))


def _order(context: typer.Context, overrides: list[str], workers: int | None) -> Search:
    from pipeline.tune.search import Search

    project = project_of(context)
    config = project.config(overrides)
    return Search(context.obj.resolve(), project, tuple(overrides), workers or config.tune.workers, config)


def emit_study(output: Output, order: Search, body: StudyFile, facts: dict[str, Any]) -> None:
    """The trials, best first, and what became of the best one."""
    from pipeline.tune.study import Study

    tune = order.config.tune.model_copy(update={"direction": body.direction})
    study = Study(folder_of(order.project.runs, body.name), tune, {})
    runs = trials_of(body.name, load_history(order.project.runs))
    rows = [
        {
            "trial": trial.number,
            "state": study.state_of(trial),
            body.metric: trial.value,
            **{key: trial.params.get(key) for key in body.space},
            "epochs": max(trial.intermediate_values, default=0),
            "run": runs[trial.number][0].id if trial.number in runs else None,
            "reason": trial.user_attrs.get("reason", ""),
        }
        for trial in study.best_first()
    ]
    head = {"study": body.name, "metric": body.metric, "direction": body.direction}
    lines = [f"{name:9} {value}" for name, value in (head | facts).items() if not isinstance(value, dict)]
    text = "\n".join([table([rounded(row) for row in rows]), "", *lines])
    emit(output, head | {"trials": rows} | facts, text)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A learning rate of 0.00003 is not 0."""
    return {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}


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
