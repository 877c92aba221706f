"""One stream of an HTTP/2 connection: a request and its answer."""

from __future__ import annotations

import time
from typing import Any

from serve.grpc.http2.frames import MAX_WINDOW, ErrorCode, StreamFault


class Stream:
    __slots__ = (
        "cancelled",
        "complete",
        "content_length",
        "head",
        "id",
        "opened_at",
        "parts",
        "running",
        "sending",
        "size",
        "state",
        "unacknowledged",
        "window",
    )

    def __init__(self, stream_id: int, window: int, head: Any, content_length: int | None) -> None:
        self.id = stream_id
        self.window = window  # bytes the client will take
        self.head = head  # what Application.parse_head returned
        self.content_length = content_length
        self.state: Any = None  # for the application
        self.parts: list[bytes] = []  # of the request's body
        self.size = 0  # bytes of the body received so far
        self.unacknowledged = 0  # received bytes that no WINDOW_UPDATE has returned yet
        self.complete = False  # the whole request was received
        self.running = False  # the application computes the answer
        self.sending = False  # the answer is being sent; the rest of the request is ignored
        self.cancelled = False  # the client reset the stream or disconnected
        self.opened_at = time.monotonic()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def widen(self, size: int) -> None:
        if not size:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE must not be 0")
        self.window += size
        if self.window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, f"the stream's window exceeds {MAX_WINDOW}")
