"""Commands for the project itself: init, doctor, gc, repro."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, RunName, app, complete_settings, emit, project_of, table
from pipeline.compare import result_digests
from pipeline.contract.errors import ConfigError
from pipeline.contract.registry import Entry, read_registry
from pipeline.contract.run import STEPS, Run
from pipeline.display import Display
from pipeline.doctor import check_machine
from pipeline.history import Project, example_folder, find_run, load_history, lock_runs
from pipeline.plan import steps_of_setting
from pipeline.runner import RunRequest, run_pipeline
from pipeline.service.cluster_record import read_cluster_record
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
    name = model_name(folder.resolve().name)
    source = example_folder("starter")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    text = (source / "pipe.yaml").read_text().replace("name: starter", f"name: {name}")
    (folder / "pipe.yaml").write_text(text)
    message = f"{folder}: edit task.py and codec.py; `pipe -C {folder} run all` already runs it as it is"
    emit(output, {"folder": str(folder), "name": name}, message)


@app.command()
def explain(
    setting: Annotated[
        str, typer.Argument(metavar="SETTING", help="As in train.lr.", autocompletion=complete_settings)
    ],
    output: OutputOption = Output.text,
) -> None:
    """Print what a setting means, and what runs again when it changes."""
    from pipeline.config_reference import describe_setting  # slow to load

    facts = describe_setting(setting)
    steps = steps_of_setting(setting)
    facts["reruns"] = ", ".join(steps) + " and what depends on it" if steps else "nothing"
    emit(output, facts, "\n".join(f"{name:8} {value}" for name, value in facts.items()))


def model_name(folder: str) -> str:
    """Make a folder's name fit for URLs and Kubernetes."""
    label = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.lower()).strip("-")
    label = label[:40].rstrip("-")
    return label if label[:1].isalpha() else f"model-{label}".rstrip("-")[:40]


@app.command()
def doctor(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Check this machine and suggest fixes."""
    findings = [asdict(finding) for finding in check_machine(project_of(context).runs.parent)]
    emit(output, findings, table(findings))
    if any(finding["state"] == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def gc(
    context: typer.Context,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Number of the newest runs to keep.")] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Remove old runs and finished trials.

    What is live, champion, previous champion, or the best of its study is kept.
    """
    project = project_of(context)
    if not project.runs.is_dir():
        return emit(output, {"removed": [], "dry_run": dry_run}, "nothing to remove")
    with lock_runs(project.runs):
        entries = list(read_registry(project.runs, project.config().registry).names.values())
        removable = _removable_runs(project, entries, keep)
        if not dry_run:
            for run in removable:
                shutil.rmtree(run.path)
            from pipeline.contract.registry import forget_fetched  # numpy is slow to load

            forget_fetched(project.runs, {entry.bundle for entry in entries})
    verb = "would remove" if dry_run else "removed"
    text = "\n".join(f"{verb} {run.id}" for run in removable) or "nothing to remove"
    return emit(output, {"removed": [run.id for run in removable], "dry_run": dry_run}, text)


def _removable_runs(project: Project, entries: list[Entry], keep: int) -> list[Run]:
    history = load_history(project.runs)
    live, cluster = read_live(project.runs), read_cluster_record(project.runs)
    needed_names = {live.run} if live else set()
    needed_names |= {version.run for version in cluster.versions} if cluster else set()
    needed_names |= {entry.run for entry in entries}
    needed_names |= needed_runs(project.runs, history)
    needed_names |= {run.id for run in [run for run, body in history if not body.study][:keep]}
    return [run for run, _ in history if run.id not in needed_names]


@app.command()
def repro(context: typer.Context, run: RunName = "latest", output: OutputOption = Output.text) -> None:
    """Repeat a run up to the bundle and compare the results bit for bit."""
    project = project_of(context)
    original_run = find_run(project.runs, run)
    if not result_digests(original_run):
        raise ConfigError(f"run {original_run.id} trained nothing, so there is nothing to compare")
    steps = tuple(step for step in STEPS[: STEPS.index("export") + 1] if step in original_run.read().steps)
    request, display = RunRequest(steps, force=frozenset(steps)), Display(sys.stderr.isatty())
    with lock_runs(project.runs):
        repeated_run = run_pipeline(project, original_run.config, request, display)
    before, after = result_digests(original_run), result_digests(repeated_run)
    rows = [
        {"file": name, "equal": before.get(name) == after.get(name), "digest": after.get(name, "absent")[:12]}
        for name in sorted(before.keys() | after.keys())
    ]
    emit(output, {"run": repeated_run.id, "original": original_run.id, "files": rows}, table(rows))
    if not all(row["equal"] for row in rows):
        raise typer.Exit(1)
