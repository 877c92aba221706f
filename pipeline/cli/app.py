"""The `pipe` application: its global options, the order of its commands, and how they print results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline.contract import __version__
from pipeline.contract.run import STEPS, all_runs
from pipeline.history import Project, find_project
from pipeline.system.wording import align, number

GROUPS = {
    "Start": ("demo", "init", "export", "doctor", "explain"),
    "Run": ("plan", "run", "accept", "join", "status", "logs", "tune", "gc"),
    "Judge": ("report", "compare", "gate", "monitor", "verify", "repro", "chaos"),
    "Deploy": ("registry", "sign", "package", "deploy", "serve", "predict", "stop"),
}
COMMANDS = [command for group in GROUPS.values() for command in group]
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 rejected by the gate or by `pipe monitor`, "
    "4 the plan has changes, 130 interrupted, 143 by SIGTERM."
)


class _Commands(TyperGroup):
    """Lists commands in the order in which people need them."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=COMMANDS.index)

    def format_commands(self, _: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            commands = [(name, self.commands[name]) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(80)) for name, command in commands])


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug shows its plain traceback
    rich_markup_mode=None,  # plain help and one-line usage errors; loading rich would double the time of `--help`
    help="Train a PyTorch model, evaluate it, export it to ONNX and deploy it.",
    epilog=EXIT_CODES,
)


class Output(StrEnum):
    text = "text"
    json = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Format of the result on standard output.")]


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    names = ["latest", *(run.id for run in all_runs(_folder_of(context) / "runs"))]
    return [name for name in names if name.startswith(incomplete)]


def complete_logs(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the logs of the run that `--run` names."""
    name = context.params.get("run") or "latest"
    runs = [run for run in all_runs(_folder_of(context) / "runs") if name == "latest" or run.id.startswith(name)]
    names = {*(path.stem for path in (runs[0].path / "logs").glob("*.log")), "service"} if runs else set()
    return sorted(name for name in names if name.startswith(incomplete))


def complete_words(incomplete: str) -> list[str]:
    """Complete steps, settings as `section.name=`, and their values where there are few."""
    from pipeline.contract.config import setting_choices, setting_names  # slow to load

    name, is_setting, _ = incomplete.partition("=")
    if is_setting:
        return [word for choice in setting_choices(name) if (word := f"{name}={choice}").startswith(incomplete)]
    words = ["all", *STEPS, *(f"{name}=" for name in setting_names())]
    return [word for word in words if word.startswith(incomplete)]


def complete_settings(incomplete: str) -> list[str]:
    from pipeline.contract.config import setting_names  # slow to load

    return [name for name in setting_names() if name.startswith(incomplete)]


def _folder_of(context: typer.Context) -> Path:
    """Return the project folder while a command line is completed, when no callback has run."""
    parent = context.parent
    return Path(parent.params.get("folder") or ".") if parent is not None else Path()


RunName = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", help="Run id, the beginning of one, its path, or `latest`.", autocompletion=complete_runs
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE…]", help="Settings that override pipe.yaml.", autocompletion=complete_words),
]
KubeContext = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; the current one by default.")
]


def _print_version(show_version: bool) -> None:
    if show_version:
        print(f"pipe {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Option(
            "-C", "--project", metavar="DIR", help="Project folder, the current one by default; accepted anywhere."
        ),
    ] = Path(),
    version: Annotated[  # noqa: ARG001 - the callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj = folder


def project_of(context: typer.Context) -> Project:
    return find_project(context.obj)


def emit(output: Output, value: Any, text: str) -> None:
    """Print a result for a program or for a person."""
    print(json.dumps(value, indent=2) if output is Output.json else text)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Align rows in columns under headings from the first row."""
    if not rows:
        return "nothing yet"
    names = list(rows[0])
    return "\n".join(align([names, *([_cell(row[name]) for name in names] for row in rows)]))


def pairs(facts: Mapping[str, object]) -> str:
    """Align values beside their names; mappings are for programs only."""
    return "\n".join(align([(name, str(value)) for name, value in facts.items() if not isinstance(value, dict)]))


def _cell(value: object) -> str:
    return "-" if value is None else number(value) if isinstance(value, float) else str(value)


def split_overrides(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Split arguments into names and `key=value` overrides."""
    words = words or []
    return [argument for argument in words if "=" not in argument], [argument for argument in words if "=" in argument]
