"""Following a collection of the API server: listed, then watched; listed again when its history has expired."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping

from k8s.cluster.api import (
    TRANSIENT_STATUSES,
    Connection,
    Lines,
    Response,
    StreamBroken,
    api_path,
    list_objects,
    plural,
    retry_after_seconds,
)
from k8s.cluster.errors import api_error
from k8s.objects.kustomize import Object
from pipeline.system.errors import PipelineError

_WATCH_TIMEOUT_SECONDS = 240
_READ_TIMEOUT_SECONDS = 300.0  # bookmarks come about every minute
_RETRY_PAUSE_SECONDS, _MAX_RETRY_PAUSE_SECONDS = 0.05, 10.0
_FAILURES_BEFORE_REPORT = 3
_HTTP_GONE = 410

OnChange = Callable[[Mapping[str, Object]], None]


class Watcher:
    """Calls `on_change` with all objects by name, first and after each change, in its own thread until it is closed."""

    def __init__(
        self,
        connection: Connection,
        kind: Mapping[str, str],
        namespace: str,
        selector: str,
        on_change: OnChange,
        report: Callable[[str], None],
    ) -> None:
        self._connection, self._kind, self._namespace, self._selector = connection, kind, namespace, selector
        self._on_change, self._report = on_change, report
        self._objects: dict[str, Object] = {}
        self._version = ""  # the resourceVersion to watch from; empty: list first
        self._failures = 0  # in a row
        self._retry_after = 0.0  # seconds, requested by the server
        self._closed = threading.Event()
        self._lines: Lines | None = None
        self.error: Exception | None = None  # that no retry would fix; a caller that waits for changes must check it
        self._thread = threading.Thread(target=self._run, name=f"watch {kind['kind']}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._lines is not None:
            self._lines.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._watch() if self._version else self._list()
            except StreamBroken as error:
                self._failures += 1
                if self._failures == _FAILURES_BEFORE_REPORT and not self._closed.is_set():
                    self._report(f"the cluster does not answer ({error}); its pods run on, and pipe tries again")
                pause = min(_RETRY_PAUSE_SECONDS * 2 ** min(self._failures, 10), _MAX_RETRY_PAUSE_SECONDS)
                self._closed.wait(max(pause, self._retry_after))
                self._retry_after = 0.0
            except Exception as error:  # also a bug of ours must not leave the caller waiting for ever
                self.error = error
                return

    def _list(self) -> None:
        try:
            listing = list_objects(self._connection, self._kind, self._namespace, {"labelSelector": self._selector})
        except PipelineError as error:
            raise StreamBroken(str(error)) from error
        if isinstance(listing, Response):
            return self._handle_error(listing)
        self._handle_success()
        self._version = listing.version
        self._objects = {item["metadata"]["name"]: item for item in listing.items}
        self._on_change(dict(self._objects))
        return None

    def _watch(self) -> None:
        query = {"watch": "true", "labelSelector": self._selector, "resourceVersion": self._version}
        query |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_TIMEOUT_SECONDS)}
        lines = self._connection.lines(api_path(self._kind, self._namespace), query, _READ_TIMEOUT_SECONDS)
        if isinstance(lines, Response):
            return self._handle_error(lines)
        self._lines = lines
        if self._closed.is_set():
            return lines.close()
        self._handle_success()
        with contextlib.suppress(StreamBroken):  # the next watch continues from the last version
            self._read_events(lines)
        self._closed.wait(_RETRY_PAUSE_SECONDS)  # not a busy loop if the server ends each stream at once
        return None

    def _read_events(self, lines: Lines) -> None:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError as error:  # a proxy ended the stream in the middle of an event
                raise StreamBroken(f"incomplete event: {line[:80]!r}") from error
            item = event["object"]
            if event["type"] == "ERROR":
                if item.get("code") == _HTTP_GONE:
                    self._version = ""  # the history has expired: list again
                    return
                raise StreamBroken(str(item.get("message")))
            self._version = item["metadata"]["resourceVersion"]
            name = item["metadata"].get("name", "")
            if event["type"] == "DELETED":
                self._objects.pop(name, None)
            elif event["type"] != "BOOKMARK":
                self._objects[name] = item
            if event["type"] != "BOOKMARK":
                self._on_change(dict(self._objects))

    def _handle_success(self) -> None:
        if self._failures >= _FAILURES_BEFORE_REPORT:
            self._report("the cluster answers again")
        self._failures = 0

    def _handle_error(self, response: Response) -> None:
        if response.status == _HTTP_GONE and self._version:
            self._version = ""
        elif response.status in TRANSIENT_STATUSES:
            self._retry_after = retry_after_seconds(response) or 0.0
            raise StreamBroken(f"{response.status}: {response.reason}")
        else:
            subject = f"watching {plural(self._kind['kind'])}"
            raise api_error(response, subject, self._namespace, self._kind["apiVersion"])
