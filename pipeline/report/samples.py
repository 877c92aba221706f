"""Sections on the worst and on typical samples: texts, tables, pictures and what else `evaluate/worst.json` has."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.report.charts import RUN_STYLES, Chart, Label, Path, Picture, Plot, Rectangle, Shape, make_plot, px
from pipeline.system.wording import MISSING, number

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_PICTURES = ("picture", "boxes")
_MIN_SMOOTH_PIXELS = 64  # pictures that are smaller show their pixels
_CURVE_WIDTH, _CURVE_HEIGHT = 400, 150
_BOXES_WIDTH = 210

Styles = Mapping[str, str]  # of labels and tags


def worst_samples(facts: Facts) -> Body | None:
    """Return one card for each sample, as the evaluate step stored them."""
    lead = f"The candidate’s worst samples by {facts.worst.get('metric', '')}; ties are ordered by the other metrics."
    return _samples(facts, "samples", " ".join(filter(None, (lead, str(facts.worst.get("note") or "")))))


def typical_samples(facts: Facts) -> Body | None:
    return _samples(facts, "typical", f"Samples around the median of {facts.worst.get('metric', '')}.")


def _samples(facts: Facts, key: str, lead: str) -> Body | None:
    samples = mappings(facts.worst.get(key))
    if not samples:
        return None
    styles = _label_styles([*mappings(facts.worst.get("samples")), *mappings(facts.worst.get("typical"))])
    cards = [_card(sample, bool(facts.classes), styles) for sample in samples]
    parts = [card["parts"] for card in cards if card["parts"]]
    is_wide = any(len(shown) > 1 or shown[0]["kind"] != "picture" for shown in parts)
    return {"lead": lead, "cards": cards, "is_wide": is_wide}


def _card(sample: Mapping[str, Any], has_classes: bool, styles: Styles) -> Body:
    actual, predicted = sample.get("actual"), sample.get("predicted")
    if actual is None or predicted is None:
        answer = ""
    elif not has_classes:
        answer = f"is {actual}, predicted {predicted}"
    else:
        answer = f"is {actual}, " + ("recognised" if predicted == actual else f"taken for {predicted}")
    metrics = (sample.get("metrics") or {}).items()
    parts = mappings(sample.get("shown"))
    return {
        "index": sample.get("index"),
        "answer": answer,
        "baseline": sample.get("baseline_predicted"),
        "metrics": ", ".join(f"{name} {number(value)}" for name, value in metrics),
        "parts": [_part(part, parts, styles) for part in _join_curves(parts)],
    }


def _join_curves(parts: Sequence[Body]) -> list[Body]:
    """Put neighbouring curves of one length, such as forecast and future, into one part."""
    joined: list[Body] = []
    for part in parts:
        if part.get("kind") == "curve":
            part = {**part, "curves": [part]}
            if joined and len(joined[-1].get("values") or ()) == len(part["values"]) and "curves" in joined[-1]:
                joined[-1]["curves"].append(part)
                continue
        joined.append(part)
    return joined


def _part(part: Body, parts: Sequence[Body], styles: Styles) -> Body:
    """Return a part as its template needs it; `parts` are all of the sample."""
    body: Body = {"name": str(part.get("name", "")), "kind": str(part.get("kind", ""))}
    text = str(part.get("text", "")) + ("" if part.get("whole", True) else " …")
    if body["kind"] in _PICTURES and (size := _png_size(part)):
        if body["kind"] == "boxes":
            return {**body, "chart": _boxes_chart(part, size, styles)}
        return {**body, "png": part["png"], "is_small": size[0] < _MIN_SMOOTH_PIXELS}
    match body["kind"]:
        case "text":
            return {**body, "text": text}
        case "number":
            return {**body, "text": _plain(part.get("value"))}
        case "row":
            cells = [(str(column), _plain(value)) for column, value in part.get("row") or ()]
            return {**body, "cells": cells, "whole": part.get("whole", True)}
        case "tags":
            return {**body, "words": list(_words(part, parts, styles)), "whole": part.get("whole", True)}
        case "neighbors":
            near = [
                {"text": str(item.get("text", "")), "own": item.get("own"), "score": f"{item['score']:.3f}"}
                for item in mappings(part.get("neighbors"))
            ]
            return {**body, "text": text, "neighbors": near}
        case "curve" if any(is_number(value) for curve in part["curves"] for value in curve["values"]):
            chart = _curves_chart(part["curves"], [item for item in parts if item.get("kind") == "curve"])
            legend = [
                (str(curve.get("name", "")), style) for curve, style in zip(part["curves"], RUN_STYLES, strict=False)
            ]
            return {**body, "chart": chart, "legend": legend}
    values = [number(value, 3) for value in part.get("values") or ()]
    more = " …" if part.get("count", 0) > len(values) else ""
    return {**body, "kind": "values", "values": ", ".join(values) + more}


def _plain(value: Any) -> str:
    """Return an original value without rounding it further than needed, and without separators."""
    if value is None:
        return MISSING
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _png_size(part: Body) -> tuple[int, int] | None:
    """Return width and height; what is not valid base64 of a PNG is never given to the browser as an image."""
    png = str(part.get("png", ""))
    if not _BASE64.fullmatch(png) or len(png) < 32:
        return None
    head = base64.b64decode(png[:32])
    if head[:8] != b"\x89PNG\r\n\x1a\n":
        return None
    width, height = struct.unpack(">II", head[16:24])
    return (width, height) if width and height else None


def _label_styles(samples: Sequence[Body]) -> Styles:
    """Return a colour for each label of a box and each tag, the same in all samples."""
    parts = [part for sample in samples for part in mappings(sample.get("shown"))]
    labels = {str(box.get("label", "")) for part in parts for box in mappings(part.get("boxes"))}
    tags = {_entity(str(tag)) for part in parts for tag in part.get("tags") or ()}
    return {name: RUN_STYLES[place % len(RUN_STYLES)] for place, name in enumerate(sorted((labels | tags) - {""}))}


def _entity(tag: str) -> str:
    """Return a tag without the prefix that marks the beginning or the inside of an entity."""
    return tag[2:] if tag[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else tag


def _words(part: Body, parts: Sequence[Body], styles: Styles) -> Iterator[Body]:
    """Yield the words; one `differs` if another part of the sample tags it otherwise, as a target does."""
    words, tags = part.get("words") or (), part.get("tags") or ()
    others = [
        other["tags"] for other in parts if other is not part and other.get("words") == words and other.get("tags")
    ]
    previous = ""
    for place, (word, tag) in enumerate(zip(words, tags, strict=True)):
        entity = _entity(str(tag))
        is_inside = entity == previous and not str(tag).startswith(("B-", "S-", "U-"))
        yield {
            "word": str(word),
            "tag": "" if is_inside else entity,
            "title": str(tag),
            "style": styles.get(entity, ""),
            "differs": any(other[place] != tag for other in others),
        }
        previous = entity


def _boxes_chart(part: Body, size: tuple[int, int], styles: Styles) -> Chart:
    width, height = _BOXES_WIDTH, _BOXES_WIDTH * size[1] / size[0]
    boxes = [box for box in mappings(part.get("boxes")) if all(map(is_number, box["box"]))]
    texts = [" ".join(filter(None, (str(box.get("label", "")), _score(box)))) for box in boxes]
    shapes: list[Shape] = [Picture(str(part["png"]), width, height)]
    for box, text in zip(boxes, texts, strict=True):
        style = styles.get(str(box.get("label", "")), "one")
        left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in box["box"])
        sides = max(right - left, 0) * width, max(bottom - top, 0) * height
        shapes.append(Rectangle(left * width, top * height, *sides, style))
        if text:  # above the box, or inside it if there is no room
            x, y = min(left, 0.85) * width, box["box"][1] * height
            shapes.append(Label(x + 1, y - 3 if y > 13 else max(y, 0) + 11, text, f"start {style}"))
    name = str(part.get("name", "")) or "picture"
    text = f"{len(boxes)} boxes" + (f": {', '.join(filter(None, texts))}" if any(texts) else "")
    return Chart(name, text, shapes, width, height, "boxes")


def _score(box: Body) -> str:
    return f"{box['score']:.2f}" if is_number(box.get("score")) else ""


def _curves_chart(curves: Sequence[Body], all_curves: Sequence[Body]) -> Chart:
    """Draw curves; all curves of a sample have one vertical scale."""
    numbers = [v for curve in all_curves for v in (*curve["values"], *curve.get("upper", ())) if is_number(v)]
    low, high = min(numbers), max(numbers)
    pad = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    count = len(curves[0]["values"])
    plot = make_plot((0, max(count - 1, 1)), (low - pad, high + pad), _CURVE_WIDTH, _CURVE_HEIGHT)
    paths = [
        _band(curve, plot, style) if "upper" in curve else Path(_path(curve["values"], plot), f"curve {style}")
        for curve, style in zip(curves, RUN_STYLES, strict=False)
    ]
    own = [value for curve in curves for value in curve["values"] if is_number(value)]
    name = ", ".join(str(curve.get("name", "")) for curve in curves)
    text = f"{count} points, from {number(min(own))} to {number(max(own))}"
    shapes = [*plot.frame("position", "value", whole=True), *paths]
    return plot.chart(name, text, shapes, "curve-part")


def _band(curve: Body, plot: Plot, style: str) -> Path:
    """Return the area between a curve and its upper one."""
    rows = [row for row in enumerate(zip(curve["values"], curve["upper"], strict=True)) if all(map(is_number, row[1]))]
    edge = [(x, low) for x, (low, _) in rows] + [(x, high) for x, (_, high) in reversed(rows)]
    return plot.path(edge, f"band {style}")


def _path(values: Sequence[float | None], plot: Plot) -> str:
    """Return the curve as a path with gaps where there is no number."""
    path, pen = "", "M"
    for place, value in enumerate(values):
        if is_number(value):
            path, pen = f"{path}{pen}{px(plot.x.at(place))} {px(plot.y.at(value))}", "L"
        else:
            pen = "M"
    return path
