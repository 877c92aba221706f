"""The section of `pipe.yaml` on what is checked before training."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from pipeline.spec.section import Fraction, Section

Severity: TypeAlias = Literal["error", "warn", "off"]


class Prepare(Section):
    """What is checked before training."""

    leaks: Literal["error", "warn"] = Field("error", description="what a sample found in two splits does to the road")
    near: Severity = Field("warn", description="what samples of two splits that are nearly one do")
    near_distance: float = Field(
        0.25, gt=0, le=1, description="how near they are, as a share of what lies between a sample and its neighbour"
    )
    columns: Severity = Field(
        "error", description="what other types, shapes or classes do, in a split or since the champion was trained"
    )
    missing: Severity = Field("error", description="what numbers that are NaN or infinite do")
    missing_share: Fraction = Field(0.0, description="share of a column in one split that may be missing")
    range: Severity = Field("warn", description="what a feature does most of whose values lie outside the known range")
    labels: Severity = Field("warn", description="what other labels do than in training, or than the champion's")
    drift: Severity = Field("warn", description="what other inputs do than in training, or than the champion's")
    drift_psi: float = Field(0.2, ge=0, description="population stability index up to which a difference is small")
    drift_p: float = Field(
        0.01, gt=0, lt=1, description="chance of one false alarm among all features of all splits (Holm)"
    )
    ignore: tuple[str, ...] = Field((), description="columns that none of these checks looks at")
    files: tuple[str, ...] = Field(
        (), description="globs of data files the task reads; a change in one reruns the road"
    )

    @field_validator("near", "columns", "missing", "range", "labels", "drift", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return "off" if value is False else value
