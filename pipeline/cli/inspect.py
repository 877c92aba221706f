"""Commands on finished work: status, logs, compare, report, verify, and `pipe gate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from pipeline.cli.app import Output, OutputOption, RunName, app, complete_logs, complete_runs, emit, project_of, table
from pipeline.compare import align_columns, describe_different_tests, differences, result_row
from pipeline.contract.bundle import check_gate, open_bundle, read_override
from pipeline.contract.restarts import read_attempts
from pipeline.contract.results import read_evaluation
from pipeline.contract.run import STEPS, Run, RunFile
from pipeline.contract.signing import Trust
from pipeline.history import Project, find_run, load_history, lock_run, lock_runs, open_run, unreadable_runs
from pipeline.override import override_verdict, verdict_digest
from pipeline.service.places import describe_places, read_places
from pipeline.service.process import LiveService, read_live, read_status
from pipeline.system.errors import BundleError, ConfigError, PipelineError
from pipeline.system.wording import age
from pipeline.tune.record import all_studies, study_trials


@app.command()
def status(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", help="Number of runs to show.")] = 10,
    output: OutputOption = Output.text,
) -> None:
    """Show the newest runs and the live service."""
    project = project_of(context)
    history = load_history(project.runs)
    problems = unreadable_runs(project.runs, history)
    shown = [(run, body) for run, body in history if not body.study][:count]
    runs = [_run_row(run, body, problems) for run, body in shown]
    names = [run.id for run, _ in shown]
    restarts, overrides = _restarts(project, names), _overrides([run for run, _ in shown], problems)
    read_studies, damaged_studies = all_studies(project.runs)
    studies = [{"study": one.name, "runs": len(study_trials(one.name, history))} for one in read_studies]
    clusters = read_places(project)
    try:
        live = read_live(project.runs)
        service, service_lines = _service(live) if live else (None, [] if clusters else ["no service is live"])
    except PipelineError as error:
        service, service_lines = None, [str(error)]
    lines = [table([_shown(row) for row in runs]), "", *map(_restart_line, restarts)]
    lines += [f"run {run.id}: {problem}" for run, problem in problems]
    lines += [f"run {override['run']} went past the gate: {override['text']}" for override in overrides]
    lines += [f"study {study['study']}: runs of {study['runs']} trials; see `pipe tune status`" for study in studies]
    lines += [*damaged_studies.values(), *service_lines]
    lines += describe_places(clusters)
    facts = {"runs": runs, "restarts": restarts, "overrides": overrides, "studies": studies, "service": service}
    facts["problems"] = [
        *({"run": run.id, "problem": problem} for run, problem in problems),
        *({"study": name, "problem": problem} for name, problem in damaged_studies.items()),
    ]
    emit(output, facts | {"clusters": [cluster.facts() for cluster in clusters]}, "\n".join(lines))


Problems: TypeAlias = list[tuple[Run, str]]


def _run_row(run: Run, body: RunFile, problems: Problems) -> dict[str, Any]:
    """Return what became of a run: how far it came, whether it trained, and what the gate decided."""
    steps = {step: body.steps[step].current_status for step in STEPS if step in body.steps}
    unfinished = next(
        (f"{step} {status}" for step, status in steps.items() if status not in ("done", "overridden")), ""
    )
    missing = next((step for step in body.wanted if step not in steps), "")
    training = body.steps.get("train")
    model = None if training is None or not training.complete else "reused" if training.reused_from else "trained"
    row = {
        "run": run.id,
        "age": round((datetime.now(UTC) - datetime.fromisoformat(body.created).astimezone(UTC)).total_seconds()),
        "state": unfinished or (f"before {missing}" if missing else "done"),
        "model": model,
        "verdict": None,
        "metric": None,
        "value": None,
    }
    try:
        if evaluation := read_evaluation(run):
            values = evaluation.verdict, evaluation.metric, evaluation.metrics.get(evaluation.metric)
            row |= zip(("verdict", "metric", "value"), values, strict=True)
    except PipelineError as error:
        problems.append((run, str(error)))
    return {**row, "steps": steps}


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a run's row in the terminal; ages are seconds."""
    value = "" if row["value"] is None else f" {row['value']:.4g}"
    metric = row["metric"] and f"{row['metric']}{value}"
    cells = {name: row[name] for name in ("run", "age", "state", "model", "verdict")}
    return {**cells, "age": age(timedelta(seconds=row["age"])), "metric": metric}


def _restarts(project: Project, names: list[str]) -> list[dict[str, Any]]:
    """Return the runs whose training lost processes and was restarted."""
    attempts = [(name, read_attempts(project.runs / name)) for name in names]
    return [
        {"run": name, "restarts": log.restarts, "seconds_lost": log.seconds_lost}
        for name, log in attempts
        if log.restarts
    ]


def _restart_line(row: dict[str, Any]) -> str:
    times = "once" if row["restarts"] == 1 else f"{row['restarts']} times"
    return f"training of {row['run']} was restarted {times} automatically, {row['seconds_lost']:.0f} s without a step"


