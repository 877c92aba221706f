"""What was exported: parity of the ONNX file with torch, the variants that were tried, and other formats.

What became of the bundle: the image, and how fast it answers, as a service or, before there is one, as a file.
"""

from __future__ import annotations

from typing import Any

from pipeline.contract.facts import Facts, mappings
from pipeline.contract.html import Child, Html, el, number, pairs, seconds, short, size, table
from pipeline.report.charts import interval_text, range_of

_ERRORS = ("largest difference", "relative", "beyond tolerance", "flips", "unexplained")
_TIMED = {"1": "p50, batch 1", "32": "p50, batch 32"}


def parity(facts: Facts) -> Child:
    body = facts.parity
    if not body:
        return None
    runs = mappings(body.get("runs"))
    rows = [(number(one.get("batch_size")), *_errors(one), seconds(one.get("seconds"))) for one in runs]
    measured = next((one.get("bytes") for one in facts.variants if one.get("variant") == "fp32"), None)
    note = (
        f"All {number(body.get('samples'))} test samples through ONNX Runtime and torch, element by element "
        f"(rtol {body.get('rtol')}, atol {body.get('atol')}). "
        f"Opset {body.get('opset')}, {size(measured or body.get('onnx_bytes'))}."
    )
    return [el("p", note, class_="muted"), table(["batch size", *_ERRORS, "time"], rows), _coverage(body)]


def _coverage(body: dict[str, Any]) -> Child:
    """Where else it was compared, and where it could not be."""
    found = mappings(body.get("coverage"))
    rows = [(str(one.get("place", "")), str(one.get("inputs", "")), *_errors(one)) for one in found]
    left = [el("p", f"Not compared: {text}.", class_="muted") for text in body.get("left_out") or ()]
    shown = table(["where", "inputs", *_ERRORS], rows, words=(1,)) if rows else None
    return el("details", el("summary", "Threads, devices and random inputs"), shown, left) if rows or left else None


def _errors(one: dict[str, Any]) -> list[Child]:
    return [
        number(one.get("max_abs_error")),
        number(one.get("max_rel_error")),
        *[_count(one.get(key)) for key in ("beyond_tolerance", "flips", "unexplained_flips")],
    ]


def variants(facts: Facts) -> Child:
    if not facts.variants:
        return None
    first = next((one for one in facts.variants if one.get("variant") == "fp32"), facts.variants[0])
    metric = next((str(one["metric"].get("name")) for one in facts.variants if one.get("metric")), "metric")
    timed = [key for key in _TIMED if any(key in (one.get("p50_ms") or {}) for one in facts.variants)]
    head = [
        "variant",
        metric,
        "difference to fp32",
        "largest error",
        "size",
        *[_TIMED[key] for key in timed],
        "outcome",
    ]
    rows = [_variant(one, first, timed) for one in facts.variants]
    text = (
        "Each file is verified and judged by itself on the whole test set; one that fails is not shipped. Times are "
        "medians on the exporting machine."
    )
    return [el("p", text, class_="muted"), table(head, rows, words=(len(head) - 1,))]


def formats(facts: Facts) -> Child:
    if not facts.formats:
        return None
    rows = [
        (
            str(one.get("format", "")),
            _outcome(one, one.get("reason")),
            number(one.get("max_abs_error")),
            el("code", str(one.get("path") or "–")),
        )
        for one in facts.formats
    ]
    return table(["format", "outcome", "largest error", "file"], rows, words=(1, 3))


def _variant(one: dict[str, Any], first: dict[str, Any], timed: list[str]) -> list[Child]:
    metric, times = one.get("metric") or {}, one.get("p50_ms") or {}
    return [
        el("span", str(one.get("variant", "")), el("b", "← shipped") if one.get("chosen") else None),
        number(metric.get("value")),
        interval_text(range_of(one.get("difference"))) or "–",
        number(one.get("max_abs_error")),
        _size(one, first),
        *[f"{number(times.get(key), 3)} ms" if times.get(key) is not None else "–" for key in timed],
        _outcome(one, one.get("reason"), one.get("note"), _first_wrong(one.get("first_wrong"))),
    ]


def _size(one: dict[str, Any], first: dict[str, Any]) -> str:
    whole, own = first.get("bytes"), one.get("bytes")
    share = f" ({own / whole:.0%})" if own and whole and one is not first else ""
    return size(own) + share


def _first_wrong(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    return f"First wrong at {found.get('node')} ({found.get('op')}), error {number(found.get('error'))}."


def _outcome(one: dict[str, Any], *details: Any) -> Html:
    small = [el("small", str(text).removeprefix("passed, ")) for text in details if text]
    if one.get("passed"):
        return el("span", "✓ passed", small, class_="good-text words")
    return el("span", "✕ failed", small, class_="bad-text words")


def _count(value: int | None) -> Child:
    return number(value) if not value else el("b", number(value), class_="bad-text")


_QUANTILES = {"p50": "median", "p95": "95 %", "p99": "99 %", "max": "slowest"}


def latency(facts: Facts) -> Child:
    return _deployed(facts) if facts.deploy else _of_the_file(facts)


def package(facts: Facts) -> Child:
    if not facts.image:
        return None
    names = {
        "image": "image",
        "builder": "builder",
        "image_digest": "digest",
        "reference": "pushed as",
        "context": "context",
        "reason": "note",
    }
    rows = [(label, str(facts.image.get(key) or "")) for key, label in names.items()]
    return el("div", pairs(rows), class_="long")


def _deployed(facts: Facts) -> Html:
    deploy, times = facts.deploy, facts.deploy.get("latency_ms") or {}
    known = {label: times[name] for name, label in _QUANTILES.items() if times.get(name) is not None}
    golden = (deploy.get("golden") or {}).get("requests")
    rows = {
        "target": deploy.get("target"),
        "address": deploy.get("url"),
        "bundle": short(deploy.get("bundle") or ""),
        "golden requests answered": number(golden) if golden is not None else None,
    }
    note = f"Over {number(times.get('requests'))} requests over HTTP, the round trip from the deploying machine."
    timing = el("div", el("p", note, class_="muted"), _times(known)) if known else None
    return el("div", timing, pairs(rows.items()), class_="split")


def _of_the_file(facts: Facts) -> Child:
    """Not deployed: what the shipped file took when it was exported."""
    shipped = next((one for one in facts.variants if one.get("chosen")), None)
    times = (shipped or {}).get("p50_ms") or {}
    known = {f"batch {size}": value for size, value in times.items() if value is not None}
    if shipped is None or not known:
        return None
    text = f"The service has not been deployed in this run; the {shipped.get('variant')} file itself took, by median:"
    return el("div", el("p", text, class_="muted"), _times(known))


def _times(known: dict[str, float]) -> Html:
    slowest = max(known.values()) or 1.0
    return el("div", [_time(name, value, slowest) for name, value in known.items()], class_="times")


def _time(name: str, milliseconds: float, slowest: float) -> Html:
    bar = el("div", el("i", style=f"width:{100 * milliseconds / slowest:.1f}%"))
    return el("div", el("span", name), bar, el("b", f"{number(milliseconds, 3)} ms"))
