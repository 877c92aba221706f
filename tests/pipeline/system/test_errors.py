from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.system import errors
from pipeline.system.errors import (
    DataError,
    LostContact,
    PipelineError,
    StageError,
    clear_error,
    read_error,
    write_error,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PipelineError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_error_is_read_back_as_written(tmp_path: Path, kind: type[PipelineError]) -> None:
    write_error(kind("what, where, how"), tmp_path)
    found = read_error(tmp_path)
    assert type(found) is kind
    assert str(found) == "what, where, how"
    assert (found.exit_code, found.keeps_output) == (kind.exit_code, kind.keeps_output)


def test_first_error_of_several_ranks_is_kept(tmp_path: Path) -> None:
    write_error(DataError("the cause"), tmp_path)
    write_error(StageError("lost contact"), tmp_path)
    assert str(read_error(tmp_path)) == "the cause"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_an_error_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounts of object storage have none, and mostly say so by this error."""

    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    write_error(DataError("the cause"), tmp_path)
    assert str(read_error(tmp_path)) == "the cause"


@pytest.mark.parametrize("order", [1, -1])
def test_cause_takes_precedence_over_lost_contact(tmp_path: Path, order: int) -> None:
    for error in [DataError("the cause"), LostContact("rank 0 lost contact")][::order]:
        write_error(error, tmp_path)
    assert str(read_error(tmp_path)) == "the cause"


def test_lost_contact_is_read_without_a_cause_and_both_are_cleared(tmp_path: Path) -> None:
    write_error(LostContact("rank 0 lost contact"), tmp_path)
    assert str(read_error(tmp_path)) == "rank 0 lost contact"
    write_error(StageError("the cause"), tmp_path)
    clear_error(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_error_creates_its_folder(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    write_error(DataError("early"), tmp_path / "train.partial")
    assert str(read_error(tmp_path / "train.partial")) == "early"


def test_unknown_kind_of_error_is_a_pipeline_error(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(json.dumps({"kind": "WeatherError", "message": "rain"}))
    found = read_error(tmp_path)
    assert type(found) is PipelineError
    assert str(found) == "rain"
