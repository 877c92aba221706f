"""The samples the candidate does worst on, as evaluate kept them: pictures, texts or plain numbers."""

from __future__ import annotations

import re
from typing import Any

from pipeline.spec.facts import Facts, mappings
from pipeline.spec.html import Child, Html, el
from pipeline.spec.wording import number

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def worst(facts: Facts) -> Child:
    samples = mappings(facts.worst.get("samples"))
    if not samples:
        return None
    metric = str(facts.worst.get("metric", ""))
    text = f"What the candidate does worst on by {metric}; among equals the other metrics decide."
    note = str(facts.worst.get("note") or "")
    wide = any(shown.get("kind") == "text" for one in samples for shown in mappings(one.get("shown")))
    cards = [_card(one, bool(facts.classes)) for one in samples]
    return [el("p", " ".join(filter(None, (text, note))), class_="muted"), el("div", cards, class_=_layout(wide))]


def _layout(wide: bool) -> str:
    return "worst texts" if wide else "worst"


def _card(one: dict[str, Any], classes: bool) -> Html:
    shown = [_shown(part, one.get("index")) for part in mappings(one.get("shown"))]
    values = [f"{name} {number(value)}" for name, value in (one.get("metrics") or {}).items()]
    caption = el(
        "figcaption",
        el("b", f"Sample {number(one.get('index'))}"),
        _answers(one, classes),
        el("small", ", ".join(values)) if values else None,
    )
    return el("figure", shown, caption)


def _answers(one: dict[str, Any], classes: bool) -> Html | None:
    actual, predicted, baseline = (one.get(key) for key in ("actual", "predicted", "baseline_predicted"))
    if actual is None or predicted is None:
        return None
    if not classes:
        said = f"is {actual}, predicted {predicted}"
    else:
        said = f"is {actual}, " + ("recognised" if predicted == actual else f"taken for {predicted}")
    return el("span", said, f"; baseline: {baseline}" if baseline is not None else None)


def _shown(part: dict[str, Any], index: Any) -> Html:
    name, kind = str(part.get("name", "")), part.get("kind")
    png = str(part.get("png", ""))
    if kind == "picture" and _BASE64.fullmatch(png):
        return el("img", src=f"data:image/png;base64,{png}", alt=f"{name} of sample {index}")
    if kind == "text":
        return el("blockquote", str(part.get("text", "")), "" if part.get("whole", True) else " …")
    values = [number(value, 3) for value in part.get("values") or ()]
    more = " …" if part.get("count", 0) > len(values) else ""
    return el("p", el("span", f"{name} "), el("code", ", ".join(values), more), class_="values")
