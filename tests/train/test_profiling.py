from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from train.profiling import (
    SHARES_FILE,
    TRACE_FILE,
    Timeline,
    clock_offsets_ns,
    communication_shares,
    merge_timelines,
    phase,
    traced_steps,
    uncovered_length,
    union_length,
)

from .conftest import Project, equal, weights


def test_phases_are_named_in_a_timeline() -> None:
    assert phase("one") is phase("two")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as timeline, phase("forward"):
        sum(range(10))
    assert [event.key for event in timeline.key_averages()] == ["forward"]


def span(name: str, start: float, stop: float, pid: int = 0, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": 1, "ts": start, "dur": stop - start}


def timeline(host: str, events: list[dict[str, Any]], base_ns: int = 0, clock_ns: int = 0) -> Timeline:
    return Timeline(host, tuple(clock_ns + i * 1000 for i in range(5)), base_ns, events)


def test_union_length_counts_overlaps_once() -> None:
    assert union_length([]) == 0
    assert union_length([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_uncovered_length_excludes_covered_spans() -> None:
    assert uncovered_length([(0, 10)], []) == 10
    assert uncovered_length([(0, 4), (3, 10)], [(2, 5), (4, 6), (20, 30)]) == 6
    assert uncovered_length([(2, 3)], [(0, 10)]) == 0


def test_communication_without_computation_is_exposed() -> None:
    events = [
        span("step 1", 0, 100),
        span("aten::mm", 0, 50),
        span("gloo:all_reduce", 30, 70),  # 20 of it after the computation
        span("backward", 0, 75),  # a user annotation is no computation
        span("step 1", 0, 100, pid=1),
        span("aten::mm", 0, 40, pid=1),
        span("aten::add", 40, 95, pid=1),
        span("gloo:all_reduce", 50, 120, pid=1),  # of which 20 are after the last step
    ]
    assert communication_shares(events) == {
        "rank 0": {"communication": 0.4, "exposed": 0.2},
        "rank 1": {"communication": 0.5, "exposed": 0.05},
    }


def test_with_a_gpu_only_kernels_count() -> None:
    events = [
        span("step 1", 0, 100),
        span("aten::mm", 0, 100),  # only launches the kernel
        span("nccl:all_reduce", 0, 100),
        span("gemm", 0, 60, category="kernel"),
        span("ncclDevKernel_AllReduce_Sum_f32", 40, 80, category="kernel"),
        span("Memcpy HtoD", 75, 80, category="gpu_memcpy"),
    ]
    assert communication_shares(events) == {"rank 0": {"communication": 0.4, "exposed": 0.15}}


def test_a_process_without_traced_steps_has_no_shares() -> None:
    assert communication_shares([span("gloo:all_reduce", 0, 1)]) == {"rank 0": {"communication": 0.0, "exposed": 0.0}}


def test_processes_become_named_lanes_and_steps_get_their_numbers() -> None:
    own = [
        span("ProfilerStep#1", 10, 20, pid=77),
        {"ph": "s", "id": 5, "name": "fwdbwd", "pid": 77, "tid": 1, "ts": 11},
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 1, "ts": 0, "args": {"name": "main"}},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 0, "ts": 0, "dur": 9},
    ]
    merged = merge_timelines([timeline("a", own), timeline("b", own)], first_step=40)
    names = [(event["pid"], event["args"]["name"]) for event in merged if event["name"] == "process_name"]
    assert names == [(0, "rank 0 (a)"), (1, "rank 1 (b)")]
    assert [(event["pid"], event["name"]) for event in merged if event["ph"] == "X"] == [(0, "step 41"), (1, "step 41")]
    assert [event["id"] for event in merged if event["ph"] == "s"] == ["0.5", "1.5"], "arrows stay in their lane"
    assert [event["pid"] for event in merged if event["name"] == "thread_name"] == [0, 1]


def test_merged_times_start_at_the_first_event() -> None:
    first = timeline("a", [span("x", 100, 110)], base_ns=1_000_000)
    second = timeline("a", [span("x", 0, 10)], base_ns=1_120_000)  # 20 µs later
    assert [event["ts"] for event in merge_timelines([first, second], 0) if event["ph"] == "X"] == [0, 20]


def test_clocks_of_machines_are_aligned_by_collectives() -> None:
    first = timeline("a", [span("x", 0, 1)])
    near = timeline("a", [span("x", 0, 1)], clock_ns=30_000)  # the same clock, read a little later
    far = timeline("b", [span("x", 5, 6)], clock_ns=7_000)  # 7 µs fast
    assert clock_offsets_ns([first, near, far]) == [0, 0, -7_000]
    assert [event["ts"] for event in merge_timelines([first, near, far], 0) if event["ph"] == "X"] == [2, 2, 0]


@pytest.mark.parametrize(
    ("first", "count", "start", "total", "expected"),
    [
        (3, 5, 0, 100, range(3, 8)),
        (0, 5, 0, 100, range(1, 6)),  # one step to warm up in
        (3, 5, 40, 100, range(43, 48)),  # resumed
        (50, 5, 0, 20, range(15, 20)),
        (3, 5, 0, 4, range(1, 4)),
        (3, 5, 0, 1, range(1, 1)),
        (3, 5, 100, 100, range(101, 101)),
    ],
)
def test_traced_steps_lie_within_training_after_a_warm_up(
    first: int, count: int, start: int, total: int, expected: range
) -> None:
    assert traced_steps(first, count, start, total) == expected


@pytest.mark.long
def test_two_processes_give_one_file_with_two_lanes(project: Project) -> None:
    project.replace("nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)", DEEP)
    project.replace(
        "class Tiny:", "from train.parallel.ddp import DDPStrategy\nDDPStrategy.BUCKET_CAP_MB = 0.3\n\n\nclass Tiny:"
    )
    plain, traced = (project.run(name, trace=trace, epochs=2) for name, trace in (("plain", False), ("traced", True)))
    for run in (plain, traced):
        done = project.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    assert equal(weights(plain), weights(traced))
    assert not (plain.partial("train") / TRACE_FILE).exists()

    body = json.loads(gzip.decompress((traced.partial("train") / TRACE_FILE).read_bytes()))
    events: list[dict[str, Any]] = body["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(" (")[0] for name in lanes.values()] == ["rank 0", "rank 1"]
    for lane in lanes:
        own = [event for event in events if event["pid"] == lane and event["ph"] == "X"]
        named = {event["name"] for event in own}
        assert named >= {"data", "forward", "backward", "exchange", "update", "gloo:all_reduce"}
        assert [event["name"] for event in sorted(own, key=start) if event["name"].startswith("step ")] == [
            f"step {i}" for i in range(3, 8)
        ]
        assert overlaps(own)
    facts = json.loads((traced.partial("train") / SHARES_FILE).read_text())
    for rank in ("rank 0", "rank 1"):
        assert 0 < facts[rank]["exposed"] <= facts[rank]["communication"] <= 1


def test_single_process_timeline_and_too_short_training(project: Project) -> None:
    alone = project.run("alone", trace=True, epochs=1)
    assert project.train(alone).returncode == 0
    facts = json.loads((alone.partial("train") / SHARES_FILE).read_text())
    assert facts == {"first_step": 1, "steps": 4, "rank 0": {"communication": 0.0, "exposed": 0.0}}
    short = project.run("short", trace=True, epochs=1, batch_size=37)
    assert "no timeline: training ended after 1 steps" in project.train(short).stdout


def overlaps(events: list[dict[str, Any]]) -> bool:
    """Return whether some gradients are exchanged while others are computed."""
    exchanges = [event for event in events if event["name"] == "gloo:all_reduce"]
    products = [event for event in events if event["name"] == "aten::mm"]
    return any(start(a) < start(b) < start(a) + a["dur"] for a in exchanges for b in products)


def start(event: dict[str, Any]) -> float:
    found: float = event["ts"]
    return found


DEEP = "nn.Linear(3, 512), *[m for _ in range(4) for m in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 1)"
