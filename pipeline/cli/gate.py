"""`pipe gate`: explain a verdict, or override it."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, RunName, app, emit, project_of
from pipeline.contract.errors import BundleError, ConfigError
from pipeline.contract.run import Run
from pipeline.history import find_run, lock_runs
from pipeline.override import override_verdict, verdict_digest

gate = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Explain or override a gate verdict.")
app.add_typer(gate, name="gate")


@gate.command("explain")
def explain(
    context: typer.Context,
    run: RunName = "latest",
    against: Annotated[
        str, typer.Option("--against", metavar="RUN", help="Compare with this run, sample by sample.")
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Explain each rule of a verdict: its numbers, how they were computed, what would have changed it."""
    from pipeline.evaluate.results import describe_verdict
    from pipeline.evaluate.results import explain as explain_verdict  # numpy is slow to load

    runs = project_of(context).runs
    explained = with_verdict(find_run(runs, run))
    if against:
        return _compare(explained, with_verdict(find_run(runs, against)), output)
    override = explained.override(verdict_digest(explained))
    verdict = explain_verdict(explained.verdict(), override.model_dump() if override else None)
    facts = {"run": explained.id, **verdict}
    return emit(output, facts, "\n".join([f"run {explained.id}", *describe_verdict(facts)]))


def _compare(run: Run, other: Run, output: Output) -> None:
    """Compare two runs anew: their stored verdicts may be about different baselines."""
    from pipeline.evaluate.compare_runs import compare_runs, describe_comparison  # numpy is slow to load

    facts = compare_runs(run, other, run.config.evaluate)
    emit(output, facts, "\n".join(describe_comparison(facts)))


@gate.command("override")
def override(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run the gate rejected.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded permanently.")],
    output: OutputOption = Output.text,
) -> None:
    """Let a rejected model pass; author, time and reason go into its card and its service."""
    rejected = find_run(project_of(context).runs, run)
    with lock_runs(rejected.runs):
        given = override_verdict(rejected, reason)
    text = f"run {rejected.id} is {given}\n`pipe run --resume {rejected.id}` continues it"
    emit(output, {"run": rejected.id, **given.model_dump()}, text)


def with_verdict(run: Run) -> Run:
    """Return the run, or raise where it has no verdict, or one that changed on disk."""
    if not (run.output("evaluate") / "verdict.json").is_file():
        raise ConfigError(f"run {run.id} has no verdict yet; `pipe run --resume {run.id}` continues it")
    record = run.read().steps.get("evaluate")
    if record is not None and record.outputs.get("verdict.json") not in (None, verdict_digest(run)):
        raise BundleError(
            f"run {run.id}: evaluate/verdict.json changed on disk; `pipe run --resume {run.id}` evaluates again"
        )
    return run
