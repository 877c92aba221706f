"""The message that docs/operations.md quotes is that of the code, and its sections are linked at the top."""

from __future__ import annotations

from pipeline.contract.restarts import Event, attempts_from, describe_restart
from pipeline.system.processes import describe_exit
from pipeline.system.sources import SOURCE_ROOT

DOCUMENT = SOURCE_ROOT / "docs" / "operations.md"


def test_quoted_restart_is_what_is_logged() -> None:
    hosts = ("node0", "node1", "node2")
    reason = describe_exit("rank 1 on node1", -9)
    events = [
        Event(time=0.0, event="launch", attempt=0),
        Event(time=0.0, event="start", attempt=1, hosts=hosts, processes=3, step=380),
        Event(time=0.0, event="end", attempt=1, host="node0", reason=reason),
        Event(time=0.0, event="start", attempt=2, hosts=hosts, processes=3, step=400),
    ]
    assert describe_restart(attempts_from(events), allowed=3) in DOCUMENT.read_text()
