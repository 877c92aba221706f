from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from train.phase import phase


def test_a_phase_is_named_in_a_timeline_and_costs_nothing_without_one() -> None:
    assert phase("one") is phase("two")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as timeline, phase("forward"):
        sum(range(10))
    assert [event.key for event in timeline.key_averages()] == ["forward"]
