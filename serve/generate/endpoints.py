"""OpenAI's paths: from a request's body to its texts, whole or as a stream of events."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from serve.canary import choose_by
from serve.errors import Refusal, Unknown
from serve.generate import openai_api
from serve.generate.openai_api import Choice, Completion, Conversation, Reply, completion, conversation
from serve.generate.sequence import Asking, Detokenizer, Order, Piece, Writing
from serve.request_body import of_header, read
from serve.routes import JSON, Answer, Asked, Flow, check_content, json_answer

if TYPE_CHECKING:
    from serve.generate.model import Writer
    from serve.model_version import ModelVersion
    from serve.models import OnnxPlane


TEXT = ("completions", "chat")  # kinds of routes that ask for texts
_VERSION = re.compile(r"(?P<name>[^/]{1,200})/versions/(?P<version>[0-9A-Za-z]{1,64})")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


class Texts:
    """Of all models that write; the name of the one that is asked is in the body."""

    def __init__(self, plane: OnnxPlane) -> None:
        self._plane = plane

    async def models(self, _: Asked) -> Answer:
        current = [one for one, is_current in self._plane.loaded() if is_current]
        return json_answer(openai_api.models((one.name, one.writer.created) for one in current if one.writer))

    async def model(self, asked: Asked) -> Answer:
        served = self._plane.served(asked.route.model, asked.route.version)
        asked.watch.served = served
        return json_answer(openai_api.model(served.name, _writer(served).created))

    async def complete(self, asked: Asked) -> Answer | Flow:
        return await self._written(asked, completion)

    async def chat(self, asked: Asked) -> Answer | Flow:
        return await self._written(asked, conversation)

    async def _written(self, asked: Asked, parse: Callable[[bytes], Completion | Conversation]) -> Answer | Flow:
        check_content(asked.headers, "application/json")
        timeout_seconds = of_header(asked.headers)
        wanted = parse(await read(asked.headers, asked.receive, self._most_bytes(), asked.hold))
        served = asked.watch.served = self._served(wanted.model, asked.watch.id)
        writer = _writer(served)
        asked.watch.reading = time.monotonic()
        prompts = await writer.prompts(wanted)
        asked.watch.read = time.monotonic()
        order = writer.order(wanted, prompts)
        deadline = asked.watch.began + served.patience(timeout_seconds)
        asking = Asking(order, deadline, asked.gone, asked.watch, whole=not wanted.stream)
        writings = writer.writings(asking, prompts, wanted.n)
        reply = _reply(asked, served, wanted, order, writings)
        pieces = writer.engine.written(writings)
        if not wanted.stream:
            return await _whole(pieces, reply, asked)
        parts = _parts(pieces, reply, asked, usage=wanted.usage_wanted)
        return Flow(await _begun(parts), _EVENTS, _told)

    def _most_bytes(self) -> int:
        """Whose limit holds is known when the body is read: it names the model."""
        found = [one.max_body_bytes for one, _ in self._plane.loaded() if one.writer]
        return max(found, default=0) or max(one.max_body_bytes for one, _ in self._plane.loaded())

    def _served(self, model: str, request_id: bytes) -> ModelVersion:
        """By its name, or one of its versions as `NAME/versions/2`; a canary gets its share of the former."""
        if found := _VERSION.fullmatch(model):
            return self._plane.served(found["name"], found["version"])
        served = self._plane.served(model)
        return choose_by(served, request_id)


def _writer(served: ModelVersion) -> Writer:
    if served.writer is None:
        raise Unknown(
            f"model {served.name!r} writes no texts; ask /v1/models/{served.name}:predict "
            f"or /v2/models/{served.name}/infer"
        )
    return served.writer


def _reply(
    asked: Asked, served: ModelVersion, wanted: Completion | Conversation, order: Order, writings: list[Writing]
) -> Reply:
    prompts, language = writings[:: wanted.n], _writer(served).language
    before = [() if order.echo else one.prompt for one in writings]
    return Reply(
        chat=isinstance(wanted, Conversation),
        request_id=asked.watch.id.decode(),
        model=wanted.model,
        digest=served.bundle.digest,
        token=language.token,
        prompt_tokens=sum(len(one.prompt) for one in prompts),
        choices=[Choice(Detokenizer(language.text, ids).feed) for ids in before],
        telling=order.top is not None,
    )


async def _whole(pieces: AsyncGenerator[Piece, None], reply: Reply, asked: Asked) -> Answer:
    async with aclosing(pieces):
        async for piece in pieces:
            reply.add(piece)
    asked.watch.ran = time.monotonic()
    answer = Answer(reply.body(), (JSON,))
    asked.watch.written = time.monotonic()
    return answer


async def _parts(
    pieces: AsyncGenerator[Piece, None], reply: Reply, asked: Asked, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    """Events; the first comes with the first token, so that what goes wrong before has its own status."""
    opened = False
    async with aclosing(pieces):
        async for piece in pieces:
            opening = b"" if opened else b"".join(reply.opening(usage=usage))
            opened = True
            if part := opening + reply.event(piece, usage=usage):
                yield part
    asked.watch.ran = asked.watch.written = time.monotonic()
    yield reply.closing(usage=usage)


async def _begun(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same, with the first one made already."""
    first = await anext(parts)

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return all_of_them()


def _told(refusal: Refusal | None) -> bytes:
    """A failure in the middle of a stream."""
    return openai_api.event(openai_api.failure(refusal))
