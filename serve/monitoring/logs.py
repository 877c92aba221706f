"""Log lines on stderr: text for people, or one JSON object a line.

No text of a client can forge or break a line, and no number of clients makes more than so many lines a second.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from serve.wire.connection_limits import LOG_LINES_PER_SECOND

Format = Literal["text", "json"]

_PLAIN = re.compile(r"[^\s\"=]+")
# What ends a line, moves a cursor, reverses text, or is no text at all: a client's text may contain it.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 4000  # characters of a message or of one field


def log_fields(**fields: Any) -> dict[str, Any]:
    """Return the fields of a line in any format, as in `log.info("ready", extra=log_fields(url=...))`."""
    return {"fields": fields}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO serve.process.server ready url=http://…`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the standard library's name
        fields = getattr(record, "fields", {})
        record.message = escaped(record.message)
        return " ".join([super().formatMessage(record), *(f"{key}={_quoted(value)}" for key, value in fields.items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802  # likewise
        """Indent the traceback: the text of a client in it may look like a log line."""
        return "\n".join(f"  | {escaped(line)}" for line in super().formatException(ei).splitlines())


class JsonFormatter(logging.Formatter):
    """Always one line: a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage()),
            **{
                key: shortened(value) if isinstance(value, str) else value
                for key, value in getattr(record, "fields", {}).items()
            },
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _CONTROL.sub(_code, json.dumps(line, default=str, ensure_ascii=False))


def configure(kind: Format) -> None:
    """Log everything to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class LogLimit:
    """A limit of log lines a second, for lines that clients can cause. The next line allowed counts those left out.

    Call `allows` before each line. It costs little where the line is left out, since under a flood that is the rule.
    """

    lines_per_second = LOG_LINES_PER_SECOND  # workers divide them

    def __init__(self, summary: str) -> None:
        """`summary` is the text of the line with the number of those left out."""
        self._summary = summary
        self._second = self._lines = self._omitted = 0

    def allows(self) -> bool:
        if (now := int(time.monotonic())) != self._second:
            if self._omitted:
                _access_log.warning(self._summary, extra=log_fields(left_out=self._omitted))
            self._second, self._lines, self._omitted = now, 0, 0
        self._lines += 1
        if self._lines <= self.lines_per_second:
            return True
        self._omitted += 1
        return False


# Shared by all ports: what is refused before a model or an endpoint is known, and faults of the service itself.
refusals = LogLimit("more connections and requests were refused than are logged")
faults = LogLimit("the service failed more often than is logged")

_access_log = logging.getLogger("serve.access")
_wire_log = logging.getLogger("serve.wire")


class ConnectionLog:
    """Counts what is refused before it reaches an application, and writes it and faults within their limits."""

    def __init__(self, count_refused: Callable[[str], None] = lambda _: None) -> None:
        """`count_refused` gets the label of each refusal, for the metrics."""
        self._count_refused = count_refused

    def refused(self, label: str, **fields: Any) -> None:
        self._count_refused(label)
        if fields and refusals.allows():
            _wire_log.info("refused", extra=log_fields(**fields))

    def failed(self, text: str, **fields: Any) -> None:
        if faults.allows():
            _wire_log.error(text, exc_info=sys.exception(), extra=log_fields(**fields))


def log_loop_exception(_loop: object, context: dict[str, Any]) -> None:
    """Log what no one caught in a callback of the event loop; `loop.set_exception_handler` takes this function."""
    if faults.allows():
        log = logging.getLogger("serve")
        log.error("%s", context.get("message", "a callback failed"), exc_info=context.get("exception"))


def log_fatal(error: Exception, kind: Format) -> None:
    """Print why the service ends: a sentence for people, a line like the others for a log collector."""
    if kind == "text":
        print(f"error: {error}", file=sys.stderr)
    else:
        logging.getLogger("serve").critical("error: %s", error)


def escaped(text: str) -> str:
    """Return the text on one line, without anything that a terminal interprets."""
    return _CONTROL.sub(_code, shortened(text))


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _code(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _quoted(value: Any) -> str:
    text = shortened(str(value))
    if _PLAIN.fullmatch(text) and not _CONTROL.search(text):
        return text
    return _CONTROL.sub(_code, json.dumps(text, ensure_ascii=False))
