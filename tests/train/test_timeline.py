from __future__ import annotations

from typing import Any

from train.timeline import Shares, Timeline, clock_shifts_ns, length, merge, shares, uncovered


def span(name: str, start: float, stop: float, pid: int = 0, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": 1, "ts": start, "dur": stop - start}


def timeline(host: str, events: list[dict[str, Any]], base_ns: int = 0, clock_ns: int = 0) -> Timeline:
    return Timeline(host, tuple(clock_ns + i * 1000 for i in range(5)), base_ns, events)


def test_the_length_of_spans_counts_what_they_share_once() -> None:
    assert length([]) == 0
    assert length([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_what_is_covered_is_left_out() -> None:
    assert uncovered([(0, 10)], []) == 10
    assert uncovered([(0, 4), (3, 10)], [(2, 5), (4, 6), (20, 30)]) == 6
    assert uncovered([(2, 3)], [(0, 10)]) == 0


def test_an_exchange_is_exposed_where_its_process_computes_nothing() -> None:
    events = [
        span("step 1", 0, 100),
        span("aten::mm", 0, 50),
        span("gloo:all_reduce", 30, 70),  # 20 of it after the computation
        span("backward", 0, 75),  # a name for a stretch of time is no computation
        span("step 1", 0, 100, pid=1),
        span("aten::mm", 0, 40, pid=1),
        span("aten::add", 40, 95, pid=1),
        span("gloo:all_reduce", 50, 120, pid=1),  # of which 20 are after the last step
    ]
    assert shares(events) == {"rank 0": Shares(0.4, 0.2), "rank 1": Shares(0.5, 0.05)}


def test_with_a_gpu_it_is_the_kernels_that_count() -> None:
    events = [
        span("step 1", 0, 100),
        span("aten::mm", 0, 100),  # launches
        span("nccl:all_reduce", 0, 100),
        span("gemm", 0, 60, category="kernel"),
        span("ncclDevKernel_AllReduce_Sum_f32", 40, 80, category="kernel"),
        span("Memcpy HtoD", 75, 80, category="gpu_memcpy"),
    ]
    assert shares(events) == {"rank 0": Shares(0.4, 0.15)}


def test_a_process_without_traced_steps_has_no_shares() -> None:
    assert shares([span("gloo:all_reduce", 0, 1)]) == {"rank 0": Shares(0.0, 0.0)}


def test_processes_become_named_lanes_and_steps_get_their_numbers() -> None:
    own = [
        span("ProfilerStep#1", 10, 20, pid=77),
        {"ph": "s", "id": 5, "name": "fwdbwd", "pid": 77, "tid": 1, "ts": 11},
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 1, "ts": 0, "args": {"name": "main"}},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 0, "ts": 0, "dur": 9},
    ]
    merged = merge([timeline("a", own), timeline("b", own)], first_step=40)
    names = [(event["pid"], event["args"]["name"]) for event in merged if event["name"] == "process_name"]
    assert names == [(0, "rank 0 (a)"), (1, "rank 1 (b)")]
    assert [(event["pid"], event["name"]) for event in merged if event["ph"] == "X"] == [(0, "step 41"), (1, "step 41")]
    assert [event["id"] for event in merged if event["ph"] == "s"] == ["0.5", "1.5"], "arrows stay in their lane"
    assert [event["pid"] for event in merged if event["name"] == "thread_name"] == [0, 1]


def test_times_count_from_the_first_event_whatever_each_process_counts_from() -> None:
    first = timeline("a", [span("x", 100, 110)], base_ns=1_000_000)
    second = timeline("a", [span("x", 0, 10)], base_ns=1_120_000)  # 20 µs later
    assert [event["ts"] for event in merge([first, second], 0) if event["ph"] == "X"] == [0, 20]


def test_clocks_of_other_machines_are_set_by_the_moments_at_which_all_met() -> None:
    first = timeline("a", [span("x", 0, 1)])
    near = timeline("a", [span("x", 0, 1)], clock_ns=30_000)  # the same clock, read a little later
    far = timeline("b", [span("x", 5, 6)], clock_ns=7_000)  # 7 µs fast
    assert clock_shifts_ns([first, near, far]) == [0, 0, -7_000]
    assert [event["ts"] for event in merge([first, near, far], 0) if event["ph"] == "X"] == [2, 2, 0]
