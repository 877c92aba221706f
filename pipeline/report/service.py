"""What became of the model: parity of the ONNX file, the image, and the service with its latency."""

from __future__ import annotations

from pipeline.report.facts import Facts
from pipeline.report.wording import number, seconds, short, size
from pipeline.spec.html import Child, Html, el, pairs, table


def parity(facts: Facts) -> Child:
    body = facts.parity
    if not body:
        return None
    head = ["batch size", "largest difference", "relative", "beyond tolerance", "flips", "unexplained", "time"]
    rows = [
        (
            number(run.get("batch_size")),
            number(run.get("max_abs_error")),
            number(run.get("max_rel_error")),
            _count(run.get("beyond_tolerance")),
            _count(run.get("flips")),
            _count(run.get("unexplained_flips")),
            seconds(run.get("seconds")),
        )
        for run in body.get("runs", [])
    ]
    note = (
        f"All {number(body.get('samples'))} test samples through ONNX Runtime and torch, element by element "
        f"(rtol {body.get('rtol')}, atol {body.get('atol')}). "
        f"Opset {body.get('opset')}, {size(body.get('onnx_bytes'))}."
    )
    return [el("p", note, class_="muted"), table(head, rows)]


def latency(facts: Facts) -> Child:
    deploy, times = facts.deploy, facts.deploy.get("latency_ms") or {}
    if not deploy:
        return None
    slowest = max((times.get(name) or 0.0 for name in ("p50", "p95", "max")), default=0.0)
    bars = [_time(label, times.get(name), slowest) for name, label in _QUANTILES.items() if times.get(name) is not None]
    golden = (deploy.get("golden") or {}).get("requests")
    rows = {
        "target": deploy.get("target"),
        "address": deploy.get("url"),
        "bundle": short(deploy.get("bundle") or ""),
        "golden requests answered": number(golden) if golden is not None else None,
    }
    note = f"Over {number(times.get('requests'))} requests over HTTP, the round trip from the deploying machine."
    timing = el("div", el("p", note, class_="muted"), el("div", bars, class_="times")) if bars else None
    return el("div", timing, pairs(rows.items()), class_="split")


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
    return pairs((label, str(facts.image.get(key) or "")) for key, label in names.items())


_QUANTILES = {"p50": "median", "p95": "95 %", "max": "slowest"}


def _time(label: str, milliseconds: float | None, slowest: float) -> Html:
    width = 100 * (milliseconds or 0) / (slowest or 1)
    bar = el("div", el("i", style=f"width:{width:.1f}%"))
    return el("div", el("span", label), bar, el("b", f"{number(milliseconds, 3)} ms"))


def _count(value: int | None) -> Child:
    return number(value) if not value else el("b", number(value), class_="bad-text")
