"""Sections on predictions: of regressors and rankers, from `evaluate/figures.json`, and of single samples.

`evaluate/worst.json` has the worst samples and typical ones: texts, tables, pictures and others.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.report.charts import (
    RUN_STYLES,
    Axis,
    Chart,
    Circle,
    Label,
    Line,
    Path,
    Picture,
    Plot,
    Rectangle,
    Series,
    Shape,
    line_chart,
    make_plot,
    px,
)
from pipeline.system.wording import MISSING, number

_HEIGHT = 320
_MODELS = {"candidate": "one", "baseline": "two"}


def regression(facts: Facts) -> Body | None:
    """Draw predicted against actual values, the residuals and the error by decile."""
    body = facts.figures.get("regression")
    if not isinstance(body, dict):
        return None
    points = [(point[0], point[1]) for point in body["points"] if is_number(point[0]) and is_number(point[1])]
    deciles = mappings(body.get("deciles"))
    largest = max((row["mae"] for row in deciles if is_number(row.get("mae"))), default=0.0)
    scatter = _scatter(points, body.get("samples")) if points else None
    return {
        "samples": body.get("samples"),
        "not_finite": body.get("not_finite"),
        "charts": [scatter, _residuals(body["residuals"]) if body.get("residuals") else None],
        "deciles": deciles,
        "largest": largest or 1.0,
        "has_baseline": any(is_number(row.get("baseline_mae")) for row in deciles),
    }


def forecast(facts: Facts) -> Body | None:
    """Draw the error by horizon, and list which share of the true values is at or below each quantile."""
    horizons, shares = facts.metrics.get("horizons"), facts.metrics.get("coverage") or {}
    if not isinstance(horizons, dict):
        return None
    metric = "pinball" if "pinball" in horizons else "mae"
    by_model = {name: horizons[metric][name] for name in _MODELS if name in horizons[metric]}
    series = [
        Series(name, [(i + 1, value) for i, value in enumerate(values) if is_number(value)], _MODELS[name])
        for name, values in by_model.items()
    ]
    names = [name for name in ("level", *_MODELS) if name in shares]
    rows = [list(map(number, row)) for row in zip(*(shares[name] for name in names), strict=True)]
    return {"chart": line_chart("Error by horizon", series, metric, x_title="horizon"), "names": names, "rows": rows}


def ranking(facts: Facts) -> Body | None:
    """Draw the distribution of NDCG over the queries, and list the worst ones."""
    body = facts.figures.get("ranking")
    if not isinstance(body, dict):
        return None
    counts = {name: body["histogram"][name] for name in _MODELS if name in body["histogram"]}
    return {
        "queries": body.get("queries"),
        "omitted": body.get("without_relevant"),
        "chart": _ndcg_chart(counts),
        "worst": mappings(body.get("worst")),
        "has_baseline": "baseline" in counts,
    }


def _scatter(points: Sequence[tuple[float, float]], samples: int | None) -> Chart:
    """Draw both values on one scale; samples on the diagonal are predicted exactly."""
    values = [value for point in points for value in point]
    pad = (max(values) - min(values)) * 0.04 or abs(values[0]) * 0.1 or 1.0
    low, high = min(values) - pad, max(values) + pad
    plot = make_plot((low, high), (low, high), height=_HEIGHT)
    dots = [Circle(plot.x.at(a), plot.y.at(b), 3, "", f"actual {number(a)}, predicted {number(b)}") for a, b in points]
    shapes = [*plot.frame("actual value", "predicted value"), plot.diagonal(), *dots]
    text = (
        f"{len(points)} samples; actual values from {number(min(a for a, _ in points))} to "
        f"{number(max(a for a, _ in points))}, predicted from {number(min(b for _, b in points))} to "
        f"{number(max(b for _, b in points))}"
    )
    note = f"{number(len(points))} of {number(samples)} samples" if samples and len(points) < samples else ""
    caption = "Predicted by actual"
    return plot.chart("Predicted against actual", text, shapes, "scatter one", caption=caption, note=note)


def _residuals(body: Body) -> Chart:
    counts = [int(count) for count in body["counts"]]
    plot = make_plot((float(body["low"]), float(body["high"])), (0, max(counts) * 1.06 or 1), height=_HEIGHT)
    x = plot.x
    shapes: list[Shape] = [*plot.frame("predicted minus actual value", "number of samples")]
    for count, (low, high) in zip(counts, _bins(x, len(counts)), strict=True):
        shapes += plot.bar(low, high, count, "one", f"{number(count)} from {number(low, 3)} to {number(high, 3)}")
    if x.low <= 0 <= x.high:
        shapes.append(Line(x.at(0), plot.y.stop, x.at(0), plot.y.start, "zero"))
    low, high = _bins(x, len(counts))[counts.index(max(counts))]
    most = f"{number(low)} to {number(high)}"
    text = f"mean {number(body['mean'])}; from {number(x.low)} to {number(x.high)}, most in {most}"
    return plot.chart("Residuals", text, shapes)


def _bins(x: Axis, count: int) -> list[tuple[float, float]]:
    width = (x.high - x.low) / count
    return [(x.low + i * width, x.low + (i + 1) * width) for i in range(count)]


def _ndcg_chart(counts: dict[str, Sequence[int]]) -> Chart:
    """Draw one bar per model in each bin of NDCG."""
    plot = make_plot((0, 1), (0, max(max(bins) for bins in counts.values()) * 1.06 or 1), height=_HEIGHT)
    shapes: list[Shape] = [*plot.frame("NDCG of a query", "number of queries")]
    for place, (name, values) in enumerate(counts.items()):
        for count, (low, high) in zip(values, _bins(plot.x, len(values)), strict=True):
            tooltip = f"{name}: {number(count)} from {number(low, 3)} to {number(high, 3)}"
            shapes += plot.bar(low, high, count, _MODELS[name], tooltip, place, len(counts))
    text = "; ".join(
        f"{name}: {', '.join(map(str, values))} queries per tenth of ndcg" for name, values in counts.items()
    )
    legend = [(name, _MODELS[name]) for name in counts]
    return plot.chart("NDCG by query", text, shapes, caption="Queries by NDCG", legend=legend)


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
