from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from train.trace import FILE, SHARES, traced_steps

from .conftest import Project, equal, weights


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
def test_the_traced_steps_lie_within_training_and_after_one_that_is_not_traced(
    first: int, count: int, start: int, total: int, expected: range
) -> None:
    assert traced_steps(first, count, start, total) == expected


def test_two_processes_stand_as_two_lanes_in_one_file_with_the_exchange_under_the_computation(
    project: Project,
) -> None:
    project.replace("nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)", DEEP)
    plain, traced = (
        project.run(name, trace=trace, trace_steps=[2, 3], epochs=2, bucket_mb=0.3)
        for name, trace in (("plain", False), ("traced", True))
    )
    for run in (plain, traced):
        done = project.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    assert equal(weights(plain), weights(traced))
    assert not (plain.partial("train") / FILE).exists()

    body = json.loads(gzip.decompress((traced.partial("train") / FILE).read_bytes()))
    events: list[dict[str, Any]] = body["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(" (")[0] for name in lanes.values()] == ["rank 0", "rank 1"]
    for lane in lanes:
        own = [event for event in events if event["pid"] == lane and event["ph"] == "X"]
        named = {event["name"] for event in own}
        assert named >= {"data", "forward", "backward", "exchange", "update", "gloo:all_reduce"}
        assert [event["name"] for event in sorted(own, key=start) if event["name"].startswith("step ")] == [
            f"step {i}" for i in (2, 3, 4)
        ]
        assert overlaps(own)
    facts = json.loads((traced.partial("train") / SHARES).read_text())
    for rank in ("rank 0", "rank 1"):
        assert 0 < facts[rank]["exposed"] <= facts[rank]["communication"] <= 1


def test_a_process_alone_has_its_timeline_and_training_that_ends_too_early_says_so(project: Project) -> None:
    alone = project.run("alone", trace=True, epochs=1)
    assert project.train(alone).returncode == 0
    facts = json.loads((alone.partial("train") / SHARES).read_text())
    assert facts == {"first_step": 1, "steps": 4, "rank 0": {"communication": 0.0, "exposed": 0.0}}
    short = project.run("short", trace=True, epochs=1, batch_size=37)
    assert "no timeline: training ended after 1 steps" in project.train(short).stdout


def overlaps(events: list[dict[str, Any]]) -> bool:
    """Whether some gradients are on their way while others are computed."""
    exchanges = [event for event in events if event["name"] == "gloo:all_reduce"]
    products = [event for event in events if event["name"] == "aten::mm"]
    return any(start(a) < start(b) < start(a) + a["dur"] for a in exchanges for b in products)


def start(event: dict[str, Any]) -> float:
    found: float = event["ts"]
    return found


DEEP = "nn.Linear(3, 512), *[m for _ in range(4) for m in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 1)"
