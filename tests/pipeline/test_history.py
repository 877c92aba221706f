from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.history import (
    begin_run,
    changed_outputs,
    create_run,
    environment,
    find_run,
    link_outputs,
    load_history,
    seal,
    write_record,
)
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_bytes, digest_mapping
from pipeline.spec.errors import ConfigError, PipelineError
from pipeline.spec.run import Run, StepRecord
from pipeline.spec.runs import all_runs

from .conftest import NewRun


@pytest.fixture
def sealed(new_run: NewRun) -> tuple[Run, StepRecord]:
    """A run whose train step is complete."""
    run = new_run()
    (run.partial("train") / "checkpoints").mkdir(parents=True)
    (run.partial("train") / "model.bin").write_bytes(b"weights")
    (run.partial("train") / "checkpoints" / "one").write_bytes(b"state")
    outputs, digest = seal(run, "train")
    record = StepRecord(step="train", status="done", key="k", parts={}, outputs=outputs, digest=digest)
    return run, write_record(run, record)


def test_a_new_run_keeps_its_settings_and_where_it_was_made(new_run: NewRun, config: Config) -> None:
    run = new_run()
    assert run.config == config
    assert run.read().wanted == ("prepare", "train")
    assert run.read().environment == environment()
    assert "torch" in environment()


def test_sealing_gives_the_directory_its_name_and_every_file_a_digest(sealed: tuple[Run, StepRecord]) -> None:
    run, record = sealed
    assert not run.partial("train").exists()
    assert record.outputs == {"checkpoints/one": digest_bytes(b"state"), "model.bin": digest_bytes(b"weights")}
    assert record.digest == digest_mapping(record.outputs)


def test_sealing_again_replaces_the_earlier_attempt_wholly(sealed: tuple[Run, StepRecord]) -> None:
    run, _ = sealed
    run.partial("train").mkdir()
    (run.partial("train") / "model.bin").write_bytes(b"better")
    outputs, _ = seal(run, "train")
    assert outputs == {"model.bin": digest_bytes(b"better")}
    assert not (run.output("train") / "checkpoints").exists()


def test_untouched_outputs_are_not_changed(sealed: tuple[Run, StepRecord]) -> None:
    assert changed_outputs(*sealed) == []


@pytest.mark.parametrize("what", ["altered", "removed", "added", "all gone"])
def test_any_difference_in_outputs_is_noticed(sealed: tuple[Run, StepRecord], what: str) -> None:
    run, record = sealed
    path = run.output("train") / "model.bin"
    if what == "altered":
        path.write_bytes(b"weightz")
    elif what == "removed":
        path.unlink()
    elif what == "added":
        path = path.with_name("extra")
        path.touch()
    else:
        run.output("train").rename(run.path / "elsewhere")
    assert path.name in changed_outputs(run, record)


def test_linked_outputs_are_the_same_files(sealed: tuple[Run, StepRecord], new_run: NewRun) -> None:
    source, record = sealed
    target = new_run()
    link_outputs(source, target, record)
    assert changed_outputs(target, record) == []
    names = [run.output("train") / "model.bin" for run in (source, target)]
    assert os.path.samefile(*names)


def test_linking_replaces_what_a_crash_left_half_linked(sealed: tuple[Run, StepRecord], new_run: NewRun) -> None:
    source, record = sealed
    target = new_run()
    target.partial("train").mkdir()
    (target.partial("train") / "junk").touch()
    link_outputs(source, target, record)
    assert changed_outputs(target, record) == []


def named(runs: Path, *names: str) -> None:
    for name in names:
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text("{}")


def test_a_run_is_found_by_its_id_its_beginning_its_path_or_as_the_latest(tmp_path: Path) -> None:
    named(tmp_path, "20260101-100000-aaaa", "20260102-100000-bbbb")
    (tmp_path / "manifests").mkdir()  # not a run
    assert find_run(tmp_path, "latest").id == "20260102-100000-bbbb"
    assert find_run(tmp_path, "20260101").id == "20260101-100000-aaaa"
    assert find_run(tmp_path, "20260101-100000-aaaa").id == "20260101-100000-aaaa"
    assert find_run(Path("/nowhere"), str(tmp_path / "20260101-100000-aaaa")).id == "20260101-100000-aaaa"


def test_runs_of_one_second_are_told_apart_by_a_finer_time(tmp_path: Path, config: Config) -> None:
    made = [create_run(tmp_path, config, ("prepare",), "") for _ in range(12)]
    assert [run.id for run in all_runs(tmp_path)] == [run.id for run in reversed(made)]
    assert len({run.id[:15] for run in made}) < len(made), "several in one second"
    assert find_run(tmp_path, "latest") == made[-1]


def test_a_name_that_fits_no_run_or_several_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no runs in .* yet; `pipe run all` makes one"):
        find_run(tmp_path, "latest")
    named(tmp_path, "20260101-100000-aaaa", "20260102-100000-bbbb")
    with pytest.raises(ConfigError, match=r"more than one run '2026' .*newest: 20260102-100000-bbbb"):
        find_run(tmp_path, "2026")
    with pytest.raises(ConfigError, match="no run '2025'"):
        find_run(tmp_path, "2025")


def test_a_damaged_record_is_named(sealed: tuple[Run, StepRecord]) -> None:
    run, _ = sealed
    (run.path / "run.json").write_text("{")
    with pytest.raises(PipelineError, match=r"run.json: damaged"):
        load_history(run.runs)


def test_runs_that_a_workflow_has_named_stand_where_their_time_puts_them(tmp_path: Path, config: Config) -> None:
    before, after = (datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC) for second in (0, 2))
    begin_run(Run(tmp_path / "wf-first"), config, ("prepare",), began=before)
    begin_run(Run(tmp_path / "20260101-120001-0000"), config, ("prepare",))
    begin_run(Run(tmp_path / "a-later-one"), config, ("prepare",), began=after)
    assert [run.id for run in all_runs(tmp_path)] == ["a-later-one", "20260101-120001-0000", "wf-first"]
    assert find_run(tmp_path, "latest").id == "a-later-one"
