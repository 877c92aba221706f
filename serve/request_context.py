"""One request as it is watched: its id, when each of its phases ended, who answered it and how it ended."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.model_version import ModelVersion


_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:=+/-]{0,127}")
_PREFIX = secrets.token_hex(8).encode()
_NUMBERS = itertools.count(1)
_UNTRACED: Mapping[str, bytes] = {}


class Watch:
    """Times are of `time.monotonic`; a phase that was never reached is 0."""

    __slots__ = (
        "began",
        "code",
        "id",
        "over",
        "path",
        "protocol",
        "ran",
        "read",
        "reading",
        "served",
        "taken",
        "trace",
        "written",
    )

    def __init__(self, request_id: bytes = b"", path: str = "", protocol: str = "") -> None:
        self.id, self.path, self.protocol = request_id, path, protocol
        self.began = time.monotonic()
        self.reading = self.read = self.taken = self.ran = self.written = self.over = 0.0
        self.trace: Mapping[str, bytes] = _UNTRACED
        self.served: ModelVersion | None = None
        self.code: int | str = "aborted"  # the client left before an answer began

    @property
    def model(self) -> str:
        return self.served.name if self.served else ""

    @property
    def version(self) -> str:
        return self.served.version if self.served else ""


def request_id(given: bytes | None) -> bytes:
    """The client's own where it is fit for a header and a log line, else one that no other process makes."""
    if given is not None and _SANE.fullmatch(given):
        return given
    return b"%b-%d" % (_PREFIX, next(_NUMBERS))
