"""Malformed requests to the real service: each gets a 4xx with a message, and does no harm."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.golden import difference
from tests.serve.malformed_requests import JSON, V1, cases, v1

if TYPE_CHECKING:
    from tests.serve.conftest import Running


def _post(server: Running, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(text) if is_json else {"error": text.decode()}


CASES = list(cases())


@pytest.mark.parametrize(("path", "body", "headers", "status", "named"), CASES, ids=map(str, range(len(CASES))))
def test_malformed_request_is_refused_naming_the_field(
    server: Running, path: str, body: bytes, headers: dict[str, str], status: int, named: str
) -> None:
    found, answer = _post(server, path, body, headers)
    assert found == status, (path, body[:300], headers, answer)
    assert named in answer["error"]
    assert " " in answer["error"], "a sentence"
    assert len(answer["error"]) <= 501, "of bounded length"
    assert "Traceback" not in answer["error"]


def test_table_has_more_than_500_cases() -> None:
    assert len(CASES) > 500


def test_malformed_requests_leave_no_memory_behind(server: Running, bundle: Bundle) -> None:
    """Answers stay right, and nothing is logged."""
    sizes = []
    for _ in range(3):
        for path, body, headers, _, _ in CASES:
            _post(server, path, body, headers)
        sizes.append(psutil.Process(server.process.pid).memory_info().rss)
    golden = bundle.golden()
    status, answer = _post(server, V1, v1(golden.instances), JSON)
    assert status == 200
    assert difference(golden.predictions, answer["predictions"], golden.rtol, golden.atol) is None
    assert sizes[2] - sizes[0] < 4 << 20, sizes
    assert "Traceback" not in server.log
