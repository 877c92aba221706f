"""Where a classifier errs: the confusion matrix, and each class by itself."""

from __future__ import annotations

from pipeline.spec.facts import Facts
from pipeline.spec.html import Child, Html, el, table
from pipeline.spec.wording import number, percent

_LARGEST_MATRIX = 30  # classes; beyond that only the confusions that happen are listed
_LISTED = 12


def confusion(facts: Facts) -> Child:
    matrix, classes = facts.metrics.get("confusion"), facts.metrics.get("classes")
    if not matrix or not classes:
        return None
    grid = _matrix(matrix, classes) if len(classes) <= _LARGEST_MATRIX else None
    return el("div", grid, _most_confused(matrix, classes), class_="split")


def per_class(facts: Facts) -> Child:
    rows = facts.metrics.get("per_class")
    if not rows:
        return None
    names = ("precision", "recall", "f1")
    known = [(name, rows[name]) for name in facts.classes if name in rows]
    body = [(name, number(row.get("samples")), *(_bar(row.get(key)) for key in names)) for name, row in known]
    return table(["class", "samples", *names], body)


def _matrix(matrix: list[list[int]], classes: list[str]) -> Html:
    """Right answers and errors have each their own colour and scale, or the errors would not show."""
    errors = max((n for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j), default=0)
    head = el("tr", el("th"), [el("th", name, scope="col") for name in classes])
    rows = []
    for i, (name, row) in enumerate(zip(classes, matrix, strict=False)):
        cells = [_cell(n, n / (sum(row) or 1) if i == j else n / (errors or 1), i == j) for j, n in enumerate(row)]
        rows.append(el("tr", el("th", name, scope="row"), cells))
    caption = el("caption", "actual class by row, predicted by column")
    return el("div", el("table", caption, el("thead", head), el("tbody", rows), class_="heat"), class_="scroll")


def _cell(count: int, share: float, right: bool) -> Html:
    strength = f"{(0.12 + 0.88 * share) * 100:.0f}%" if count else "0%"
    kind = ("right" if right else "wrong") + ((" strong" if share > 0.55 else " some") if count else "")
    return el("td", count if count or right else "·", class_=kind, style=f"--strength:{strength}")


def _most_confused(matrix: list[list[int]], classes: list[str]) -> Html:
    pairs = [(n, classes[i], classes[j]) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j and n]
    total, wrong = sum(map(sum, matrix)), sum(n for n, _, _ in pairs)
    summary = f"{number(wrong)} of {number(total)} samples are answered wrongly."
    pairs.sort(key=lambda pair: -pair[0])
    rows = [(f"{actual} taken for {predicted}", number(n)) for n, actual, predicted in pairs[:_LISTED]]
    listing = table(["confusion", "samples"], rows) if rows else None
    return el("div", el("p", summary), listing)


def _bar(value: float | None) -> Html:
    width = f"{(value or 0) * 100:.1f}%"
    return el("div", el("span", percent(value)), el("i", style=f"width:{width}"), class_="bar")
