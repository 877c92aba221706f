from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.facts import Facts, read_facts
from pipeline.contract.files import write_json
from pipeline.contract.html import flat
from pipeline.contract.run import Run, RunFile
from pipeline.report.training import exposed_share, speed

LINE = {"epoch": 0, "loss": 1.0, "samples_per_second": 900.0, "step_seconds": 0.02, "sent_bytes_per_step": 2048.0}
TRACED = {"first_step": 3, "steps": 5, "rank 0": {"exposed": 0.125}, "rank 1": {"exposed": 0.375}}


def facts(*lines: dict[str, Any], **more: Any) -> Facts:
    file = RunFile(id="one", created="2026-01-01", wanted=("train",), config={}, environment={})
    return Facts(file=file, steps=tuple({"step": i + 1, **LINE, **line} for i, line in enumerate(lines)), **more)


def page(found: Facts) -> str:
    return flat(speed(found))


def test_the_exposed_share_comes_from_the_timeline_or_else_from_the_journal() -> None:
    told = facts({"communication_share": 0.25}, {"communication_share": 0.5})
    assert exposed_share(told) == (0.375, "mean of all steps")
    assert exposed_share(replace(told, communication=TRACED)) == (0.25, "timeline of steps 3 to 7")
    assert exposed_share(facts({})) is None
    assert "37.5% (mean of all steps)" in page(told)


def test_nothing_is_said_of_what_was_not_measured() -> None:
    shown = page(facts({}))
    assert "2.0 KiB a step" in shown
    for name in ("exposed communication", "overflow", "GPU", "memory", "Batch sizes", "Shares of a batch", "Timeline"):
        assert name not in shown
    assert speed(facts()) is None


def test_overflows_of_a_run_that_is_not_finished_are_those_told_last() -> None:
    lines = [{"overflow_steps": 1, "loss_scale": 32768.0}, {"overflow_steps": 2, "loss_scale": 16384.0}]
    assert "<dt>steps skipped for overflow</dt><dd>2</dd>" in page(facts(*lines))
    assert "<dd>16,384</dd>" in page(facts(*lines))


def test_the_sizes_that_were_tried_are_drawn_and_the_chosen_one_stands_out() -> None:
    timed = [{"batch_size": 8, "samples_per_second": 100.0}, {"batch_size": 16, "samples_per_second": 200.0}]
    choice = {"batch_size": 16, "largest": 64, "limit": "memory", "timed": timed}
    shown = page(facts({}, batch_size=choice))
    assert shown.count('class="taken"') == 1
    assert "16, the fastest; 64 is the largest that fits, for want of memory" in shown


@pytest.mark.parametrize(("processes", "names"), [(2, ["rank 0", "rank 1"]), (20, ["largest", "smallest"])])
def test_the_shares_of_a_batch_are_drawn_by_process_or_by_their_ends_where_there_are_many(
    processes: int, names: list[str]
) -> None:
    shares = {f"rank {rank}": (rank + 1) / 10 for rank in range(processes)}
    shown = page(facts({"batch_share": shares}, {"batch_share": shares}))
    assert f"Shares of a batch: {', '.join(names)} by optimizer step" in shown


def test_what_training_left_is_found_while_it_runs_and_when_it_is_done(tmp_path: Path) -> None:
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


def test_the_pause_for_a_checkpoint_is_told_where_there_was_one() -> None:
    assert "pause for a checkpoint" not in page(facts({}))
    lines = [{"checkpoint_seconds": value} for value in (0.003, 0.002, 0.5)]
    assert "<dt>median pause for a checkpoint</dt><dd>3 ms</dd>" in page(facts(*lines, {}))
