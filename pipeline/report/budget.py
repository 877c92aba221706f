"""Where training's time went: waiting for data, for other processes, for checkpoints; the rest is computing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.report.scale import drawing, label, px
from pipeline.spec.facts import Body, Facts, is_number
from pipeline.spec.html import Html, el, table
from pipeline.spec.wording import percent, seconds

_WIDTH, _BAR = 960, 30
_REST = "validation and the rest"
_KINDS = {
    "computing": "one",
    "communication": "two",
    "data": "three",
    "checkpoints": "four",
    _REST: "five",
}


@dataclass(frozen=True)
class Budget:
    """Seconds by what they were spent on, of the first process."""

    parts: dict[str, float]
    complete: bool  # what lies between the steps is known too

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def budget_of(facts: Facts) -> Budget | None:
    """From the journal's lines, each of which speaks of the steps since the one before."""
    windows = list(_windows(facts))
    stepped = sum(spent for _, spent in windows)
    if not stepped:
        return None
    traced = exposed_share(facts)
    found = {
        "data": _weighed(windows, "data_wait_share"),
        "communication": _weighed(windows, "communication_share") or (traced and traced[0] * stepped),
        "checkpoints": _checkpoints(facts),
    }
    waits = {name: spent for name, spent in found.items() if spent is not None}
    computing = max(0.0, stepped - sum(waits.values()))  # a pause lies within the steps of the line that tells it
    parts = {"computing": computing, **waits}
    whole = facts.summary.get("seconds")
    if is_number(whole) and whole >= stepped:  # after a resume it speaks of the last attempt alone
        parts[_REST] = max(0.0, whole - sum(parts.values()))
    return Budget({name: parts[name] for name in _KINDS if name in parts}, _REST in parts)


def time_budget(facts: Facts, other: Facts | None) -> Html | None:
    runs = {"this run": facts, "other run": other}
    found = {name: budget for name, run in runs.items() if run and (budget := budget_of(run))}
    if not found:
        return None
    names = [name for name in _KINDS if any(name in one.parts for one in found.values())]
    rows = [(el("span", el("i", class_=f"key {_KINDS[name]}"), name), *_cells(name, found)) for name in names]
    rows.append(("altogether", *[cell for one in found.values() for cell in (seconds(one.total), "100%")]))
    head = ["", *[word for name in found for word in (name if len(found) > 1 else "time", "share")]]
    bars = [_bar(name, one, len(found) > 1) for name, one in found.items()]
    note = (
        None
        if all(one.complete for one in found.values())
        else "Of the optimizer steps; what lies between is not known."
    )
    caption = el("figcaption", el("b", "Time budget"), el("span", note, class_="legend") if note else None)
    return el("figure", caption, bars, table(head, rows), class_="budget")


def exposed_share(facts: Facts) -> tuple[float, str] | None:
    """How much of the time went into waiting for the exchange, and where that is known from."""
    if traced := [of["exposed"] for name, of in facts.communication.items() if name.startswith("rank ")]:
        first, count = facts.communication["first_step"], facts.communication["steps"]
        return sum(traced) / len(traced), f"timeline of steps {first} to {first + count - 1}"
    if told := [value for _, value in facts.curve("communication_share")]:
        return sum(told) / len(told), "mean of all steps"
    return None


def _windows(facts: Facts) -> Iterator[tuple[Body, float]]:
    """The lines of the journal, with the seconds each speaks of."""
    before = 0
    for line in facts.steps:
        if is_number(line.get("step_seconds")):
            yield line, line["step_seconds"] * max(line["step"] - before, 1)
        before = line["step"]


def _weighed(windows: list[tuple[Body, float]], name: str) -> float | None:
    """The seconds that a share comes to; None where no line tells it."""
    told = [value * spent for line, spent in windows if is_number(value := line.get(name))]
    return sum(told) if told else None


def _checkpoints(facts: Facts) -> float | None:
    """The journal tells the mean of each line, the summary all of the last attempt."""
    told = [value for _, value in facts.curve("checkpoint_seconds")]
    whole = facts.summary.get("checkpoint_seconds")
    known = [*([sum(told)] if told else []), *([whole] if is_number(whole) else [])]
    return max(known, default=None)


def _cells(name: str, found: dict[str, Budget]) -> Iterator[str]:
    for one in found.values():
        value = one.parts.get(name)
        yield seconds(value)
        yield percent(value / one.total) if value is not None else "–"


def _bar(name: str, found: Budget, named: bool) -> Html:
    """Parts beside each other, in one order; each says itself what it is."""
    at, parts = 0.0, []
    for part, spent in found.parts.items():
        width = _WIDTH * spent / found.total
        told = el("title", f"{part}: {seconds(spent)}, {percent(spent / found.total)}")
        parts.append(
            el("rect", told, x=px(at), y=0, width=px(max(width - 1, 0)), height=_BAR, class_=f"part {_KINDS[part]}")
        )
        if width > 110:
            parts.append(label(at + 10, 20, f"{part} {percent(spent / found.total)}", "start inside"))
        at += width
    text = ", ".join(f"{part} {percent(spent / found.total)}" for part, spent in found.parts.items())
    drawn = drawing(f"Time budget of {name}", text, parts, _WIDTH, _BAR, "bar-chart")
    return el("div", el("small", name), drawn) if named else drawn
