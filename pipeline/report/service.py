"""What became of the bundle: the image, and how fast it answers, as a service or, before there is one, as a file."""

from __future__ import annotations

from pipeline.spec.facts import Facts
from pipeline.spec.html import Child, Html, el, pairs
from pipeline.spec.wording import number, short

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
