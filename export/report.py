"""The comparisons of a file with its model, passed or not, as parity.json records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from export.checks.weights_check import WeightsComparison
from export.compare import Attempts, Rows, is_different, require_equal
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError


@dataclass(frozen=True)
class LastCheck:
    """A check that one kind of model adds, of a file that equals its model."""

    record: Mapping[str, Any] = field(default_factory=dict)  # for parity.json
    lines: Sequence[str] = ()  # for the log
    padding: str = ""  # how padding changes answers


@dataclass(frozen=True)
class Report:
    """What was compared, or a part of it; `+` joins parts."""

    test_set: Rows = field(default_factory=list)  # a row for each batch size
    shapes: Rows = field(default_factory=list)  # that were never traced
    coverage: Rows = field(default_factory=list)  # wherever else a service may run the file
    left_out: Sequence[str] = ()  # what could not be compared
    attempts: Attempts = field(default_factory=Attempts)  # the cases of all parts
    weights: WeightsComparison = field(default_factory=WeightsComparison)
    nondeterminism: str = ""  # why torch's own outputs cannot be compared with a file
    cause: str = ""  # the first wrong node, or the module that was traced differently
    last_check: LastCheck = field(default_factory=LastCheck)
    file: Mapping[str, Any] = field(default_factory=dict)  # properties of the file

    def __add__(self, part: Report) -> Report:
        return replace(
            self,
            test_set=[*self.test_set, *part.test_set],
            shapes=[*self.shapes, *part.shapes],
            coverage=[*self.coverage, *part.coverage],
            left_out=[*self.left_out, *part.left_out],
            attempts=part.attempts if part.attempts.count else self.attempts,
            weights=self.weights if part.weights == WeightsComparison() else part.weights,
        )

    @property
    def rows(self) -> Rows:
        return [*self.test_set, *self.shapes, *self.coverage]

    @property
    def equal(self) -> bool:
        return not self.nondeterminism and not any(map(is_different, self.rows)) and not self.weights.different

    def require(self, config: Export) -> None:
        """Raise unless the file is the model."""
        if self.nondeterminism:
            raise StageError(f"no ONNX file can be the model: {self.nondeterminism}")
        require_equal(self.rows, config, self.cause)
        if self.weights.different:
            raise StageError(f"the ONNX file is not the model: {'; '.join(self.weights.different[:3])}")

    def worst(self) -> str:
        row = max(self.rows, key=lambda row: (row["beyond_tolerance"], row["max_abs_error"]))
        text = (
            f"{row['beyond_tolerance']} elements beyond tolerance, off by {row['max_abs_error']:.3g} in {row['worst']}"
        )
        return f"{text}; {self.cause}" if self.cause else text

    def record(self) -> dict[str, Any]:
        """Return the part of parity.json that is about comparisons."""
        return {
            "runs": [*self.test_set, *self.shapes],
            **self.last_check.record,
            **self.file,
            "coverage": self.coverage,
            "weights": {**asdict(self.weights), "text": self.weights.text},
            "left_out": [*self.left_out, *self.attempts.left_out, *filter(None, [self.attempts.text])],
        }
