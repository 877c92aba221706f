from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.results import Facts, read_facts
from pipeline.contract.run import Run, RunFile
from pipeline.report.training import exposed_communication, speed
from pipeline.system.files import write_json

LINE = {"epoch": 0, "loss": 1.0, "samples_per_second": 900.0, "step_seconds": 0.02, "sent_bytes_per_step": 2048.0}
TRACED = {"first_step": 3, "steps": 5, "rank 0": {"exposed": 0.125}, "rank 1": {"exposed": 0.375}}


def facts(*lines: dict[str, Any], **more: Any) -> Facts:
    file = RunFile(id="one", created="2026-01-01", wanted=("train",), config={}, environment={})
    return Facts(file=file, steps=tuple({"step": i + 1, **LINE, **line} for i, line in enumerate(lines)), **more)


def page(run: Facts) -> str:
    return str(speed({"this run": run}))


def test_exposed_communication_is_read_from_the_timeline_or_the_log() -> None:
    logged = facts({"communication_share": 0.25}, {"communication_share": 0.5})
    assert exposed_communication(logged) == (0.375, "mean of all steps")
    assert exposed_communication(replace(logged, communication=TRACED)) == (0.25, "timeline of steps 3 to 7")
    assert exposed_communication(facts({})) is None
    assert "37.5% (mean of all steps)" in page(logged)


def test_unmeasured_figures_are_omitted() -> None:
    shown = page(facts({}))
    assert "2.0 KiB per step" in shown
    for name in ("exposed communication", "overflow", "GPU", "memory", "Batch sizes", "Shares of a batch", "Timeline"):
        assert name not in shown
    assert speed({"this run": facts()}) is None


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("memory_bytes", "peak GPU memory of a process, allocated by torch"),
        ("resident_bytes", "peak resident memory of a process"),
    ],
)
def test_peak_memory_is_named_by_what_was_measured(name: str, title: str) -> None:
    assert f"<dt>{title}</dt><dd>3.0 MiB</dd>" in page(facts({}, summary={name: 3 << 20}))


def test_overflows_of_an_unfinished_run_are_the_last_logged() -> None:
    lines = [{"overflow_steps": 1, "loss_scale": 32768.0}, {"overflow_steps": 2, "loss_scale": 16384.0}]
    assert "<dt>steps skipped for overflow</dt><dd>2</dd>" in page(facts(*lines))
    assert "<dd>16,384</dd>" in page(facts(*lines))


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
    (run.path / "run.json").write_text(facts().file.model_dump_json())
    (run.partial("train") / "trace.json.gz").write_bytes(b"")
    write_json(run.partial("train") / "communication.json", TRACED)
    write_json(run.partial("train") / "batch_size.json", {"batch_size": 8})
    (run.partial("train") / "metrics.jsonl").write_text(json.dumps({"step": 1, **LINE}) + "\n")
    assert read_facts(run).timeline == "train.partial/trace.json.gz"
    run.partial("train").rename(run.output("train"))
    found = read_facts(run)
    assert (found.timeline, found.batch_size, found.communication) == ("train/trace.json.gz", {"batch_size": 8}, TRACED)
    assert "<code>train/trace.json.gz</code>" in page(found)


def test_checkpoint_pause_is_shown_if_there_was_one() -> None:
    assert "pause for a checkpoint" not in page(facts({}))
    lines = [{"checkpoint_seconds": value} for value in (0.003, 0.002, 0.5)]
    assert "<dt>median pause for a checkpoint</dt><dd>3 ms</dd>" in page(facts(*lines, {}))
