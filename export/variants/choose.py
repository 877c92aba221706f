"""Make, run, time and evaluate all variants of a verified file, and choose one.

`decide` chooses from the results alone; `rows`, `table` and `explanations` describe them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from export.checks.fault_search import FirstWrong, find_first_wrong
from export.conversion.optimize import check_file
from export.conversion.to_onnx import tensor_specs
from export.subject import ModelExporter
from export.variants import judge
from export.variants.judge import Deviation
from export.variants.quantize import Converter, VariantInputs
from export.variants.samples import SampleComparison
from export.variants.timing import SIZES, Timing, measure_times
from pipeline.contract.config import Config
from pipeline.contract.settings.stages import FASTEST, Export
from pipeline.contract.task import is_evaluated
from pipeline.statistics.intervals import Interval
from pipeline.system.errors import PipelineError, StageError
from pipeline.system.files import digest_file
from pipeline.system.wording import align

FP32 = "fp32"


@dataclass(frozen=True)
class VariantResult:
    """The results for one variant, as far as it could be built and run."""

    name: str
    path: Path
    faults: tuple[str, ...] = ()
    note: str = ""  # what a reader should know about how it was built
    deviation: Deviation | None = None  # None: it did not run
    outcome: judge.MetricResult | None = None
    timing: Timing | None = None
    first_wrong: FirstWrong | None = None
    own_measure: judge.OwnMeasure | None = None
    rounding: float = 0.0  # largest difference expected on other processors

    @property
    def bytes(self) -> int:
        """Return the size including external weights; 0 if it could not be built."""
        if not self.path.exists():
            return 0
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{self.path.name}*"))

    @property
    def share(self) -> Interval | None:
        """Return its share of fp32's time; None if it was not timed."""
        return self.timing.share if self.timing else None


