"""Compare the profiles of splits with each other and with the champion's training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pipeline.contract.settings.stages import Prepare
from pipeline.data_checks.near_duplicates import Pair
from pipeline.data_checks.profile import Feature, Histogram, Profile
from pipeline.data_checks.rules import (
    CHAMPION,
    MAX_NAMES,
    SPLITS,
    CheckResult,
    Difference,
    Reference,
    Severity,
    by_column,
    check_champion_schema,
    check_missing,
    check_ranges,
    check_split_schema,
    differences,
)
from pipeline.statistics.significance import holm
from pipeline.system.wording import join_names

DRIFT_PSI = 0.2  # population stability index; smaller differences are no drift
DRIFT_P_VALUE = 0.01  # probability of any false alarm among all features of all splits (Holm)
_UNEXPLAINED = 2.0  # times what time explains
_AFTER_TRAINING = (
    "that is more than twice what time explains, by the drift within train; to fix it: look for what changed since, "
    "such as a source or a unit; if the change is real, set prepare.drift=off"
)
_FIXES = {
    SPLITS: "to fix it: split at random or by group; if the splits are meant to differ, set prepare.drift=off",
    CHAMPION: "to fix it: check that source and preparation are the same; if the change is real, set prepare.drift=off",
}
_COPIED = "to fix it: remove the copies from test or train, or set prepare.copies=off if equal samples are independent"
_NATURAL = (
    "the inputs take so few values that samples of train are equal as often, so they count like all others; if rows "
    "were repeated before they were split, remove these"
)

Explained: TypeAlias = Mapping[str, Mapping[str, float]]  # split → feature → PSI that is due to time


@dataclass(frozen=True)
class SplitComparison:
    """Two data sets and the differences between them by feature."""

    where: str
    against: Reference
    before: Mapping[str, Histogram]
    after: Mapping[str, Histogram]
    differences: Mapping[str, Difference]
    adjusted_p: Mapping[str, float]  # corrected for all features of all pairs
    explained: Mapping[str, float] = field(default_factory=dict)  # PSI by feature that is due to time

    def is_explained(self, name: str) -> bool:
        """Whether time explains at least half of a difference."""
        limit = _UNEXPLAINED * self.explained.get(name, 0.0)
        return limit > 0 and name in self.differences and self.differences[name].psi <= limit


def compare_profiles(
    profile: Profile,
    flexible: bool,
    config: Prepare,
    champion: tuple[Profile, Mapping[str, Histogram]] | None,
    explained: Explained,
) -> list[CheckResult]:
    """Run all checks except near-duplicates; `champion` is its profile and our training split over its features."""
    ignored = set(config.ignore)
    columns = {
        split: {name: column for name, column in summaries.items() if name not in ignored}
        for split, summaries in profile.columns.items()
    }
    results = [
        *check_split_schema(columns, flexible, config.columns),
        *check_missing(columns, profile.features, config.missing_share, config.missing),
    ]
    splitting = (config.time_column, config.group_column)
    features = tuple(feature for feature in profile.features if feature.column not in splitting)
    others = [split for split in profile.columns if split != "train"]
    for pair in _compare([(split, SPLITS, features, _histograms(features, split)) for split in others]):
        results += _check_drift(replace(pair, explained=explained.get(pair.where, {})), profile, features, config)
    if champion is not None:
        champion_profile, our_histograms = champion
        features = tuple(
            feature
            for feature in champion_profile.features
            if feature.column not in ignored and _same_shape(feature.column, champion_profile, profile)
        )
        results += check_champion_schema(champion_profile, profile, ignored, flexible, config.columns)
        for pair in _compare([("train", CHAMPION, features, our_histograms)]):
            results += _check_drift(pair, champion_profile, features, config)
    return results


def check_copies(
    duplicates: Sequence[Mapping[str, Any]], is_natural: bool, all_copied: bool, severity: Severity
) -> Iterator[CheckResult]:
    """Check for identical samples in two splits, and for a test set of copies only."""
    count, detail = len(duplicates), "no sample is in more than one split"
    if duplicates:
        a, b = (f"{place['split']}[{place['index']}]" for place in (duplicates[0]["a"], duplicates[0]["b"]))
        meaning = _NATURAL if is_natural else f"the gate judges the candidate also without those in test; {_COPIED}"
        detail = f"{count} samples are in more than one split, as {b} = {a} (data.json has the places); {meaning}"
    yield CheckResult("copies", "all splits", severity, not duplicates, detail, float(count), 0.0)
    if all_copied:
        detail = f"every sample is a copy of a training sample, so that none is left to judge by; {_COPIED}"
        yield CheckResult("copies", "test", "error", False, detail, float(count), 0.0)


def check_near_duplicates(pairs: Mapping[str, Sequence[Pair]], severity: Severity) -> Iterator[CheckResult]:
    for column, duplicates in pairs.items():
        if not duplicates:
            detail = "no near-duplicates between splits"
            yield CheckResult("near", column, severity, True, detail, 0.0, 0.0)
            continue
        a, b = duplicates[0].a, duplicates[0].b
        detail = (
            f"{len(duplicates)} pairs of samples in two splits are nearly identical, as {b[0]}[{b[1]}] ≈ "
            f"{a[0]}[{a[1]}] ({duplicates[0].distance:.2f} of the usual distance between neighbors); to fix it: remove "
            "one of each, or keep samples of one group (person, page, scene) in one split"
        )
        yield CheckResult("near", column, severity, False, detail, float(len(duplicates)), 0.0)


def _same_shape(column: str, champion: Profile, ours: Profile) -> bool:
    """Return False for a column whose shape differs: its features cannot be compared, the schema check reports it."""
    before, after = (profile.columns["train"].get(column) for profile in (champion, ours))
    return before is None or after is None or before.shape == after.shape


def _histograms(features: Sequence[Feature], split: str) -> dict[str, Histogram]:
    return {feature.name: feature.splits[split] for feature in features if split in feature.splits}


def _compare(
    sides: Sequence[tuple[str, Reference, tuple[Feature, ...], Mapping[str, Histogram]]],
) -> list[SplitComparison]:
    """Compute differences to the training data, with p-values corrected over all features of all pairs."""
    trained = [_histograms(features, "train") for _, _, features, _ in sides]
    by_pair = [
        differences(features, before, after) for (_, _, features, after), before in zip(sides, trained, strict=True)
    ]
    adjusted = iter(holm([difference.p for by_feature in by_pair for difference in by_feature.values()]))
    return [
        SplitComparison(split, against, before, after, by_feature, {name: next(adjusted) for name in by_feature})
        for (split, against, _, after), before, by_feature in zip(sides, trained, by_pair, strict=True)
    ]


def _check_drift(
    pair: SplitComparison, profile: Profile, features: tuple[Feature, ...], config: Prepare
) -> Iterator[CheckResult]:
    inputs = tuple(feature for feature in features if feature.column in profile.inputs)
    labels = tuple(feature for feature in features if feature.column not in profile.inputs)
    unit_severity = config.columns if pair.against == SPLITS else None
    ranges = tuple(feature for feature in inputs if not pair.is_explained(feature.name))
    yield from check_ranges(ranges, pair.before, pair.after, pair.where, config.drift, pair.against, unit_severity)
    for check, group in (("drift", inputs), ("labels", labels)):
        for column in by_column(group).values():
            yield from _check_column_drift(check, pair, column, config)


def _check_column_drift(
    check: str, pair: SplitComparison, features: list[Feature], config: Prepare
) -> Iterator[CheckResult]:
    """Yield one result per column, for the feature that differs most."""
    features_compared = [feature for feature in features if feature.name in pair.differences]
    features_compared.sort(key=lambda feature: -pair.differences[feature.name].psi)
    if not features_compared:
        return
    drifted = [feature for feature in features_compared if _has_drifted(pair, feature.name)]
    worst = (drifted or features_compared)[0]
    difference, p_value = pair.differences[worst.name], pair.adjusted_p[worst.name]
    detail = f"{difference.description}; PSI {difference.psi:.3f}, p = {p_value:.2g}"
    if drifted:
        subject = "other labels" if check == "labels" else "other values"
        reference = "since the champion was trained" if pair.against == CHAMPION else "than in train"
        names = f"in {join_names([feature.name for feature in drifted], MAX_NAMES)}; " if len(drifted) > 1 else ""
        fix = _AFTER_TRAINING if pair.explained else _FIXES[pair.against]
        detail = f"{subject} {reference} ({names}{detail}); {fix}"
    elif difference.psi > DRIFT_PSI:
        is_explained = pair.is_explained(worst.name)
        detail += ", which time explains" if is_explained else ", which is not significant for so few samples"
    location = f"{pair.where}.{worst.name if len(drifted) == 1 else worst.column}"
    yield CheckResult(check, location, config.drift, not drifted, detail, difference.psi, DRIFT_PSI, pair.against)


def _has_drifted(pair: SplitComparison, name: str) -> bool:
    """Whether the difference is large and significant, and not explained."""
    is_large = pair.differences[name].psi > DRIFT_PSI and pair.adjusted_p[name] < DRIFT_P_VALUE
    return is_large and not pair.is_explained(name)
