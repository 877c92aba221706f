"""The validation values of a training under way, read from its growing `metrics.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Curve:
    """Each epoch's value once, though a resumed training writes its file anew."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._file, self._place = 0, 0  # inode, and how much of it is read
        self._known: set[int] = set()

    def read(self, path: Path) -> Iterator[tuple[int, float | None]]:
        """(epoch, counted from one, value) of what was added; None where the metric is missing or not finite."""
        for line in self._added(path):
            if "validation" in line and line["epoch"] not in self._known:
                self._known.add(line["epoch"])
                yield line["epoch"] + 1, line["validation"].get(self._metric)

    def _added(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._place if inode == self._file else 0)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a half line is read again when it is whole
            self._file, self._place = inode, file.tell() - len(data) + len(whole)
        return [json.loads(line) for line in whole.splitlines()]
