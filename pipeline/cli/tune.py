"""The command that searches: tune."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.cli.road import finish, make_order, run_facts, split_words
from pipeline.display import Display
from pipeline.history import load_history
from pipeline.lock import locked
from pipeline.spec.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.tune.search import Search
    from pipeline.tune.study import Study

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
    from pipeline.tune.search import best_run, search  # Optuna is slow to load

    names, overrides = split_words(words)
    if unknown := [name for name in names if name != "status"]:
        raise ConfigError(f"{unknown[0]!r}: `pipe tune` takes `status` and key=value; its steps are set by --until")
    steps = make_order([], None, until, None).wanted
    order = _order(context, overrides, workers)
    if names:
        return _emit_study(output, order, order.study(), {})
    display = Display(live=sys.stderr.isatty())
    study = search(order, display)
    with locked(order.project.runs, told=display.say):
        run = finish(order.project, lambda: best_run(order, study, steps, display))
    return _emit_study(output, order, study, run_facts(run))


def _order(context: typer.Context, overrides: list[str], workers: int | None) -> Search:
    from pipeline.tune.search import Search

    project = project_of(context)
    config = project.config(overrides)
    return Search(context.obj.resolve(), project, tuple(overrides), workers or config.tune.workers, config)


def _emit_study(output: Output, order: Search, study: Study, facts: dict[str, Any]) -> None:
    rows = trial_rows(order, study)
    head = {"study": study.name, "metric": order.config.tune.metric, "direction": order.config.tune.direction}
    lines = [f"{name:9} {value}" for name, value in (head | facts).items() if not isinstance(value, dict)]
    emit(output, head | {"trials": rows} | facts, "\n".join([table(rows), "", *lines]))


def trial_rows(order: Search, study: Study) -> list[dict[str, Any]]:
    """Best first."""
    from pipeline.tune.record import trials_of

    runs = trials_of(study.name, load_history(order.project.runs))
    return [
        {
            "trial": trial.number,
            "state": study.state_of(trial),
            order.config.tune.metric: trial.value,
            **{key: trial.params.get(key) for key in order.config.tune.space},
            "epochs": max(trial.intermediate_values, default=0),
            "run": runs[trial.number][0].id if trial.number in runs else None,
            "reason": trial.user_attrs.get("reason", ""),
        }
        for trial in study.best_first()
    ]
