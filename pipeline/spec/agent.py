"""How torch's elastic agent, which starts the training processes of one machine, tells its node why it ended."""

from __future__ import annotations

from enum import IntEnum


class AgentStatus(IntEnum):
    DONE = 0
    FAILED = 1  # its processes did, and are not started again
    TOO_FEW = 81  # machines came within the time
    NO_STORE = 82  # the place where machines meet does not answer
    CLOSED = 83  # those who met there are through