def _overrides(runs: list[Run], problems: Problems) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        try:
            if override := read_override(run.path):
                rows.append({"run": run.id, **override.model_dump(), "text": str(override)})
        except PipelineError as error:
            problems.append((run, str(error)))
    return rows


def _service(live: LiveService) -> tuple[dict[str, Any], list[str]]:
    """Return the facts about the local service, and the lines that show them."""
    state = (
        f"live at {live.url}"
        if live.alive
        else f"recorded at {live.url}, but its process {live.pid} is gone; `pipe deploy` starts it"
    )
    lines = [f"service {live.name}: {state} (run {live.run}, bundle {live.bundle[:12]}, since {live.since})"]
    if live.canary is not None:
        lines.append(
            f"canary: {live.canary.share:.3g} of the requests to run {live.canary.run}, bundle "
            f"{live.canary.bundle[:12]}; `pipe registry promote` or `pipe registry rollback` ends it"
        )
    versions = read_status(live) if live.alive else None
    if versions and versions["shadow"]:
        lines.append(_shadow_line(versions["shadow"]))
    return live.model_dump() | {"alive": live.alive, "url": live.url, "versions": versions}, lines


def _shadow_line(shadow: dict[str, Any]) -> str:
    compared, rows = shadow["same"] + shadow["other"], shadow["rows"]
    classes = f", {shadow['rows_same_class']} of {rows} instances with the same class" if rows else ""
    return (
        f"shadow: bundle {shadow['bundle'][:12]} gave the same answer to {shadow['same']} of {compared} requests"
        f"{classes}, largest difference {shadow['max_difference']:.3g}; "
        f"{shadow['failed']} failed, {shadow['dropped']} dropped"
    )


