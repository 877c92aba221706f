"""Requests at a fixed rate to a small server with given answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from benchmarks.serve.arrivals import Arrived, arrive, complete, connections, summary

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
LAST = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

TIMES = ("p50_ms", "p99_ms", "refused_p99_ms", "late_p99_ms", "cpu_seconds")


def against(answer: Callable[[int], bytes], rate: float, seconds: float) -> Arrived:
    async def run() -> Arrived:
        count = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            while (await reader.read(4096)).endswith(b"body"):
                count += 1
                received = answer(count)
                writer.write(received)
                if not received or b"close" in received:
                    break
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        try:
            return Arrived.of(await arrive(url, b"body", {"a": "b"}, rate, seconds))
        finally:
            server.close()

    return asyncio.run(run())


def test_all_due_requests_are_sent_and_counted_by_status() -> None:
    found = against(lambda number: BUSY if number % 4 == 0 else OK, rate=400, seconds=0.2)
    assert found.statuses == {200: 60, 503: 20}
    assert (found.due, found.predictions, found.refused, found.failed) == (80, 60, 20, 0)
    assert 0 < found.p50_ms <= found.p99_ms
    assert found.refused_p99_ms > 0
    assert found.cpu_seconds > 0


def test_connection_closed_without_an_answer_is_a_failure() -> None:
    found = against(lambda number: b"" if number == 3 else OK, rate=100, seconds=0.1)
    assert found.failed == 1
    assert found.statuses == {200: 9}


def test_connection_closed_after_an_answer_is_reopened() -> None:
    found = against(lambda _: LAST, rate=400, seconds=0.1)
    assert (found.due, found.failed, found.statuses) == (40, 0, {503: 40})


def test_latency_counts_from_the_due_time() -> None:
    """Status, due, sent, answered: the second was sent 3 s late, and answered 1 s later."""
    found = summary([(503, 1.0, 1.0, 1.5), (200, 2.0, 5.0, 6.0)], began=1.0, seconds=4.0)
    assert (found["p50_ms"], found["p99_ms"], found["late_p99_ms"]) == (4000, 4000, 3000)
    assert (found["refused_p99_ms"], found["seconds"], found["statuses"]) == (500, 5.0, {"503": 1, "200": 1})


def test_due_requests_without_200_or_503_have_failed() -> None:
    found = Arrived.of({"due": 5, "seconds": 1.0, "statuses": {"200": 1, "504": 1}, **dict.fromkeys(TIMES, 0.0)})
    assert (found.predictions, found.refused, found.failed) == (1, 0, 4)


@pytest.mark.parametrize("name", [b"content-length", b"Content-Length"])
def test_answer_is_complete_with_the_last_byte_of_its_body(name: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nx: y\r\n" + name + b": 5\r\n\r\nabcde"
    assert [size for size in range(len(answer) + 1) if complete(answer[:size])] == [len(answer)]
    assert complete(b"HTTP/1.1 204 No Content\r\n\r\n")


def test_connection_count_follows_from_rate_and_duration() -> None:
    assert [connections(*one) for one in ((1000, 60), (1000, 1), (0.1, 1), (1e6, 60))] == [3000, 1000, 1, 4096]
