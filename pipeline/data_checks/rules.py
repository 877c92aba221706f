"""Single checks of the data: schema, missing values, ranges, and differences of distributions.

Two histograms differ by the population stability index (PSI); significance is tested by Kolmogorov-Smirnov for numbers
and by a z-test of frequencies for ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pipeline.data_checks.profile import ColumnSummary, Feature, Floats, Histogram, Profile
from pipeline.system.wording import join_names, number

Counts: TypeAlias = np.ndarray[Any, Any]

_PSI_GROUPS = 10  # equally full bins of the PSI; values outside the training range have their own
_MIN_EXPECTED = 5.0  # count in the smaller split, for the normal approximation


@dataclass(frozen=True)
class Difference:
    psi: float
    p: float
    description: str  # the largest part of it


def differences(
    features: tuple[Feature, ...], before: Mapping[str, Histogram], after: Mapping[str, Histogram]
) -> dict[str, Difference]:
    """Return differences by feature, for features with values on both sides."""
    result = {}
    for feature in features:
        a, b = before.get(feature.name), after.get(feature.name)
        if a is not None and b is not None and any(a.bins) and any(b.bins):
            result[feature.name] = _id_difference(feature, a, b) if feature.kind == "ids" else _numeric_difference(a, b)
    return result


def psi(before: Counts, after: Counts) -> float:
    """Return the population stability index; half a count is added to each bin to keep it finite."""
    a, b = before + 0.5, after + 0.5
    a, b = a / a.sum(), b / b.sum()
    terms: Floats = (b - a) * np.log(b / a)
    return float(terms.sum())


def ks_p_value(distance: float, n: int, m: int) -> float:
    """Return the p-value of a Kolmogorov-Smirnov distance (Stephens' approximation); conservative for histograms."""
    root = math.sqrt(n * m / (n + m))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.1:  # the series converges slowly, and the value is 1 to many digits
        return 1.0
    terms = [(1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * sum(terms)))


def _numeric_difference(before: Histogram, after: Histogram) -> Difference:
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    gaps = np.abs(np.cumsum(a) / a.sum() - np.cumsum(b) / b.sum())
    distance = float(gaps.max())
    groups = _decile_groups(a)
    description = f"KS distance {distance:.3f}"
    if before.mean is not None and after.mean is not None:
        description += f", mean {number(before.mean)} → {number(after.mean)}"
    return Difference(
        psi(np.bincount(groups, a), np.bincount(groups, b)),
        ks_p_value(distance, int(a.sum()), int(b.sum())),
        description,
    )


def _decile_groups(counts: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return which tenth of the training split each bin belongs to; bins outside its range stay separate."""
    inner = counts[1:-1]
    if not inner.sum():
        return np.arange(len(counts))
    middle = np.cumsum(inner) - inner / 2
    tenth = np.unique(np.floor(middle / inner.sum() * _PSI_GROUPS), return_inverse=True)[1]
    return np.concatenate([[0], tenth + 1, [tenth.max() + 2]])


def _id_difference(feature: Feature, before: Histogram, after: Histogram) -> Difference:
    names = [*(feature.words or map(str, feature.ids)), "all others"]
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    squares = np.asarray(before.squares, float) + np.asarray(after.squares, float)
    rare = _rare_ids(a + b, squares, before.samples, after.samples)
    group = np.where(rare, 0, np.cumsum(~rare))
    z = _scores(a, b, squares, before.samples, after.samples)
    z[rare] = 0.0
    p_value = math.erfc(float(z.max()) / math.sqrt(2)) * max(1, int((~rare).sum()))
    worst = int(z.argmax())
    description = f"{names[worst]}: {a[worst] / a.sum():.2%} → {b[worst] / b.sum():.2%}"
    return Difference(psi(np.bincount(group, a), np.bincount(group, b)), min(1.0, p_value), description)


def _rare_ids(total: Floats, squares: Floats, n: int, m: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether an id is too rare to test; dependent tokens, as those of one text, count less."""
    independent = total**2 / np.maximum(squares, 1)
    return np.asarray(independent * min(n, m) / (n + m) < _MIN_EXPECTED)


def _scores(a: Floats, b: Floats, squares: Floats, n: int, m: int) -> Floats:
    """Return z of the mean count per sample: samples are independent, the tokens in them are not."""
    mean = (a + b) / (n + m)
    variance = np.maximum(squares / (n + m) - mean**2, 0) * (1 / n + 1 / m)
    gap = np.abs(a / n - b / m)
    return np.where(variance > 0, gap / np.sqrt(np.where(variance > 0, variance, 1)), np.where(gap > 0, 40.0, 0.0))


Severity: TypeAlias = Literal["error", "warn", "off"]
Level: TypeAlias = Literal["ok", "warn", "error"]
Reference: TypeAlias = Literal["splits", "champion"]

MAX_NAMES = 5  # in a message

SPLITS: Reference = "splits"
CHAMPION: Reference = "champion"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check in one place; `severity` is the configured action if it does not pass."""

    check: str
    where: str
    severity: Severity
    passed: bool
    detail: str
    value: float | None = None
    limit: float | None = None
    against: Reference = SPLITS

    @property
    def level(self) -> Level:
        return "ok" if self.passed or self.severity == "off" else self.severity

    def row(self) -> dict[str, Any]:
        body = asdict(self) | {"level": self.level, "value": round_value(self.value), "limit": round_value(self.limit)}
        return {name: value for name, value in body.items() if name not in ("severity", "passed")}

    def sentence(self) -> str:
        return f"{self.where}: {self.detail}"


def round_value(value: float | None) -> float | None:
    """Round to six digits, and replace infinity by a large number."""
    return None if value is None else float(f"{min(value, 1e300):.6g}")


_MAX_OUTSIDE = 0.5  # fraction of values outside the known range; fewer are outliers
_MIN_UNIT_FACTOR = 2.0  # between the numbers of two units
_MAX_UNIT_ERROR = 1.5  # between the factors of mean and spread, which agree for another unit
_MIN_UNIT_VALUES = 20  # in each split; fewer have a small range by chance


def check_missing(
    columns: Mapping[str, Mapping[str, ColumnSummary]], features: Sequence[Feature], share: float, severity: Severity
) -> Iterator[CheckResult]:
    """Yield a result per column of a split with missing numbers, or one if nothing is missing."""
    parts = by_column(features)
    rows = [
        (
            split,
            name,
            facts,
            *max([(_fraction(facts.missing, facts.values), name), *_missing_fractions(parts.get(name, []), split)]),
        )
        for split, summaries in columns.items()
        for name, facts in summaries.items()
    ]
    worst = max((fraction for *_, fraction, _ in rows), default=0.0)
    for split, name, facts, fraction, feature in rows:
        if fraction > share:
            description = "every number is" if fraction == 1 else f"{number(100 * fraction, 2)}% of the numbers are"
            detail = (
                f"{description} NaN or infinite ({facts.missing} of {facts.values} in {name}); to fix it: fill or drop "
                f"them in data({split!r}), or set prepare.missing_share={_round_up(worst):g}, which accepts all "
                "that are missing now"
            )
            yield CheckResult("missing", f"{split}.{feature}", severity, False, detail, fraction, share)
    if worst <= share:
        detail = f"at most {number(100 * worst, 2)}% of a feature are" if worst else "no number is"
        yield CheckResult("missing", "all splits", severity, True, f"{detail} NaN or infinite", worst, share)


def by_column(features: Sequence[Feature]) -> dict[str, list[Feature]]:
    columns: dict[str, list[Feature]] = {}
    for feature in features:
        columns.setdefault(feature.column, []).append(feature)
    return columns


def _missing_fractions(features: Sequence[Feature], split: str) -> Iterator[tuple[float, str]]:
    """Yield the fraction per number of a vector: one that is always missing is a small part of the whole."""
    for feature in features:
        if feature.kind == "numbers" and split in feature.splits:
            histogram = feature.splits[split]
            yield _fraction(histogram.samples - sum(histogram.bins), histogram.samples), feature.name


def _fraction(count: int, total: int) -> float:
    return count / total if total else 0.0


def _round_up(part: float) -> float:
    """Round a fraction up to three digits, so that the suggested limit accepts it."""
    return min(1.0, float(np.ceil(part * 1000) / 1000))


def check_split_schema(
    columns: Mapping[str, Mapping[str, ColumnSummary]], flexible: bool, severity: Severity
) -> Iterator[CheckResult]:
    """Check that common columns have the same type and shape. `flexible`: axis sizes may differ, not their number."""
    train, consistent = columns["train"], True
    for split, summaries in columns.items():
        for name in sorted(summaries.keys() & train.keys()):
            if difference := _schema_difference(train[name], summaries[name], flexible):
                consistent = False
                detail = f"{difference} as in train.{name}; to fix it: make data() return the same for both"
                yield CheckResult("schema", f"{split}.{name}", severity, False, detail)
    if consistent:
        yield CheckResult("schema", "all splits", severity, True, f"{len(train)} columns have one type and shape")


def check_champion_schema(
    before: Profile, profile: Profile, ignored: Set[str], flexible: bool, severity: Severity
) -> Iterator[CheckResult]:
    """Check that inputs and classes are those the champion was trained on."""
    problems = list(_schema_changes(before, profile, ignored, flexible))
    fix = "if this is intended, set prepare.columns=warn; the champion cannot predict such data"
    for column, change in problems:
        yield CheckResult("schema", column, severity, False, f"{change}; {fix}", against=CHAMPION)
    if not problems:
        yield CheckResult(
            "schema", "train", severity, True, "types, shapes and classes are the champion's", None, None, CHAMPION
        )


def _schema_changes(
    champion: Profile, profile: Profile, ignored: Set[str], flexible: bool
) -> Iterator[tuple[str, str]]:
    champion_columns, our_columns = champion.columns["train"], profile.columns["train"]
    for name in champion.inputs:
        if name not in our_columns and name not in ignored:
            yield f"train.{name}", "the champion's input is missing"
    for name in profile.inputs:
        if name not in champion_columns and name not in ignored:
            yield f"train.{name}", "the champion's data has no such input"
    for name in sorted(champion_columns.keys() & our_columns.keys() - ignored):
        if difference := _schema_difference(champion_columns[name], our_columns[name], flexible):
            yield f"train.{name}", f"{difference} as the champion was trained on"
    if champion.classes != profile.classes:
        yield "classes", _class_difference(champion.classes or (), profile.classes or ())


def check_constant(profile: Profile, severity: Severity) -> Iterator[CheckResult]:
    """Yield a failure that names the inputs, and numbers of vectors except tokens and masks, of one value."""
    names = []
    for column, features in by_column([each for each in profile.features if each.column in profile.inputs]).items():
        constant = [feature.name for feature in features if feature.kind != "sums" and _is_constant(feature)]
        summary = profile.columns["train"][column]
        is_table = "float" in summary.dtype and len(constant) < len(features)
        names += constant if is_table or math.prod(summary.shape) == 1 else []
    if names:
        detail = (
            f"{join_names(names, MAX_NAMES)}: the same value in every sample, which carries no information; to fix it: "
            "remove it from the inputs, or look for why it never changes"
        )
        yield CheckResult("constant", "all splits", severity, False, detail, float(len(names)), 0.0)


def _is_constant(feature: Feature) -> bool:
    values = {value for side in feature.splits.values() for value in (side.low, side.high)}
    return len(values) == 1 and all(side.samples == sum(side.bins) for side in feature.splits.values())


def _schema_difference(expected: ColumnSummary, actual: ColumnSummary, flexible: bool) -> str:
    """Describe the difference, or return an empty string."""
    if expected.dtype != actual.dtype:
        return f"type {actual.dtype}, not {expected.dtype}"
    sizes = len(expected.shape) == len(actual.shape) if flexible else expected.shape == actual.shape
    return "" if sizes else f"shape {list(actual.shape)} of a sample, not {list(expected.shape)}"


def _class_difference(champion_classes: tuple[str, ...], our_classes: tuple[str, ...]) -> str:
    added = [name for name in our_classes if name not in champion_classes]
    removed = [name for name in champion_classes if name not in our_classes]
    changes = [f"new {join_names(added, MAX_NAMES)}"] if added else []
    changes += [f"removed {join_names(removed, MAX_NAMES)}"] if removed else []
    difference = "; ".join(changes) or "another order, so every index means another class"
    return f"the classes are not the champion's ({difference})"


def check_ranges(
    features: tuple[Feature, ...],
    before: Mapping[str, Histogram],
    after: Mapping[str, Histogram],
    where: str,
    severity: Severity,
    against: Reference = SPLITS,
    unit_severity: Severity | None = None,
) -> Iterator[CheckResult]:
    """Yield results for columns whose values are mostly outside the known range.

    `unit_severity` is for values that another unit explains: mean and spread are larger or smaller by one factor.
    """
    shares: dict[str, dict[str, float]] = {}  # column → feature
    left: set[str] = set()  # features of which known values are outside the new range
    for feature in features:
        a, b = before.get(feature.name), after.get(feature.name)
        if feature.kind == "ids" or a is None or b is None or not any(a.bins) or not any(b.bins):
            continue
        shares.setdefault(feature.column, {})[feature.name] = max(_fraction_outside(b), _fraction_left(feature, a, b))
        if _fraction_left(feature, a, b) > _fraction_outside(b):
            left.add(feature.name)
    worst = max((share for fractions in shares.values() for share in fractions.values()), default=0.0)
    for column, fractions in shares.items():
        outside = sorted(
            (name for name, share in fractions.items() if share > _MAX_OUTSIDE), key=lambda name: -fractions[name]
        )
        if outside:
            a, b, share = before[outside[0]], after[outside[0]], fractions[outside[0]]
            also = f" (also {join_names(outside[1:], MAX_NAMES)})" if len(outside) > 1 else ""
            which = (
                "former values are outside the latter" if outside[0] in left else "latter values are outside the former"
            )
            detail = (
                f"{number(a.low)} … {number(a.high)} became {number(b.low)} … {number(b.high)}, and {share:.0%} of "
                f"the {which} range{also}; to fix it: look for a change of unit, scale or encoding"
            )
            location = f"{where}.{outside[0] if len(fractions) == 1 else column}"
            text = detail if location.endswith(outside[0]) else f"{outside[0]}: {detail}"
            action = severity
            if unit_severity is not None and any(_is_other_unit(before[name], after[name]) for name in outside):
                action = unit_severity
            yield CheckResult("range", location, action, False, text, share, _MAX_OUTSIDE, against)
    if worst <= _MAX_OUTSIDE:
        detail = f"at most {worst:.0%} of a feature's values are outside the known range"
        yield CheckResult("range", where, severity, True, detail, worst, _MAX_OUTSIDE, against)


def _is_other_unit(before: Histogram, after: Histogram) -> bool:
    """Whether one factor explains mean and spread; a trend, such as time in later data, changes only one of them."""
    if min(sum(before.bins), sum(after.bins)) < _MIN_UNIT_VALUES or not before.spread or not after.spread:
        return False
    if before.mean is None or after.mean is None:
        return False
    factor = after.spread / before.spread
    sizes = [math.hypot(side.mean or 0.0, side.spread or 0.0) for side in (before, after)]
    ratio = sizes[1] / sizes[0] / factor
    return max(factor, 1 / factor) >= _MIN_UNIT_FACTOR and max(ratio, 1 / ratio) <= _MAX_UNIT_ERROR


def _fraction_outside(after: Histogram) -> float:
    """Return the fraction of values outside the edges."""
    return (after.bins[0] + after.bins[-1]) / sum(after.bins) if len(after.bins) > 1 else 0.0


def _fraction_left(feature: Feature, before: Histogram, after: Histogram) -> float:
    """Return the fraction of the known values outside the new range, by whole bins."""
    if after.low is None or after.high is None or not feature.edges:
        return 0.0
    edges, counts = np.asarray(feature.edges), np.asarray(before.bins[1:-1])
    is_outside = (edges[1:] < after.low) | (edges[:-1] >= after.high)
    return float(counts[is_outside].sum() / sum(before.bins))
