"""One HTTP request as the endpoints see it, and the answers they give."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive, Scope

from serve.body import Room
from serve.refusal import Headers, Refusal, Unreadable
from serve.routes import Route
from serve.runtime.batcher import stays
from serve.watch import Watch

JSON = (b"content-type", b"application/json")
_CURL = "application/x-www-form-urlencoded"  # what `curl -d` says of any body unless told otherwise: read as JSON


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    headers: Headers = (JSON,)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Flow:
    """An answer that comes in parts, none of them empty. A failure after the first is told in a part of its own."""

    parts: AsyncGenerator[bytes, None]
    headers: Headers
    failure: Callable[[Refusal | None], bytes]  # None: our own fault


@dataclass(slots=True)
class Asked:
    route: Route
    headers: dict[bytes, bytes]
    scope: Scope
    receive: Receive
    watch: Watch
    room: Room
    held: int = 0  # bytes of its body

    @property
    def gone(self) -> Callable[[], bool]:
        return self.scope.get("left", stays)  # type: ignore[no-any-return]

    @property
    def alone(self) -> bool:
        return "alone" in self.scope and self.scope["alone"]()

    def hold(self, size: int, most: int) -> None:
        self.room.take(size, most)
        self.held += size


def json_answer(body: Any, status: int = 200, headers: Headers = ()) -> Answer:
    return Answer(orjson.dumps(body), (JSON, *headers), status)


def check_content(headers: dict[bytes, bytes], *accepted: str) -> None:
    """What we cannot read is refused, not guessed at; no type at all is taken for JSON."""
    given = headers.get(b"content-type")
    if given is None or given == b"application/json":
        return
    found = given.decode("latin-1")
    kind, _, parameters = found.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() not in (*accepted, _CURL) or charset not in ("", "utf-8"):
        raise Unreadable(f"content-type: {found[:200]!r} given, send {' or '.join(accepted)}")
