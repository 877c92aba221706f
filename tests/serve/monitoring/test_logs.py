from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve.monitoring.logs import (
    JsonFormatter,
    LogLimit,
    TextFormatter,
    escaped,
    log_fatal,
    log_fields,
    log_loop_exception,
)
from serve.monitoring.request_log import RequestLog, is_failure
from serve.monitoring.snapshot import Metrics
from serve.request_context import RequestContext
from serve.wire.connection_limits import LOG_LINES_PER_SECOND


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    handler, logger = Lines(getattr(request, "param", JsonFormatter)()), logging.getLogger("serve")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # pytest-xdist cannot encode a lone surrogate
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


def _request(status: int | str) -> RequestContext:
    request = RequestContext({b"x-request-id": b"id-1"}, "/v1/models/tiny:predict")
    request.protocol, request.status = "v1", status
    return request


@pytest.mark.parametrize("lines", [TextFormatter], indirect=True)
def test_text_line_names_each_field(lines: Lines) -> None:
    logging.getLogger("serve.process.server").info(
        "ready", extra=log_fields(url="http://a:1", reason='no "device" here', empty="")
    )
    line = lines.found[0].partition(" ")[2]
    assert line == r'INFO serve.process.server ready url=http://a:1 reason="no \"device\" here" empty=""'


def test_a_json_line_is_one_object_with_the_same_fields(lines: Lines) -> None:
    logging.getLogger("serve.process.server").warning("signal %d", 15, extra=log_fields(pid=7, ratio=0.5))
    line = json.loads(lines.found[0])
    time = line.pop("time")
    assert line == {
        "level": "warning",
        "logger": "serve.process.server",
        "message": "signal 15",
        "pid": 7,
        "ratio": 0.5,
    }
    assert len(time) == len("2026-01-31T12:00:00.000Z")


def test_a_traceback_stays_within_its_json_line(lines: Lines) -> None:
    try:
        raise KeyError("a\nb")
    except KeyError as error:
        logging.getLogger("serve.app").error("request failed", exc_info=error)
    assert "\n" not in lines.found[0]
    assert json.loads(lines.found[0])["traceback"].endswith("KeyError: 'a\\nb'")


@pytest.mark.parametrize("value", ["\ud800", "a\nb\x1b[31m", object()])
def test_no_value_breaks_a_line(lines: Lines, value: Any) -> None:
    logging.getLogger("serve").info("odd", extra=log_fields(value=value))
    assert len(lines.found[0].splitlines()) == 1
    assert json.loads(lines.found[0])["message"] == "odd"


def test_fatal_error_is_a_sentence_or_a_json_line(lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    log_fatal(ValueError("port 1: in use"), "text")
    assert capsys.readouterr().err == "error: port 1: in use\n"
    log_fatal(ValueError("port 1: in use"), "json")
    assert json.loads(lines.found[0])["message"] == "error: port 1: in use"


HOSTILE = "a\nready url=http://evil\r\x1b[2Jb\x85c\u2028d\u202ee\x00"


@pytest.mark.parametrize("lines", [TextFormatter, JsonFormatter], indirect=True)
def test_control_characters_from_clients_are_escaped(lines: Lines) -> None:
    logging.getLogger("serve").warning("requested %s", HOSTILE, extra=log_fields(path=HOSTILE, plain="x\x1b[31m"))
    (line,) = lines.found
    assert line.isprintable()
    assert line.encode()
    assert "\\u001b[2Jb" in line


def test_lone_surrogate_is_escaped() -> None:
    """It cannot be logged here, because pytest-xdist could not encode it."""
    assert escaped("a\ud800b") == r"a\ud800b"


@pytest.mark.parametrize("lines", [TextFormatter], indirect=True)
def test_lines_of_a_traceback_have_a_prefix(lines: Lines) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("serve").exception("failed")
    first, *others = lines.found[0].split("\n")
    assert first.endswith("ERROR serve failed")
    assert all(line.startswith("  | ") and line.isprintable() for line in others)


@pytest.mark.parametrize("lines", [TextFormatter, JsonFormatter], indirect=True)
def test_length_of_a_line_is_limited(lines: Lines) -> None:
    logging.getLogger("serve").warning("%s", "m" * 100_000, extra=log_fields(path="p" * 100_000, plain="x y" * 50_000))
    assert len(lines.found[0]) < 13_000


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 10)])
def test_configured_share_of_requests_is_logged(lines: Lines, share: float, expected: int) -> None:
    requests = RequestLog(Metrics(list), share)
    for _ in range(10):
        requests.finish(_request(200))
    assert len(lines.found) == expected


def test_failures_are_logged_whatever_the_share(lines: Lines) -> None:
    RequestLog(Metrics(list)).finish(_request(500))
    line = json.loads(lines.found[0])
    assert (line["message"], line["request_id"], line["code"], line["protocol"]) == ("request", "id-1", 500, "v1")
    assert line["path"] == "/v1/models/tiny:predict"
    assert line["milliseconds"] >= 0


def test_refusals_are_rate_limited_in_the_log_and_counted(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, now = RequestLog(Metrics(list)), 100.0
    failed = [_request(503) for _ in range(1001)]
    monkeypatch.setattr("serve.monitoring.logs.time.monotonic", lambda: now)
    for request in failed[1:]:
        requests.finish(request)
    assert 1 < len(lines.found) < 50
    logged, now = len(lines.found), 101.5
    requests.finish(failed[0])
    assert json.loads(lines.found[logged])["left_out"] == 1000 - logged


def test_tracebacks_are_rate_limited_and_the_rest_counted(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 200.0
    monkeypatch.setattr("serve.monitoring.logs.time.monotonic", lambda: now)
    monkeypatch.setattr("serve.monitoring.request_log.faults", limit := LogLimit("more"))
    monkeypatch.setattr("serve.monitoring.logs.faults", limit)
    requests = RequestLog(Metrics(list))
    for _ in range(100):
        requests.fail(_request("aborted"), KeyError("a fault of ours"))
        log_loop_exception(None, {"message": "protocol.data_received() failed", "exception": KeyError()})
    assert len(lines.found) == LOG_LINES_PER_SECOND
    now = 201.0
    log_loop_exception(None, {"message": "one more"})
    assert [json.loads(line)["message"] for line in lines.found[LOG_LINES_PER_SECOND:]] == ["more", "one more"]
    assert json.loads(lines.found[LOG_LINES_PER_SECOND])["left_out"] == 200 - LOG_LINES_PER_SECOND


@pytest.mark.parametrize(
    ("status", "failure"),
    [(200, False), (404, False), (500, True), (503, True), ("OK", False), ("aborted", False), ("INTERNAL", True)],
)
def test_server_errors_are_failures(status: int | str, failure: bool) -> None:
    assert is_failure(status) is failure
