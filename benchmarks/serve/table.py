"""What was found, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.serve.race import Row, Start


def closed_loop(rows: Sequence[Row]) -> str:
    head = ["model", "clients", "service", "wire", "requests/s", "÷ raw", "÷ kserve", "p50 ms", "p99 ms", "CPU µs"]
    lines = [
        [
            row.workload,
            str(row.concurrency),
            row.contender,
            row.wire,
            f"{row.per_second:,.0f}",
            f"{row.to_raw:.3f}",
            _ratio(row.per_second, baseline(rows, row)),
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.cpu_us:.0f}" + (f" ({row.failed} failed)" if row.failed else ""),
        ]
        for row in rows
    ]
    return _table(head, lines)


def baseline(rows: Sequence[Row], row: Row) -> float | None:
    """kserve as it comes over the same wire; over V2 JSON where it has no such wire."""
    same = [one for one in rows if (one.workload, one.concurrency) == (row.workload, row.concurrency)]
    plain = {one.wire: one.per_second for one in same if one.contender == "kserve"}
    return plain.get(row.wire, plain.get("V2 JSON"))


def starts(found: Sequence[Start]) -> str:
    lines = [[one.workload, one.contender, f"{one.seconds:.2f}", f"{one.memory_mb:.0f}"] for one in found]
    return _table(["model", "service", "s to the first answer", "MB"], lines)


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "-"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])
