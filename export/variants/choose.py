"""Make, run, time and evaluate all variants of a verified file, and choose one.

Which of the variants that passed is shipped; pure.

What is written and printed of the variants.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from export.fault_search import FirstWrong, first_wrong
from export.optimize import check_file
from export.to_onnx import tensor_specs
from export.variants.judge import (
    FP16_TOLERANCE,
    INT8_NOISE,
    Apart,
    MetricResult,
    Reference,
    answers_of,
    evaluate_variant,
    faults,
    over_budget,
    reference_of,
    rounding,
    stretched,
)
from export.variants.quantize import MAKERS, Maker, Material, calibration
from export.variants.timing import SIZES, Timing, race
from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError, PipelineError, StageError
from pipeline.contract.files import digest_file
from pipeline.contract.settings.stages import FASTEST, Export
from pipeline.contract.statistics.bootstrap import Interval
from pipeline.contract.task import Generates, Task

FP32 = "fp32"
_LOOKED_AT = 32  # test samples that the first wrong node is looked for with


@dataclass(frozen=True)
class Entry:
    """One variant, as far as it came."""

    name: str
    path: Path
    faults: tuple[str, ...] = ()
    note: str = ""  # what a reader should know of how it was made
    apart: Apart | None = None  # None: it has not answered
    outcome: MetricResult | None = None
    timing: Timing | None = None
    first_wrong: FirstWrong | None = None
    rounding: float = 0.0  # what another processor may answer otherwise

    @property
    def bytes(self) -> int:
        """With the weights outside; nothing where it could not be made."""
        return (
            sum(one.stat().st_size for one in self.path.parent.glob(f"{self.path.name}*")) if self.path.exists() else 0
        )


@dataclass(frozen=True)
class Contest:
    """The inputs of the comparison of variants."""

    task: Task
    model: nn.Module
    test: Samples
    config: Config
    path: Path  # the verified file
    folder: Path  # for the other variants
    makers: Mapping[str, Maker] = field(default_factory=lambda: MAKERS)

    def entries(self) -> list[Entry]:
        """Of every variant, fp32 first; none of them raises."""
        if isinstance(self.task, Generates):
            return [self._of_language()]
        reference = self._reference()
        found = [self._entry(name, reference) for name in self.config.export.built_variants]
        timed = self._timed([one for one in found if one.apart is not None])
        return [self._with_result(replace(one, timing=timed.get(one.name)), reference) for one in found]

    def rounding(self, entry: Entry) -> float:
        """fp32 has the tolerances of the export; halves are computed as halves elsewhere; integers are rounded anew."""
        if entry.apart is None or entry.name == FP32:
            return 0.0
        if entry.name == "fp16":
            return entry.apart.largest
        if (
            entry.name == "int8-dynamic"
        ):  # has one kind of kernel: a few roundings that fall otherwise, of all there are
            return entry.apart.largest / 4
        return rounding(self.task, self.test, entry.path, max(self.config.export.batch_sizes))

    def _reference(self) -> Reference:
        metric, sizes = self.config.evaluate.metric, self.config.export.batch_sizes
        reference = reference_of(self.task, self.model, self.test, max(sizes))
        if metric not in reference.metrics:
            raise ConfigError(
                f"evaluate.metric: the task has no metric {metric} (it has {', '.join(reference.metrics)}), so that "
                "its exported file cannot be compared"
            )
        return reference

    def _of_language(self) -> Entry:
        """Proven token by token, which is no matter of a metric; how long it takes depends on the text."""
        entry = Entry(FP32, self.path)
        return replace(entry, faults=tuple(over_budget(self.config.export.budget, entry.bytes, None)))

    def _entry(self, name: str, reference: Reference) -> Entry:
        """Make and run the variant; whatever goes wrong is recorded as a fault of this variant."""
        entry = Entry(name, self.path if name == FP32 else self.folder / name / self.path.name)
        try:
            entry = replace(entry, note=self._make(name, entry.path))
            return self._answered(entry, reference)
        except PipelineError as error:
            return replace(entry, faults=(str(error),))
        except Exception as error:  # quantisers and ONNX Runtime raise a dozen types without a common base
            message = " ".join(str(error).split())[:400]
            return replace(entry, faults=(f"it cannot be made: {type(error).__name__}: {message}",))

    def _make(self, name: str, path: Path) -> str:
        if name == FP32:
            return ""
        path.parent.mkdir(parents=True)
        specs = tensor_specs(self.path)
        material = Material(
            reference=self.path,
            external=self.path.with_name(f"{self.path.name}.data").exists(),
            weight_bits=INT8_WEIGHT_BITS,
            calibration=lambda: calibration(self.task, specs[0], CALIBRATION_SAMPLES),
        )
        note = self.makers[name](material, path)
        check_file(path)
        if tensor_specs(path) != specs:
            raise StageError("its inputs and outputs are others than those of fp32, which codec and clients know")
        return note

    def _answered(self, entry: Entry, reference: Reference) -> Entry:
        """fp32 was compared at every size and shape when it was proven."""
        sizes = self.config.export.batch_sizes
        batch_sizes = [max(sizes)] if entry.name == FP32 else sizes
        answers = [answers_of(self.task, self.test, entry.path, reference, size) for size in batch_sizes]
        shapes = stretched(self.task, self.model, self.test, entry.path, reference) if entry.name != FP32 else []
        found = evaluate_variant(self.config.evaluate, reference, answers)
        message = faults(entry.name, self.config.export, self.config.evaluate, found, reference, answers, shapes)
        worst = Apart.worst(*(one.apart for one in answers), *shapes)
        return replace(entry, apart=worst, outcome=found, faults=tuple(message))

    def _timed(self, entries: Sequence[Entry]) -> dict[str, Timing]:
        if not entries:
            return {}
        config = self.config
        alone = len(entries) == 1 and not config.export.budget  # nothing hangs on it
        feeds = {
            size: {name: batch[name].numpy() for name in self.task.inputs}
            for size in SIZES
            for batch in [self.test.batch([index % len(self.test) for index in range(size)])]
        }
        seconds = min(TIMING_SECONDS, _GLANCE) if alone else TIMING_SECONDS
        paths = {one.name: one.path for one in entries}
        return race(paths, feeds, seconds, config.serve.threads, config.evaluate.confidence)

    def _with_result(self, entry: Entry, reference: Reference) -> Entry:
        """With its cost, and for what failed where it goes wrong."""
        if entry.timing is not None:
            costs = over_budget(self.config.export.budget, entry.bytes, entry.timing)
            entry = replace(entry, faults=(*entry.faults, *costs))
        if not entry.faults or entry.apart is None or entry.name == FP32:
            return entry
        try:
            return replace(entry, first_wrong=self._first_wrong(entry, entry.apart, reference))
        except PipelineError as error:
            return replace(entry, note=f"{entry.note}; the place of the error is unknown: {error}".removeprefix("; "))

    def _first_wrong(self, entry: Entry, worst: Apart, reference: Reference) -> FirstWrong | None:
        """By the bound of this variant, or by half of its largest error where a metric suffers from less."""
        bound = FP16_TOLERANCE if entry.name == "fp16" else INT8_NOISE
        atol = min(bound * max(reference.spread.values(), default=1.0), worst.largest / 2)
        batch = self.test.batch(range(min(_LOOKED_AT, len(self.test))))
        feed = {name: batch[name].numpy() for name in self.task.inputs}
        return first_wrong(self.path, entry.path, feed, rtol=0.0, atol=atol)


def check_wanted(task: Task, config: Config) -> None:
    """Reject variants that a language model cannot have, before the work begins."""
    if not isinstance(task, Generates):
        return
    export = config.export
    if others := [name for name in export.built_variants if name != FP32]:
        raise ConfigError(
            f"export.variants: {', '.join(others)} of a language model is refused: its decoder is proven token by "
            "token against torch, and no rounding keeps every token; write variants: [fp32]"
        )
    if times := [cost for cost in export.budget if cost != "megabytes"]:
        raise ConfigError(
            f"export.budget: {', '.join(times)} of a language model depends on the text; of its costs only "
            "only megabytes is checked here; `python -m benchmarks.serve` measures its time"
        )


def contenders(entries: Sequence[Entry]) -> list[Contender]:
    return [Contender(one.name, one.faults, one.timing.share if one.timing else None) for one in entries]


def ship(entry: Entry, model: Path) -> None:
    """Replace the verified file by the evaluated bytes of the variant."""
    if entry.path == model:
        return
    evaluated_digest = digest_file(entry.path)
    for old in model.parent.glob(f"{model.name}*"):
        old.unlink()
    for new in entry.path.parent.glob(f"{model.name}*"):
        shutil.move(new, model.parent / new.name)
    check_file(model)
    assert digest_file(model) == evaluated_digest


MIN_SPEEDUP = 0.1  # part of fp32's time that a variant must save to be chosen as the fastest
TIMING_SECONDS = 2.0  # for each variant
INT8_WEIGHT_BITS = 7  # 8 are finer, but sums overflow on processors without VNNI
CALIBRATION_SAMPLES = 256  # of the training split, for the ranges of int8-static
_GLANCE = 0.1  # seconds, if the time is only reported


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
    name = _fastest(passed) if export.choose == FASTEST else _named(export, passed)
    refusal = "" if name else _refusal(export, contenders, passed)
    return Choice(name, {one.name: _reason(export, one, name) for one in contenders}, refusal)


def _named(export: Export, passed: Sequence[Contender]) -> str:
    return export.choose if export.choose in {one.name for one in passed} else ""


def _fastest(passed: Sequence[Contender]) -> str:
    """Choose fp32 unless another saves enough time with confidence; among equals, the most exact."""
    exact = sorted(passed, key=lambda one: _EXACTNESS.index(one.name))
    quick = [one for one in exact if one.name != "fp32" and one.share and one.share.high < 1 - MIN_SPEEDUP]
    if not exact or (exact[0].name == "fp32" and not quick):
        return exact[0].name if exact else ""
    shares = {one.name: one.share for one in quick or exact if one.share is not None}
    if not shares:
        return exact[0].name
    best = min(shares.values(), key=lambda share: share.estimate)
    return next(name for name, share in shares.items() if share.low <= best.high)


def _refusal(export: Export, contenders: Sequence[Contender], passed: Sequence[Contender]) -> str:
    if export.choose == FASTEST:
        message = "; ".join(f"{one.name}: {'; '.join(one.faults)}" for one in contenders)
        return f"no variant passes, so nothing is shipped: {message}"
    wanted = next(one for one in contenders if one.name == export.choose)
    names = [one.name for one in passed]
    fix = f"choose {' or '.join(names)}, or {FASTEST}" if names else "none of the others passed either"
    return f"export.choose={wanted.name} is not shipped: {'; '.join(wanted.faults)}; {fix}"


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
        return f"passed, but does not save {MIN_SPEEDUP:.0%} of fp32's time beyond doubt; it {speed}"
    return f"passed, {chosen} is faster" + (f"; it {speed}" if speed else "")


def _how(export: Export, chosen: str) -> str:
    if export.choose != FASTEST:
        return "chosen by name"
    if chosen == "fp32":
        return f"chosen: none that passes saves {MIN_SPEEDUP:.0%} of its time beyond doubt"
    return "chosen as the fastest that passes"


def _speed(share: Interval | None) -> str:
    if share is None:
        return ""
    return f"takes {share.estimate:.0%} of fp32's time ({share.low:.0%} to {share.high:.0%})"


VARIANTS_FILE = "variants.json"


def rows(entries: Sequence[Entry], reasons: Mapping[str, str], chosen: str, metric: str) -> list[dict[str, Any]]:
    """`variants.json`; what was not measured is null."""
    return [_row(one, reasons[one.name], one.name == chosen, metric) for one in entries]


def table(entries: Sequence[Entry], chosen: str, metric: str) -> list[str]:
    """For the log: a line for each, the numbers that decide."""
    lines: list[tuple[str, ...]] = [("", "variant", metric, "difference", "ms at 1", "ms at 32", "MB")]
    for one in entries:
        mark = "*" if one.name == chosen else "x" if one.faults else ""
        lines.append(
            (mark, one.name, *_metric(one), *_milliseconds(one), f"{one.bytes / 1e6:.3g}" if one.bytes else "-")
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def story(entries: Sequence[Entry], reasons: Mapping[str, str]) -> list[str]:
    """For the log: why each is or is not shipped, and how it was made."""
    notes = {one.name: "; ".join(filter(None, (str(one.first_wrong or ""), one.note))) for one in entries}
    return [f"{name}: {reason}" + (f" [{notes[name]}]" if notes[name] else "") for name, reason in reasons.items()]


def _interval(found: Interval | None) -> str:
    return "-" if found is None else f"{found.estimate:+.4f}, {found.low:+.4f} to {found.high:+.4f}"


def _row(one: Entry, reason: str, chosen: bool, metric: str) -> dict[str, Any]:
    found, timing = one.outcome, one.timing
    body: dict[str, Any] = {
        "variant": one.name,
        "chosen": chosen,
        "passed": not one.faults,
        "reason": reason,
        "note": one.note,
        "bytes": one.bytes,
        "p50_ms": None if timing is None else {str(n): _short(each.estimate) for n, each in timing.p50_ms.items()},
        "p99_ms": None if timing is None else {str(n): _short(each.estimate) for n, each in timing.p99_ms.items()},
        "p50_interval_ms": None if timing is None else {str(n): _plain(each) for n, each in timing.p50_ms.items()},
        "p99_interval_ms": None if timing is None else {str(n): _plain(each) for n, each in timing.p99_ms.items()},
        "share_of_time": None if timing is None else _plain(timing.share),
        "metric": None,
        "difference": None,
        "batch_size": None if found is None else found.size,
        "max_abs_error": None if one.apart is None else one.apart.largest,
        "noise": None if one.apart is None else one.apart.noise,
        "first_wrong": None if one.first_wrong is None else asdict(one.first_wrong),
    }
    if found is not None:
        body["metric"] = {"name": metric, "value": _finite(found.value), "reference": _finite(found.reference)}
        body["difference"] = None if found.difference is None else asdict(found.difference)
    return body


def _metric(one: Entry) -> tuple[str, str]:
    if one.outcome is None:
        return "-", "-"
    return f"{one.outcome.value:.4f}", _interval(one.outcome.difference)


def _milliseconds(one: Entry) -> tuple[str, ...]:
    return ("-", "-") if one.timing is None else tuple(f"{each.estimate:.3g}" for each in one.timing.p50_ms.values())


def _plain(interval: Interval) -> dict[str, float | None]:
    return {name: _short(value) for name, value in asdict(interval).items()}


def _short(value: float) -> float | None:
    """Format milliseconds with three significant digits."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    """JSON has no infinity: a bound that is not known is null."""
    return value if math.isfinite(value) else None
