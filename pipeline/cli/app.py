"""The typer application, its one global option, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline.history import Project, find_project

COMMANDS = [
    "init", "doctor", "plan", "run", "join", "status", "log", "diff", "compare", "report", "gate", "verify", "sign",
    "serve",
    "predict", "package", "deploy", "render", "promote", "rollback", "registry", "stop", "gc", "repro", "tune", "chaos",
    "bench",
]  # fmt: skip


class _InOrder(TyperGroup):
    """Help lists commands as one meets them, not as modules happen to be imported."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=COMMANDS.index)


app = typer.Typer(
    cls=_InOrder,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,  # a bug shows its plain traceback
    rich_markup_mode=None,  # plain help and one-line usage errors; loading rich would double the time of `--help`
    help="From a PyTorch model to a judged, verified and served one.",
)


class Output(StrEnum):
    text = "text"
    json = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How results are printed on standard output.")]


@app.callback()
def everywhere(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Option("-C", "--project", help="Project folder; without a pipe.yaml the digits example is used.")
    ] = Path(),
) -> None:
    context.obj = folder


def project_of(context: typer.Context) -> Project:
    return find_project(context.obj)


def emit(output: Output, value: Any, text: str) -> None:
    """The result, for a program or for a person."""
    print(json.dumps(value, indent=2) if output is Output.json else text)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Columns as wide as they need to be, headings from the first row."""
    if not rows:
        return "nothing yet"
    names = list(rows[0])
    lines = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)  # fmt: skip  # noqa: E501


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
