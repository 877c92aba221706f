"""What is written and printed of the variants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from export.variants.contest import Entry
from pipeline.spec.statistics.interval import Interval

FILE = "variants.json"


def rows(entries: Sequence[Entry], reasons: Mapping[str, str], chosen: str, metric: str) -> list[dict[str, Any]]:
    """`variants.json`; what was not measured is null."""
    return [_row(one, reasons[one.name], one.name == chosen, metric) for one in entries]


def table(entries: Sequence[Entry], chosen: str, metric: str) -> list[str]:
    """For the log: a line for each, the numbers that decide."""
    lines: list[tuple[str, ...]] = [("", "variant", metric, "difference", "ms at 1", "ms at 32", "MB")]
    for one in entries:
        mark = "*" if one.name == chosen else "x" if one.faults else ""
        lines.append(
            (mark, one.name, *_metric(one), *_milliseconds(one), f"{one.bytes / 1e6:.3g}" if one.bytes else "-")
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def story(entries: Sequence[Entry], reasons: Mapping[str, str]) -> list[str]:
    """For the log: why each is or is not shipped, and how it was made."""
    notes = {one.name: "; ".join(filter(None, (str(one.first_wrong or ""), one.note))) for one in entries}
    return [f"{name}: {reason}" + (f" [{notes[name]}]" if notes[name] else "") for name, reason in reasons.items()]


def _interval(found: Interval | None) -> str:
    return "-" if found is None else f"{found.estimate:+.4f}, {found.low:+.4f} to {found.high:+.4f}"


def _row(one: Entry, reason: str, chosen: bool, metric: str) -> dict[str, Any]:
    found, timing = one.judged, one.timing
    body: dict[str, Any] = {
        "variant": one.name,
        "chosen": chosen,
        "passed": not one.faults,
        "reason": reason,
        "note": one.note,
        "bytes": one.bytes,
        "p50_ms": None if timing is None else {str(n): _short(each.estimate) for n, each in timing.p50_ms.items()},
        "p99_ms": None if timing is None else {str(n): _short(each.estimate) for n, each in timing.p99_ms.items()},
        "p50_interval_ms": None if timing is None else {str(n): _plain(each) for n, each in timing.p50_ms.items()},
        "p99_interval_ms": None if timing is None else {str(n): _plain(each) for n, each in timing.p99_ms.items()},
        "share_of_time": None if timing is None else _plain(timing.share),
        "metric": None,
        "difference": None,
        "batch_size": None if found is None else found.size,
        "max_abs_error": None if one.apart is None else one.apart.largest,
        "noise": None if one.apart is None else one.apart.noise,
        "first_wrong": None if one.first_wrong is None else asdict(one.first_wrong),
    }
    if found is not None:
        body["metric"] = {"name": metric, "value": _finite(found.value), "reference": _finite(found.reference)}
        body["difference"] = None if found.difference is None else asdict(found.difference)
    return body


def _metric(one: Entry) -> tuple[str, str]:
    if one.judged is None:
        return "-", "-"
    return f"{one.judged.value:.4f}", _interval(one.judged.difference)


def _milliseconds(one: Entry) -> tuple[str, ...]:
    return ("-", "-") if one.timing is None else tuple(f"{each.estimate:.3g}" for each in one.timing.p50_ms.values())


def _plain(interval: Interval) -> dict[str, float | None]:
    return {name: _short(value) for name, value in asdict(interval).items()}


def _short(value: float) -> float | None:
    """Of a time nobody needs more digits."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    """JSON has no infinity: a bound that is not known is null."""
    return value if math.isfinite(value) else None
