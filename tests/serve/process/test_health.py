"""The health port: a thread of its own answers, even while the service's event loop is blocked."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from serve.monitoring.logs import ConnectionLog
from serve.process import server
from serve.process.server import ControlThread, Health, Heartbeat
from serve.process.sockets import Address, bind_socket
from serve.wire.listeners import Http1Listener
from tests.ports import free_port
from tests.serve.load_clients import SECONDS

LIVE, READY = "/v2/health/live", "/v2/health/ready"


async def _get_while_the_loop_is_blocked(is_ready: bool, path: str, method: str = "GET") -> tuple[int, Any]:
    """Send a request from the event loop's own thread, so that the loop is blocked until the response arrives."""
    port = free_port()
    sock = bind_socket(Address("127.0.0.1", port), share=False)
    control, heartbeat = ControlThread(), Heartbeat()

    async def status() -> dict[str, Any]:
        return {"models": {}}

    app = Health(heartbeat.is_live, lambda: is_ready, status)
    await control.listen(partial(Http1Listener, app, sock, (), ConnectionLog()))
    response = httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=SECONDS)
    await control.stop(1)
    heartbeat.stop()
    return response.status_code, response.json() if method == "GET" else response.text


@pytest.mark.parametrize(
    ("is_ready", "path", "status", "body"),
    [
        (True, LIVE, 200, {"live": True}),
        (True, READY, 200, {"ready": True, "live": True}),
        (False, LIVE, 200, {"live": True}),
        (False, READY, 503, {"ready": False, "live": True}),
        (True, "/status", 200, {"models": {}}),
        (True, "/v2", 404, {"error": f"only GET {LIVE}, {READY} and /status are here"}),
    ],
)
def test_health_port_answers_while_the_event_loop_is_blocked(is_ready: bool, path: str, status: int, body: Any) -> None:
    assert asyncio.run(_get_while_the_loop_is_blocked(is_ready, path)) == (status, body)


def test_head_has_no_body_and_post_is_unknown() -> None:
    assert asyncio.run(_get_while_the_loop_is_blocked(True, LIVE, "HEAD")) == (200, "")
    assert asyncio.run(_get_while_the_loop_is_blocked(True, LIVE, "POST"))[0] == 404


def test_a_stuck_event_loop_is_neither_live_nor_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STUCK_SECONDS", -1.0)
    assert asyncio.run(_get_while_the_loop_is_blocked(True, LIVE)) == (503, {"live": False})
    assert asyncio.run(_get_while_the_loop_is_blocked(True, READY)) == (503, {"ready": False, "live": False})
