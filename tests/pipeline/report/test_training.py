"""Sections of the train step: the time budget adds up, and nothing is shown that was not measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.results import Body, Facts, read_facts
from pipeline.contract.run import Run, RunFile
from pipeline.report.page import render
from pipeline.report.training import experts, exposed_communication, speed, time_budget
from pipeline.system.files import write_json

FILE = RunFile(id="one", created="2026-01-01", wanted=("train",), config={}, environment={})
LINE = {"epoch": 0, "loss": 1.0, "samples_per_second": 900.0, "step_seconds": 0.02, "sent_bytes_per_step": 2048.0}
SHARES = {"data_wait_share": 0.1, "communication_share": 0.25}
TRACED = {"first_step": 3, "steps": 5, "rank 0": {"exposed": 0.125}, "rank 1": {"exposed": 0.375}}


def facts(*lines: dict[str, Any], **more: Any) -> Facts:
    return Facts(FILE, steps=tuple({"step": i + 1, **LINE, **line} for i, line in enumerate(lines)), **more)


def page(run: Facts) -> str:
    return _render("speed.html", speed({"this run": run}))


def experts_page(*lines: dict[str, Any]) -> str:
    return _render("experts.html", experts(facts(*lines)))


def _render(template: str, values: Body | None) -> str:
    assert values is not None
    return str(render(template, **values))


def test_lines_are_weighted_by_their_steps_and_parts_add_up() -> None:
    lines = (
        {"step": 10, "step_seconds": 1.0, **SHARES},
        {"step": 30, "step_seconds": 0.5, **SHARES, "data_wait_share": 0.3, "checkpoint_seconds": 2.0},
    )
    budget = time_budget(facts(*lines, summary={"seconds": 25.0, "checkpoint_seconds": 2.5}))
    assert budget is not None
    assert budget.parts == pytest.approx(
        {"computing": 8.5, "communication": 5.0, "data": 4.0, "checkpoints": 2.5, "validation and the rest": 5.0}
    )
    assert budget.complete
    assert budget.total == pytest.approx(25.0)


def test_budget_covers_only_the_steps_after_a_resume() -> None:
    budget = time_budget(facts({"step": 10, "step_seconds": 1.0, **SHARES}, summary={"seconds": 4.0}))
    assert budget is not None
    assert not budget.complete
    assert budget.total == pytest.approx(10.0)
    shown = page(facts({"step": 10, "step_seconds": 1.0}))
    assert "the time between them is unknown" in shown
    for name in ("communication", "data", "checkpoints"):
        assert name not in shown


def test_overlapping_waits_and_untimed_steps_give_no_wrong_budget() -> None:
    budget = time_budget(facts({"data_wait_share": 0.7, "communication_share": 0.6}))
    assert budget is not None
    assert budget.parts["computing"] == 0
    assert time_budget(facts({"step_seconds": None})) is None
    assert "Time budget" not in page(facts({"step_seconds": None}))
    assert speed({"this run": facts()}) is None


def test_exposed_communication_is_read_from_the_timeline_or_the_log() -> None:
    logged = facts({"communication_share": 0.25}, {"communication_share": 0.5})
    assert exposed_communication(logged) == (0.375, "mean of all steps")
    assert exposed_communication(replace(logged, communication=TRACED)) == (0.25, "timeline of steps 3 to 7")
    assert exposed_communication(facts({})) is None
    assert "37.5% (mean of all steps)" in page(logged)
    budget = time_budget(facts({"step": 8, "step_seconds": 1.0}, communication=TRACED))
    assert budget is not None
    assert budget.parts["communication"] == pytest.approx(2.0)


def test_unmeasured_figures_are_omitted() -> None:
    shown = page(facts({}))
    assert "2.0 KiB per step" in shown
    names = ("exposed communication", "overflow", "GPU", "memory", "Batch sizes", "Shares of a batch", "Timeline")
    for name in (*names, "pause for a checkpoint"):
        assert name not in shown


@pytest.mark.parametrize(
    ("lines", "summary", "name", "value"),
    [
        ([{}], {"memory_bytes": 3 << 20}, "peak GPU memory of a process, allocated by torch", "3.0 MiB"),
        ([{}], {"resident_bytes": 3 << 20}, "peak resident memory of a process", "3.0 MiB"),
        ([{"overflow_steps": 1}, {"overflow_steps": 2}], {}, "steps skipped for overflow", "2"),
        ([{"overflow_steps": 1, "loss_scale": 16384.0}], {}, "loss scale", "16,384"),
        ([{"checkpoint_seconds": each} for each in (0.003, 0.002, 0.5)], {}, "median pause for a checkpoint", "3 ms"),
    ],
)
def test_measured_figures_are_named_by_what_was_measured(
    lines: list[dict[str, Any]], summary: dict[str, Any], name: str, value: str
) -> None:
    assert f"<dt>{name}</dt><dd>{value}</dd>" in page(facts(*lines, summary=summary))


def test_tried_batch_sizes_are_drawn_and_the_chosen_one_is_marked() -> None:
    timed = [{"batch_size": 8, "samples_per_second": 100.0}, {"batch_size": 16, "samples_per_second": 200.0}]
    choice = {"batch_size": 16, "limit": "memory", "timed": timed}
    shown = page(facts({}, batch_size=choice))
    assert shown.count('class="taken"') == 1
    assert "16, the fastest of those tried, limited by memory" in shown


@pytest.mark.parametrize(("processes", "names"), [(2, ["rank 0", "rank 1"]), (20, ["largest", "smallest"])])
def test_batch_shares_are_drawn_per_process_or_as_extremes(processes: int, names: list[str]) -> None:
    shares = {f"rank {rank}": (rank + 1) / 10 for rank in range(processes)}
    shown = page(facts({"batch_share": shares}, {"batch_share": shares}))
    assert f"Shares of a batch: {', '.join(names)} by optimizer step" in shown


def test_training_files_are_read_during_and_after_training(tmp_path: Path) -> None:
    run = Run(tmp_path / "one")
    run.partial("train").mkdir(parents=True)
    (run.path / "run.json").write_text(FILE.model_dump_json())
    (run.partial("train") / "trace.json.gz").write_bytes(b"")
    write_json(run.partial("train") / "communication.json", TRACED)
    write_json(run.partial("train") / "batch_size.json", {"batch_size": 8})
    # The last line is still being written.
    (run.partial("train") / "metrics.jsonl").write_text(json.dumps({"step": 1, **LINE}) + '\n{"step": 256, "lo')
    assert read_facts(run).timeline == "train.partial/trace.json.gz"
    run.partial("train").rename(run.output("train"))
    read = read_facts(run)
    assert (read.timeline, read.batch_size, read.communication) == ("train/trace.json.gz", {"batch_size": 8}, TRACED)
    assert len(read.steps) == 1
    assert "<code>train/trace.json.gz</code>" in page(read)


def expert_line(peak: float, dropped: float, **more: Any) -> dict[str, Any]:
    values = {"load_max_over_mean": peak, "router_entropy": 0.75, "dropped_tokens": dropped}
    return {"experts": values, "expert_load_max_over_mean": {"layer_0": peak}, **more}


def test_balance_entropy_and_dropped_tokens_of_experts_are_shown() -> None:
    shown = experts_page(expert_line(2.5, 1), expert_line(1.5, 2))
    assert "<dt>largest load over the mean, at last</dt><dd>1.5</dd>" in shown
    assert "75.0% of the maximum" in shown
    assert "<dt>dropped tokens</dt><dd>3</dd>" in shown
    assert "Largest load over the mean: mean of layers, worst layer by optimizer step" in shown
    assert "Tokens of each expert" not in shown
    assert experts(facts({}, {})) is None, "of a model without experts"


def test_last_loads_of_experts_are_drawn_most_uneven_layer_first() -> None:
    shown = experts_page(expert_line(1.5, 0, expert_loads=[[5, 5], [1, 9]]))
    places = [shown.index(f"<span>{name}</span>") for name in ("1.0", "1.1", "0.0", "0.1")]
    assert places == sorted(places)
    assert "width:11.1%" in shown
