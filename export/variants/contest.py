"""All variants of a verified file: made, answered, timed, judged, and one of them chosen."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from export.bisect import FirstWrong, first_wrong
from export.convert import tensor_specs
from export.proof import check_file
from export.variants.answers import Apart, Reference, answers_of, reference_of, rounding, stretched
from export.variants.calibration import calibration
from export.variants.choice import Contender
from export.variants.making import MAKERS, Maker, Material
from export.variants.rules import Judged, faults, judged, over_budget
from export.variants.timing import SIZES, Timing, race
from pipeline.spec.config import Config
from pipeline.spec.data import Samples
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import ConfigError, PipelineError, StageError
from pipeline.spec.task import Generates, Task

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
    judged: Judged | None = None
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
    """What the variants are judged on."""

    task: Task
    model: nn.Module
    test: Samples
    config: Config
    path: Path  # the verified file
    folder: Path  # for the others, while they are judged
    makers: Mapping[str, Maker] = field(default_factory=lambda: MAKERS)

    def entries(self) -> list[Entry]:
        """Of every variant, fp32 first; none of them raises."""
        if isinstance(self.task, Generates):
            return [self._of_language()]
        reference = self._reference()
        found = [self._entry(name, reference) for name in self.config.export.made]
        timed = self._timed([one for one in found if one.apart is not None])
        return [self._judged(replace(one, timing=timed.get(one.name)), reference) for one in found]

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
                "nothing can be said of its exported file"
            )
        return reference

    def _of_language(self) -> Entry:
        """Proven token by token, which is no matter of a metric; how long it takes depends on the text."""
        entry = Entry(FP32, self.path)
        return replace(entry, faults=tuple(over_budget(self.config.export.budget, entry.bytes, None)))

    def _entry(self, name: str, reference: Reference) -> Entry:
        """Made, and asked everything; whatever goes wrong is a fault of this variant alone."""
        entry = Entry(name, self.path if name == FP32 else self.folder / name / self.path.name)
        try:
            entry = replace(entry, note=self._make(name, entry.path))
            return self._answered(entry, reference)
        except PipelineError as error:
            return replace(entry, faults=(str(error),))
        except Exception as error:  # quantisers and ONNX Runtime raise a dozen types without a common base
            told = " ".join(str(error).split())[:400]
            return replace(entry, faults=(f"it cannot be made: {type(error).__name__}: {told}",))

    def _make(self, name: str, path: Path) -> str:
        if name == FP32:
            return ""
        path.parent.mkdir(parents=True)
        export = self.config.export
        specs = tensor_specs(self.path)
        material = Material(
            reference=self.path,
            external=self.path.with_name(f"{self.path.name}.data").exists(),
            weight_bits=export.int8_weight_bits,
            calibration=lambda: calibration(self.task, specs[0], export.calibration_samples),
        )
        note = self.makers[name](material, path)
        check_file(path)
        if tensor_specs(path) != specs:
            raise StageError("its inputs and outputs are others than those of fp32, which codec and clients know")
        return note

    def _answered(self, entry: Entry, reference: Reference) -> Entry:
        """fp32 was compared at every size and shape when it was proven."""
        sizes = self.config.export.batch_sizes
        asked = [max(sizes)] if entry.name == FP32 else sizes
        answers = [answers_of(self.task, self.test, entry.path, reference, size) for size in asked]
        shapes = stretched(self.task, self.model, self.test, entry.path, reference) if entry.name != FP32 else []
        found = judged(self.config.evaluate, reference, answers)
        told = faults(entry.name, self.config.export, self.config.evaluate, found, reference, answers, shapes)
        worst = Apart.worst(*(one.apart for one in answers), *shapes)
        return replace(entry, apart=worst, judged=found, faults=tuple(told))

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
        seconds = min(config.export.timing_seconds, _GLANCE) if alone else config.export.timing_seconds
        paths = {one.name: one.path for one in entries}
        return race(paths, feeds, seconds, config.serve.threads, config.evaluate.confidence)

    def _judged(self, entry: Entry, reference: Reference) -> Entry:
        """With its cost, and for what failed where it goes wrong."""
        if entry.timing is not None:
            costs = over_budget(self.config.export.budget, entry.bytes, entry.timing)
            entry = replace(entry, faults=(*entry.faults, *costs))
        if not entry.faults or entry.apart is None or entry.name == FP32:
            return entry
        try:
            return replace(entry, first_wrong=self._first_wrong(entry, entry.apart, reference))
        except PipelineError as error:
            return replace(entry, note=f"{entry.note}; where it goes wrong cannot be told: {error}".removeprefix("; "))

    def _first_wrong(self, entry: Entry, worst: Apart, reference: Reference) -> FirstWrong | None:
        """By the bound of this variant, or by half of its largest error where a metric suffers from less."""
        export = self.config.export
        bound = export.fp16_tolerance if entry.name == "fp16" else export.int8_noise
        atol = min(bound * max(reference.spread.values(), default=1.0), worst.largest / 2)
        batch = self.test.batch(range(min(_LOOKED_AT, len(self.test))))
        feed = {name: batch[name].numpy() for name in self.task.inputs}
        return first_wrong(self.path, entry.path, feed, rtol=0.0, atol=atol)


def check_wanted(task: Task, config: Config) -> None:
    """What a language model cannot be, told before the work begins."""
    if not isinstance(task, Generates):
        return
    export = config.export
    if others := [name for name in export.made if name != FP32]:
        raise ConfigError(
            f"export.variants: {', '.join(others)} of a language model is refused: its decoder is proven token by "
            "token against torch, and no rounding keeps every token; write variants: [fp32]"
        )
    if times := [cost for cost in export.budget if cost != "megabytes"]:
        raise ConfigError(
            f"export.budget: {', '.join(times)} of a language model depends on the text; of its costs only "
            "megabytes is judged here, and `pipe bench serve` measures its time"
        )


def contenders(entries: Sequence[Entry]) -> list[Contender]:
    return [Contender(one.name, one.faults, one.timing.share if one.timing else None) for one in entries]


def ship(entry: Entry, model: Path) -> None:
    """The very bytes that were judged take the place of the verified file."""
    if entry.path == model:
        return
    judged_digest = digest_file(entry.path)
    for old in model.parent.glob(f"{model.name}*"):
        old.unlink()
    for new in entry.path.parent.glob(f"{model.name}*"):
        shutil.move(new, model.parent / new.name)
    check_file(model)
    assert digest_file(model) == judged_digest


_GLANCE = 0.1  # seconds, where the time is only told
