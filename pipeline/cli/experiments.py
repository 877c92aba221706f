"""Commands that start many trainings: tune and chaos."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, Overrides, app, emit, pairs, project_of, split_overrides, table
from pipeline.cli.run import make_request, run_and_report, run_facts
from pipeline.display import Display
from pipeline.history import load_history, lock_runs
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.tune.record import StudyFile, read_study, study_folder, study_trials

if TYPE_CHECKING:
    from pipeline.tune.search import SearchRequest


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[status] [KEY=VALUE…]", help="`status` lists the trials; overrides are for all of them."),
]


@app.command()
def tune(
    context: typer.Context,
    words: Words = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Number of trials to run at once.")] = 1,
    until: Annotated[str, typer.Option("--until", help="Last step of the best trial's run.")] = "evaluate",
    output: OutputOption = Output.text,
) -> None:
    """Search for better settings; the best trial becomes a run."""
    from pipeline.tune.search import SearchRequest, run_best_trial, run_search  # Optuna is slow to load

    names, overrides = split_overrides(words)
    if unknown := [name for name in names if name != "status"]:
        raise ConfigError(f"{unknown[0]!r}: `pipe tune` takes `status` and key=value; --until sets its last step")
    steps = make_request([], None, until, None).steps
    project = project_of(context)
    search_request = SearchRequest(context.obj.resolve(), project, tuple(overrides), workers, project.config(overrides))
    display = Display(live=sys.stderr.isatty())
    if names:
        return _emit_study(output, search_request, search_request.existing_study(display), {})
    study = run_search(search_request, display)
    with lock_runs(project.runs, shared=True, on_wait=display.report):
        best = run_and_report(display, lambda: run_best_trial(search_request, study, steps, display))
    return _emit_study(output, search_request, read_study(project.runs, study.name), run_facts(best))


def _emit_study(output: Output, order: SearchRequest, body: StudyFile, facts: dict[str, Any]) -> None:
    """Print the trials, best first, and the run of the best one."""
    from pipeline.tune.search import Study

    tune = order.config.tune.model_copy(update={"metric": body.metric})
    study = Study(study_folder(order.project.runs, body.name), tune, {})
    runs = study_trials(body.name, load_history(order.project.runs))
    rows = [
        {
            "trial": trial.number,
            "state": study.trial_state(trial),
            body.metric: trial.value,
            **{key: trial.params.get(key) for key in body.space},
            "epochs": max(trial.intermediate_values, default=0),
            "run": runs[trial.number][0].id if trial.number in runs else None,
            "reason": trial.user_attrs.get("reason", ""),
        }
        for trial in study.ranked_trials()
    ]
    head = {"study": body.name, "metric": body.metric, "direction": body.direction}
    text = f"{table([_with_rounded_floats(row) for row in rows])}\n\n{pairs(head | facts)}"
    emit(output, head | {"trials": rows} | facts, text)


def _with_rounded_floats(row: dict[str, Any]) -> dict[str, Any]:
    """Keep four digits: a learning rate of 0.00003 must not become 0."""
    return {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}


@app.command()
def chaos(
    context: typer.Context,
    words: Overrides = None,
    kills: Annotated[int, typer.Option("--kills", min=1, help="Number of kills and other faults.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Seed for where and when to kill.")] = 0,
    output: OutputOption = Output.text,
) -> None:
    """Kill and harm a small version of your training repeatedly; check for losses."""
    from pipeline.chaos.campaign import Campaign  # numpy is slow to load
    from pipeline.chaos.verdict import Verdict

    project = project_of(context)
    campaign = Campaign.begin(project, context.obj, Display(live=False).report)
    try:
        prepared = campaign.prepare(project.config(words or []))
        reference = campaign.train_reference(prepared, campaign.reduced_config(prepared, kills, words or []))
        trainings = tuple(campaign.train_with_kills(prepared, reference, kills, seed))
    except PipelineError:
        campaign.report(f"all files are kept in {campaign.folder}")
        raise
    verdict = Verdict(kills, reference.steps, reference.processes, trainings)
    emit(output, verdict.as_json(), f"{table(verdict.table())}\n\n{verdict.text()}")
    if not verdict.held:
        raise typer.Exit(1)
    shutil.rmtree(campaign.folder)
