"""Are columns what they were: type, shape, classes, range; and is nothing missing in them?

Do two histograms come from one distribution: how far apart (PSI), and by chance or not (KS; z of shares)?

One line of the judgement of the data, and what is done about all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pipeline.data_checks.profile import Facts, Feature, Floats, Histogram, Profile

Counts: TypeAlias = np.ndarray[Any, Any]

_GROUPS = 10  # bins of the population stability index, equally full at first; what lies outside has its own
_ENOUGH = 5.0  # expected in the smaller split, for a share to be judged by the normal distribution


@dataclass(frozen=True)
class Difference:
    psi: float
    p: float
    told: str  # the largest of it, in words


def differences(
    features: tuple[Feature, ...], before: Mapping[str, Histogram], after: Mapping[str, Histogram]
) -> dict[str, Difference]:
    """By the feature's name, where both have one and something in it."""
    found = {}
    for feature in features:
        a, b = before.get(feature.name), after.get(feature.name)
        if a is not None and b is not None and any(a.bins) and any(b.bins):
            found[feature.name] = _of_ids(feature, a, b) if feature.kind == "ids" else _of_numbers(a, b)
    return found


def psi(before: Counts, after: Counts) -> float:
    """Population stability index of counts; half a count in each bin keeps an empty one from making it infinite."""
    a, b = before + 0.5, after + 0.5
    a, b = a / a.sum(), b / b.sum()
    found: Floats = (b - a) * np.log(b / a)
    return float(found.sum())


def kolmogorov(distance: float, n: int, m: int) -> float:
    """Chance of such a distance between samples of one distribution (Stephens' form); of histograms, at most that."""
    root = math.sqrt(n * m / (n + m))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.1:  # the series takes ever more terms, and it is certain to many digits
        return 1.0
    terms = [(1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * sum(terms)))


def _of_numbers(before: Histogram, after: Histogram) -> Difference:
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    gaps = np.abs(np.cumsum(a) / a.sum() - np.cumsum(b) / b.sum())
    distance = float(gaps.max())
    groups = _groups(a)
    told = f"KS distance {distance:.3f}"
    if before.mean is not None and after.mean is not None:
        told += f", mean {before.mean:.4g} → {after.mean:.4g}"
    return Difference(
        psi(np.bincount(groups, a), np.bincount(groups, b)), kolmogorov(distance, int(a.sum()), int(b.sum())), told
    )


