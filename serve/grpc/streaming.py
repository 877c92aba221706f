"""Calls with several messages, in either direction.

Messages of an answer are small and few: each is sent at once where the client's flow control windows have room for it,
and none is queued. A client that opens no window loses its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from serve.errors import Busy, Unimplemented
from serve.grpc import messages
from serve.wire.http2.stream import Stream
from serve.wire.http2.streams import Streams

_MAX_MESSAGE_BYTES = 4096  # of a client; the messages are names


class Answering(Protocol):
    """One call that is answered as its messages arrive. Errors that it raises end the call with their status."""

    def on_message(self, message: Any) -> None:
        """Handle a message of the client."""

    def on_end(self) -> None:
        """Handle the end of the client's messages."""

    def close(self) -> None:
        """Clean up after the call has ended, in whatever way."""


Open = Callable[["MessageStream"], Answering]


class MessageStream:
    """The messages of one call."""

    def __init__(self, streams: Streams, stream: Stream, end: Callable[[Exception | None], None]) -> None:
        """`end` ends the call, with the status of an error or with OK."""
        self._streams, self._stream, self.end = streams, stream, end
        self._received = b""
        self.has_begun = False  # the headers of the answer have been sent

    def send(self, message: Any) -> None:
        data = messages.frame_message(message.SerializeToString())
        head = b"" if self.has_begun else messages.ANSWER
        if not self._streams.send_part(self._stream, head, data):
            raise Busy("the client takes no more messages of this call")
        self.has_begun = True

    def receive(self) -> Iterator[bytes]:
        """Yield the messages that are complete; the stream keeps the rest."""
        parts, self._stream.parts = self._stream.parts, []
        self._received += b"".join(parts)
        while len(self._received) >= messages.PREFIX.size:
            compressed, size = messages.PREFIX.unpack_from(self._received)
            if compressed:
                raise Unimplemented("message: compressed messages are not supported in this method")
            if size > _MAX_MESSAGE_BYTES:
                raise messages.too_large(size, _MAX_MESSAGE_BYTES)
            end = messages.PREFIX.size + size
            if len(self._received) < end:
                return
            message, self._received = self._received[messages.PREFIX.size : end], self._received[end:]
            yield message

    def check_end(self) -> None:
        if self._received:
            raise messages.MalformedMessage("message: the call ends in the middle of it")
