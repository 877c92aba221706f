"""A small Kubernetes API server over real HTTP: keeps what is applied, plays the controllers, proxies to a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

TOKEN = "a-secret-token"
Answer = tuple[int, dict[str, str], Any]
Service = Callable[[str, Any], Answer]


class ApiServer:
    """`namespaces` and `crds` say what the cluster knows; `pods`, `unready_polls` and `statuses` how it behaves."""

    def __init__(self) -> None:
        self.namespaces = {"default"}
        self.crds: set[str] = set()
        self.objects: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.statuses: dict[str, dict[str, Any]] = {}  # by kind, in place of what a working controller writes
        self.unready_polls = 1
        self.failing_reads: list[int] = []  # HTTP statuses of the next reads of a workload
        self.warning = ""
        self.service: Service = lambda path, body: (503, {}, {"message": "no endpoints available"})
        self.requests: list[tuple[str, str, dict[str, str], str]] = []  # method, path, query, content type
        self.proxied: list[dict[str, str]] = []  # headers of the requests to the model
        self._polls: dict[str, int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, path: Path, token: str = TOKEN) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "small",
            "clusters": [{"name": "small", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "small", "context": {"cluster": "small", "user": "me"}}],
        }
        path.write_text(yaml.safe_dump(body))

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        path = urlsplit(target).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.requests.append((method, path, query, headers.get("content-type", "")))
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if path == "/version":
            return 200, {}, {"gitVersion": "v1.37.0"}
        if "/proxy/" in path:
            self.proxied.append(headers)
            return self._proxy(path, body)
        if method == "PATCH":
            return self._apply(path, query, headers, body)
        if path.endswith("/pods"):
            wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
            found = [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]
            return 200, {}, {"kind": "PodList", "apiVersion": "v1", "items": found}
        return self._read(path)

    def _apply(self, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        if headers.get("content-type") != "application/apply-patch+yaml" or "fieldManager" not in query:
            return _status(415, "server-side apply needs its content type and a fieldManager")
        item = yaml.safe_load(body)
        version, namespace = item["apiVersion"], path.split("/namespaces/")[1].split("/")[0]
        if version.startswith("serving.kserve.io") and version not in self.crds:
            return 404, {}, "404 page not found\n"
        if namespace not in self.namespaces:
            return _status(404, f'namespaces "{namespace}" not found')
        if not version.startswith("serving.kserve.io"):
            try:
                kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as error:
                return _status(400, f"strict decoding error: {error.message}")
        if query.get("dryRun") != "All":
            self.objects[path] = self._stored(path, item)
        return 200, {"Warning": f'299 - "{self.warning}"'} if self.warning else {}, item

    def _stored(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        old = self.objects.get(path)
        generation = old["metadata"]["generation"] + (old["spec"] != item["spec"]) if old and "spec" in item else 1
        self._polls[path] = 0
        return {**item, "metadata": {**item["metadata"], "generation": generation}}

    def _read(self, path: str) -> Answer:
        if self.failing_reads:
            return _status(self.failing_reads.pop(0), "the server is busy")
        if path not in self.objects:
            return _status(404, f'"{path.rsplit("/", 1)[1]}" not found')
        self._polls[path] += 1
        item = self.objects[path]
        return 200, {}, {**item, "status": self._status_of(path, item)}

    def _status_of(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        if item["kind"] in self.statuses:
            return self.statuses[item["kind"]]
        generation, ready = item["metadata"]["generation"], self._polls[path] > self.unready_polls
        if item["kind"] == "InferenceService":
            conditions = [{"type": "Ready", "status": "True" if ready else "False", "message": "pods start"}]
            return {"observedGeneration": generation, "conditions": conditions}
        wanted = item["spec"].get("replicas", 1)
        available = wanted if ready else 0
        return {
            "observedGeneration": generation,
            "replicas": wanted,
            "updatedReplicas": wanted,
            "availableReplicas": available,
        }

    def _proxy(self, path: str, body: bytes) -> Answer:
        root, _, rest = path.partition("/proxy/")
        name, _, port = root.rsplit("/", 1)[1].removeprefix("https:").partition(":")
        services = {key.rsplit("/", 1)[1] for key, item in self.objects.items() if item["kind"] == "Service"}
        services |= {
            item["metadata"]["name"] + "-predictor"
            for item in self.objects.values()
            if item["kind"] == "InferenceService"
        }
        if name not in services or port != "http":
            return _status(404, f'services "{name}:{port}" not found')
        return self.service(f"/{rest}", json.loads(body) if body else None)


def _status(code: int, message: str) -> Answer:
    return code, {}, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def _handler_of(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, extra, answer = server.answer(self.command, self.path, headers, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _handle  # noqa: N815 - names the standard library looks up

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the overridden method's signature
            """Quiet."""

    return Handler
