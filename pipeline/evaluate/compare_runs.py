"""Two runs' stored predictions, sample by sample: which of them is better on the test set that both were judged on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.contract.statistics.bootstrap import BOOTSTRAP_SEED
from pipeline.contract.errors import DataError
from pipeline.contract.files import digest_file
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.significance import holm, mcnemar, permutation_p_value, smallest_difference
from pipeline.evaluate.metrics import Measure, measures
from pipeline.evaluate.predictions import ACTUAL, BASELINE, CANDIDATE, Columns


def compare_runs(first: Run, second: Run, config: Evaluate) -> dict[str, Any]:
    """Every metric that both have, `first` less `second`; refused where they were judged on different samples."""
    mine, other = read_records(first), read_records(second)
    prints = [str(_metrics(run).get("test_fingerprint", "")) for run in (first, second)]
    if prints[0] != prints[1] or not prints[0]:
        raise DataError(
            f"runs {first.id} and {second.id} were judged on different test data (fingerprints {_short(prints[0])} and "
            f"{_short(prints[1])}), so their samples cannot be paired; evaluate both on the same data"
        )
    classes = _metrics(first).get("classes")
    columns = _paired(mine, other, classes == _metrics(second).get("classes"))
    found = measures(columns, classes, compared=True)
    rows = [_row(one, config) for one in found.values() if one.candidate is not None and one.baseline is not None]
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["adjusted_p"] = adjusted
    return {"run": first.id, "against": second.id, "test_fingerprint": prints[0], "metrics": rows}


def describe_comparison(found: Mapping[str, Any]) -> Iterator[str]:
    test = _short(found["test_fingerprint"])
    yield f"run {found['run']} against run {found['against']}, on the same test samples ({test})"
    for row in found["metrics"]:
        if row["difference"] is None:
            yield f"{row['metric']}: cannot be compared, a value is not finite or undefined"
        else:
            yield f"{_compared(row)}, {_chance(row, len(found['metrics']))}{_shows(row)}"
        if row["mcnemar"]:
            one = row["mcnemar"]
            yield (
                f"  McNemar's exact test: p = {one['p_value']:.3g}; {one['only_candidate']} samples only the first "
                f"gets right, {one['only_baseline']} only the second"
            )


def _compared(row: Mapping[str, Any]) -> str:
    difference = row["difference"]
    bounds = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
    return (
        f"{row['metric']} {row['candidate']:.4f} against {row['baseline']:.4f}: {_word(difference['estimate'])} "
        f"({row['confidence']:.0%} interval {bounds})"
    )


def _chance(row: Mapping[str, Any], metrics: int) -> str:
    told = "no more than chance" if row["adjusted_p"] >= 1 - row["confidence"] else "not by chance"
    return f"{told} (adjusted p = {row['adjusted_p']:.3g} over {metrics} metrics)"


def _shows(row: Mapping[str, Any]) -> str:
    if row["detectable"] is None:
        return ""
    return f"; {row['samples']} {row['unit']} show a difference of {row['detectable']:.3g}"


def read_records(run: Run) -> Columns:
    """What the evaluate step kept of each sample, every byte as it was sealed."""
    path = run.output("evaluate") / "predictions.npz"
    if not path.is_file():
        raise DataError(f"run {run.id} has no per-sample records; `pipe run --resume {run.id}` makes them")
    record = run.read().steps.get("evaluate")
    for file in (path, path.with_name("metrics.json")):
        if record is not None and record.outputs.get(file.name) not in (None, digest_file(file)):
            raise DataError(f"{file}: changed since it was judged; evaluate again")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); evaluate again") from error


def _paired(mine: Columns, other: Columns, same_classes: bool) -> Columns:
    """The second run's candidate in the baseline's place."""
    for name in (name for name in mine.keys() & other.keys() if "." not in name):
        if not np.array_equal(mine[name], other[name]):
            raise DataError(f"the two runs have other true values of the same samples ({name}): the task changed")
    if ACTUAL in mine and not same_classes:
        raise DataError("the two runs tell other classes apart; their samples cannot be paired")
    found = {name: values for name, values in mine.items() if not name.startswith((CANDIDATE, BASELINE))}
    for name in mine.keys() & other.keys():
        if name.startswith(CANDIDATE):
            found[name] = mine[name]
            found[BASELINE + name.removeprefix(CANDIDATE)] = other[name]
    return _in_order(found, mine)


def _in_order(found: Columns, like: Columns) -> Columns:
    names = [name for name in like if name in found]
    return {name: found[name] for name in [*names, *sorted(found.keys() - set(names))]}


def _row(measure: Measure, config: Evaluate) -> dict[str, Any]:
    difference = measure.difference(config.confidence, config.resamples, BOOTSTRAP_SEED)
    values = measure.contributions()
    finite = difference is not None and math.isfinite(float(values.sum()))
    detectable = smallest_difference(values, config.confidence) if finite else math.inf
    return {
        "metric": measure.name,
        "candidate": _finite(measure.value("candidate")),
        "baseline": _finite(measure.value("baseline")),
        "difference": asdict(difference) if finite and difference is not None else None,
        "confidence": config.confidence,
        "p_value": permutation_p_value(values, config.resamples, BOOTSTRAP_SEED) if finite else 1.0,
        "mcnemar": _mcnemar(measure),
        "samples": measure.units,
        "unit": measure.unit,
        "detectable": detectable if math.isfinite(detectable) else None,
        "lower_is_better": measure.lower,
    }


def _mcnemar(measure: Measure) -> dict[str, Any] | None:
    if measure.slices is None or measure.slices[1] is None:
        return None
    own, other = measure.slices
    found = mcnemar(own, other) if other is not None else None
    return None if found is None else asdict(found)


def _metrics(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.output("evaluate") / "metrics.json").read_text())
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(fingerprint: str) -> str:
    return fingerprint[:12] or "none"


def _word(estimate: float) -> str:
    return f"{'better' if estimate > 0 else 'worse'} by {abs(estimate):.4f}" if estimate else "the same on average"