@dataclass(frozen=True)
class VariantEvaluation:
    """Builds, evaluates and times the variants."""

    exporter: ModelExporter
    config: Config
    folder: Path  # for the variants
    converters: Mapping[str, Converter]

    @property
    def path(self) -> Path:
        """Return the verified file."""
        return self.exporter.subject.path

    def entries(self) -> list[VariantResult]:
        """Return the results of all variants, fp32 first; a failure is recorded, not raised."""
        export = self.config.export
        is_only_sized = export.built_variants == (FP32,) and not set(export.budget) - {"megabytes"}
        is_scored = self.exporter.measures_fp32_alone and is_evaluated(self.exporter.subject.task)
        if is_only_sized and not is_scored:
            entry = VariantResult(FP32, self.path)
            return [replace(entry, faults=tuple(judge.budget_faults(export.budget, entry.bytes, None)))]
        results = [self._entry(name) for name in export.built_variants]
        timings = self._measure_times([result for result in results if result.deviation is not None])
        return [self._with_result(replace(result, timing=timings.get(result.name))) for result in results]

    def make_all(self) -> None:
        """Make all variants without judging them; raise why one cannot be made."""
        for name in self.config.export.built_variants:
            self._make(name, self.folder / name / self.path.name)

    def rounding(self, entry: VariantResult) -> float:
        """Return the largest difference expected on other processors; fp32 needs only the tolerances of the export."""
        if entry.deviation is None or entry.name == FP32:
            return 0.0
        if entry.name == "fp16":
            return entry.deviation.largest
        if isinstance(self._comparison, SampleComparison) and entry.name == "int8-static":
            return 2 * self._comparison.kernel_differences(entry.path)  # other processors may differ more
        return entry.deviation.largest / 4  # one kind of kernel: a few roundings fall otherwise, of all there are

    @cached_property
    def _comparison(self) -> judge.VariantComparison:
        return self.exporter.open_variants(self.config)

    def _entry(self, name: str) -> VariantResult:
        """Make and run the variant; whatever goes wrong is recorded as a fault of this variant."""
        entry = VariantResult(name, self.path if name == FP32 else self.folder / name / self.path.name)
        try:
            entry = replace(entry, note=self._make(name, entry.path))
            return self._evaluate(entry)
        except PipelineError as error:
            return replace(entry, faults=(str(error),))
        except Exception as error:  # quantizers and ONNX Runtime raise a dozen types without a common base
            message = " ".join(str(error).split())[:400]
            return replace(entry, faults=(f"it cannot be made: {type(error).__name__}: {message}",))

    def _make(self, name: str, path: Path) -> str:
        if name == FP32:
            return ""
        path.parent.mkdir(parents=True)
        specs = tensor_specs(self.path)
        material = VariantInputs(
            reference=self.path,
            external=self.path.with_name(f"{self.path.name}.data").exists(),
            weight_bits=INT8_WEIGHT_BITS,
            calibration=lambda: self._comparison.calibration_feeds(CALIBRATION_SAMPLES),
        )
        note = self.converters[name](material, path)
        check_file(path)
        if tensor_specs(path) != specs:
            raise StageError("its inputs and outputs are others than those of fp32, which codec and clients know")
        return note

    def _evaluate(self, entry: VariantResult) -> VariantResult:
        export, gate = self.config.export, self.config.evaluate
        answers = self._comparison.answers(entry.path)
        result = judge.evaluate_variant(gate, answers.sizes)
        return replace(
            entry,
            deviation=answers.deviation,
            outcome=result,
            faults=tuple(judge.find_faults(entry.name, export, gate, result, answers)),
            own_measure=answers.own_measure,
        )

    def _measure_times(self, entries: Sequence[VariantResult]) -> dict[str, Timing]:
        if not entries:
            return {}
        config = self.config
        is_only_reported = len(entries) == 1 and not config.export.budget  # no decision depends on it
        feeds = {size: self._comparison.timed_feed(size) for size in SIZES}
        seconds = min(TIMING_SECONDS, _SHORT_TIMING_SECONDS) if is_only_reported else TIMING_SECONDS
        paths = {entry.name: entry.path for entry in entries}
        return measure_times(paths, feeds, seconds, config.serve.threads, config.evaluate.confidence)

    def _with_result(self, entry: VariantResult) -> VariantResult:
        """Add the cost and, for a variant that failed, its first wrong node."""
        if entry.timing is not None:
            costs = judge.budget_faults(self.config.export.budget, entry.bytes, entry.timing)
            entry = replace(entry, faults=(*entry.faults, *costs))
        if not entry.faults or entry.deviation is None or entry.name == FP32:
            return entry
        try:
            return replace(entry, first_wrong=self._first_wrong(entry, entry.deviation))
        except PipelineError as error:
            return replace(entry, note=f"{entry.note}; the place of the error is unknown: {error}".removeprefix("; "))

    def _first_wrong(self, entry: VariantResult, worst: Deviation) -> FirstWrong | None:
        """Search with the bound of this variant, or with half of its largest error if that is smaller."""
        bound = judge.FP16_TOLERANCE if entry.name == "fp16" else judge.INT8_NOISE
        atol = min(bound * max(self._comparison.scale.values(), default=1.0), worst.largest / 2)
        return find_first_wrong(self.path, entry.path, self._comparison.fault_feed(), rtol=0.0, atol=atol)


def ship(entry: VariantResult, model: Path) -> None:
    """Replace the verified file by the evaluated bytes of the variant."""
    if entry.path == model:
        return
    evaluated_digest = digest_file(entry.path)
    for old_file in model.parent.glob(f"{model.name}*"):
        old_file.unlink()
    for new_file in entry.path.parent.glob(f"{model.name}*"):
        shutil.move(new_file, model.parent / new_file.name)
    check_file(model)
    assert digest_file(model) == evaluated_digest


