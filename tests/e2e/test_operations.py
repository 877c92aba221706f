"""The messages that docs/operations.md quotes are those of the code, and its table links to its sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.contract.restarts import Event, GiveUp, attempts_from, describe_restart
from pipeline.system.processes import describe_exit
from pipeline.system.sources import SOURCE_ROOT
from pipeline.training.node import describe_give_up
from train.hang_report import Activity, Hang, ProcessReport, describe_hang

DOCUMENT = SOURCE_ROOT / "docs" / "operations.md"
KILLED = describe_exit("rank 1 on node1", -9)
LOST = "rank 0 lost contact with another process, which was killed, failed or hangs; see the log"
FAULT = "rank 3 on node2: its GPU failed: CUDA error: uncorrectable ECC error encountered"
THREE, TWO = ("node0", "node1", "node2"), ("node0", "node1")


def quoted() -> str:
    """All blocks of text, each sentence on one line."""
    blocks = re.findall(r"^```text\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(" ".join(block.split()) for block in blocks)


def news(*attempts: tuple[Sequence[str], int, str]) -> str:
    """Describe the last of some attempts: their hosts, the step they started from, and what ended them."""
    lines: list[dict[str, Any]] = [{"event": "launch", "attempt": 0}]
    for number, (hosts, step, reason) in enumerate(attempts, start=1):
        lines.append({"event": "start", "attempt": number, "hosts": hosts, "processes": len(hosts), "step": step})
        if reason:
            lines.append({"event": "end", "attempt": number, "host": "node0", "reason": reason})
    return describe_restart(attempts_from([Event(time=0.0, **line) for line in lines]), allowed=3)


def different_calls() -> str:
    calls = (
        ("all_reduce", "gloo:all_reduce, no. 37, of [4] Float"),
        ("barrier", "gloo:barrier, no. 37, of nothing"),
    )
    reports = [
        ProcessReport(
            rank, "node0", 1, 0.0, 1, 9, "forward and backward", Activity.WAITING, f"the collective {name}", 60.0,
            exchange, calls={"0 no. 37": name},
        )
        for rank, (name, exchange) in enumerate(calls)
    ]  # fmt: skip
    return describe_hang(Hang(reports, ()))


def stopped() -> str:
    report = ProcessReport(1, "node1", 4242, 0.0, 1, 434, "forward and backward", Activity.PIPE_CODE, "", 60.0)
    return describe_hang(Hang([report], [report], {1: "it is stopped (SIGSTOP)"}))


def all_wait() -> str:
    place = "the backward pass"
    exchange = "gloo:all_reduce, no. 98, of [151498] Float"
    reports = [
        ProcessReport(rank, host, 1, 0.0, 1, 433, "forward and backward", Activity.WAITING, place, 60.0, exchange)
        for rank, host in enumerate(THREE)
    ]
    return describe_hang(Hang(reports, ()))


@pytest.mark.parametrize(
    "output",
    [
        describe_give_up(GiveUp(KILLED, 4, 400), allowed=3),
        news((THREE, 380, KILLED), (THREE, 400, "")),
        news((THREE, 380, LOST), (TWO, 400, "")),
        news((THREE, 380, FAULT), (THREE, 400, "")),
        f"a GPU of node2 is gone ({FAULT}); to fix it",
        news((TWO, 400, ""), (THREE, 460, "")),
        all_wait().partition(". If")[0],
        different_calls().partition("; conditions")[0],
        stopped().partition(". Waiting")[0],
    ],
)
def test_what_the_document_quotes_is_what_is_stated(output: str) -> None:
    assert output, "nothing would be found everywhere"
    assert output in quoted()


def test_every_section_is_linked_at_the_top() -> None:
    text = DOCUMENT.read_text()
    sections = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    named = set(re.findall(r"\]\(#([^)]+)\)", text))
    slugs = {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in sections}
    assert slugs <= named
