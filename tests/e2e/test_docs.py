"""What the documents tell to type is typed, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.config import parse_config
from pipeline.contract.run import STEPS
from pipeline.contract.sources import HOUSE

from .walker import PIPE, Walker, environment

DOCUMENTS = [HOUSE / "README.md", *sorted((HOUSE / "docs").glob("*.md")), *sorted(HOUSE.glob("examples/*/README.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GROUPS = ("bench", "registry", "gate")
_FILE = re.compile(r"# file: (\S+)\n")


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return [(language, body) for language, body in _BLOCK.findall(document.read_text())]


def commands_in(document: Path) -> Iterator[list[str]]:
    """Every `pipe …` in a block of shell or in backticks, as words."""
    text = document.read_text()
    lines = [
        line
        for language, body in blocks(document)
        if language == "sh"
        for line in body.replace("\\\n", " ").splitlines()
        if line.startswith("pipe ")  # a shell has other commands, and lines that are no words by themselves
    ]
    for line in [*lines, *re.findall(r"`(pipe [^`]+)`", _BLOCK.sub("", text))]:
        words = shlex.split(line, comments=True)
        if words[:1] == ["pipe"]:
            yield words[1:]


@pytest.fixture
def walker(tmp_path: Path) -> Iterator[Walker]:
    """An empty folder to follow a document in."""
    walker = Walker.beside(tmp_path)
    yield walker
    Walker(tmp_path / "flowers", walker.port).stop()


@pytest.mark.long
def test_adding_a_model_works_as_it_is_written(walker: Walker) -> None:
    """Literally: every block in order, in one folder, save that the port is one that is free here."""
    folder, said = walker.folder, ""
    for language, body in blocks(HOUSE / "docs" / "your-own-model.md"):
        if named := _FILE.match(body):
            assert language in ("python", "yaml")
            (folder / named[1]).write_text(body)
            if named[1] == "pipe.yaml":
                (folder / named[1]).write_text(f"{body}\ndeploy: {{port: {walker.port}}}\n")
            continue
        assert language == "sh"
        for line in body.splitlines():
            words = shlex.split(line)
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            assert words[0] == "pipe"
            done = subprocess.run([*PIPE, *words[1:]], cwd=folder, env=environment({}), capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            said += done.stdout
    assert '"flower": "setosa"' in said
    assert "ended flowers" in said


def readme_commands() -> list[list[str]]:
    """What its blocks tell to type, as words."""
    lines = [line for language, body in blocks(HOUSE / "README.md") if language == "sh" for line in body.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_commands_of_the_readme_work_one_after_the_other(copied: Walker) -> None:
    """On a walked road, up to the next project; `pipe tune` and `pipe chaos` have tests of their own."""
    commands = [words for words in readme_commands() if words[0] not in ("tune", "chaos", "init", "-C")]
    copied.deploy(copied.latest)
    for words in commands:
        copied.pipe(*words)
    assert [words[0] for words in commands] == [
        "status", "predict", "report", "run", "plan", "verify", "promote", "stop",
    ]  # fmt: skip


@pytest.mark.long
def test_the_project_that_init_writes_walks_the_road_as_the_readme_says(walker: Walker) -> None:
    try:
        for words in readme_commands():
            if words[0] in ("init", "-C"):
                walker.pipe(*words)
        assert (walker.folder / "my-model" / "runs" / "live.json").is_file()
    finally:
        Walker(walker.folder / "my-model", 0).stop()


def known_options(command: str, subject: str) -> tuple[int, str]:
    """`bench` hands its options on to the one that measures its subject; a group to one of its commands."""
    if command == "bench":
        argv = [sys.executable, "-m", f"bench.{subject}", "--help"]
        told = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        return told.returncode, told.stdout
    done = CliRunner().invoke(app, [command, *([subject] if subject else []), "--help"], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_every_command_a_document_names_exists_with_its_options() -> None:
    wrong: list[str] = []
    helps: dict[tuple[str, str], tuple[int, str]] = {}
    for document in DOCUMENTS:
        for words in commands_in(document):
            rest = words[2:] if words[0] in ("-C", "--project") else words
            command, *arguments = rest
            key = (command, arguments[0] if command in GROUPS and arguments else "")
            helps[key] = helps.get(key) or known_options(*key)
            status, text = helps[key]
            options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
            missing = [option for option in options if not re.search(rf"{re.escape(option)}\b", text)]
            if status != 0 or missing:
                wrong.append(f"{document.name}: pipe {' '.join(words)}")
    assert wrong == []
    assert {"run", "predict", "stop", "init"} <= {command for command, _ in helps}


def test_every_step_a_document_asks_for_exists() -> None:
    for document in DOCUMENTS:
        for command, *arguments in commands_in(document):
            names = [word for word in arguments if word.isalpha() and word.islower()]
            if command in ("run", "plan"):
                assert {name for name in names if name != "all"} <= set(STEPS), document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def slug(heading: str) -> str:
    """The anchor a heading gets where Markdown is shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_links_within_a_document_lead_to_a_heading(document: Path) -> None:
    text = document.read_text()
    headings = {slug(line.lstrip("# ")) for line in _BLOCK.sub("", text).splitlines() if line.startswith("#")}
    assert [target for target in re.findall(r"\]\(#([^)]+)\)", text) if target not in headings] == []


def test_every_example_of_configuration_is_one_that_pipe_takes() -> None:
    whole = {"name": "x", "task": "task.py:T", "codec": "codec.py:C"}
    examples = [
        (document.name, body)
        for document in DOCUMENTS
        for language, body in blocks(document)
        if language == "yaml" and not _FILE.match(body)
    ]
    for name, body in examples:
        parse_config({**whole, **yaml.safe_load(body)}, source=name)
    assert len(examples) > 15
