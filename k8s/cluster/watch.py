"""Following a collection of the API server: listed, then watched; listed anew when its history has expired."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping

from k8s.cluster.api import PASSING, Answer, Broken, Connection, Lines, listed, path_of, pause_of, plural
from k8s.cluster.errors import refusal
from k8s.objects.kustomize import Object
from pipeline.contract.errors import PipelineError

_WATCH_SECONDS = 240
_SILENCE_SECONDS = 300.0  # bookmarks come each minute or so
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 10.0
_WORTH_SAYING = 3
_EXPIRED = 410

See = Callable[[Mapping[str, Object]], None]


class Watcher:
    """Tells `see` all objects by name, again after each change; runs in a thread of its own until it is closed."""

    def __init__(
        self,
        connection: Connection,
        kind: Mapping[str, str],
        namespace: str,
        selector: str,
        see: See,
        say: Callable[[str], None],
    ) -> None:
        self._connection, self._kind, self._namespace, self._selector = connection, kind, namespace, selector
        self._see, self._say = see, say
        self._known: dict[str, Object] = {}
        self._version = ""
        self._failures = 0  # in a row
        self._closed = threading.Event()
        self._lines: Lines | None = None
        self._asked_pause = 0.0  # by the server
        self.error: Exception | None = None  # what no second try would mend; whoever waits for news must not wait on
        self._thread = threading.Thread(target=self._follow, name=f"watch {kind['kind']}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._lines is not None:
            self._lines.close()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._watch() if self._version else self._list()
            except Broken as error:
                self._failures += 1
                if self._failures == _WORTH_SAYING and not self._closed.is_set():
                    self._say(f"the cluster does not answer ({error}); what runs there goes on, and so does asking")
                pause = min(_PAUSE_SECONDS * 2 ** min(self._failures, 10), _LONGEST_PAUSE_SECONDS)
                self._closed.wait(max(pause, self._asked_pause))
                self._asked_pause = 0.0
            except Exception as error:  # told where it is waited for: a bug of ours, too, must not hang there
                self.error = error
                return

    def _list(self) -> None:
        try:
            found = listed(self._connection, self._kind, self._namespace, {"labelSelector": self._selector})
        except PipelineError as error:
            raise Broken(str(error)) from error
        if isinstance(found, Answer):
            return self._refused(found)
        self._answers()
        self._version = found.version
        self._known = {item["metadata"]["name"]: item for item in found.items}
        self._see(dict(self._known))
        return None

    def _watch(self) -> None:
        query = {"watch": "true", "labelSelector": self._selector, "resourceVersion": self._version}
        query |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_SECONDS)}
        found = self._connection.lines(path_of(self._kind, self._namespace), query, _SILENCE_SECONDS)
        if isinstance(found, Answer):
            return self._refused(found)
        self._lines = found
        if self._closed.is_set():
            return found.close()
        self._answers()
        with contextlib.suppress(Broken):  # a stream that was cut is taken up where it ended
            self._read(found)
        self._closed.wait(_PAUSE_SECONDS)  # a server that ends each stream at once is not asked without rest
        return None

    def _read(self, lines: Lines) -> None:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError as error:  # cut in its middle by something that ends streams politely
                raise Broken(f"an event that ends too early: {line[:80]!r}") from error
            item = event["object"]
            if event["type"] == "ERROR":
                if item.get("code") == _EXPIRED:
                    self._version = ""  # some changes cannot be told any more
                    return
                raise Broken(str(item.get("message")))
            self._version = item["metadata"]["resourceVersion"]
            name = item["metadata"].get("name", "")
            if event["type"] == "DELETED":
                self._known.pop(name, None)
            elif event["type"] != "BOOKMARK":
                self._known[name] = item
            if event["type"] != "BOOKMARK":
                self._see(dict(self._known))

    def _answers(self) -> None:
        if self._failures >= _WORTH_SAYING:
            self._say("the cluster answers again")
        self._failures = 0

    def _refused(self, answer: Answer) -> None:
        if answer.status == _EXPIRED and self._version:
            self._version = ""
        elif answer.status in PASSING:
            self._asked_pause = pause_of(answer) or 0.0
            raise Broken(f"{answer.status}: {answer.reason}")
        else:
            raise refusal(answer, f"watching {plural(self._kind['kind'])}", self._namespace, self._kind["apiVersion"])
