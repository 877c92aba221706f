"""Commands that look: status, log, diff, compare, report, verify."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.compare import aligned, differences, results, unlike
from pipeline.contract.attempts import read_story
from pipeline.contract.errors import ConfigError
from pipeline.contract.override import read_override
from pipeline.contract.run import STEPS, Run
from pipeline.contract.signing import Trust
from pipeline.history import Project, find_run, load_history
from pipeline.service.cluster_record import told_of_cluster
from pipeline.service.process import Live, read_live
from pipeline.service.rollout import Admin
from pipeline.tune.record import count_trials

RunName = Annotated[str, typer.Argument(metavar="[RUN]", help="Run id, its beginning, its path, or `latest`.")]


@app.command()
def status(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", help="How many runs to show.")] = 10,
    output: OutputOption = Output.text,
) -> None:
    """The newest runs and the service that is live."""
    project = project_of(context)
    history = load_history(project.runs)
    runs = [
        {"run": run.id, **{step: body.steps[step].status if step in body.steps else "-" for step in STEPS}}
        for run, body in [(run, body) for run, body in history if not body.study][:count]
    ]
    again = _began_again(project, [row["run"] for row in runs])
    studies = count_trials(project.runs, history)
    live = read_live(project.runs)
    service: dict[str, Any] | None = live.model_dump() | {"alive": live.alive, "url": live.url} if live else None
    line = "no service is live"
    if live is not None:
        state = f"live at {live.url}" if live.alive else f"recorded at {live.url}, but its process {live.pid} is gone; `pipe deploy` starts it"  # fmt: skip  # noqa: E501
        line = f"service {live.name}: {state} (run {live.run}, bundle {live.bundle[:12]}, since {live.since})"
        if live.canary is not None:
            line += f"\ncanary: {live.canary.share:.3g} of the requests to run {live.canary.run}, bundle {live.canary.bundle[:12]}; `pipe promote` or `pipe rollback` ends it"  # fmt: skip  # noqa: E501
        told = _told(live)
        service = {**(service or {}), "told": told}
        line += _shadow_line(told)
    cluster = told_of_cluster(project)
    lines = [f"study {study['study']}: runs of {study['runs']} trials; see `pipe tune status`" for study in studies]
    lines += [line] if live is not None or cluster is None else []
    lines += cluster.lines() if cluster else []
    given = [told for row in runs if (told := _override(project, row["run"]))]
    past_gate = [f"run {one['run']} went past the gate: {one['told']}" for one in given]
    text = "\n".join([table(runs), "", *map(_again_line, again), *past_gate, *lines])
    found = {"runs": runs, "began_again": again, "overrides": given, "studies": studies, "service": service}
    emit(output, found | {"cluster": cluster.facts() if cluster else None}, text)


def _told(live: Live) -> dict[str, Any] | None:
    """What the service itself says of its versions; None where it does not."""
    admin = Admin(live)
    return admin.status() if live.alive and live.admin_port and admin.answers() else None


def _shadow_line(told: dict[str, Any] | None) -> str:
    if told is None or (shadow := told["shadow"]) is None:
        return ""
    asked, rows = shadow["same"] + shadow["other"], shadow["rows"]
    classes = f", {shadow['rows_same_class']} of {rows} instances of the same class" if rows else ""
    return (
        f"\nshadow: bundle {shadow['bundle'][:12]} gave the same answer to {shadow['same']} of {asked} requests"
        f"{classes}, largest difference {shadow['max_difference']:.3g}; "
        f"{shadow['failed']} failed, {shadow['dropped']} not asked"
    )


def _began_again(project: Project, names: list[str]) -> list[dict[str, Any]]:
    """The runs whose training lost processes and went on by itself."""
    stories = [(name, read_story(project.runs / name)) for name in names]
    return [
        {"run": name, "restarts": story.restarts, "seconds_lost": story.seconds_lost}
        for name, story in stories
        if story.restarts
    ]


def _override(project: Project, name: str) -> dict[str, Any] | None:
    given = read_override(project.runs / name)
    return {"run": name, **given.model_dump(), "told": str(given)} if given else None


def _again_line(row: dict[str, Any]) -> str:
    times = "once" if row["restarts"] == 1 else f"{row['restarts']} times"
    return f"training of {row['run']} began again {times} by itself, {row['seconds_lost']:.0f} s without a step"


@app.command()
def log(
    context: typer.Context,
    step: Annotated[str, typer.Argument(help="A step, or `service`.")] = "train",
    run: Annotated[str, typer.Option("--run", help="Run id or `latest`.")] = "latest",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is added.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print what a step wrote."""
    found = find_run(project_of(context).runs, run)
    live = read_live(found.runs)
    if step == "service" and live is not None and live.run == found.id:
        return _print_log(found, step, Path(live.log), follow, output)  # the process may be an earlier run's
    record = found.read().steps.get(step)
    if record is not None and record.reused_from:  # the log stays with the run that did the work
        found = find_run(found.runs, record.reused_from)
    path = found.log(step)
    if not path.exists():
        known = sorted(log.stem for log in path.parent.glob("*.log"))
        raise ConfigError(f"run {found.id} has no log of {step!r}; it has {', '.join(known) or 'none'}")
    return _print_log(found, step, path, follow, output)


