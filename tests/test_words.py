"""Plain English: words of the project's former private language do not come back."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import app

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".html", ".css", ".js", ".Dockerfile", ""}

# Words that have a plain replacement wherever they stand, in prose and in identifiers.
WORDS = {
    "anybody",
    "asked",
    "asks",
    "autopsy",
    "blame",
    "borne",
    "companions",
    "crowd",
    "everybody",
    "evidence",
    "goodwill",
    "leash",
    "leashed",
    "lent",
    "mend",
    "mended",
    "mends",
    "nobody",
    "outbox",
    "peril",
    "perils",
    "rehearsal",
    "renewal",
    "rival",
    "road",
    "roads",
    "said",
    "says",
    "seldom",
    "shelf",
    "somebody",
    "standstill",
    "tell",
    "telling",
    "tells",
    "told",
    "town",
    "watchman",
    "whoever",
}
PHRASES = ("held against", "looked at", "stands in for", "wished for", "walk the road", "beside each other")
# Where they are meant: the distribution's name, attributes of other libraries, and the rule itself.
ALLOWED = re.compile(r"pipe[-_]road|\bf?tell\(\)|\.tell\(")
EXEMPT = {"tests/test_words.py", "LICENSE", "constraints.txt"}

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def replaced_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and replaced words; identifiers are split at underscores and capitals."""
    for number, line in enumerate(text.splitlines(), 1):
        line = ALLOWED.sub("", line)
        yield from ((number, part) for part in _PART.findall(line) if part.lower() in WORDS)
        yield from ((number, phrase) for phrase in PHRASES if phrase in line.lower())


def project_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.splitlines() if name not in EXEMPT]
    return [path for path in files if path.suffix in TEXT and path.is_file()]


def test_replaced_words_are_found() -> None:
    assert list(replaced_words("def is_told(self): pass")) == [(1, "told")]
    assert list(replaced_words("\nclass Watchman: pass")) == [(2, "Watchman")]
    assert list(replaced_words("a file held against torch; pip install pipe-road")) == [(1, "held against")]


def test_sources_and_documents_use_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in project_files()
        for number, word in replaced_words(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", [" ".join(path) for path in commands(typer.main.get_command(app))])
def test_help_uses_plain_words(path: str) -> None:
    shown = CliRunner().invoke(app, [*path.split(), "--help"])
    assert shown.exit_code == 0
    assert list(replaced_words(shown.output)) == []
