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
    """Return the speed of plain kserve with the same protocol, or with V2 JSON if it does not have that."""
    same_load = [other for other in rows if (other.workload, other.concurrency) == (row.workload, row.concurrency)]
    kserve_speeds = {other.wire: other.per_second for other in same_load if other.contender == "kserve"}
    return kserve_speeds.get(row.wire, kserve_speeds.get("V2 JSON"))


def starts(measured_starts: Sequence[Start]) -> str:
    lines = [
        [start.workload, start.contender, f"{start.seconds:.2f}", f"{start.cpu_seconds:.2f}", f"{start.memory_mb:.0f}"]
        for start in measured_starts
    ]
    return _table(["model", "service", "s to the first answer", "CPU s", "MB"], lines)


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "-"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])