MIN_SPEEDUP = 0.1  # fraction of fp32's time that a variant must save to be chosen as the fastest
TIMING_SECONDS = 2.0  # for each variant
INT8_WEIGHT_BITS = 7  # 8 are finer, but sums overflow on processors without VNNI
CALIBRATION_SAMPLES = 256  # of the training split, for the ranges of int8-static
_SHORT_TIMING_SECONDS = 0.1  # seconds, if the time is only reported


_EXACTNESS = ("fp32", "fp16", "int8", "int8-static", "int8-dynamic", "int4-gptq", "int4", "int4-128")


@dataclass(frozen=True)
class Choice:
    """The shipped variant, or why none is, and a reason for each variant."""

    name: str  # empty: none
    reasons: dict[str, str]
    refusal: str = ""


def decide(export: Export, contenders: Sequence[VariantResult]) -> Choice:
    passing = [candidate for candidate in contenders if not candidate.faults]
    named = export.choose if any(candidate.name == export.choose for candidate in passing) else ""
    name = _fastest(passing) if export.choose == FASTEST else named
    refusal = "" if name else _refusal(export, contenders, passing)
    return Choice(name, {candidate.name: _reason(export, candidate, name) for candidate in contenders}, refusal)


def _fastest(passing: Sequence[VariantResult]) -> str:
    """Choose fp32 unless another saves enough time with confidence; among equals, the most exact."""
    by_exactness = sorted(passing, key=lambda candidate: _EXACTNESS.index(candidate.name))
    others = [candidate for candidate in by_exactness if candidate.name != FP32]
    faster = [other for other in others if other.share and other.share.high < 1 - MIN_SPEEDUP]
    if not by_exactness or (by_exactness[0].name == "fp32" and not faster):
        return by_exactness[0].name if by_exactness else ""
    shares = {candidate.name: candidate.share for candidate in faster or by_exactness if candidate.share is not None}
    if not shares:
        return by_exactness[0].name
    best = min(shares.values(), key=lambda share: share.estimate)
    return next(name for name, share in shares.items() if share.low <= best.high)


def _refusal(export: Export, contenders: Sequence[VariantResult], passing: Sequence[VariantResult]) -> str:
    if export.choose == FASTEST:
        message = "; ".join(f"{candidate.name}: {'; '.join(candidate.faults)}" for candidate in contenders)
        return f"no variant passes, so nothing is shipped: {message}"
    requested = next(candidate for candidate in contenders if candidate.name == export.choose)
    names = [candidate.name for candidate in passing]
    fix = f"choose {' or '.join(names)}, or {FASTEST}" if names else "none of the others passed either"
    return f"export.choose={requested.name} is not shipped: {'; '.join(requested.faults)}; {fix}"


def _reason(export: Export, candidate: VariantResult, chosen: str) -> str:
    if candidate.faults:
        return "; ".join(candidate.faults)
    speed = _speed(candidate.share) if candidate.name != "fp32" else ""
    if candidate.name == chosen:
        return _choice_reason(export, chosen) + (f": {speed}" if speed else "")
    if export.choose != FASTEST:
        other = f"export.choose={export.choose} ships another" if chosen else "nothing is shipped"
        return f"passed, {other}" + (f"; it {speed}" if speed else "")
    if chosen == "fp32":
        return f"passed, but does not save {MIN_SPEEDUP:.0%} of fp32's time beyond doubt; it {speed}"
    return f"passed, {chosen} is faster" + (f"; it {speed}" if speed else "")


def _choice_reason(export: Export, chosen: str) -> str:
    if export.choose != FASTEST:
        return "named in export.choose"
    if chosen == "fp32":
        return f"chosen: none that passes saves {MIN_SPEEDUP:.0%} of its time beyond doubt"
    return "chosen as the fastest that passes"


def _speed(share: Interval | None) -> str:
    if share is None:
        return ""
    return f"takes {share.estimate:.0%} of fp32's time ({share.low:.0%} to {share.high:.0%})"


