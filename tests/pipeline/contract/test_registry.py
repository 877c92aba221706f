from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from pipeline.contract import registry
from pipeline.contract.registry import (
    CHAMPION,
    PREVIOUS,
    Change,
    ComparisonCount,
    Entry,
    FolderStore,
    ProposedChange,
    Registry,
    change_registry,
    count_comparison,
    read_registry,
)
from pipeline.system.errors import ConfigError, PipelineError, ResourceError

WRITERS, EACH = 8, 6


def entry(name: str) -> Entry:
    return Entry(bundle=f"bundle-{name}", checkpoint=f"checkpoint-{name}", path=f"{name}/export/bundle")


def registry_with(*names: str, to: str = CHAMPION) -> Registry:
    return Registry(tuple(Change(at="now", name=to, entry=entry(name), reason="deployed") for name in names))


def give(runs: Path, name: str, word: str = "", to: str = CHAMPION) -> Registry:
    return change_registry(runs, word, lambda _: ProposedChange(to, entry(name), "deployed"))


@pytest.fixture(params=["beside", "folder", "file://", "memory://"])
def word(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "beside": "",
        "folder": "shared/registry",
        "file://": f"file://{tmp_path}/shared",
        "memory://": f"memory://{secrets.token_hex(4)}",
    }[str(request.param)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_champion_is_compared_with_the_one_before_it() -> None:
    assert Registry().champion_for("checkpoint-a") is None
    assert registry_with("a", to="canary").champion_for(None) is None
    assert registry_with("a", "b").champion_for("checkpoint-c") == entry("b")
    assert registry_with("a", "b").champion_for(None) == entry("b")
    assert registry_with("a", "b").champion_for("checkpoint-b") == entry("a")
    assert registry_with("a").champion_for("checkpoint-a") is None
    assert registry_with("a", "b", "a").champion_for("checkpoint-a") == entry("b")


def test_names_follow_from_the_history() -> None:
    assert registry_with("a").names == {CHAMPION: entry("a")}
    assert registry_with("a", "b").names == {CHAMPION: entry("b"), PREVIOUS: entry("a")}
    assert registry_with("a", "b", "b").names == {CHAMPION: entry("b"), PREVIOUS: entry("a")}
    assert Registry(registry_with("a").history + registry_with("b", "c", to="canary").history).names == {
        CHAMPION: entry("a"), "canary": entry("c"),
    }  # fmt: skip


def test_previous_entry_of_a_name_differs_from_its_current_one() -> None:
    assert registry_with("a", "b", "c", "b").previous_entry(CHAMPION) == entry("c")
    assert registry_with("a", "a").previous_entry(CHAMPION) is None
    assert Registry().previous_entry(CHAMPION) is None


def test_written_changes_are_read_from_every_store(runs: Path, word: str) -> None:
    assert read_registry(runs, word) == Registry()
    for name in ("a", "b"):
        made = give(runs, name, word)
    found = read_registry(runs, word)
    assert found == made
    assert [change.entry for change in found.history] == [entry("a"), entry("b")]
    assert found.history[1].by.endswith(os.uname().nodename)
    assert change_registry(runs, word, lambda _: None) == found


def test_concurrent_change_is_decided_again_on_the_new_history(runs: Path, word: str) -> None:
    """The second writer decides again, after reading the first one's change."""
    seen: list[int] = []

    def decide(registry: Registry) -> ProposedChange:
        if not seen:
            give(runs, "the first", word)
        seen.append(len(registry.history))
        return ProposedChange(CHAMPION, entry("the second"), "x")

    names = change_registry(runs, word, decide).names
    assert seen == [0, 1]
    assert (names[CHAMPION], names[PREVIOUS]) == (entry("the second"), entry("the first"))


def test_comparisons_on_a_test_set_are_counted_once(runs: Path, word: str) -> None:
    give(runs, "a", word)

    def count(key: str, test_set: str = "f" * 64) -> ComparisonCount:
        return count_comparison(runs, word, test_set, key, "run")

    assert [count(key).number for key in ("one", "two", "one", "three", "two")] == [1, 2, 1, 3, 2]
    assert count("four", "e" * 64) == (1, 1, ""), "another test set"
    assert [change.entry for change in read_registry(runs, word).history] == [entry("a")]


def test_authors_of_a_comparison_are_its_own_and_those_before_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(key: str, who: str) -> tuple[int, int]:
        monkeypatch.setattr(registry, "current_user", lambda: who)
        return count_comparison(runs, "", "f", key, "run")[:2]

    authors = [("one", "ann"), ("two", "ann"), ("three", "bob"), ("four", "ann"), ("two", "bob")]
    assert [count(*each) for each in authors] == [(1, 1), (2, 1), (3, 2), (4, 2), (2, 1)]


def test_comparisons_at_the_same_time_get_different_numbers(runs: Path) -> None:
    numbers: list[int] = []

    def count(who: int) -> None:
        numbers.extend(count_comparison(runs, "", "f", f"{who}-{each}", "run")[0] for each in range(EACH))

    writers = [threading.Thread(target=count, args=(who,)) for who in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(numbers) == list(range(1, WRITERS * EACH + 1))


def test_a_comparison_that_cannot_be_recorded_is_reported(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_comparison(runs, "", "f", "one", "run") == (1, 1, "")

    def refuse(*_: object) -> bool:
        raise ResourceError("cannot write the registry: read-only file system")

    monkeypatch.setattr(FolderStore, "create", refuse)
    assert count_comparison(runs, "", "f", "one", "run") == (1, 1, "")
    number, _, reason = count_comparison(runs, "", "f", "two", "run")
    assert number == 2
    assert reason.endswith("could not be recorded and will not count: cannot write the registry: read-only file system")


def test_a_damaged_comparison_is_named(runs: Path) -> None:
    count_comparison(runs, "", "f", "one", "run")
    path = runs / "registry" / "test_sets" / "f" / "000001.json"
    path.chmod(0o644)
    path.write_text("{}")
    with pytest.raises(PipelineError, match=r"test_sets/f/000001\.json: damaged: .*restore it from a copy"):
        count_comparison(runs, "", "f", "two", "run")


def _write(runs: Path, word: str, who: int) -> None:
    for number in range(EACH):
        give(runs, f"{who}-{number}", word, to=str(who))


def _refuse(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False], ids=["", "without hard links"])
def test_concurrent_processes_lose_no_change(runs: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write, args=(runs, "", who)) for who in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    _all_there(read_registry(runs, ""))
    left = [path.name for path in (runs / "registry").iterdir() if path.name.startswith(".")]
    assert left == ([] if links else [".lock"])


@pytest.mark.usefixtures("without_locks")
def test_folder_without_locks_is_written_by_hard_links(runs: Path) -> None:
    assert give(runs, "a").names == {CHAMPION: entry("a")}


@pytest.mark.usefixtures("without_locks")
def test_folder_without_locks_and_hard_links_is_only_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = give(runs, "a")
    monkeypatch.setattr(os, "link", _refuse)
    with pytest.raises(ResourceError, match=r"registry: .* no locks, and no hard links .* set `registry` to .* bucket"):
        give(runs, "b")
    assert read_registry(runs, "") == before
    assert "could not be recorded" in count_comparison(runs, "", "f", "one", "run").unrecorded


def test_concurrent_threads_lose_no_change_of_a_store(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word, one_request, create = f"memory://{secrets.token_hex(4)}", threading.Lock(), MemoryFileSystem.pipe_file

    def create_exclusively(*arguments: Any, **options: Any) -> None:
        """Look and write in one request, as stores of objects do; fsspec's memory does so in two."""
        with one_request:
            create(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", create_exclusively)
    writers = [threading.Thread(target=_write, args=(runs, word, who)) for who in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    _all_there(read_registry(runs, word))


def _all_there(found: Registry) -> None:
    for who in range(WRITERS):
        mine = [change.entry for change in found.history if change.name == str(who)]
        assert mine == [entry(f"{who}-{number}") for number in range(EACH)]


def test_killed_writers_lose_no_acknowledged_change(runs: Path) -> None:
    reader, writer = os.pipe()
    pids = []
    for who in range(4):
        if not (pid := os.fork()):
            try:
                for number in range(10_000):
                    os.write(writer, b"%06d" % len(give(runs, f"{who}-{number}").history))
            finally:
                os._exit(1)
        pids.append(pid)
    heard = [int(os.read(reader, 6)) for _ in range(16)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(writer)
    heard += [int(raw) for raw in iter(lambda: os.read(reader, 6), b"")]
    os.close(reader)
    found = read_registry(runs, "")
    assert set(heard) <= set(range(1, len(found.history) + 1))
    assert len(set(heard)) == len(heard), "two writers got the same change"
    assert give(runs, "after").names[CHAMPION] == entry("after")


def test_writer_killed_before_the_commit_changes_nothing(runs: Path) -> None:
    give(runs, "a")
    if not (pid := os.fork()):
        registry.os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
        give(runs, "b")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert [path for path in (runs / "registry").iterdir() if path.name.startswith(".")], "it had begun to write"
    assert read_registry(runs, "").names == {CHAMPION: entry("a")}
    assert len(give(runs, "c").history) == 2


def test_altered_removed_or_damaged_change_is_named(runs: Path) -> None:
    for name in ("a", "b", "c"):
        give(runs, name)
    second = runs / "registry" / "000002.json"
    whole = second.read_text()
    assert second.stat().st_mode & 0o222 == 0
    second.chmod(0o644)
    for text, message in (
        (whole.replace("bundle-b", "bundle-x"), r"000003\.json: does not follow"),
        ("{", r"000002\.json: damaged"),
        (whole.replace('"at"', '"shiny": 1, "at"'), r"000002\.json: written by a newer version of pipe \(shiny is"),
    ):
        second.write_text(text)
        with pytest.raises(PipelineError, match=message):
            read_registry(runs, "")
    second.unlink()
    with pytest.raises(PipelineError, match=r"000002\.json is missing"):
        read_registry(runs, "")
    with pytest.raises(PipelineError, match=r"000002\.json is missing"):
        give(runs, "d")


def test_unreachable_registry_is_named(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"registry=nosuch://x.*or name a folder"):
        read_registry(runs, "nosuch://x")
