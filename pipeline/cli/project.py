"""Commands for the project itself: init, doctor, explain, gc, repro; and the reference of all settings."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo

from pipeline.cli.app import (
    Output,
    OutputOption,
    RunName,
    app,
    complete_settings,
    emit,
    pairs,
    project_of,
    split_overrides,
    table,
)
from pipeline.cli.from_script import codec_source, read_script, settings_source, task_source
from pipeline.cli.run import run
from pipeline.compare import result_digests
from pipeline.contract.config import Config, all_sections, override_config, setting_names
from pipeline.contract.registry import Entry, forget_fetched, read_registry
from pipeline.contract.run import STEPS, Run
from pipeline.contract.settings.section import Section
from pipeline.display import Display
from pipeline.doctor import check_machine
from pipeline.given.write import write_project
from pipeline.history import Project, example_folder, find_run, load_history, lock_runs
from pipeline.plan import steps_of_setting
from pipeline.run import run_pipeline
from pipeline.service.process import read_live
from pipeline.system.errors import ConfigError
from pipeline.tune.record import needed_runs
from pipeline.work import RunRequest

_OF_CLUSTERS = ("cluster", "rollout", "deploy")  # `pipe explain` alone only names them


def reference() -> str:
    """Describe all settings but those of clusters."""
    kinds = all_sections()
    top_level = {name: field for name, field in Config.model_fields.items() if name not in kinds}
    shown = (_describe_section(name, kind) for name, kind in kinds.items() if name not in _OF_CLUSTERS)
    head = "Settings of pipe.yaml; `pipe run all train.epochs=3` overrides one.\n"
    more = f"For clusters and roll-outs: {', '.join(f'`pipe explain {name}`' for name in _OF_CLUSTERS)}"
    return "\n".join([head, _list_settings("", top_level), *shown, more])


def _describe_section(name: str, kind: type[Section]) -> str:
    title = _wrap(f"{name}: {kind.__doc__ or ''}", "")
    return f"{title}\n\n{_list_settings(f'{name}.', kind.model_fields)}"


def _list_settings(section: str, fields: Mapping[str, FieldInfo]) -> str:
    lines = []
    for name, field in fields.items():
        default = "required" if field.is_required() else f"default {_plain(field.default)}"
        lines += [
            _wrap(f"{section}{name}: {_type(field.annotation)}; {default}", ""),
            _wrap(str(field.description), "    "),
        ]
    return "\n".join(lines) + "\n"


def _wrap(text: str, indent: str) -> str:
    width = max(60, shutil.get_terminal_size().columns - 1)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False)


def describe_setting(name: str) -> dict[str, str]:
    """Return the type, default and meaning of one setting, as in `train.lr`."""
    section, _, key = name.partition(".")
    kind = all_sections().get(section)
    field = kind.model_fields.get(key) if kind else Config.model_fields.get(section)
    if field is None or (kind is None and key):
        same = [other for other in setting_names() if other.partition(".")[2] == name]
        near = same[:1] or difflib.get_close_matches(name, setting_names(), n=1)
        raise ConfigError(f"no setting {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    default = "required" if field.is_required() else _plain(field.default)
    return {"setting": name, "type": _type(field.annotation), "default": default, "meaning": str(field.description)}


def _type(annotation: Any) -> str:
    """Return the text of a type: the choices of a `Literal`, and a type without the wrapper of its limits."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return " | ".join(map(str, parts))
    if kind is Annotated:
        return _type(parts[0])
    if kind in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if kind is not None:
        return "list" if kind is tuple else "mapping"
    return str(annotation.__name__)


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


TEMPLATES = {
    "tabular": "a number from rows with texts and missing values",
    "images": "a class from a PNG or JPEG",
    "text": "a class from a text",
    "transformer": "the same by LoRA on pretrained weights",
    "embedding": "vectors of texts, for search",
    "ranking": "the order of a query's items",
    "forecast": "the next days of a series, with quantiles",
    "image-to-image": "a picture from a picture",
    "speech": "the text of a recording",
    "sequence": "a tag for each word",
    "sft": "a chat model, finetuned on conversations",
    "lora": "the same with adapters",
    "dpo": "a chat model, finetuned on preferences",
}
_PROJECT_FILES = ("task.py", "codec.py", "pipe.yaml")
_DATA_SCRIPT = "make_data.py"  # of templates


