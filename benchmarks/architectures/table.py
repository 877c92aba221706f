"""Rows of results, and the document that is written from them."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS, TABLE = ROOT / "benchmarks" / "architectures.jsonl", ROOT / "docs" / "architectures.md"
Rows = dict[str, dict[str, Any]]


def read_rows(path: Path = ROWS) -> tuple[dict[str, Any], Rows]:
    """Return the first line, with date and versions, and the rows by name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return (lines[0] if lines else {}), {row["name"]: row for row in lines[1:]}


def write_rows(rows: Rows, path: Path) -> None:
    packages = ("torch", "transformers", "timm", "torchvision", "onnx", "onnxruntime")
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: metadata.version(name) for name in packages},
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in (about, *(rows[name] for name in sorted(rows)))))


def passes(row: Mapping[str, Any]) -> bool:
    """Return whether it was exported, equal to torch at every batch size, with the library's own answers."""
    return bool(row["exported"] and "batch" in row["axes"] and row["answers"])


def is_made(row: Mapping[str, Any]) -> bool:
    """Return whether its library made the model; some need other packages."""
    return not str(row.get("reason")).startswith(NOT_MADE)


def by_library(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of models that were made."""
    groups: dict[str, list[dict[str, Any]]] = {"transformers": [], "timm": [], "torchvision": []}
    for row in filter(is_made, rows.values()):
        groups[row["name"].partition(":")[0]].append(row)
    return groups


NOT_MADE = "not made from a tiny configuration"  # begins the reason
_LONGEST_REASON = 180  # characters
_DOCUMENT = """# Architectures

What `pipe export` makes of transformers, timm and torchvision: one network of each of their modules, with random
weights, tiny where the library allows. The list leaves out models with pictures or sounds beside texts, the less known
of the language models that are changes of another one, and networks of timm above 10 million weights.

An architecture passes if `pipe export` wrote a bundle with a dynamic batch, and other axes as named, whose outputs are
those of torch at every size that was compared, and whose answers to requests are those of the library itself.

{passed} of {count} pass ({date}; {versions}).

Seconds are those that a processor core spends on `pipe export`, with the libraries already loaded: together {minutes}
minutes of two cores. To make the models takes another eight.

| library | pass | of | median seconds |
|---|---|---|---|
{counts}

`python -m benchmarks.architectures --table docs/architectures.md` runs what has no row in
`benchmarks/architectures.jsonl`, which has all numbers, and writes this page from it.

## Those that pass

| library, kind | dynamic axes | largest difference | names |
|---|---|---|---|
{groups}

## Those that fail

| reason | names |
|---|---|
{failures}

Not counted, as the library needs other packages to make them: {others}.
"""


def make_table(about: Mapping[str, Any], rows: Rows) -> str:
    libraries, good = by_library(rows), [row for row in rows.values() if passes(row)]
    others = sorted(name.partition(":")[2] for name, row in rows.items() if not is_made(row))
    groups, failures = defaultdict(list), defaultdict(list)
    for name, row in sorted(rows.items()):
        library, _, model = name.partition(":")
        if passes(row):
            kind = f"{library}, {row['kind']}" if library == "transformers" else library
            groups[kind, ", ".join(row["axes"])].append((model, row["difference"]))
        elif is_made(row):
            failures[_shown_reason(row)].append(name if library != "transformers" else model)
    counts = [
        (library, sum(map(passes, members)), len(members), round(median(row["cpu"] for row in members)))
        for library, members in libraries.items()
        if members
    ]
    shown = [
        (kind, axes, f"{max(difference for _, difference in members):.1g}", ", ".join(name for name, _ in members))
        for (kind, axes), members in groups.items()
    ]
    return _DOCUMENT.format(
        passed=len(good), count=sum(map(len, libraries.values())), date=about["date"],
        versions=", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        counts=_lines(counts), groups=_lines(shown),
        failures=_lines((reason, ", ".join(names)) for reason, names in failures.items()),
        others=", ".join(others), minutes=round(sum(row["cpu"] for row in rows.values()) / 2 / 60),
    )  # fmt: skip


def _shown_reason(row: Mapping[str, Any]) -> str:
    """Return the first part of the reason."""
    text = re.sub(r" \(\w+\.py, line \d+\)", "", row.get("reason") or "no answers were compared").split("; ")[0]
    text = textwrap.shorten(text, _LONGEST_REASON, placeholder=" …")
    return text.replace("|", "\\|").replace("<", "&lt;")


def _lines(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
