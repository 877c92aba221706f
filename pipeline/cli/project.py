"""Commands around the project itself: init, doctor, gc, repro."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.compare import outcome_digests
from pipeline.contract.errors import ConfigError
from pipeline.contract.registry import read_registry
from pipeline.contract.run import STEPS
from pipeline.display import Display
from pipeline.doctor import examine
from pipeline.history import example, find_run, load_history, locked
from pipeline.runner import Order, run_road
from pipeline.service.cluster_record import read_placed
from pipeline.service.process import read_live
from pipeline.tune.record import needed_runs


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; its name becomes the model's name.")],
    output: OutputOption = Output.text,
) -> None:
    """Start a project: task.py, codec.py and pipe.yaml, ready to run."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder")
    name = folder.resolve().name
    source = example("starter")
    text = (source / "pipe.yaml").read_text().replace("name: starter", f"name: {model_name(name)}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    (folder / "pipe.yaml").write_text(text)
    said = f"{folder}: edit task.py and codec.py; `pipe -C {folder} run all` walks the road as it stands"
    emit(output, {"folder": str(folder), "name": model_name(name)}, said)


def model_name(folder: str) -> str:
    """A folder's name made fit for URLs and clusters."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.lower()).strip("-")
    letters = letters[:40].rstrip("-")
    return letters if letters[:1].isalpha() else f"model-{letters}".rstrip("-")[:40]


@app.command()
def doctor(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Look this machine over; each problem with its mend."""
    findings = examine(project_of(context).runs.parent)
    emit(output, [asdict(finding) for finding in findings], table([asdict(finding) for finding in findings]))
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def gc(
    context: typer.Context,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest runs to keep.")] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Remove old runs and finished trials; never one that is live, champion, previous, or the best of its study."""
    project = project_of(context)
    runs = project.runs
    if not runs.is_dir():
        return emit(output, {"removed": [], "dry_run": dry_run}, "nothing to remove")
    with locked(runs):
        live = read_live(runs)
        placed = read_placed(runs)
        needed = {live.run} if live else set()
        needed |= {version.run for version in placed.versions} if placed else set()
        names = read_registry(runs, project.config().registry).names.values()
        needed |= {entry.run for entry in names}
        history = load_history(runs)
        newest = [run.id for run, body in history if not body.study][:keep]
        old = [run for run, _ in history if run.id not in needed | needed_runs(runs, history) | set(newest)]
        if not dry_run:
            for run in old:
                shutil.rmtree(run.path)
            from pipeline.contract.registry import forget_fetched  # numpy is slow to load

            forget_fetched(runs, {entry.bundle for entry in names})
    verb = "would remove" if dry_run else "removed"
    emit(output, {"removed": [run.id for run in old], "dry_run": dry_run}, "\n".join(f"{verb} {run.id}" for run in old) or "nothing to remove")  # fmt: skip  # noqa: E501
    return None


@app.command()
def repro(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="The run to do again.")] = "latest",
    output: OutputOption = Output.text,
) -> None:
    """Do a run again from nothing, up to the bundle, and compare what comes out, bit for bit."""
    project = project_of(context)
    original = find_run(project.runs, run)
    until = STEPS[: STEPS.index("export") + 1]
    done = tuple(step for step in until if step in original.read().steps)
    if not outcome_digests(original):
        raise ConfigError(f"run {original.id} trained nothing, so there is nothing to compare")
    with locked(project.runs):
        again = run_road(project, original.config, Order(done, force=frozenset(done)), Display(sys.stderr.isatty()))
    before, after = outcome_digests(original), outcome_digests(again)
    rows = [
        {"file": name, "equal": before.get(name) == after.get(name), "digest": after.get(name, "absent")[:12]}
        for name in sorted(before.keys() | after.keys())
    ]
    emit(output, {"run": again.id, "original": original.id, "files": rows}, table(rows))
    if not all(row["equal"] for row in rows):
        raise typer.Exit(1)
