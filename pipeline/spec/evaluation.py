"""The section `evaluate` of `pipe.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.spec.section import Positive, Section, Seed


class Evaluate(Section):
    """What the candidate must prove."""

    metric: str = Field("accuracy", description="the candidate is compared by it: one of metrics(), or as r2 or ndcg")
    rule: Literal["non-inferior", "superior"] = Field(
        "non-inferior", description="no worse than the baseline by the margin, or better than it by the margin"
    )
    margin: float = Field(
        0.01, ge=0, description="how far below the baseline, or above it to be `superior`, the interval must end"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of the bootstrap interval (BCa)")
    resamples: int = Field(10_000, ge=100, description="bootstrap resamples")
    require: dict[str, float] = Field(
        {}, description="absolute floors, as in `{accuracy: 0.9}`; ceilings of mae and rmse, which are errors"
    )
    slices: tuple[str, ...] = Field(
        (), description="columns of whole numbers in the test data to slice by, beside the true class and `slices()`"
    )
    slice_min: Positive = Field(30, description="samples a slice needs to be judged; smaller ones are only told")
    slice_margin: float | None = Field(
        None,
        ge=0,
        description="how far a slice may fall below the baseline's other than by chance; else 0.05 or `margin`",
    )
    calibration: dict[Literal["ece", "brier", "brier_margin"], float] = Field(
        {}, description="most `ece` and `brier` (0 to 2) may be; `brier_margin`: how much worse than the baseline's"
    )
    batch_size: Positive = Field(256, description="samples per forward pass")
    processes: Positive = Field(1, description="processes that share the test set")
    seed: Seed = Field(0, description="seed of the bootstrap")

    @property
    def slice_allowance(self) -> float:
        """A margin that is wide for the whole is wide for its parts."""
        return max(0.05, self.margin) if self.slice_margin is None else self.slice_margin
