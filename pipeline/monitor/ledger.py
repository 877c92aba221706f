"""The ledger of what was read: files, samples that wait for labels, labels that wait for samples, and the tests.

It is one SQLite file for each bundle, next to the runs. A look is one transaction: a killed one leaves no trace.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.system.errors import DataError, ResourceError

_WAIT_SECONDS = 60.0  # for a look of another `pipe monitor`
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, problem TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
  id TEXT, row INTEGER, rows INTEGER, time REAL, data BLOB, other INTEGER, PRIMARY KEY (id, row)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS labels (id TEXT PRIMARY KEY, label TEXT) WITHOUT ROWID;
"""


class Waiting(NamedTuple):
    """A row of a request whose label has come."""

    id: str
    row: int
    rows: int
    time: float
    data: bytes
    label: str


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def look(self) -> Iterator[Ledger]:
        """Begin a look; what it changes is there when it ends without an error, and not before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(self.path, _WAIT_SECONDS, isolation_level=None)) as self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.split(";"):
                    self._database.execute(statement)
                yield self
                self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise ResourceError(f"{self.path}: another `pipe monitor` is looking; wait until it ends") from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path}: is damaged ({error}); to fix it: move it away, and look again") from error

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Do all of this or, where it raises an error, nothing."""
        self._database.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK TO part")
            raise
        finally:
            self._database.execute("RELEASE part")

    def read(self, name: str) -> Any:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    def write(self, name: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        counters = self.read("counters") or {}
        self.write("counters", counters | {name: counters.get(name, 0) + number})

    def is_new(self, name: str) -> bool:
        return not self._database.execute("SELECT 1 FROM files WHERE name = ?", (name,)).fetchone()

    def add_file(self, name: str, problem: str = "") -> None:
        self._database.execute("INSERT INTO files VALUES (?, ?)", (name, problem))

    def damaged_files(self) -> dict[str, str]:
        return dict(self._database.execute("SELECT name, problem FROM files WHERE problem != '' ORDER BY name"))

    def known(self, ids: Sequence[str]) -> set[tuple[str, int]]:
        """Return the rows of these requests that are there already."""
        query = "SELECT id, row FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        return set(self._database.execute(query, (json.dumps(ids),)))

    def add_samples(self, rows: Iterable[tuple[str, int, int, float, bytes | None, bool]]) -> None:
        """Add rows: id, row, rows, time, data, and whether another bundle answered."""
        self._database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", rows)

    def add_label(self, id_: str, label: str) -> bool:
        """Add a label; return False if there was one for this request."""
        return self._database.execute("INSERT OR IGNORE INTO labels VALUES (?, ?)", (id_, label)).rowcount == 1

    def labelled(self) -> Iterator[Waiting]:
        """Yield the rows of complete requests whose label has come, in the order of time."""
        query = (
            "SELECT id, row, rows, time, data, label FROM samples JOIN labels USING (id) "
            "WHERE data IS NOT NULL AND label IS NOT NULL ORDER BY time, id, row"
        )
        return map(Waiting._make, self._database.execute(query).fetchall())

    def use_label(self, id_: str) -> None:
        """Note that a request was scored: its arrays and its label are no longer needed."""
        self._database.execute("UPDATE samples SET data = NULL WHERE id = ?", (id_,))
        self._database.execute("UPDATE labels SET label = NULL WHERE id = ?", (id_,))

    def reject_label(self, id_: str) -> None:
        """Remove a label; its sample waits for another one."""
        self._database.execute("DELETE FROM labels WHERE id = ?", (id_,))

    def counts(self) -> dict[str, int]:
        query = """
          SELECT COUNT(*) FILTER (WHERE NOT other), COUNT(*) FILTER (WHERE other), COUNT(data), 0, 0, 0 FROM samples
          UNION ALL SELECT 0, 0, 0, COUNT(*) FILTER (WHERE label IS NULL),
            COUNT(*) FILTER (WHERE id NOT IN (SELECT id FROM samples)),
            COUNT(*) FILTER (WHERE id IN (SELECT id FROM samples WHERE other)) FROM labels
        """
        sums = map(sum, zip(*self._database.execute(query), strict=True))
        names = ("samples", "samples_other_bundle", "samples_waiting", "labels_counted", "labels_without_sample")
        number = dict(zip((*names, "labels_other_bundle"), sums, strict=True))
        counters = self.read("counters") or {}
        others = ("samples_repeated", "labels_repeated", "labels_rejected", "answers_unread")
        return number | {name: counters.get(name, 0) for name in others}
