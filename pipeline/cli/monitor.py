"""`pipe monitor`: compare the live traffic with training and with the verdict, once or again and again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.app import Output, OutputOption, RunName, app, emit, project_of
from pipeline.cli.run import newest_bundle
from pipeline.contract.run import Run
from pipeline.contract.settings.section import parse_interval
from pipeline.history import find_run
from pipeline.service.process import read_live
from pipeline.system.errors import ConfigError, GateError, Interrupted, PipelineError

if TYPE_CHECKING:
    from pipeline.history import Project
    from pipeline.monitor.look import Monitor, Report


@app.command()
def monitor(
    context: typer.Context,
    run: RunName = "latest",
    samples: Annotated[
        str, typer.Option("--samples", metavar="DIR|URL", help="Where the service writes samples and labels.")
    ] = "",
    labels: Annotated[
        list[Path] | None,
        typer.Option("--labels", metavar="FILE", help="Labels as Parquet or CSV: columns id, label; repeatable."),
    ] = None,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="Look again and again, as every 1h.")] = "",
    render: Annotated[
        str, typer.Option("--render", metavar="DIR", help="Write monitor.html, and monitor.prom for Prometheus.")
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Compare live inputs, answers and the metric with training and the verdict.

    Exits with 0 if the model is as promised, with 3 if not. `latest` is the run that
    is live here, else the newest one with a bundle.
    """
    project, pause = project_of(context), parse_interval(every, "--every") if every else 0
    config, chosen = project.config(), _choose(project, run)
    where = samples or config.serve.sample_to
    if not where and not labels:
        raise ConfigError("nothing to read; to fix it: set serve.sample_to, or name the folder with --samples")
    from pipeline.contract.samples import SampleFolder  # numpy and torch are slow to load
    from pipeline.monitor.look import Monitor
    from pipeline.monitor.show import describe, facts, write_files

    folder = SampleFolder(str(project.root / where) if "://" not in where else where) if where else None
    looked = False
    try:
        while True:
            try:
                watched = Monitor(chosen, chosen.bundle(), project.root, config)
                report = watched.look(folder, labels or ())
            except (PipelineError, OSError) as error:
                if not looked:
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                looked = True
                if render:
                    write_files(report, watched.ledger.path.parent if render == "default" else Path(render))
                emit(output, facts(report), "\n".join(describe(report)))
                _act(watched, report, project, config.monitor.on_alert)
            if not every:
                break
            sys.stdout.flush()
            time.sleep(pause)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the next look continues") from None
    if report.failures:
        raise typer.Exit(GateError.exit_code)


def _choose(project: Project, name: str) -> Run:
    live = read_live(project.runs)
    if name == "latest" and live is not None and live.alive:
        name = live.run
    return newest_bundle(project) if name == "latest" else find_run(project.runs, name)


def _act(watched: Monitor, report: Report, project: Project, on_alert: str) -> None:
    """Start a run from the one that is no longer as promised, once for each bundle; its gate decides."""
    if on_alert != "run" or not report.failures:
        return
    with watched.ledger.look() as ledger:
        if ledger.read("started") is not None:
            return
        ledger.write("started", report.looked)
    command = ["run", "all", "--since", report.run]
    print(f"starting `pipe {' '.join(command)}`", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "-C", str(project.root), *command], stdout=sys.stderr, check=False
    )
    print(f"`pipe {' '.join(command)}` ended with status {done.returncode}", file=sys.stderr, flush=True)