def _print_log(found: Run, step: str, path: Path, follow: bool, output: Output) -> None:
    if output is Output.json:
        lines = path.read_text(errors="replace").splitlines()
        return emit(output, {"run": found.id, "step": step, "path": str(path), "lines": lines}, "")
    with path.open(errors="replace") as file:
        while True:
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not follow:
                return None
            time.sleep(0.2)


@app.command()
def diff(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="RUN", help="The run to start from.")],
    second: Annotated[str, typer.Argument(metavar="[RUN]", help="The run to compare it with.")] = "latest",
    output: OutputOption = Output.text,
) -> None:
    """What differs between two runs: settings, sources, versions, inputs."""
    runs = project_of(context).runs
    rows = differences(find_run(runs, first), find_run(runs, second))
    emit(output, rows, table(rows) if rows else "no difference")


@app.command()
def compare(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN…]", help="Runs; without any, the newest.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Results of several runs beside each other."""
    runs = project_of(context).runs
    chosen = [find_run(runs, name) for name in names] if names else [run for run, _ in load_history(runs)[:10]]
    rows = aligned([results(run) for run in chosen])
    emit(output, rows, table(rows))
    if found := unlike(rows):
        print(f"note: {found}", file=sys.stderr)
    elif len([row for row in rows if row["test"]]) > 1:
        print("note: `pipe gate explain RUN --against RUN` says which differences are no chance", file=sys.stderr)


@app.command()
def report(
    context: typer.Context,
    run: RunName = "latest",
    other: Annotated[str, typer.Option("--compare", metavar="RUN", help="Show it beside this run.")] = "",
    index: Annotated[bool, typer.Option("--index", help="A page that lists all runs instead.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="Where to write it.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Write the run's report, one HTML file that opens offline."""
    runs = project_of(context).runs
    if index:
        return _write_index(runs, file, output)
    found = find_run(runs, run)
    compared = find_run(runs, other) if other else None
    if compared is not None and compared.path == found.path:
        raise ConfigError(f"--compare {other}: that is run {found.id} itself; name another run")
    target = file or found.path / (f"report-with-{compared.id}.html" if compared else "report.html")
    from pipeline.report.page import write_report  # other commands do without its pages

    write_report(found, target, compared)
    beside = {"compare": compared.id} if compared else {}
    return emit(output, {"run": found.id, **beside, "report": str(target)}, str(target))


def _write_index(runs: Path, file: Path | None, output: Output) -> None:
    history = load_history(runs)
    if not history:
        raise ConfigError(f"no runs in {runs} yet; `pipe run all` makes one")
    target = file or runs / "index.html"
    from pipeline.report.page import write_index

    write_index(history, target)
    emit(output, {"runs": [run.id for run, _ in history], "report": str(target)}, str(target))


@app.command()
def verify(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[RUN|BUNDLE]", help="A run, or a bundle directory.")] = "latest",
    key: Annotated[
        Path | None, typer.Option("--key", metavar="PUB", help="Public keys: one of them must have signed the bundle.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Check every digest of the chain and ask the golden requests again."""
    from pipeline.verify import (
        verify_bundle,
        verify_run,  # onnxruntime is slow to load
    )

    bundle, trust = (Path(target) / "manifest.json").is_file(), Trust(key) if key else None
    held = []
    run = None if bundle else find_run(project_of(context).runs, target)
    for sentence in verify_run(run, trust) if run else verify_bundle(Path(target), trust):
        held.append(sentence)
        if output is Output.text:
            print(sentence)
    if output is Output.json:
        emit(output, {"verified": True, "held": held}, "")