def _groups(counts: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which tenth of the training split each bin belongs to; the bins outside its range stay alone."""
    inner = counts[1:-1]
    if not inner.sum():
        return np.arange(len(counts))
    middle = np.cumsum(inner) - inner / 2
    tenth = np.unique(np.floor(middle / inner.sum() * _GROUPS), return_inverse=True)[1]
    return np.concatenate([[0], tenth + 1, [tenth.max() + 2]])


def _of_ids(feature: Feature, before: Histogram, after: Histogram) -> Difference:
    names = [*(feature.words or map(str, feature.ids)), "all others"]
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    squares = np.asarray(before.squares, float) + np.asarray(after.squares, float)
    seldom = _seldom(a + b, squares, before.samples, after.samples)
    place = np.where(seldom, 0, np.cumsum(~seldom))
    z = _scores(a, b, squares, before.samples, after.samples)
    z[seldom] = 0.0
    chances = math.erfc(float(z.max()) / math.sqrt(2)) * max(1, int((~seldom).sum()))
    worst = int(z.argmax())
    told = f"{names[worst]}: {a[worst] / a.sum():.2%} → {b[worst] / b.sum():.2%}"
    return Difference(psi(np.bincount(place, a), np.bincount(place, b)), min(1.0, chances), told)


def _seldom(total: Floats, squares: Floats, n: int, m: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Too few to judge; tokens that come together, as of one text, count as less than so many."""
    apart = total**2 / np.maximum(squares, 1)
    return np.asarray(apart * min(n, m) / (n + m) < _ENOUGH)


def _scores(a: Floats, b: Floats, squares: Floats, n: int, m: int) -> Floats:
    """z of the mean count per sample: samples are independent, the tokens in them are not."""
    mean = (a + b) / (n + m)
    variance = np.maximum(squares / (n + m) - mean**2, 0) * (1 / n + 1 / m)
    gap = np.abs(a / n - b / m)
    return np.where(variance > 0, gap / np.sqrt(np.where(variance > 0, variance, 1)), np.where(gap > 0, 40.0, 0.0))


Severity: TypeAlias = Literal["error", "warn", "off"]
Level: TypeAlias = Literal["ok", "warn", "error"]
Against: TypeAlias = Literal["splits", "champion"]

_NAMED = 5

SPLITS: Against = "splits"
CHAMPION: Against = "champion"


@dataclass(frozen=True)
class Finding:
    """What a check found in one place; `severity` is what configuration makes of a limit that is passed."""

    check: str
    where: str
    severity: Severity
    passed: bool
    detail: str
    value: float | None = None
    limit: float | None = None
    against: Against = SPLITS

    @property
    def level(self) -> Level:
        return "ok" if self.passed or self.severity == "off" else self.severity

    def row(self) -> dict[str, Any]:
        body = asdict(self) | {"level": self.level, "value": rounded(self.value), "limit": rounded(self.limit)}
        return {name: value for name, value in body.items() if name not in ("severity", "passed")}

    def sentence(self) -> str:
        return f"{self.where}: {self.detail}"


def listed(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def rounded(value: float | None) -> float | None:
    """As many digits as mean something, and never infinite."""
    return None if value is None else float(f"{min(value, 1e300):.6g}")


_OUTSIDE = 0.5  # share of values beyond the known range from which it is another range, not an outlier


def missing(
    columns: Mapping[str, Mapping[str, Facts]], features: Sequence[Feature], share: float, severity: Severity
) -> Iterator[Finding]:
    """Every column of every split with a number that is none; and one line where there is no such."""
    worst, parts = 0.0, _by_column(features)
    for split, found in columns.items():
        for name, facts in found.items():
            part, place = max([(_part(facts.missing, facts.values), name), *_gaps(parts.get(name, []), split)])
            worst = max(worst, part)
            if part <= share:
                continue
            what = "every number is" if part == 1 else f"{100 * part:.2g}% of the numbers are"
            mend = f"fill or drop them in data({split!r}), or accept them with prepare.missing_share={_up(part):g}"
            detail = f"{what} NaN or infinite ({facts.missing} of {facts.values} in {name}); {mend}"
            yield Finding("missing", f"{split}.{place}", severity, False, detail, part, share)
    if worst <= share:
        detail = f"at most {100 * worst:.2g}% of a feature are" if worst else "no number is"
        yield Finding("missing", "all splits", severity, True, f"{detail} NaN or infinite", worst, share)


def _by_column(features: Sequence[Feature]) -> dict[str, list[Feature]]:
    found: dict[str, list[Feature]] = {}
    for feature in features:
        found.setdefault(feature.column, []).append(feature)
    return found


def _gaps(features: Sequence[Feature], split: str) -> Iterator[tuple[float, str]]:
    """Of a vector, each number for itself: one that is always missing is a small part of the whole."""
    for feature in features:
        if feature.kind == "numbers" and split in feature.splits:
            found = feature.splits[split]
            yield _part(found.samples - sum(found.bins), found.samples), feature.name


def _part(count: int, whole: int) -> float:
    return count / whole if whole else 0.0


def _up(part: float) -> float:
    """A round share that accepts this one."""
    return min(1.0, float(np.ceil(part * 1000) / 1000))


def between_splits(columns: Mapping[str, Mapping[str, Facts]], flexible: bool, severity: Severity) -> Iterator[Finding]:
    """Columns that two splits share have one type and shape. `flexible`: sizes of axes may differ, not their number."""
    train, good = columns["train"], True
    for split, found in columns.items():
        for name in sorted(found.keys() & train.keys()):
            if told := _other(train[name], found[name], flexible):
                good = False
                detail = f"{told} as in train.{name}; make data() give both alike"
                yield Finding("schema", f"{split}.{name}", severity, False, detail)
    if good:
        yield Finding("schema", "all splits", severity, True, f"{len(train)} columns have one type and shape")


def against_champion(
    before: Profile, now: Profile, ignored: Set[str], flexible: bool, severity: Severity
) -> Iterator[Finding]:
    """Inputs and classes are those the champion was trained on."""
    problems = list(_changes(before, now, ignored, flexible))
    mend = "if this is meant, set prepare.columns=warn; the champion cannot be asked about such data"
    for where, told in problems:
        yield Finding("schema", where, severity, False, f"{told}; {mend}", against=CHAMPION)
    if not problems:
        yield Finding(
            "schema", "train", severity, True, "types, shapes and classes are the champion's", None, None, CHAMPION
        )


def _changes(before: Profile, now: Profile, ignored: Set[str], flexible: bool) -> Iterator[tuple[str, str]]:
    theirs, ours = before.columns["train"], now.columns["train"]
    for name in before.inputs:
        if name not in ours and name not in ignored:
            yield f"train.{name}", "the champion's input is no column any more"
    for name in now.inputs:
        if name not in theirs and name not in ignored:
            yield f"train.{name}", "the champion's data has no such input"
    for name in sorted(theirs.keys() & ours.keys() - ignored):
        if told := _other(theirs[name], ours[name], flexible):
            yield f"train.{name}", f"{told} as the champion was trained on"
    if before.classes != now.classes:
        yield "classes", _other_classes(before.classes or (), now.classes or ())


def _other(known: Facts, found: Facts, flexible: bool) -> str:
    """In words, or nothing."""
    if known.dtype != found.dtype:
        return f"type {found.dtype}, not {known.dtype}"
    sizes = len(known.shape) == len(found.shape) if flexible else known.shape == found.shape
    return "" if sizes else f"shape {list(found.shape)} of a sample, not {list(known.shape)}"


def _other_classes(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    new = [name for name in now if name not in before]
    gone = [name for name in before if name not in now]
    told = [f"new {listed(new)}"] if new else []
    told += [f"gone {listed(gone)}"] if gone else []
    return f"the classes are not the champion's ({'; '.join(told) or 'another order: every index means another class'})"


def ranges(
    features: tuple[Feature, ...],
    before: Mapping[str, Histogram],
    after: Mapping[str, Histogram],
    where: str,
    severity: Severity,
    against: Against = SPLITS,
) -> Iterator[Finding]:
    """Most values lie where there were none: another unit or scale. A few outliers are no other range."""
    shares: dict[str, dict[str, float]] = {}  # column → feature
    for feature in features:
        a, b = before.get(feature.name), after.get(feature.name)
        if feature.kind == "ids" or a is None or b is None or not any(a.bins) or not any(b.bins):
            continue
        shares.setdefault(feature.column, {})[feature.name] = max(_beyond(b), _left(feature, a, b))
    worst = max((share for found in shares.values() for share in found.values()), default=0.0)
    for column, found in shares.items():
        left = sorted((name for name, share in found.items() if share > _OUTSIDE), key=lambda name: -found[name])
        if left:
            a, b, share = before[left[0]], after[left[0]], found[left[0]]
            many = f" (and so {listed(left[1:])})" if len(left) > 1 else ""
            detail = (
                f"{a.low:.4g} … {a.high:.4g} became {b.low:.4g} … {b.high:.4g}, and {share:.0%} of one lies outside "
                f"the other{many}; look for another unit, scale or encoding"
            )
            place = f"{where}.{left[0] if len(found) == 1 else column}"
            told = detail if place.endswith(left[0]) else f"{left[0]}: {detail}"
            yield Finding("range", place, severity, False, told, share, _OUTSIDE, against)
    if worst <= _OUTSIDE:
        detail = f"at most {worst:.0%} of a feature's values lie outside the known range"
        yield Finding("range", where, severity, True, detail, worst, _OUTSIDE, against)


def _beyond(after: Histogram) -> float:
    """Share of values outside what the edges fence in."""
    return (after.bins[0] + after.bins[-1]) / sum(after.bins) if len(after.bins) > 1 else 0.0


def _left(feature: Feature, before: Histogram, after: Histogram) -> float:
    """The other way round: share of known values outside the new range, by whole bins."""
    if after.low is None or after.high is None or not feature.edges:
        return 0.0
    edges, counts = np.asarray(feature.edges), np.asarray(before.bins[1:-1])
    gone = (edges[1:] < after.low) | (edges[:-1] >= after.high)
    return float(counts[gone].sum() / sum(before.bins))