VARIANTS_FILE = "variants.json"


def rows(
    entries: Sequence[VariantResult], reasons: Mapping[str, str], chosen: str, metric: str
) -> list[dict[str, Any]]:
    """Return the content of `variants.json`; values that were not measured are null."""
    return [_row(entry, reasons[entry.name], entry.name == chosen, metric) for entry in entries]


def table(entries: Sequence[VariantResult], chosen: str, metric: str) -> list[str]:
    """Return a table of the decisive numbers for the log."""
    lines: list[tuple[str, ...]] = [("", "variant", metric, "difference", "ms at 1", "ms at 32", "MB")]
    for entry in entries:
        mark = "*" if entry.name == chosen else "x" if entry.faults else ""
        megabytes = f"{entry.bytes / 1e6:.3g}" if entry.bytes else "-"
        lines.append((mark, entry.name, *_metric(entry), *_milliseconds(entry), megabytes))
    return align(lines)


def explanations(entries: Sequence[VariantResult], reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each variant for the log: why it is or is not shipped, and how it was built."""
    notes = {
        entry.name: "; ".join(filter(None, (str(entry.first_wrong or ""), str(entry.own_measure or ""), entry.note)))
        for entry in entries
    }
    return [f"{name}: {reason}" + (f" [{notes[name]}]" if notes[name] else "") for name, reason in reasons.items()]


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.estimate:+#.4g}, {interval.low:+#.4g} to {interval.high:+#.4g}"


def _row(entry: VariantResult, reason: str, chosen: bool, metric: str) -> dict[str, Any]:
    result, timing = entry.outcome, entry.timing
    times: dict[str, Any] = dict.fromkeys(("p50_ms", "p99_ms", "p50_interval_ms", "p99_interval_ms", "share_of_time"))
    if timing is not None:
        p50, p99 = timing.p50_ms.items(), timing.p99_ms.items()
        times = {
            "p50_ms": {str(size): _short(interval.estimate) for size, interval in p50},
            "p99_ms": {str(size): _short(interval.estimate) for size, interval in p99},
            "p50_interval_ms": {str(size): _rounded_interval(interval) for size, interval in p50},
            "p99_interval_ms": {str(size): _rounded_interval(interval) for size, interval in p99},
            "share_of_time": _rounded_interval(timing.share),
        }
    body: dict[str, Any] = {
        "variant": entry.name,
        "chosen": chosen,
        "passed": not entry.faults,
        "reason": reason,
        "note": entry.note,
        "bytes": entry.bytes,
        **times,
        "metric": None,
        "difference": None,
        "batch_size": None if result is None else result.size,
        "max_abs_error": None if entry.deviation is None else entry.deviation.largest,
        "noise": None if entry.deviation is None else entry.deviation.noise,
        "perplexity": None if entry.own_measure is None else entry.own_measure.record(),
        "first_wrong": None if entry.first_wrong is None else asdict(entry.first_wrong),
    }
    if result is not None:
        body["metric"] = {"name": metric, "value": _finite(result.value), "reference": _finite(result.reference)}
        body["difference"] = None if result.difference is None else asdict(result.difference)
    return body


def _metric(entry: VariantResult) -> tuple[str, str]:
    if entry.outcome is None:
        return "-", "-"
    return f"{entry.outcome.value:#.4g}", _interval(entry.outcome.difference)


def _milliseconds(entry: VariantResult) -> tuple[str, ...]:
    if entry.timing is None:
        return "-", "-"
    return tuple(f"{interval.estimate:.3g}" for interval in entry.timing.p50_ms.values())


def _rounded_interval(interval: Interval) -> dict[str, float | None]:
    return {name: _short(value) for name, value in asdict(interval).items()}


def _short(value: float) -> float | None:
    """Format milliseconds with four significant digits."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    """Replace infinity, which JSON does not have, by null."""
    return value if math.isfinite(value) else None
