"""Requests that come at a fixed rate, against a small server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bench.serve.arrivals import arrive, content_length

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def against(answer: Callable[[int], bytes], rate: float, seconds: float) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        count = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            while (await reader.read(4096)).endswith(b"body"):
                count += 1
                told = answer(count)
                writer.write(told)
                if not told or b"close" in told:
                    break
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await arrive(f"http://127.0.0.1:{port}/x", b"body", {"a": "b"}, rate, seconds)
        finally:
            server.close()

    return asyncio.run(run())


def test_all_that_was_due_is_sent_and_counted_by_its_status() -> None:
    found = against(lambda number: BUSY if number % 4 == 0 else OK, rate=400, seconds=0.2)
    assert found["sent"] == 80
    assert found["statuses"] == {"200": 60, "503": 20}
    assert found["failed"] == 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_a_connection_that_closes_without_an_answer_is_a_failure() -> None:
    found = against(lambda number: b"" if number == 3 else OK, rate=100, seconds=0.1)
    assert found["failed"] == 1
    assert found["statuses"] == {"200": 9}


def test_a_length_is_found_whatever_the_case_of_its_name() -> None:
    assert content_length(b"HTTP/1.1 200 OK\r\nContent-LENGTH: 17") == 17
    assert content_length(b"HTTP/1.1 204 No Content") == 0
