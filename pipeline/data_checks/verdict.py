"""From what splits are to what is said of them: every check of every place, with its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.contract.settings.stages import Prepare
from pipeline.contract.statistics.significance import holm
from pipeline.data_checks.near_duplicates import Pair
from pipeline.data_checks.profile import Feature, Histogram, Profile
from pipeline.data_checks.rules import (
    CHAMPION,
    SPLITS,
    Against,
    Difference,
    Finding,
    against_champion,
    between_splits,
    differences,
    listed,
    missing,
    ranges,
)

_MEND = {
    SPLITS: "split at random, or by what tells samples apart; if splits are meant to differ, set prepare.{0}=off",
    CHAMPION: "see that source and preparation are the same; if the world has changed, prepare.{0}=off says so",
}


@dataclass(frozen=True)
class Compared:
    """One pair of data sets, and what is between them by feature."""

    where: str
    against: Against
    before: Mapping[str, Histogram]
    after: Mapping[str, Histogram]
    found: Mapping[str, Difference]
    adjusted: Mapping[str, float]  # chances, with all features of all pairs looked at in mind


def judge(
    now: Profile,
    flexible: bool,
    config: Prepare,
    champion: tuple[Profile, Mapping[str, Histogram]] | None,
) -> list[Finding]:
    """All but near copies; of the champion its profile, and our training split over its features."""
    ignored = set(config.ignore)
    columns = {split: {k: v for k, v in found.items() if k not in ignored} for split, found in now.columns.items()}
    findings = [
        *between_splits(columns, flexible, config.columns),
        *missing(columns, now.features, config.missing_share, config.missing),
    ]
    pairs = _compare(
        [
            (split, SPLITS, now.features, _of(now.features, "train"), _of(now.features, split))
            for split in now.columns
            if split != "train"
        ]
    )
    findings += [finding for pair in pairs for finding in _drifted(pair, now, now.features, config)]
    if champion is not None:
        theirs, ours = champion
        features = tuple(
            one for one in theirs.features if one.column not in ignored and _alike(one.column, theirs, now)
        )
        findings += against_champion(theirs, now, ignored, flexible, config.columns)
        for pair in _compare([("train", CHAMPION, features, _of(features, "train"), ours)]):
            findings += _drifted(pair, theirs, features, config)
    return [finding for finding in findings if finding.severity != "off"]


def near_copies(pairs: Mapping[str, Sequence[Pair]], config: Prepare) -> Iterator[Finding]:
    for column, found in pairs.items():
        if not found:
            detail = "no sample of one split is nearly one of another"
            yield Finding("near", column, config.near, True, detail, 0.0, 0.0)
            continue
        a, b = found[0].a, found[0].b
        detail = (
            f"{len(found)} pairs in two splits are nearly one sample, as {b[0]}[{b[1]}] ≈ {a[0]}[{a[1]}] "
            f"({found[0].distance:.2f} of what lies between neighbours); remove one of each, or keep what belongs "
            "together (one person, one page, one scene) in one split; prepare.near_distance says how near is nearly"
        )
        yield Finding("near", column, config.near, False, detail, float(len(found)), 0.0)


def _alike(column: str, theirs: Profile, now: Profile) -> bool:
    """Of another shape the same features mean other things; the schema tells that."""
    before, after = (one.columns["train"].get(column) for one in (theirs, now))
    return before is None or after is None or before.shape == after.shape


def _of(features: Sequence[Feature], split: str) -> dict[str, Histogram]:
    return {feature.name: feature.splits[split] for feature in features if split in feature.splits}


_Sides = tuple[str, Against, tuple[Feature, ...], Mapping[str, Histogram], Mapping[str, Histogram]]


def _compare(sides: Sequence[_Sides]) -> list[Compared]:
    """Chances are corrected over all pairs together: one good split in a hundred raises an alarm, not one feature."""
    found = [differences(features, before, after) for _, _, features, before, after in sides]
    adjusted = iter(holm([difference.p for one in found for difference in one.values()]))
    return [
        Compared(where, against, before, after, one, {name: next(adjusted) for name in one})
        for (where, against, _, before, after), one in zip(sides, found, strict=True)
    ]


def _drifted(pair: Compared, known: Profile, features: tuple[Feature, ...], config: Prepare) -> Iterator[Finding]:
    inputs = tuple(feature for feature in features if feature.column in known.inputs)
    labels = tuple(feature for feature in features if feature.column not in known.inputs)
    yield from ranges(inputs, pair.before, pair.after, pair.where, config.range, pair.against)
    for check, some in (("drift", inputs), ("labels", labels)):
        by_column: dict[str, list[Feature]] = {}
        for feature in some:
            by_column.setdefault(feature.column, []).append(feature)
        for column in by_column.values():
            yield from _column_drifted(check, pair, column, config)


def _column_drifted(check: str, pair: Compared, features: list[Feature], config: Prepare) -> Iterator[Finding]:
    """One line for a column, with the feature that moved furthest, or the one that came nearest to it."""
    known = sorted((one for one in features if one.name in pair.found), key=lambda one: -pair.found[one.name].psi)
    if not known:
        return
    moved = [one for one in known if _moved(pair, one.name, config)]
    worst = (moved or known)[0]
    difference, chance = pair.found[worst.name], pair.adjusted[worst.name]
    detail = f"{difference.told}; PSI {difference.psi:.3f}, chance {chance:.2g}"
    if moved:
        what = "other labels" if check == "labels" else "other values"
        since = "since the champion was trained" if pair.against == CHAMPION else "than in train"
        many = f"in {listed([one.name for one in moved])}; " if len(moved) > 1 else ""
        detail = f"{what} {since} ({many}{detail}); {_MEND[pair.against].format(check)}"
    elif difference.psi > config.drift_psi:
        detail += ", as it comes with so few samples"
    severity = config.labels if check == "labels" else config.drift
    where = f"{pair.where}.{worst.name if len(moved) == 1 else worst.column}"
    yield Finding(check, where, severity, not moved, detail, difference.psi, config.drift_psi, pair.against)


def _moved(pair: Compared, name: str, config: Prepare) -> bool:
    """Far, and not by chance."""
    return pair.found[name].psi > config.drift_psi and pair.adjusted[name] < config.drift_p
