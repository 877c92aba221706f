"""A request of any protocol, the id by which its client and log lines name it, and the log of connections."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

_SAFE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:=+/-]{0,127}")
_PROCESS_ID = secrets.token_hex(8).encode()
_NUMBERS = itertools.count(1)


def _renew_process_id() -> None:
    global _PROCESS_ID
    _PROCESS_ID = secrets.token_hex(8).encode()


os.register_at_fork(after_in_child=_renew_process_id)  # ids of workers must differ


class Disconnected(Exception):
    """The client is gone, in the middle of its request."""


class IncomingRequest:
    """Each protocol adds how it receives the body and sends the response."""

    length = -1  # of the body, where the head of an HTTP/1.1 request states it

    def __init__(self, headers: Mapping[bytes, bytes], path: str) -> None:
        self.received_at = time.monotonic()
        self.headers, self.path = headers, path
        self.id = request_id(headers.get(b"x-request-id"))

    @property
    def address(self) -> str:
        """Return the peer's address, by which its connections are counted."""
        return ""

    def is_disconnected(self) -> bool:
        """Return True once the client is known to be gone; a request that waited is then not computed."""
        return False


def request_id(given: bytes | None) -> bytes:
    """Return the client's own id where it is safe in a header and a log line, else one that no other process makes."""
    if given is not None and _SAFE_ID.fullmatch(given):
        return given
    return b"%b-%d" % (_PROCESS_ID, next(_NUMBERS))


class Log(Protocol):
    """The log of connections, which the service implements: refusals that reach no application, and faults.

    Clients can cause each of these lines: no number of clients may make more than so many a second.
    """

    def refused(self, label: str, **fields: Any) -> None:
        """Count a refusal under this label, and write its fields in a line, if there are any."""

    def failed(self, text: str, **fields: Any) -> None:
        """Write a fault of ours, with the exception that is being handled, if any."""
