"""This run beside another: their numbers, the paired difference on the same samples, and what they differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.compare import differing
from pipeline.contract.errors import PipelineError
from pipeline.contract.facts import Body, Facts, is_number
from pipeline.contract.html import Child, Html, el, number, seconds, signed, table
from pipeline.contract.run import Run
from pipeline.report.charts import interval_chart, interval_text, range_of, shared_axis, small_interval
from pipeline.report.summary import date, stamp

_PARTS = 40  # listed
_HOUSE = "house:"  # parts of a key that are sources of ours


@dataclass(frozen=True)
class Paired:
    """The differences of this run's candidate to the other's; `refused` says why there are none."""

    metrics: tuple[Body, ...] = ()  # as evaluate.against has them
    refused: str = ""


def paired(run: Run, facts: Facts, other: Run, others: Facts) -> Paired:
    """Two runs that were judged on the same test set can be compared on each sample."""
    if not facts.verdict or not others.verdict:
        return Paired(refused="one of the runs has not been judged")
    from pipeline.evaluate.compare_runs import against  # brings numpy, which most reports do without

    try:
        found = against(run, other, run.config.evaluate)
    except PipelineError as error:
        return Paired(refused=str(error))
    return Paired(tuple(found["metrics"]))


def beside(facts: Facts, other: Facts, found: Paired) -> Child:
    rows = [row for row in _rows(facts, other) if any(cell != "–" for cell in row[1:3])]
    head = ["", "this run", "other run", "difference"]
    note = el(
        "p", "The other run is ", el("code", other.file.id), f", begun {date(other.file.created)}.", class_="muted"
    )
    return [note, table(head, rows), _drawn(found, str(facts.verdict.get("metric", ""))), _causes(facts, other)]


def _drawn(found: Paired, metric: str) -> Html:
    """The metric that decides as a picture, all as a table."""
    if not found.metrics:
        return el("p", f"No paired difference: {found.refused or 'no metric is known of both'}.", class_="missing")
    first = next((one for one in found.metrics if one["metric"] == metric), found.metrics[0])
    difference = range_of(first["difference"])
    text = (
        f"By how much this run is better than the other on the same {number(first['samples'])} {first['unit']}, with "
        f"{first['confidence']:.0%} bootstrap intervals and permutation tests, adjusted for how many metrics there are."
    )
    drawn = interval_chart(difference, 0.0, "", f"equal in {first['metric']}") if difference else None
    return el("div", el("p", text, class_="muted"), drawn, _table(found.metrics), _mcnemar(first), class_="apart")


def _table(metrics: Sequence[Body]) -> Html:
    ranges = [range_of(one["difference"]) for one in metrics]
    rows = [
        (
            one["metric"],
            interval_text(found) or "–",
            small_interval(found, shared_axis([found])),
            number(one["adjusted_p"]),
        )
        for one, found in zip(metrics, ranges, strict=True)
    ]
    return table(["metric", "better by", "", "adjusted p"], rows)


def _mcnemar(one: Body) -> Html | None:
    if not (test := one["mcnemar"]):
        return None
    text = (
        f"In {one['metric']}, {number(test['only_candidate'])} samples only this run gets right, "
        f"{number(test['only_baseline'])} only the other; McNemar’s exact p = {number(test['p_value'])}."
    )
    return el("p", text, class_="muted")


def _rows(facts: Facts, other: Facts) -> Iterator[tuple[Child, ...]]:
    yield ("verdict", stamp(facts.standing), stamp(other.standing), "")
    mine, theirs = ((one.metrics.get("candidate") or {}) for one in (facts, other))
    for name in sorted(mine.keys() | theirs.keys()):
        yield _numbers(name, mine.get(name), theirs.get(name))
    for key, name in (("best_step", "best step"), ("samples_per_second", "samples/s"), ("steps", "optimizer steps")):
        yield _numbers(name, facts.summary.get(key), other.summary.get(key))
    spent = [one.summary.get("seconds") for one in (facts, other)]
    yield ("training", *map(seconds, spent), _ratio(*spent))
    times = [(one.deploy.get("latency_ms") or {}).get("p50") for one in (facts, other)]
    yield ("latency, median", *[f"{number(one, 3)} ms" if one is not None else "–" for one in times], _ratio(*times))


def _numbers(name: str, mine: float | None, theirs: float | None) -> tuple[str, str, str, str]:
    apart = mine - theirs if is_number(mine) and is_number(theirs) else None
    if apart is None:
        told = "–"
    else:
        told = signed(apart) if abs(apart) < 10 else f"{'+' if apart > 0 else '−'}{number(abs(apart))}"
    return name, number(mine), number(theirs), told


def _ratio(mine: float | None, theirs: float | None) -> str:
    return f"× {mine / theirs:.2f}" if mine and theirs else "–"


def _causes(facts: Facts, other: Facts) -> Html:
    """Each part once, with the steps it is a part of; steps that only one of the runs reached tell nothing."""
    mine, theirs = facts.file.steps, other.file.steps
    rows = differing(
        {name: one for name, one in theirs.items() if name in mine},
        {name: one for name, one in mine.items() if name in theirs},
    )
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row["part"], row["after"], row["before"]), []).append(row["step"])
    ours = sum(part.startswith(_HOUSE) for part, _, _ in found)
    told = {parts: steps for parts, steps in found.items() if not parts[0].startswith(_HOUSE)}
    if not found:
        return el("p", "Nothing that the steps of both depend on differs.", class_="muted")
    listed = [(part, el("code", a), el("code", b), ", ".join(steps)) for (part, a, b), steps in told.items()]
    shown = table(["part", "this run", "other run", "of"], listed[:_PARTS], numbers=False) if listed else None
    rest = _rest(max(len(listed) - _PARTS, 0), ours, el("code", f"pipe diff {other.file.id} {facts.file.id}"))
    return el("div", el("h3", "What they differ in"), shown, rest, class_="causes")


def _rest(parts: int, ours: int, command: Html) -> Html | None:
    counts = ((parts, "more part", "more parts"), (ours, "source of pipe itself", "sources of pipe itself"))
    words = [f"{number(count)} {one if count == 1 else many}" for count, one, many in counts if count]
    if not words:
        return None
    differ = "differs" if parts + ours == 1 else "differ"
    return el("p", f"{' and '.join(words)} {differ}; ", command, " lists all.")
