"""Are columns what they were: type, shape, classes, range; and is nothing missing in them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from pipeline.checks.finding import CHAMPION, SPLITS, Against, Finding, Severity, listed
from pipeline.checks.profile import Facts, Feature, Histogram, Profile

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