def complete_templates(incomplete: str) -> list[str]:
    return [name for name in TEMPLATES if name.startswith(incomplete)]


@app.command()
def init(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of the project; its name becomes the model's name.")
    ] = None,
    template: Annotated[
        str,
        typer.Option("--template", help=f"Kind of model: {', '.join(TEMPLATES)}.", autocompletion=complete_templates),
    ] = "",
    script: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="Training script, or folder of a model, to start from."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only list the templates.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Start a project: task.py, codec.py and pipe.yaml, in a new folder or beside other files."""
    if list_:
        rows = [{"template": name, "model": model} for name, model in TEMPLATES.items()]
        return emit(output, rows, table(rows))
    if folder is None:
        raise ConfigError("name a folder, as in `pipe init my-model`; `pipe init --list` lists templates")
    if template and script:
        raise ConfigError("give --template or --from, not both")
    if template and template not in TEMPLATES:
        raise ConfigError(f"no template {template!r}; there are {', '.join(TEMPLATES)}")
    if present := [name for name in _PROJECT_FILES if (folder / name).exists()]:
        raise ConfigError(f"{folder} already has {', '.join(present)}; move what is there, or give another folder")
    name = model_name(folder.resolve().name)
    value = {"folder": str(folder), "name": name}
    if script and script.is_dir():
        write_project(str(script), folder, name)
        return emit(output, value, f"{folder}: from {script}; `pipe -C {folder} run all` publishes it as it is")
    if script:
        next_steps = _write_from_script(script, folder, name)
        return emit(output, {**value, "next": next_steps}, "\n".join([f"{folder}: from {script}", *next_steps]))
    is_new = not folder.is_dir() or not any(folder.iterdir())
    _copy_example(
        f"templates/{template}" if template else "starter", folder, () if is_new else (*_PROJECT_FILES, _DATA_SCRIPT)
    )
    _make_data(folder)
    settings = folder / "pipe.yaml"
    settings.write_text(re.sub(r"(?m)^name: .*$", f"name: {name}", settings.read_text(), count=1))
    files = f"task.py and codec.py{', and replace data/' if (folder / _DATA_SCRIPT).is_file() else ''}"
    return emit(output, value, f"{folder}: edit {files}; `pipe -C {folder} run all` already runs it as it is")


def _make_data(folder: Path) -> None:
    """Run the template's script that makes its data, unless the folder has data already."""
    if not (folder / _DATA_SCRIPT).is_file() or (folder / "data").exists():
        return
    command, null = [sys.executable, "-B", _DATA_SCRIPT], subprocess.DEVNULL
    done = subprocess.run(command, cwd=folder, stdin=null, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{folder / _DATA_SCRIPT}: {done.stderr.strip().splitlines()[-1]}; to fix it: run it again")


def _write_from_script(path: Path, folder: Path, name: str) -> list[str]:
    """Write the files for a training script; return what is left to do."""
    script = read_script(path)
    folder.mkdir(parents=True, exist_ok=True)
    sources = (task_source(script), codec_source(script), settings_source(script, name))
    for file, text in zip(_PROJECT_FILES, sources, strict=True):
        (folder / file).write_text(text)
    steps = []
    if script.imported and path.resolve().parent != folder.resolve():
        steps.append(f"copy {path}, and the files that it imports, to {folder}: task.py imports it")
    if script.unsafe is not None:
        steps.append(f"{script.name} trains when it is imported (line {script.unsafe.line}); see the top of task.py")
    if script.left:
        lines = ", ".join(str(piece.line) for piece in script.left)
        steps.append(f"not carried over: {script.name}, lines {lines}; task.py lists them")
    steps += [
        f"complete what raises NotImplementedError in {folder / 'task.py'} and {folder / 'codec.py'}",
        f"run `pipe -C {folder} plan`, then `pipe -C {folder} run all`",
    ]
    return steps


@app.command()
def demo(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR] [KEY=VALUE…]", help="Folder to make, `digits` by default; and settings."),
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Write the digits example to a folder and run the whole pipeline."""
    names, overrides = split_overrides(words)
    if len(names) > 1:
        raise ConfigError(f"`pipe demo` takes one folder, not {' and '.join(names)}")
    folder = context.obj / (names[0] if names else "digits")
    if not (folder / "pipe.yaml").is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; give a new folder")
        _copy_example("digits", folder)
    context.obj = folder
    run(context, ["all", *overrides], output=output)
    print(f"next: cd {folder}, then pipe predict, pipe report, pipe stop", file=sys.stderr)


def _copy_example(name: str, folder: Path, files: Sequence[str] = ()) -> None:
    """Copy the named files of an example, or all."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in filter(Path.is_file, example_folder(name).iterdir()):
        if not files or path.name in files:
            shutil.copyfile(path, folder / path.name)


@app.command()
def explain(
    setting: Annotated[
        str,
        typer.Argument(
            metavar="[SETTING]", help="As in train.lr, or a section, as in train.", autocompletion=complete_settings
        ),
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Print what a setting means and what it runs again; without one, describe those that need no cluster."""
    if not setting:
        return emit(output, [describe_setting(name) for name in setting_names()], reference().rstrip())
    if section := all_sections().get(setting):
        names = [name for name in setting_names() if name.startswith(f"{setting}.")]
        return emit(output, [describe_setting(name) for name in names], _describe_section(setting, section).rstrip())
    facts = describe_setting(setting)
    steps = steps_of_setting(setting)
    facts["reruns"] = ", ".join(steps) + " and what depends on it" if steps else "nothing"
    return emit(output, facts, pairs(facts))


def model_name(folder: str) -> str:
    """Make a folder's name fit for URLs, Kubernetes and pipe.yaml, where `on` is no text."""
    label = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.lower()).strip("-")
    label = label[:40].rstrip("-")
    is_word = label[:1].isalpha() and isinstance(yaml.safe_load(label), str)
    return label if is_word else f"model-{label}".rstrip("-")[:40]


@app.command()
def doctor(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Check this machine and suggest fixes."""
    findings = [asdict(finding) for finding in check_machine(context.obj)]
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
    need = (
        "so that a run in use could be removed; to fix it: end all commands, then remove what `pipe gc --dry-run` lists"
    )
    with lock_runs(project.runs, need="" if dry_run else need):
        entries = list(read_registry(project.runs, project.config().registry).names.values())
        removable = _removable_runs(project, entries, keep)
        if not dry_run:
            for run in removable:
                shutil.rmtree(run.path)
            forget_fetched(project.runs, {entry.bundle for entry in entries})
    verb = "would remove" if dry_run else "removed"
    text = "\n".join(f"{verb} {run.id}" for run in removable) or "nothing to remove"
    return emit(output, {"removed": [run.id for run in removable], "dry_run": dry_run}, text)


def _removable_runs(project: Project, entries: list[Entry], keep: int) -> list[Run]:
    history = load_history(project.runs)
    live = read_live(project.runs)
    needed_names = {live.run} if live else set()
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
    with lock_runs(project.runs, shared=True):
        config = override_config(original_run.config, ["track=[]"])  # the trackers have the original
        repeated_run = run_pipeline(project, config, request, display)
    before, after = result_digests(original_run), result_digests(repeated_run)
    rows = [
        {"file": name, "equal": before.get(name) == after.get(name), "digest": after.get(name, "absent")[:12]}
        for name in sorted(before.keys() | after.keys())
    ]
    emit(output, {"run": repeated_run.id, "original": original_run.id, "files": rows}, table(rows))
    if not all(row["equal"] for row in rows):
        raise typer.Exit(1)
