"""docs/architectures.md and benchmarks/architectures.jsonl, from which it is written."""

from __future__ import annotations

from benchmarks.architectures.table import TABLE, make_table, passes, read_rows


def test_document_is_written_from_the_rows() -> None:
    assert TABLE.read_text() == make_table(*read_rows())


def test_failures_have_a_reason_of_one_line() -> None:
    _, rows = read_rows()
    assert rows
    for name, row in rows.items():
        if not passes(row):
            assert row["reason"], name
            assert "\n" not in row["reason"], name
            assert "Traceback" not in row["reason"], name
