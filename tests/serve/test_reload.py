from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from serve.security import reload_changed_files


def _watch(path: Path, reload: Callable[[], None], *changes: Callable[[], object]) -> None:
    """Make the changes one after the other, each after the last one was noticed."""
    seen = asyncio.Event()

    def reload_and_report() -> None:
        seen.set()
        reload()

    async def main() -> None:
        task = asyncio.create_task(reload_changed_files([("the file", (path,), reload_and_report)], 0.001))
        await asyncio.sleep(0.005)
        assert not seen.is_set()
        for change in changes:
            change()
            await asyncio.wait_for(seen.wait(), 300)
            seen.clear()
        await asyncio.sleep(0.005)
        assert not seen.is_set()
        task.cancel()

    asyncio.run(main())


def test_each_change_reloads_once(tmp_path: Path) -> None:
    path, read = tmp_path / "file", []
    path.write_text("one")
    changes = [lambda: path.write_text("a longer one"), lambda: path.write_text("back")]
    _watch(path, lambda: read.append(path.read_text()), *changes)
    assert read == ["a longer one", "back"]


def test_a_swapped_link_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted Secret."""
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    link, read = tmp_path / "link", []
    link.symlink_to("old")

    def swap() -> None:
        (tmp_path / "other").symlink_to("new")
        (tmp_path / "other").rename(link)

    _watch(link, lambda: read.append(link.read_text()), swap)
    assert read == ["new"]


def test_unusable_file_is_logged_and_reloaded_at_the_next_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("good")

    def reload() -> None:
        if not path.exists():
            raise ConfigError("it is gone")

    with caplog.at_level("INFO"):
        _watch(path, reload, path.unlink, lambda: path.write_text("good again"))
    assert [record.message for record in caplog.records] == [
        "the file changed and cannot be used, the old one stays: it is gone",
        "the file changed: the new one is in use",
    ]
