"""Streams of the test API server: events of a watch and lines of a log, also cut or incomplete."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping

from .api_requests import ApiRequest
from .mock_pods import MockPod
from .object_store import Store, selected


def watch_events(store: Store, request: ApiRequest, since: int, closing: threading.Event) -> Iterator[bytes]:
    """Yield events until the timeout, or until the history expires."""
    deadline = time.monotonic() + float(request.query.get("timeoutSeconds", 60))
    while not closing.is_set():
        with store.changed:
            new = [event for event in store.events if event[0] > since]
            if not new and time.monotonic() < deadline and since >= store.oldest:
                store.changed.wait(0.2)
                continue
            ends, now = not new, store.version
        for version, kind, path, item in new:
            since = version
            if path.rpartition("/")[0] == request.path and selected(item, request.labels):
                yield json.dumps({"type": kind, "object": item}).encode() + b"\n"
        if "allowWatchBookmarks" in request.query and since >= store.oldest:
            mark = {"kind": "Bookmark", "metadata": {"resourceVersion": str(max(since, now))}}
            yield json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n"
        if ends:
            return


def log_lines(store: Store, pod: MockPod, query: Mapping[str, str], closing: threading.Event) -> Iterator[bytes]:
    lines = pod.lines(query.get("sinceTime", ""))
    if "tailLines" in query:
        lines = lines[-int(query["tailLines"]) :]
    stamped, follow = query.get("timestamps") == "true", query.get("follow") == "true"
    shown = len(pod.lines()) - len(lines)
    while True:
        with store.changed:
            new, ended = pod.lines()[shown:], pod.ended or closing.is_set() or not follow
            if not new and not ended:
                store.changed.wait(0.2)
                continue
        shown += len(new)
        for stamp, line in new:
            yield (f"{stamp} {line}\n" if stamped and stamp else f"{line}\n").encode()
        if ended and shown == len(pod.lines()):
            return


def cut_stream(stream: Iterator[bytes], after: int) -> Iterator[bytes]:
    """Cut a stream like a load balancer that limits connections."""
    for _ in range(after):
        yield next(stream, b"")
    raise ConnectionAbortedError


def torn_stream(stream: Iterator[bytes]) -> Iterator[bytes]:
    """End a stream properly in the middle of its first line, like some proxies."""
    first = next(stream)
    yield first[: len(first) // 2]
