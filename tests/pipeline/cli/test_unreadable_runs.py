"""A run whose run.json cannot be read: `status` names it, and all other commands ignore it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.contract.run import Run, RunFile, StepRecord
from pipeline.history import begin_run, create_run, find_project, write_record

from .conftest import Pipe

BAD = "29990101-000000-aaaa"  # newer than every other one


def newer(body: bytes) -> bytes:
    environment = {"environment": {"pipe-road": "9.1.0"}}
    return json.dumps(json.loads(body) | {"schema_version": RunFile.SCHEMA + 1, "shiny": 1} | environment).encode()


CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda body: b"", "damaged: it is empty; to fix it: restore it"),
    "zeros": (lambda body: bytes(len(body)), "damaged: it is empty; to fix it: restore it"),
    "cut": (lambda body: body[: len(body) // 2], "damaged: Invalid JSON"),
    "no text": (lambda body: b"\xff\xfe", "damaged: Invalid JSON"),
    "list": (lambda body: b"[]", "damaged: Input should be an object"),
    "field": (lambda body: body.replace(b'"id"', b'"i"'), "damaged: id: Field required"),
    "newer": (
        newer,
        f"newer version of pipe (9.1.0; schema {RunFile.SCHEMA + 1}, this one reads {RunFile.SCHEMA}); to fix it: pip",
    ),
    "schema": (lambda body: body.replace(b'"schema_version": 3', b'"schema_version": 44'), "newer version of pipe ("),
    "key": (lambda body: body.replace(b'"id"', b'"shiny": 1, "id"'), "shiny is unknown here); to fix it: pip install"),
}


@pytest.fixture
def good(starter: Path) -> Run:
    """A run whose train step is complete."""
    project = find_project(starter)
    run = create_run(project.runs, project.config(), ("prepare", "train"), parent="")
    write_record(run, StepRecord(step="train", status="done", key="k", parts={}))
    run.log("train").write_text("epoch 1\n")
    return run


@pytest.fixture
def bad(starter: Path, good: Run) -> Run:
    project = find_project(starter)
    run = begin_run(Run(project.runs / BAD), project.config(), ("prepare",))
    (run.path / "run.json").write_bytes(b"")
    return run


@pytest.mark.parametrize("content", CONTENTS)
def test_status_names_the_run_and_the_fix(pipe: Pipe, good: Run, bad: Run, starter: Path, content: str) -> None:
    change, sentence = CONTENTS[content]
    (bad.path / "run.json").write_bytes(change((good.path / "run.json").read_bytes()))
    lines = [line for line in pipe("status").stdout.splitlines() if BAD in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"run {BAD}: ")
    assert sentence in lines[0]
    facts = json.loads(pipe("status", "-o", "json").stdout)
    assert [row["run"] for row in facts["runs"]] == [good.id]
    assert [row["run"] for row in facts["problems"]] == [BAD]
    assert sentence in facts["problems"][0]["problem"]


@pytest.mark.parametrize("file", ["tune/abc/study.json", "live.json"])
@pytest.mark.parametrize("content", [b"", bytes(9), b"{", b"[]", b'{"shiny": 1}', b"\xff"])
def test_status_names_another_file_that_cannot_be_read(pipe: Pipe, good: Run, file: str, content: bytes) -> None:
    path = good.runs / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    (line,) = [line for line in pipe("status").stdout.splitlines() if line.startswith(str(path))]
    assert "; to fix it: " in line
    assert good.id in pipe("plan").stdout + pipe("status").stdout
    assert path.read_bytes() == content


WORKING = [
    "plan", "logs", "logs -o json", "compare", "report", "report --index", "gc --dry-run", "gc", "registry list",
    "registry history",
]  # fmt: skip


@pytest.mark.parametrize("command", WORKING)
def test_other_commands_go_on_without_it(pipe: Pipe, good: Run, bad: Run, command: str) -> None:
    done = pipe(*command.split())
    assert BAD not in done.stdout + done.stderr
    assert (bad.path / "run.json").exists()
    assert good.path.exists()


def test_gc_removes_older_runs_but_not_the_unreadable_one(pipe: Pipe, good: Run, bad: Run, starter: Path) -> None:
    oldest = bad.path.rename(bad.path.with_name("20000101-000000-aaaa"))
    project = find_project(starter)
    newest = create_run(project.runs, project.config(), ("prepare",), parent="")
    assert json.loads(pipe("gc", "--keep", "1", "-o", "json").stdout)["removed"] == [good.id]
    assert [path.is_dir() for path in (oldest, good.path, newest.path)] == [True, False, True]


LATEST = ("gate explain", "deploy", "repro", "registry promote", "run --resume")


@pytest.mark.parametrize("command", LATEST)
def test_latest_is_the_newest_readable_run(pipe: Pipe, good: Run, bad: Run, command: str) -> None:
    """The commands fail because that run has no outputs for them."""
    write_record(good, StepRecord(step="prepare", status="done", key="k", parts={}))
    stderr = pipe(*command.split(), expect=2).stderr
    assert "run.json" not in stderr
    assert BAD not in stderr


NAMING = [
    "logs --run RUN", "compare RUN", "report RUN", "report --compare RUN", "verify RUN", "gate explain RUN",
    "gate override RUN --reason x", "registry promote RUN", "run --resume RUN", "run --continue RUN train.lr=0.1",
    "deploy RUN", "join RUN", "repro RUN",
]  # fmt: skip


@pytest.mark.parametrize("command", NAMING)
def test_naming_an_unreadable_run_is_an_error_with_its_fix(pipe: Pipe, good: Run, bad: Run, command: str) -> None:
    done = pipe(*command.replace("RUN", BAD).split(), expect=2)
    assert f"{bad.path / 'run.json'}: damaged: it is empty; to fix it: restore it from a copy" in done.stderr


FILES = {
    "evaluate/verdict.json": "which writes it again",
    "evaluate/metrics.json": "which writes it again",
    "override.json": "writes it",
}


@pytest.mark.parametrize("content", [b"", bytes(9), b"{", b"[]", b"{}", b"\xff"])
@pytest.mark.parametrize("name", FILES)
def test_status_names_a_damaged_result_and_the_fix(pipe: Pipe, good: Run, name: str, content: bytes) -> None:
    write_record(good, StepRecord(step="evaluate", status="done", key="k", parts={}))
    good.output("evaluate").mkdir()
    (good.output("evaluate") / "verdict.json").write_text('{"verdict": "pass", "metric": "accuracy"}')
    (good.output("evaluate") / "metrics.json").write_text('{"candidate": {"accuracy": 0.5}}')
    assert "accuracy 0.5" in pipe("status").stdout
    (good.path / name).write_bytes(content)
    (line,) = [line for line in pipe("status").stdout.splitlines() if "damaged" in line]
    assert line.startswith(f"run {good.id}: {good.path / name}: damaged")
    assert line.endswith(FILES[name])
    assert len(json.loads(pipe("status", "-o", "json").stdout)["problems"]) == 1
    assert good.id in pipe("compare").stdout


@pytest.mark.parametrize("content", [b"", bytes(9), b"{", b"[]", b"{}", b"\xff"])
def test_status_survives_a_damaged_record_of_attempts(pipe: Pipe, good: Run, content: bytes) -> None:
    (good.path / "logs" / "attempts").mkdir()
    (good.path / "logs" / "attempts" / "here.jsonl").write_bytes(content)
    assert good.id in pipe("status").stdout
