from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

import pytest

from pipeline.contract.bundle import open_bundle
from pipeline.contract.registry import Entry, champion_bundle, publish
from pipeline.system.errors import BundleError
from pipeline.system.files import digest_bytes

PLACE = "old/export/bundle"


@pytest.fixture
def runs(tmp_path: Path, bundle: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "runs" / PLACE)
    return tmp_path / "runs"


@pytest.fixture
def entry(runs: Path) -> Entry:
    return Entry(bundle=open_bundle(runs / PLACE).digest, checkpoint="w", path=PLACE)


@pytest.fixture(params=["../shared", "memory"])
def word(request: pytest.FixtureRequest) -> str:
    return f"memory://{secrets.token_hex(4)}" if request.param == "memory" else str(request.param)


def test_replaced_or_changed_champion_is_refused(runs: Path, entry: Entry) -> None:
    assert champion_bundle(entry, runs, "").path == runs / PLACE, "it is found in its run"
    with pytest.raises(BundleError, match=r"holds another bundle"):
        champion_bundle(entry.model_copy(update={"bundle": "0" * 64}), runs, "")
    (runs / PLACE / "codec.py").write_text("evil")
    with pytest.raises(BundleError, match=r"champion .*codec\.py: content changed.*`pipe registry promote`"):
        champion_bundle(entry, runs, "")


def test_champion_without_its_run_comes_from_the_shared_registry(
    runs: Path, entry: Entry, word: str, tmp_path: Path
) -> None:
    publish(open_bundle(runs / PLACE), runs, word)
    publish(open_bundle(runs / PLACE), runs, word)  # a second time: the copy exists
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for _ in range(2):
        assert champion_bundle(entry, elsewhere, word).digest == entry.bundle
    assert [path.name for path in (elsewhere / ".champions").iterdir()] == [entry.bundle]


def test_concurrent_fetches_leave_one_copy(
    runs: Path, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = str(tmp_path / "shared")
    publish(open_bundle(runs / PLACE), runs, word)
    shutil.rmtree(runs / "old")
    rename = os.rename

    def slow(aside: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        champion_bundle(entry, runs, word)  # another process is faster
        rename(aside, target)

    monkeypatch.setattr(os, "rename", slow)
    assert champion_bundle(entry, runs, word).digest == entry.bundle
    assert [path.name for path in (runs / ".champions").iterdir()] == [entry.bundle]


def test_missing_champion_without_a_copy_is_reported(runs: Path, entry: Entry) -> None:
    shutil.rmtree(runs / "old")
    with pytest.raises(BundleError, match=r"old/export/bundle is gone, .*no copy of it; restore it, or name"):
        champion_bundle(entry, runs, "")


def test_a_copy_that_was_altered_is_refused(runs: Path, entry: Entry, tmp_path: Path) -> None:
    word = str(tmp_path / "shared")
    publish(open_bundle(runs / PLACE), runs, word)
    shutil.rmtree(runs / "old")
    copy = tmp_path / "shared" / "bundles" / entry.bundle
    (copy / "codec.py").write_text("evil")
    with pytest.raises(BundleError, match=r"codec\.py: content changed"):
        champion_bundle(entry, runs, word)
    shutil.rmtree(runs / ".champions")
    (copy / "card.md").unlink()
    with pytest.raises(BundleError, match=r"the copy in the registry .* is not complete"):
        champion_bundle(entry, runs, word)
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match=r"the copy in the registry .* was altered"):
        champion_bundle(entry, runs, word)


def test_a_copy_cannot_write_outside_its_folder(runs: Path, tmp_path: Path) -> None:
    path = runs / PLACE / "manifest.json"
    body = json.loads(path.read_text())
    body["files"]["../../evil"] = {"sha256": "0" * 64, "bytes": 1}
    raw = json.dumps(body)
    digest = digest_bytes(raw.encode())
    copy = tmp_path / "shared" / "bundles" / digest
    copy.mkdir(parents=True)
    (copy / "manifest.json").write_text(raw)
    with pytest.raises(BundleError, match=r"names \.\./\.\./evil, outside the bundle"):
        champion_bundle(Entry(bundle=digest, checkpoint="w", path="x/export/bundle"), runs, str(tmp_path / "shared"))
