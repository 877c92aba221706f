"""Which of the variants that passed is shipped; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.spec.exporting import FASTEST, Export
from pipeline.spec.statistics.interval import Interval

_EXACTNESS = ("fp32", "fp16", "int8-static", "int8-dynamic")


@dataclass(frozen=True)
class Contender:
    name: str
    faults: Sequence[str]
    share: Interval | None  # of fp32's time; None where nothing was timed

    @property
    def passed(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class Choice:
    """The one that is shipped, or why none is; and a sentence for each."""

    name: str  # empty: none
    reasons: dict[str, str]
    refusal: str = ""


def decide(export: Export, contenders: Sequence[Contender]) -> Choice:
    passed = [one for one in contenders if one.passed]
    name = _fastest(export, passed) if export.choose == FASTEST else _named(export, passed)
    refusal = "" if name else _refusal(export, contenders, passed)
    return Choice(name, {one.name: _reason(export, one, name) for one in contenders}, refusal)


def _named(export: Export, passed: Sequence[Contender]) -> str:
    return export.choose if export.choose in {one.name for one in passed} else ""


def _fastest(export: Export, passed: Sequence[Contender]) -> str:
    """fp32, unless another saves enough time beyond doubt; of several that cannot be told apart the most exact."""
    exact = sorted(passed, key=lambda one: _EXACTNESS.index(one.name))
    quick = [one for one in exact if one.name != "fp32" and one.share and one.share.high < 1 - export.least_gain]
    if not exact or (exact[0].name == "fp32" and not quick):
        return exact[0].name if exact else ""
    shares = {one.name: one.share for one in quick or exact if one.share is not None}
    if not shares:
        return exact[0].name
    best = min(shares.values(), key=lambda share: share.estimate)
    return next(name for name, share in shares.items() if share.low <= best.high)


def _refusal(export: Export, contenders: Sequence[Contender], passed: Sequence[Contender]) -> str:
    if export.choose == FASTEST:
        told = "; ".join(f"{one.name}: {'; '.join(one.faults)}" for one in contenders)
        return f"no variant passes, so that nothing is shipped: {told}"
    wanted = next(one for one in contenders if one.name == export.choose)
    names = [one.name for one in passed]
    mend = f"choose {' or '.join(names)}, or {FASTEST}" if names else "none of the others passed either"
    return f"export.choose={wanted.name} is not shipped: {'; '.join(wanted.faults)}; {mend}"


def _reason(export: Export, one: Contender, chosen: str) -> str:
    if one.faults:
        return "; ".join(one.faults)
    speed = _speed(one.share) if one.name != "fp32" else ""
    if one.name == chosen:
        return _how(export, chosen) + (f": {speed}" if speed else "")
    if export.choose != FASTEST:
        other = f"export.choose={export.choose} ships another" if chosen else "nothing is shipped"
        return f"passed, {other}" + (f"; it {speed}" if speed else "")
    if chosen == "fp32":
        return f"passed, but does not save {export.least_gain:.0%} of fp32's time beyond doubt; it {speed}"
    return f"passed, {chosen} is faster" + (f"; it {speed}" if speed else "")


def _how(export: Export, chosen: str) -> str:
    if export.choose != FASTEST:
        return "chosen by name"
    if chosen == "fp32":
        return f"chosen: none that passes saves {export.least_gain:.0%} of its time beyond doubt"
    return "chosen as the fastest that passes"


def _speed(share: Interval | None) -> str:
    if share is None:
        return ""
    return f"takes {share.estimate:.0%} of fp32's time ({share.low:.0%} to {share.high:.0%})"
