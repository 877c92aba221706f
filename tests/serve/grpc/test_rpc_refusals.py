"""Calls that never become whole: what they are told, what is counted, and that they leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve import request_body
from serve.grpc.http2 import frames
from serve.grpc.http2.frames import Code, frame
from serve.grpc.service import Calls
from serve.logs import AccessLog
from serve.metrics import Metrics
from serve.request_log import Observer
from serve.security import Keys

from ..wire import GRPC, HELLO, Talk, data, fields_of, head, resets

MOST = 30_000
KEY = "a-key-of-the-tests-1"
CALL = [*GRPC[:2], (b":path", b"/inference.GRPCInferenceService/ModelInfer"), (b"content-type", b"application/grpc")]
PROBE = [*GRPC[:2], (b":path", b"/inference.GRPCInferenceService/ServerLive"), (b"content-type", b"application/grpc")]


class Desk(Talk):
    """A connection to the calls of a service without models."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.observer = Observer(Metrics(list), AccessLog(0.0))
        plane: Any = None  # which no call here gets as far as to ask
        self.calls = Calls(plane, self.observer, [("x-served-by", "me")], MOST, keys)
        super().__init__(app=self.calls)
        self.say(HELLO)

    @property
    def rejected(self) -> dict[str, int]:
        return dict(self.observer.metrics.unknown.rejected)


def told(found: list[frames.Frame]) -> tuple[str, str]:
    """The status and its sentence, and that the client need not send on."""
    fields = fields_of(found[0][3])
    assert fields[b"x-served-by"] == b"me"
    assert fields[b"x-request-id"]
    assert resets(found) == {1: Code.NO_ERROR}
    return fields[b"grpc-status"].decode(), fields[b"grpc-message"].decode()


def test_one_whose_end_does_not_come_is_given_up() -> None:
    desk = Desk()
    assert desk.say(head(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 100, 0)) == []
    assert desk.calls._room.held == 105
    desk.streams.sweep(float("inf"))
    assert told(desk.heard()) == ("1", "the call did not arrive whole in time")
    assert (desk.rejected, desk.calls._room.held) == ({"slow": 1}, 0)


def test_one_that_is_taken_back_is_counted_and_leaves_no_bytes() -> None:
    desk = Desk()
    desk.say(head(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 100, 0), frames.reset(1, Code.CANCEL))
    assert (desk.heard(), desk.rejected, desk.calls._room.held) == ([], {"gone": 1}, 0)


def test_one_that_breaks_the_rules_leaves_no_bytes() -> None:
    desk = Desk()
    desk.say(head(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 200, 0), frame(frames.WINDOW_UPDATE, 0, 1, b"\0" * 4))
    assert (desk.rejected, desk.calls._room.held, desk.streams.open) == ({"gone": 1}, 0, {})


def test_one_that_is_too_large_is_refused_as_soon_as_it_says_so() -> None:
    desk = Desk()
    found = desk.say(head(1, CALL), data(1, b"\0\x10", 0), data(1, b"\0\0", 0), data(1, b"\0", 0))
    status, sentence = told(found)
    assert (status, "larger than max" in sentence) == ("8", True)
    assert desk.say(data(1, b"x" * 16384, 0)) == []
    assert (desk.rejected, desk.calls._room.held) == ({"size": 1}, 0)


def test_where_others_take_all_the_room_it_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "_BODIES", 0)
    desk = Desk()
    status, sentence = told(desk.say(head(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 300, 0)))
    assert (status, "try again in a moment" in sentence) == ("14", True)
    assert (desk.rejected, desk.calls._room.held) == ({"busy": 1}, 0)


def test_without_a_key_it_is_refused_before_its_message_is_sent(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY + "\n")
    desk = Desk(Keys(tmp_path / "keys"))
    status, sentence = told(desk.say(head(1, CALL)))
    assert (status, "asks for an API key" in sentence) == ("16", True)
    assert desk.say(head(3, PROBE)) == []
    assert desk.say(head(5, [*CALL, (b"x-api-key", KEY.encode())])) == []
    assert list(desk.streams.open) == [3, 5]


def test_a_client_that_is_gone_leaves_nothing() -> None:
    desk = Desk()
    for number in range(1, 20, 2):
        desk.say(head(number, CALL), data(number, b"\0\0\0\1\0" + b"x" * 300, 0))
    assert desk.calls._room.held == 10 * 305
    desk.streams.close()
    assert (desk.rejected, desk.calls._room.held, desk.streams.open) == ({"gone": 10}, 0, {})
