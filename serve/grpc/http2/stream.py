"""One request of an HTTP/2 connection and its answer, and who answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from serve.grpc.http2.frames import MOST_WINDOW, Code, StreamFault

if TYPE_CHECKING:
    from serve.grpc.http2.streams import Streams


class Stream:
    """One request and its answer. `about` is what its head means, `state` what the application keeps of it."""

    __slots__ = (
        "about",
        "complete",
        "gone",
        "id",
        "length",
        "parts",
        "received",
        "running",
        "sending",
        "since",
        "size",
        "state",
        "window",
    )

    def __init__(self, stream_id: int, window: int, about: Any, length: int | None) -> None:
        self.id, self.window, self.about = stream_id, window, about
        self.length = length  # that its body is said to have
        self.state: Any = None
        self.parts: list[bytes] = []  # of its body
        self.size = 0  # of all of it, as far as it came
        self.received = 0  # bytes that its window was not topped up for
        self.complete = False  # all of it is here
        self.running = False  # the application has it
        self.sending = False  # the answer is under way, and nothing more is read
        self.gone = False  # the client does not want the answer any more
        self.since = time.monotonic()

    def left(self) -> bool:
        return self.gone

    def widen(self, size: int) -> None:
        if not size:
            raise StreamFault(Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of nothing")
        self.window += size
        if self.window > MOST_WINDOW:
            raise StreamFault(Code.FLOW_CONTROL_ERROR, "the window of a stream is wider than any may be")


class Application(Protocol):
    """Who answers: by `streams.answer`, once, whenever it can."""

    def understand(self, request: dict[bytes, bytes] | None) -> Any:
        """What a head means, kept and used again for the same; None: it was longer than it may be."""
        ...

    def opened(self, streams: Streams, stream: Stream) -> None:
        """Its head is here."""
        ...

    def grew(self, streams: Streams, stream: Stream, size: int) -> None:
        """So many more bytes of its body are here, and not all of them."""
        ...

    def complete(self, streams: Streams, stream: Stream) -> None:
        """All of it is here, and it was not answered before; from now on it is `running`, until it is answered."""
        ...

    def late(self, streams: Streams, stream: Stream) -> None:
        """The rest of its body does not come."""
        ...

    def lost(self, stream: Stream) -> None:
        """The client took it back before it was complete."""
        ...
