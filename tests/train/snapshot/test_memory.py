from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run
from train.snapshot.memory import Shelf, check_room, open_memory


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "runs" / "one")
    found.path.mkdir(parents=True)
    return found


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_a_run_finds_its_folder_again_and_nobody_else_can_read_it(run: Run, memory: Path) -> None:
    folder = open_memory(run, memory)
    (folder / "kept").touch()
    assert open_memory(run, memory) == folder
    assert (folder / "kept").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_runs_that_are_gone_or_over_are_removed(run: Run, memory: Path) -> None:
    gone, over = Run(run.runs / "gone"), Run(run.runs / "over")
    for other in (gone, over):
        other.path.mkdir()
    folders = [open_memory(other, memory) for other in (gone, over)]
    assert all(folder.is_dir() for folder in folders), "both may be under way"
    shutil.rmtree(gone.path)
    over.output("train").mkdir()
    own = open_memory(run, memory)
    assert list(memory.iterdir()) == [own]


def test_a_machine_without_memory_file_system_is_told(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.snapshot=memory: this machine has no .*/none; use snapshot=none"):
        open_memory(run, tmp_path / "none")


def test_a_folder_that_somebody_else_put_there_is_refused(run: Run, memory: Path) -> None:
    folder = open_memory(run, memory)
    shutil.rmtree(folder)
    folder.symlink_to(run.path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        open_memory(run, memory)


def test_too_little_memory_is_told_with_both_numbers_and_what_is_replaced_counts_as_free(memory: Path) -> None:
    check_room(memory, 1)
    free = shutil.disk_usage(memory).free
    with pytest.raises(ConfigError, match=r"train.snapshot=memory needs \d+ MB under .* MB are free; make it larger"):
        check_room(memory, 2 * free + (64 << 20))


def test_a_shelf_is_filled_up_and_emptied_by_steps(memory: Path) -> None:
    shelf = Shelf(memory)
    for step in (10, 20, 30):
        shelf.fill(step, "manifest.json", memoryview(b"%d" % step))
    shelf.fill(20, "0.safetensors", memoryview(b"part"))
    assert shelf.manifests() == {10: b"10", 20: b"20", 30: b"30"}
    assert bytes(shelf.read(20, "0.safetensors").numpy()) == b"part"
    shelf.forget_after(20)
    assert shelf.steps() == [10, 20]
    shelf.forget_before(20)
    assert shelf.steps() == [20]


def test_parts_without_a_manifest_are_no_snapshot(memory: Path) -> None:
    Shelf(memory).fill(20, "0.safetensors", memoryview(b"part"))
    assert Shelf(memory).manifests() == {}