@app.command()
def logs(
    context: typer.Context,
    step: Annotated[str, typer.Argument(help="A step, or `service`.", autocompletion=complete_logs)] = "train",
    run: Annotated[str, typer.Option("--run", help="Run id or `latest`.", autocompletion=complete_runs)] = "latest",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing what is added.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print the log of a step or of the service."""
    source = open_run(run, context.obj)
    live = read_live(source.runs)
    if step == "service" and live is not None and live.run == source.id:
        return _print_log(source, step, Path(live.log), follow, output)  # an earlier run may have started the process
    record = source.read().steps.get(step)
    if record is not None and record.reused_from:  # the run that did the work has the log
        source = Run(source.runs / record.reused_from)
    path = source.log(step)
    if not path.exists():
        names = sorted(log.stem for log in path.parent.glob("*.log"))
        raise ConfigError(f"run {source.id} has no log of {step!r}; it has {', '.join(names) or 'none'}")
    return _print_log(source, step, path, follow, output)


def _print_log(run: Run, step: str, path: Path, follow: bool, output: Output) -> None:
    if output is Output.json:
        lines = path.read_text(errors="replace").splitlines()
        return emit(output, {"run": run.id, "step": step, "path": str(path), "lines": lines}, "")
    with path.open(errors="replace") as file:
        while True:
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not follow:
                return None
            time.sleep(0.2)


@app.command()
def compare(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN…]", help="Runs; by default the newest ones.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Compare the results of runs; of two, also what made them differ."""
    runs = project_of(context).runs
    chosen = [find_run(runs, name) for name in names] if names else [run for run, _ in load_history(runs)[:10]]
    if names and len(names) == 1 and (latest := find_run(runs, "latest")).id != chosen[0].id:
        chosen.append(latest)
    rows = align_columns([result_row(run) for run in chosen])
    changes = differences(*chosen) if names and len(chosen) == 2 else []
    text = table(rows)
    if names and len(chosen) == 2:
        text += "\n\n" + (table(changes) if changes else "no difference in settings, sources, versions or inputs")
    emit(output, {"runs": rows, "differences": changes}, text)
    if warning := describe_different_tests(rows):
        print(f"note: {warning}", file=sys.stderr)
    elif len([row for row in rows if row["test"]]) > 1:
        print("note: `pipe gate explain RUN --against RUN` tests which differences are significant", file=sys.stderr)


@app.command()
def report(
    context: typer.Context,
    run: RunName = "latest",
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--compare", metavar="RUN", help="Show this run next to it; repeatable.", autocompletion=complete_runs
        ),
    ] = None,
    index: Annotated[bool, typer.Option("--index", help="Write a page that lists all runs instead.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="Where to write it.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Write the report of a run, one HTML file that opens offline."""
    if index:
        return _write_index(project_of(context).runs, file, output)
    run_of_report = open_run(run, context.obj)
    compared = _runs_to_compare(run_of_report, others or [], context.obj)
    names = "-".join(other.id for other in compared)
    target = file or run_of_report.path / (f"report-with-{names}.html" if compared else "report.html")
    from pipeline.report.page import write_report  # slow to load

    write_report(run_of_report, target, compared)
    facts = {"run": run_of_report.id, **({"compare": [other.id for other in compared]} if compared else {})}
    return emit(output, {**facts, "report": str(target)}, str(target))


_MAX_COMPARED = 4  # runs beside the one of the report; more curves in a chart cannot be distinguished


def _runs_to_compare(run: Run, names: Sequence[str], folder: Path) -> list[Run]:
    if len(names) > _MAX_COMPARED:
        raise ConfigError(
            f"--compare: {len(names)} runs are named, a report shows at most {_MAX_COMPARED} beside its own; leave out "
            f"{len(names) - _MAX_COMPARED}, or list all with `pipe compare` or `pipe report --index`"
        )
    others: list[Run] = []
    for name in names:
        other = open_run(name, folder)
        if other.path == run.path:
            raise ConfigError(f"--compare {name}: that is run {run.id} itself; name another run")
        if other.path in [each.path for each in others]:
            raise ConfigError(f"--compare {name}: run {other.id} is named twice; name it once")
        others.append(other)
    return others


def _write_index(runs: Path, file: Path | None, output: Output) -> None:
    history = load_history(runs)
    if not history:
        raise ConfigError(f"no runs in {runs} yet; `pipe run all` makes one")
    target = file or runs / "index.html"
    from pipeline.report.page import write_index  # slow to load

    write_index(history, target)
    emit(output, {"runs": [run.id for run, _ in history], "report": str(target)}, str(target))


@app.command()
def verify(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[RUN|BUNDLE]", help="A run, or a bundle directory.")] = "latest",
    key: Annotated[
        Path | None, typer.Option("--key", metavar="PUB", help="Public keys: one of them must have signed.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="DIR", help="Check only what a deployment requires of a bundle; needs --key."),
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Check every digest of the chain and repeat the golden requests.

    `--bundle` is checked without a project, and nothing of it is run: digests, the signature, and the verdict of the
    gate.
    """
    checked = []
    for sentence in _verify(target, key, bundle, context.obj):
        checked.append(sentence)
        if output is Output.text:
            print(sentence)
    if output is Output.json:
        emit(output, {"verified": True, "checked": checked}, "")


def _verify(target: str, key: Path | None, bundle: Path | None, folder: Path) -> Iterator[str]:
    if bundle is not None:
        if key is None:
            raise ConfigError("--key FILE is needed: the public keys, one of which must have signed")
        if target != "latest":
            raise ConfigError(f"{target}: --bundle checks a folder and nothing else; leave one out")
        return _verify_before_deployment(bundle, Trust(key))
    from pipeline.verify import (
        verify_bundle,
        verify_run,  # onnxruntime is slow to load
    )

    trust = Trust(key) if key else None
    if (Path(target) / "manifest.json").is_file():
        return verify_bundle(Path(target), trust)
    return verify_run(open_run(target, folder), trust)


def _verify_before_deployment(path: Path, trust: Trust) -> Iterator[str]:
    bundle = open_bundle(path, trust)
    yield f"signed by {trust.check(path, (path / 'manifest.json').read_bytes())}"
    yield f"bundle {bundle.digest[:12]}: {len(bundle.manifest.files)} files match the manifest"
    check_gate(bundle.manifest.verdict, str(path))
    yield f"the gate's verdict is {bundle.override or bundle.manifest.verdict}"


gate = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Explain or override a gate verdict.")
app.add_typer(gate, name="gate")


@gate.command("explain")
def explain(
    context: typer.Context,
    run: RunName = "latest",
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="RUN", help="Compare with this run, sample by sample.", autocompletion=complete_runs
        ),
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Explain each rule of a verdict: its numbers, how they were computed, what would have changed it."""
    from pipeline.evaluate.results import describe_verdict
    from pipeline.evaluate.results import explain as explain_verdict  # numpy is slow to load

    explained = with_verdict(open_run(run, context.obj))
    if against:
        return _compare(explained, with_verdict(open_run(against, context.obj)), output)
    override = explained.override(verdict_digest(explained))
    verdict = explain_verdict(explained.verdict(), override.model_dump() if override else None)
    facts = {"run": explained.id, **verdict}
    return emit(output, facts, "\n".join([f"run {explained.id}", *describe_verdict(facts)]))


def _compare(run: Run, other: Run, output: Output) -> None:
    """Compare two runs anew: their stored verdicts may be about different baselines."""
    from pipeline.evaluate.compare_runs import (
        compare_runs,
        describe_comparison,  # numpy is slow to load
    )

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
    rejected_run = open_run(run, context.obj)
    with lock_runs(rejected_run.runs, shared=True), lock_run(rejected_run):
        override = override_verdict(rejected_run, reason)
    text = f"run {rejected_run.id} is {override}\n`pipe run --resume {rejected_run.id}` continues it"
    emit(output, {"run": rejected_run.id, **override.model_dump()}, text)


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
