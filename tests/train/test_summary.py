from __future__ import annotations

from train.summary import last_line

SUMMARY = {"steps": 40, "batch_size": 8, "samples_per_second": 1234.5, "best_step": 30}


def test_training_ends_with_a_line_for_people() -> None:
    assert last_line(SUMMARY) == "40 steps in batches of 8, 1,234 samples/s; best at step 30"


def test_steps_that_were_skipped_are_told() -> None:
    told = last_line({**SUMMARY, "overflow_steps": 2, "loss_scale": 16384.0})
    assert told.endswith("; best at step 30; 2 steps skipped for overflow, loss scale 16384")
    assert "; 1 step skipped" in last_line({**SUMMARY, "overflow_steps": 1, "loss_scale": 16384.0})
