"""What is exported, and the interface of the kinds of models: the core of the export knows no others.

`export/kinds.py` decides which kind a model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import nn

from export.checks.parity import MetricLimits
from export.checks.service_sizes import ServedSizes
from export.compare import Arrays, Graph, Rows
from export.conversion.optimize import Written
from export.conversion.to_onnx import ExportResult
from export.conversion.trace import ExportInput
from export.golden import GoldenInputs
from export.report import LastCheck, Report
from export.variants.judge import VariantComparison
from export.variants.quantize import Converter
from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation, Signature
from pipeline.contract.task import Task


@dataclass(frozen=True)
class Subject:
    """A model, where its file goes, and everything the file is compared with."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    served: ServedSizes | None = None  # the batches of the service; None: they are not compared
    limits: MetricLimits = field(default_factory=dict)  # evaluate.require
    files: Path | None = None  # what model, data and codec share: the tokenizer


@dataclass(frozen=True)
class ModelProperties:
    """Properties of the model that its graph does not hold."""

    axes: Mapping[str, int] = field(default_factory=dict)  # maximum size of each named axis
    shortest: Mapping[str, int] = field(default_factory=dict)  # minimum sizes that the task gives
    generation: Generation | None = None
    variant: str = "fp32"
    rounding: float = 0.0  # tolerance for processors that round this variant differently
    padding: str = ""  # how padding changes answers, or that it is unknown
    missing: frozenset[str] = frozenset()  # columns whose data have NaN


RunFeeds = Callable[[Sequence[Arrays]], list[Arrays]]  # a file of another format, run on many inputs


class ModelExporter(Protocol):
    """The export of one kind of model: how its file is written and compared, and what its bundle has of its own."""

    subject: Subject
    original: str  # what the file is compared with
    properties: ModelProperties
    converters: Mapping[str, Converter]  # of its variants
    measures_fp32_alone: bool  # whether the verified file is scored and timed where no variant is requested

    def export_input(self) -> ExportInput: ...

    def write(self) -> Written: ...

    def phases(self, result: ExportResult) -> Iterator[Report]:
        """Compare the file at `subject.path`, each phase only if those before it found it equal."""

    def last_check(self) -> LastCheck: ...

    def fault_feeds(self) -> Iterator[Arrays]:
        """Yield the inputs with which the first wrong node is searched."""

    def write_format(self, name: str, folder: Path) -> tuple[Path, Rows]:
        """Write another format, and return its place and its comparison."""

    def compare_format(self, run_feeds: RunFeeds) -> Rows: ...

    def open_variants(self, config: Config) -> VariantComparison: ...

    def complete(self, properties: ModelProperties, files: Path) -> ModelProperties:
        """Add what only the shared files state."""

    def check_bundle(self, bundle: Path, signature: Signature) -> None: ...

    def golden_inputs(self, graph: Graph, signature: Signature, rounding: float) -> GoldenInputs: ...
