"""The time budget adds up to the training time and omits what was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract.results import Facts
from pipeline.contract.run import RunFile
from pipeline.report.training import render_time_budget, time_budget

FILE = RunFile(id="one", created="2026-01-01", wanted=("train",), config={}, environment={})
SHARES = {"data_wait_share": 0.1, "communication_share": 0.25}


def facts(*lines: dict[str, Any], summary: dict[str, Any] | None = None, **more: Any) -> Facts:
    return Facts(FILE, steps=tuple({"loss": 1.0, **line} for line in lines), summary=summary or {}, **more)


def test_lines_are_weighted_by_their_steps_and_parts_add_up() -> None:
    lines = (
        {"step": 10, "step_seconds": 1.0, **SHARES},
        {
            "step": 30,
            "step_seconds": 0.5,
            "data_wait_share": 0.3,
            "communication_share": 0.25,
            "checkpoint_seconds": 2.0,
        },
    )
    found = time_budget(facts(*lines, summary={"seconds": 25.0, "checkpoint_seconds": 2.5}))
    assert found is not None
    assert found.parts == pytest.approx(
        {"computing": 8.5, "communication": 5.0, "data": 4.0, "checkpoints": 2.5, "validation and the rest": 5.0}
    )
    assert found.complete
    assert found.total == pytest.approx(25.0)


def test_budget_covers_only_the_steps_after_a_resume() -> None:
    found = time_budget(facts({"step": 10, "step_seconds": 1.0, **SHARES}, summary={"seconds": 4.0}))
    assert found is not None
    assert not found.complete
    assert found.total == pytest.approx(10.0)
    shown = render_time_budget({"this run": facts({"step": 10, "step_seconds": 1.0})})
    assert shown is not None
    assert "the time between them is unknown" in shown
    for name in ("communication", "data", "checkpoints"):
        assert name not in shown


def test_communication_is_read_from_the_timeline_if_not_logged() -> None:
    traced = {"first_step": 3, "steps": 5, "rank 0": {"exposed": 0.125}, "rank 1": {"exposed": 0.375}}
    found = time_budget(facts({"step": 8, "step_seconds": 1.0}, communication=traced))
    assert found is not None
    assert found.parts["communication"] == pytest.approx(2.0)


def test_overlapping_waits_never_make_computing_negative() -> None:
    shares = {"data_wait_share": 0.7, "communication_share": 0.6}
    found = time_budget(facts({"step": 1, "step_seconds": 1.0, **shares}))
    assert found is not None
    assert found.parts["computing"] == 0


def test_no_budget_without_timed_steps() -> None:
    assert time_budget(facts({"step": 1})) is None
    assert render_time_budget({"this run": facts()}) is None
