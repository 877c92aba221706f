from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.errors import ConfigError, PipelineError
from pipeline.spec.run import Run, RunFile, StepRecord

CONFIG = {"name": "digits", "task": "task.py:T", "codec": "codec.py:C", "train": {"epochs": 3}}


def write(path: Path, config: dict[str, object]) -> RunFile:
    file = RunFile(id=path.name, created="2026-01-01", wanted=("train",), config=config, environment={})
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text(file.model_dump_json())
    return file


def test_all_paths_follow_from_one(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "one")
    assert (run.id, run.runs) == ("one", tmp_path / "runs")
    assert run.partial("train").parent == run.output("train").parent == run.path
    assert run.partial("train") != run.output("train")
    assert run.bundle_path == run.path / "export" / "bundle"


def test_a_run_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = write(tmp_path, dict(CONFIG))
    assert Run(tmp_path).read() == file
    assert Run(tmp_path).config.train.epochs == 3


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="not a run directory"):
        Run(tmp_path).read()


@pytest.mark.parametrize("content", [b"", b'{"id": "one"', b"{}", b"\xff\xfe"])
def test_a_damaged_run_file_is_refused_on_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(PipelineError, match=r"run\.json: damaged") as caught:
        Run(tmp_path).read()
    assert "\n" not in str(caught.value)


def test_a_configuration_of_another_version_is_refused_by_its_key(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "train": {"epohcs": 3}})
    with pytest.raises(ConfigError, match="epohcs"):
        _ = Run(tmp_path).config


def test_a_record_cannot_be_changed_in_place() -> None:
    record = StepRecord(step="train", status="running", key="k", parts={})
    with pytest.raises(ValueError, match="frozen"):
        record.status = "done"  # type: ignore[misc]
