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
from pipeline.contract.errors import ConfigError
from pipeline.history import Project, find_project

COMMANDS = [
    "init", "doctor", "plan", "run", "accept", "join", "status", "logs", "compare", "report", "verify", "gate",
    "registry", "sign", "serve", "predict", "package", "deploy", "stop", "gc", "tune", "chaos", "repro",
]  # fmt: skip
REPLACED = {
    "bench": "python -m benchmarks.train, or .serve, .export, .faults, in a checkout",
    "diff": "pipe compare RUN RUN",
    "log": "pipe logs",
    "promote": "pipe registry promote",
    "render": "pipe plan --workflow argo|kfp",
    "rollback": "pipe registry rollback",
}


class _Commands(TyperGroup):
    """Lists commands in the order in which people need them, and names the new one of a command that was replaced."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=COMMANDS.index)

    def get_command(self, context: Any, name: str) -> Any:
        if name in REPLACED:
            raise ConfigError(f"`pipe {name}` was replaced by `{REPLACED[name]}`")
        return super().get_command(context, name)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug shows its plain traceback
    rich_markup_mode=None,  # plain help and one-line usage errors; loading rich would double the time of `--help`
    help="Train a PyTorch model, evaluate it, export it to ONNX and deploy it.",
)


class Output(StrEnum):
    text = "text"
    json = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Format of the result on standard output.")]
RunName = Annotated[str, typer.Argument(metavar="[RUN]", help="Run id, the beginning of one, its path, or `latest`.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="Settings that override pipe.yaml.")
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
            "-C",
            "--project",
            metavar="DIR",
            help="Project folder, the current one by default; accepted anywhere. "
            "In a folder without a pipe.yaml, the digits example is used.",
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
    lines = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def split_overrides(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Split arguments into names and `key=value` overrides."""
    words = words or []
    return [argument for argument in words if "=" not in argument], [argument for argument in words if "=" in argument]
