"""Run all data checks of a prepare step: scan each split once, compare, write `profile.json` and `checks.json`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pipeline.contract.data import Samples
from pipeline.contract.registry import Entry, champion_name, read_registry
from pipeline.contract.results import NEAR_COPIES
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Prepare
from pipeline.contract.task import Classifier, HasAxes, HasCollate, Ranker, Task
from pipeline.data_checks.champion import champion_profile, missing_champion_note, recorded_champion
from pipeline.data_checks.copies import (
    MIN_TRAINING_SAMPLES,
    Matches,
    are_natural,
    count_comparable,
    find_duplicates,
    find_picture_copies,
    find_row_copies,
)
from pipeline.data_checks.labels import MAX_PROBES, check_label_sets, check_leaks, check_numbering
from pipeline.data_checks.near_duplicates import (
    NEAR_DUPLICATE_DISTANCE,
    CandidateSearch,
    Digests,
    Pair,
    TextColumn,
    count_different_bits,
    count_different_tables,
    group_name,
    small_pictures,
)
from pipeline.data_checks.profile import Feature, Floats, Histogram, Integers, Profile
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
    check_constant,
    check_missing,
    check_ranges,
    check_split_schema,
    differences,
)
from pipeline.data_checks.scan import (
    ScanPlan,
    SimilaritySpace,
    SplitSummary,
    load_rows,
    plan_scan,
    random_samples,
    read_histograms,
    scan_split,
    with_label,
)
from pipeline.statistics.significance import holm
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import write_json
from pipeline.system.wording import join_names, number

_MAX_PAIRS = 100  # near-duplicates that are written; all are counted
_MAX_PRINTED = 5  # results on the terminal; all are written
_ROWS = 4096  # of a single column, read at once


@dataclass(frozen=True)
class CheckedData:
    """The contents of the splits and the results of all checks."""

    splits: Mapping[str, SplitSummary]
    profile: Profile
    results: Sequence[CheckResult]
    duplicates: Sequence[Mapping[str, Any]]  # pairs of places of identical samples
    near_duplicates: Mapping[str, Sequence[Pair]]  # by column
    copies: Sequence[int]  # test samples that the gate also judges without
    champion: Entry | None
    notes: Sequence[str]


def check_data(run: Run, task: Task, splits: Mapping[str, Samples]) -> CheckedData:
    config = run.config.prepare
    registry = read_registry(run.runs, run.config.registry)
    champion = recorded_champion(registry, run.runs, run)
    champion_scan = champion_profile(champion, run.runs) if champion else None
    is_flexible = isinstance(task, HasAxes | HasCollate)
    is_comparable = is_flexible or _have_equal_shapes(task, splits)  # if not, `columns` reports it
    times, groups = (
        {name: read_column(samples, setting, column) for name, samples in splits.items() if column}
        for setting, column in (("time_column", config.time_column), ("group_column", config.group_column))
    )
    plan = plan_scan(task, splits["train"], config.ignore, config.copies in ("error", "warn") and is_comparable)
    features = champion_scan.features if champion_scan else ()
    summaries = {
        name: scan_split(task, samples, plan, features if name == "train" else ()) for name, samples in splits.items()
    }
    profile, explained = _build_profile(task, plan, summaries), _explain_drift(task, splits["train"], plan, times)
    champion_data = (champion_scan, summaries["train"].champion_histograms) if champion_scan else None
    near_duplicates = {
        space.name: _find_near_duplicates(space, plan, summaries, splits) for space in plan.spaces
    } | _find_row_copies(plan, summaries)
    copy_notes = _add_picture_copies(near_duplicates, plan, summaries, splits)
    digests = {name: summary.digests for name, summary in summaries.items()}
    duplicates = find_duplicates(digests)
    is_natural = are_natural(plan.pilot, task.inputs, digests["train"], digests["test"])
    copies = [] if config.copies == "off" else _find_copies(task, digests, near_duplicates, is_natural)
    all_copied, action = len(copies) == len(digests["test"]), "warn" if config.copies == "exact" else config.copies
    results = [
        *compare_profiles(profile, is_flexible, config, champion_data, explained),
        *check_copies(duplicates, is_natural, all_copied, action),
        *check_near_duplicates(near_duplicates, action),
        *_check_labels(task, plan, summaries, splits["test"], config),
        *check_overlap(times, groups, config),
        *check_constant(profile, "off" if config.columns == "off" else "warn"),
    ]
    results = [result for result in results if result.severity != "off"]
    missing = missing_champion_note(registry, run.runs, champion_name(run.config))
    notes = [*plan.notes, *copy_notes, *_champion_notes(missing, champion, champion_scan)]
    compared = champion if champion_scan else None
    return CheckedData(summaries, profile, results, duplicates, near_duplicates, copies, compared, notes)


def describe_data(task: Task, splits: Mapping[str, Samples], config: Prepare) -> CheckedData:
    """Describe the data of a task that trains nothing: there is no training data to compare it with."""
    plan = plan_scan(task, next(iter(splits.values())), config.ignore, near_duplicates=False)
    summaries = {name: scan_split(task, samples, plan) for name, samples in splits.items()}
    return CheckedData(summaries, _build_profile(task, plan, summaries), (), (), {}, (), None, plan.notes)


def _have_equal_shapes(task: Task, splits: Mapping[str, Samples]) -> bool:
    first = [samples.batch([0]) for samples in splits.values()]
    return all(len({batch[name].shape for batch in first}) == 1 for name in task.inputs)


def write_checks(data: CheckedData, directory: Path, lower: Collection[str] = ()) -> None:
    """Write files apart from data.json, whose digest identifies the data and must not depend on limits or champions."""
    write_json(directory / "profile.json", data.profile.model_dump(mode="json"))
    pairs = [(column, pair) for column, pairs in data.near_duplicates.items() for pair in pairs]
    champion = {"bundle": data.champion.bundle, "run": data.champion.run} if data.champion else None
    body = {
        "checks": [result.row() for result in data.results],
        "near_duplicate_count": len(pairs),
        "near_duplicates": [pair.row(column) for column, pair in pairs[:_MAX_PAIRS]],
        "champion": champion,
        "notes": list(data.notes),
        "lower_is_better": sorted(lower),  # metrics of the task, for `pipe tune`
    }
    write_json(directory / "checks.json", body)
    write_json(directory / NEAR_COPIES, {"test": list(data.copies)})


def report_results(data: CheckedData) -> None:
    """Print warnings; errors stop the pipeline: all of them are printed, the first is the message."""
    for note in data.notes:
        print(f"note: {note}")
    _print_results("warning", [result for result in data.results if result.level == "warn"])
    if errors := [result for result in data.results if result.level == "error"]:
        if len(errors) > 1:
            _print_results("error", errors)
        rest = f" (and {len(errors) - 1} more, in prepare.partial/checks.json)" if len(errors) > 1 else ""
        raise DataError(f"data: {errors[0].sentence()}{rest}")


def _print_results(level: str, results: Sequence[CheckResult]) -> None:
    for result in results[:_MAX_PRINTED]:
        print(f"{level}: {result.sentence()}", file=sys.stderr)
    if len(results) > _MAX_PRINTED:
        print(
            f"{level}: {len(results) - _MAX_PRINTED} more results like these are in prepare/checks.json",
            file=sys.stderr,
        )


def _build_profile(task: Task, plan: ScanPlan, summaries: Mapping[str, SplitSummary]) -> Profile:
    features = []
    for feature in plan.features:
        splits = {
            split: summary.histograms[feature.name]
            for split, summary in summaries.items()
            if feature.name in summary.histograms
        }
        features.append(feature.model_copy(update={"splits": splits}))
    return Profile(
        inputs=tuple(task.inputs),
        classes=tuple(map(str, task.classes)) if isinstance(task, Classifier) else None,
        columns={split: summary.columns for split, summary in summaries.items()},
        features=tuple(features),
    )


def _find_near_duplicates(
    space: SimilaritySpace, plan: ScanPlan, summaries: Mapping[str, SplitSummary], splits: Mapping[str, Samples]
) -> list[Pair]:
    search = CandidateSearch(
        {split: summary.codes[space.name] for split, summary in summaries.items()},
        {split: summary.digests for split, summary in summaries.items()},
    )

    def distances(a: tuple[str, Integers], b: tuple[str, Integers]) -> Floats:
        sides = [load_rows(splits[split], places, space.columns, plan.rows) for split, places in (a, b)]
        parts = [space.distances(x, y) for x, y in zip(*sides, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0)

    if isinstance(space, TextColumn):
        rows = search.candidates(count_different_tables, space.max_difference)
    else:
        rows = search.candidates(count_different_bits, space.max_difference(plan.pilot, NEAR_DUPLICATE_DISTANCE))
    return search.confirm(rows, distances, NEAR_DUPLICATE_DISTANCE)


def check_overlap(times: Mapping[str, Any], groups: Mapping[str, Any], config: Prepare) -> Iterator[CheckResult]:
    """Yield a failure for each split with samples from before the newest training sample, or of groups of train."""
    for split in (name for name in times if name != "train"):
        newest = float(np.nanmax(times["train"]))
        early = int((times[split] < newest).sum())
        if early:
            detail = (
                f"{early} of {len(times[split])} samples are earlier than the newest training sample "
                f"({number(newest, 10)}); to fix it: split by time, so that training ends before the others begin, or "
                "set prepare.overlap=warn"
            )
            place = f"{split}.{config.time_column}"
            yield CheckResult("time_order", place, config.overlap, False, detail, float(early), 0.0)
    for split in (name for name in groups if name != "train"):
        shared = np.intersect1d(groups["train"], groups[split])
        if len(shared):
            detail = (
                f"{len(shared)} of {len(np.unique(groups[split]))} groups are also in train, such as {shared[0]}, with "
                f"{np.isin(groups[split], shared).sum()} of {len(groups[split])} samples; to fix it: keep all samples "
                "of a group in one split, or set prepare.overlap=warn"
            )
            place = f"{split}.{config.group_column}"
            yield CheckResult("group", place, config.overlap, False, detail, float(len(shared)), 0.0)


def _explain_drift(task: Task, train: Samples, plan: ScanPlan, times: Mapping[str, Floats]) -> Explained:
    """Return for each split the PSI of its features that time explains; empty if the splits are not by time.

    The training data itself drifts between its first quarter and its last samples, about as many as the split has. As
    the PSI of a shift grows with its square, it is multiplied by the square of how much farther in time the split is
    from training than these two are apart.
    """
    explained = {}
    for split in (name for name in times if name != "train"):
        known, count = times["train"], len(train)
        order = np.argsort(known, kind="stable")
        last = order[-max(1, min(max(len(times[split]), count // 10), count // 4)) :]
        first = order[: max(1, count // 4)]
        apart = float(np.mean(known[last]) - np.mean(known[first])) or 1.0
        farther = max(1.0, float(np.mean(times[split]) - np.mean(known)) / apart)
        before, after = (read_histograms(task, train, part, plan) for part in (first, last))
        drift = differences(plan.features, before, after)
        explained[split] = {name: difference.psi * farther**2 for name, difference in drift.items()}
    return explained


def read_column(samples: Samples, setting: str, column: str) -> Any:
    """Return the numbers of the column that a setting names."""
    parts = []
    for batch in samples.batches(range(len(samples)), _ROWS):
        if column not in batch:
            raise ConfigError(f"prepare.{setting}: data({samples.split!r}) has no column {column} ({', '.join(batch)})")
        if batch[column].ndim != 1:
            raise ConfigError(f"prepare.{setting}: {column} must be one number per sample")
        parts.append(batch[column].to("cpu").numpy())
    return np.concatenate(parts)


def _check_labels(
    task: Task, plan: ScanPlan, summaries: Mapping[str, SplitSummary], test: Samples, config: Prepare
) -> Iterator[CheckResult]:
    inputs = [name for name in task.inputs if name not in config.ignore and not plan.pilot[name].is_complex()]
    if config.leaks != "off":
        yield from check_leaks(plan.pilot, inputs, config.leaks)
    if config.columns == "off":
        return
    yield from check_label_sets({split: summary.classes for split, summary in summaries.items()}, config.columns)
    if isinstance(task, Classifier):
        probes = with_label(task, random_samples(test, min(len(test), MAX_PROBES)))
        yield from check_numbering(plan.pilot, probes, inputs, config.columns)


def _find_copies(
    task: Task, digests: Mapping[str, Digests], near_duplicates: Mapping[str, Sequence[Pair]], is_natural: bool
) -> list[int]:
    """Return test samples that are copies of a training sample, or of an earlier test sample."""
    sides = ("train", "test")
    copies = {pair.b[1] for pairs in near_duplicates.values() for pair in pairs if (pair.a[0], pair.b[0]) == sides}
    if not is_natural:
        test = digests["test"]
        copies |= set(np.flatnonzero(np.isin(test, digests["train"])).tolist())
        if not isinstance(task, Ranker):  # an item may be in several queries
            copies |= set(range(len(test))) - set(np.unique(test, return_index=True)[1].tolist())
    return sorted(copies)


def _find_row_copies(plan: ScanPlan, summaries: Mapping[str, SplitSummary]) -> dict[str, list[Pair]]:
    """Return near copies among rows of few numbers, between training and test data."""
    pairs = {}
    for name in map(group_name, plan.short):
        train, test = (summaries[split].short[name] for split in ("train", "test"))
        if train.shape[1:] == test.shape[1:]:  # else the schema check reports it
            places = np.arange(len(test))
            pairs[name] = _new_pairs(summaries, places, find_row_copies(train, test))
    return pairs


def _add_picture_copies(
    near_duplicates: dict[str, list[Pair]],
    plan: ScanPlan,
    summaries: Mapping[str, SplitSummary],
    splits: Mapping[str, Samples],
) -> list[str]:
    """Add test pictures that are a transformed training picture; return notes on pictures that were not compared."""
    notes = []
    for space in plan.pictures:
        train, test = summaries["train"].pictures[space.name], splits["test"]
        if len(train) < MIN_TRAINING_SAMPLES:
            continue
        count, column = count_comparable(len(train), len(test)), space.columns[0]
        if count < len(test):
            notes.append(
                f"{space.name}: mirrored, rotated and shifted copies were searched for {count} of {len(test)} test "
                "pictures, chosen at random"
            )
        places = np.sort(np.random.Generator(np.random.PCG64(7)).choice(len(test), count, replace=False))
        pictures = (small_pictures(batch[column]) for batch in load_rows(test, places, [column], plan.rows))
        matches = find_picture_copies(train, pictures)
        listed = {(pair.a, pair.b) for pair in near_duplicates[space.name]}
        new = [pair for pair in _new_pairs(summaries, places, matches) if (pair.a, pair.b) not in listed]
        near_duplicates[space.name] += new
    return notes


def _new_pairs(summaries: Mapping[str, SplitSummary], places: Integers, matches: Matches) -> list[Pair]:
    """Return the matches as pairs; a test sample with an exact copy in training is reported by the leak check."""
    test, train = summaries["test"].digests, summaries["train"].digests
    pairs = [
        Pair(("train", int(original)), ("test", int(places[copy])), float(distance))
        for copy, original, distance in zip(*matches, strict=True)
    ]
    known = set(train.tolist())
    return [pair for pair in pairs if test[pair.b[1]] not in known]


def _champion_notes(missing: str, champion: Entry | None, champion_scan: Profile | None) -> list[str]:
    if missing:
        return [missing]
    if champion is None or champion_scan is not None:
        return []
    problem = f"run {champion.run} of the champion has no prepare/profile.json that this version reads"
    return [f"{problem}, so the data was not compared with the champion's training data"]


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
