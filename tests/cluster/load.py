"""Steady requests from a pod in the cluster, on their own way through the Service, and their count."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from k8s.objects.kustomize import Object

from .images import NAME
from .place import Place, wait_until

_NAME = "load"
_MAX_SECONDS = 1800
_MORE_REQUESTS = 25  # of each thread, before the test begins and after it
# Every response must be right. Each thread connects anew for each request. The name of the Service is looked up once:
# the cluster's name server fails on a busy machine, and its address stays the same.
_PROGRAM = """
import json, socket, sys, threading, time, urllib.request
counts, lock, errors = {"requests": [0] * 4, "failed": 0}, threading.Lock(), []
host, path, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
body = json.dumps({"instances": [[1, 2]]}).encode()
end = time.monotonic() + seconds
url = ""
while not url:
    try:
        url = f"http://{socket.gethostbyname(host)}:8080{path}"
    except OSError:
        time.sleep(1)

def send(thread):
    while time.monotonic() < end:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                right = json.load(response) == {"predictions": [[2, 4]]}
                error = "" if right else "a wrong answer"
        except Exception as caught:
            error = repr(caught)
        with lock:
            counts["requests"][thread] += 1
            counts["failed"] += bool(error)
            errors.extend([error] if error and len(errors) < 5 else [])
        time.sleep(0.02)

for thread in range(4):
    threading.Thread(target=send, args=(thread,), daemon=True).start()
while time.monotonic() < end:
    time.sleep(0.5)
    with lock:
        print(json.dumps({**counts, "errors": errors}), flush=True)
"""


class Load:
    def __init__(self, place: Place) -> None:
        self._place = place

    def counts(self) -> Object:
        path = f"/api/v1/namespaces/{self._place.namespace}/pods/{_NAME}/log"
        response = self._place.cluster.connection.request("GET", path, {"tailLines": "1"})
        lines = response.body.splitlines() if response.ok else []
        counts: Object = json.loads(lines[-1]) if lines else {"requests": [0], "failed": 0, "errors": []}
        return counts

    def check(self) -> None:
        """Check that requests go on in each thread, so that none hangs, and that none has failed."""
        before = self.counts()["requests"]

        def all_go_on() -> bool:
            pairs = zip(before, self.counts()["requests"], strict=False)  # no counts were printed before
            return all(now >= earlier + _MORE_REQUESTS for earlier, now in pairs)

        wait_until(all_go_on, f"{_MORE_REQUESTS} more requests")
        counts = self.counts()
        print(f"load: {counts}")
        assert counts["failed"] == 0, counts


@contextlib.contextmanager
def send_load(place: Place) -> Iterator[Load]:
    place.create("pods", load_pod(place))
    load = Load(place)
    try:
        load.check()
        yield load
    finally:
        place.delete_pod(_NAME, 0)


def load_pod(place: Place) -> Object:
    container = {
        "name": "load",
        "image": place.image_of("stable"),
        "command": [
            "python",
            "-c",
            _PROGRAM,
            f"{NAME}.{place.namespace}",
            f"/v1/models/{NAME}:predict",
            str(_MAX_SECONDS),
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "restartPolicy": "Never", "securityContext": security}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _NAME}, "spec": spec}
