from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.cli.project import TEMPLATES, complete_templates, model_name, reference
from pipeline.contract.config import Config
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, change_registry
from pipeline.contract.settings.section import Section
from pipeline.history import create_run, find_project
from pipeline.service.process import process_started, write_live

from ..records import live_service
from .conftest import Pipe


@pytest.mark.parametrize("exists", [False, True])
def test_init_writes_a_project_that_can_be_planned(exists: bool, pipe: Pipe, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "My Model").mkdir()
    pipe("init", "My Model", here=tmp_path)
    assert "name: my-model" in (tmp_path / "My Model" / "pipe.yaml").read_text()
    pipe("-C", "My Model", "plan", here=tmp_path)


def test_init_overwrites_nothing(pipe: Pipe, starter: Path) -> None:
    before = {path: path.read_bytes() for path in starter.iterdir()}
    message = "already has task.py, codec.py, pipe.yaml; move what is there, or give another folder"
    assert message in pipe("init", str(starter), expect=2).stderr
    (starter / "pipe.yaml").unlink()
    assert "already has task.py, codec.py;" in pipe("init", ".", expect=2).stderr
    assert {path: path.read_bytes() for path in starter.iterdir()}.items() < before.items()


def test_init_adds_files_and_keeps_existing_data(pipe: Pipe, tmp_path: Path) -> None:
    project = tmp_path / "my code"
    (project / "data").mkdir(parents=True)
    (project / "train.py").write_text("print('mine')")
    (project / "data" / "mine.csv").write_text("a,b\n")
    pipe("init", ".", "--template", "tabular", here=project)
    names = {path.name for path in project.iterdir()}
    assert names == {"train.py", "task.py", "codec.py", "pipe.yaml", "make_data.py", "data"}
    assert [path.name for path in (project / "data").iterdir()] == ["mine.csv"]
    assert "name: my-code" in (project / "pipe.yaml").read_text()


def test_init_names_all_templates(pipe: Pipe, tmp_path: Path) -> None:
    stopped = pipe("init", "new", "--template", "table", here=tmp_path, expect=2)
    assert f"no template 'table'; there are {', '.join(TEMPLATES)}" in stopped.stderr
    assert not (tmp_path / "new").exists()
    assert complete_templates("im") == ["images", "image-to-image"]
    both = pipe("init", "new", "--template", "text", "--from", "train.py", here=tmp_path, expect=2)
    assert "give --template or --from, not both" in both.stderr


def test_demo_writes_the_example_and_runs_it_with_the_settings(pipe: Pipe, tmp_path: Path) -> None:
    stopped = pipe("demo", "train.epochs=-1", here=tmp_path, expect=2)
    assert "`train.epochs`: input should be greater than or equal to 0" in stopped.stderr
    assert "DigitsCodec" in (tmp_path / "digits" / "codec.py").read_text()


def test_demo_runs_the_folder_of_an_earlier_demo_as_it_is(pipe: Pipe, starter: Path) -> None:
    before = {path: path.read_bytes() for path in starter.iterdir()}
    pipe("demo", str(starter), "train.epochs=-1", expect=2)
    assert {path: path.read_bytes() for path in starter.iterdir() if path.is_file()} == before


def test_demo_does_not_change_a_folder_that_is_no_project(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    assert "is not empty; give a new folder" in pipe("demo", "full", here=tmp_path, expect=2).stderr
    assert "takes one folder, not a and b" in pipe("demo", "a", "b", here=tmp_path, expect=2).stderr


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("flowers", "flowers"),
        ("My Model_2", "my-model-2"),
        ("2nd", "model-2nd"),
        ("Größe", "gr--e"),
        ("日本", "model"),
        ("off", "model-off"),
        ("a" * 39 + "-bcd", "a" * 39),
    ],
)
def test_model_name_from_a_folder_is_valid_in_urls_and_clusters(folder: str, name: str) -> None:
    assert model_name(folder) == name


def test_gc_keeps_the_newest_runs_the_champion_and_what_is_live(pipe: Pipe, starter: Path) -> None:
    project = find_project(starter)
    runs = [create_run(project.runs, project.config(), ("prepare",), parent="").id for _ in range(5)]
    pid = os.getpid()
    write_live(project.runs, live_service(run=runs[1], pid=pid, process_started=process_started(pid)))
    entry = Entry(bundle="b", checkpoint="c", path=f"{runs[0]}/export/bundle")
    change_registry(project.runs, "", lambda _: ProposedChange(CHAMPION, entry, "deployed"))
    assert json.loads(pipe("gc", "--keep", "2", "--dry-run", "-o", "json").stdout) == {
        "removed": [runs[2]], "dry_run": True,
    }  # fmt: skip
    assert (project.runs / runs[2]).is_dir()
    pipe("gc", "--keep", "2")
    assert {path.name for path in project.runs.glob("2*")} == {*runs[:2], *runs[3:]}
    assert pipe("gc", "--keep", "2").stdout == "nothing to remove\n"


@pytest.mark.usefixtures("without_locks")
def test_gc_removes_nothing_where_it_cannot_see_what_is_in_use(pipe: Pipe, starter: Path) -> None:
    project = find_project(starter)
    runs = [create_run(project.runs, project.config(), ("prepare",), parent="").id for _ in range(3)]
    assert "no locks, so that a run in use could be removed; to fix it" in pipe("gc", "--keep", "1", expect=2).stderr
    assert {path.name for path in project.runs.glob("2*")} == set(runs)
    listed = pipe("gc", "--keep", "1", "--dry-run")
    assert listed.stdout.count("would remove") == 2
    assert listed.stderr.startswith(f"warning: {project.runs}: this file system has no locks")


def test_templates_are_listed_with_what_their_models_do(pipe: Pipe) -> None:
    rows = json.loads(pipe("init", "--list", "-o", "json").stdout)
    assert [row["template"] for row in rows] == list(TEMPLATES)
    assert "a tag for each word" in pipe("init", "--list").stdout
    assert "`pipe init --list` lists templates" in pipe("init", expect=2).stderr


def test_every_setting_is_described(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = reference()
    assert max(map(len, text.splitlines())) < 100
    for section in ("cluster", "rollout", "deploy"):
        assert f"\n{section}." not in text and f"`pipe explain {section}`" in text
        text += pipe("explain", section).stdout
    words = " ".join(text.split())
    for section, field in Config.model_fields.items():
        kind = field.annotation
        known = {section: field}
        if isinstance(kind, type) and issubclass(kind, Section):
            known = {f"{section}.{key}": inner for key, inner in kind.model_fields.items()}
        for name, inner in known.items():
            assert f" {name}: " in words and " ".join(str(inner.description).split()) in words, name


def test_types_and_defaults_are_written_as_in_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = reference().splitlines()
    assert "train.precision: auto | fp32 | bf16 | fp16; default auto" in lines
    assert "train.deterministic: bool; default true" in lines
    assert "export.batch_sizes: list; default [1, 2, 7, 256]" in lines
    assert 'train.rendezvous: str; default ""' in lines
    assert "name: str; required" in lines
