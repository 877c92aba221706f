"""A small Kubernetes API server over real HTTP, with server-side apply, watches, controllers and a proxy to a model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.k8s import mock_streams

from .admission import immutable_field_causes, validation_causes, validation_problem
from .api_requests import KINDS, ApiRequest, parse_request
from .http_server import serve_http
from .mock_pods import POD_OWNERS, Nodes
from .object_store import Conflict, Object, Store

TOKEN = "a-secret-token"
_OWN_GROUPS = ("", "apps", "autoscaling", "batch", "coordination.k8s.io", "networking.k8s.io", "policy")
Response = tuple[int, dict[str, str], Any]
Service = Callable[[str, Any], Response]


@dataclass
class Fault:
    """An error in place of the response to the next matching requests."""

    where: Callable[[ApiRequest], bool]
    status: int = 503
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False  # cut the connection instead
    seconds: float = 0.0  # or answer after this time


class ApiServer:
    """The server; tests may change its attributes at any time."""

    def __init__(self) -> None:
        self.namespaces = {"default"}
        self.crds: set[str] = set()
        self.store = Store()
        self.nodes = Nodes(self.store)
        self.statuses: dict[str, Object] = {}  # kind → status, instead of that of a working controller
        self.unready_polls = 1
        self.unscaled_polls = 0  # while the autoscaler has not seen a new Deployment
        self.page = 0  # objects in each page of a list; 0: all
        self.warning = ""
        self.login_page = ""  # of a proxy, in place of the version
        self.quota: dict[str, str] = {}  # kind → the exceeded quota
        self.rules: list[Object] | None = None  # rules of a Role; None allows everything
        self.faults: list[Fault] = []
        self.webhook: Callable[[Object], None] = lambda item: None  # changes applied objects
        self.torn = 0  # number of watches that end in the middle of their first event
        self.cut_after: list[int] = []  # lines or events after which the next streams are dropped
        self.service: Service = lambda path, body: (503, {}, {"message": "no endpoints available"})
        self.pod: Callable[[str, str, Any], Response] = lambda pod, path, body: (503, {}, {"message": "no such port"})
        self.requests: list[tuple[str, str, dict[str, str], str]] = []  # method, path, query, content type
        self.seen: set[tuple[str, str, str]] = set()  # API group, resource, verb
        self.proxied: list[dict[str, str]] = []  # headers of the requests to the model
        self.pod_ports: set[str] = set()
        self.closing = threading.Event()
        self._polls: dict[str, int] = {}
        self._edge = serve_http(self)

    @property
    def objects(self) -> dict[str, Object]:
        return self.store.objects

    @property
    def url(self) -> str:
        return self._edge.url

    def close(self) -> None:
        self.closing.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self.nodes.close()
        self._edge.close()

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

    def fail(self, method: str, part: str, **fault: Any) -> None:
        """Fail the next requests with this method and part of a URL."""
        self.faults.append(Fault(lambda request: request.method == method and part in request.target, **fault))

    def add(self, item: Object, namespace: str = "default") -> str:
        """Add an object as another client would; return its path."""
        plural = next(plural for plural, kind in KINDS.items() if kind == item["kind"])
        root = f"/apis/{item['apiVersion']}" if "/" in item["apiVersion"] else f"/api/{item['apiVersion']}"
        path = f"{root}/namespaces/{namespace}/{plural}/{item['metadata']['name']}"
        self.store.create(path, item)
        return path

    def add_pod(self, name: str, labels: dict[str, str], status: Object) -> str:
        metadata = {"name": name, "labels": labels}
        return self.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": status})

    def fault_of(self, request: ApiRequest) -> Fault | None:
        fault = next((fault for fault in self.faults if fault.where(request)), None)
        if fault is not None:
            fault.times -= 1
            if fault.times == 0:
                self.faults.remove(fault)
        return fault

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Response:
        path = urlsplit(target).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.requests.append((method, path, query, headers.get("content-type", "")))
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return status_of(401, "Unauthorized")
        request = parse_request(method, target, path, query)
        if fault := self.fault_of(request):
            time.sleep(fault.seconds)
            if fault.drop:
                raise ConnectionAbortedError
            if not fault.seconds:
                return status_of(fault.status, "the server is busy", fault.headers)
        if path == "/version" and self.login_page:
            return 200, {"Content-Type": "text/html"}, self.login_page
        if path == "/version":
            return 200, {}, {"gitVersion": "v1.37.0"}
        if request.group not in _OWN_GROUPS and f"{request.group}/{request.version}" not in self.crds:
            return 404, {}, "404 page not found\n"
        return self._allowed(request, headers, body)

    def _allowed(self, request: ApiRequest, headers: dict[str, str], body: bytes) -> Response:
        verbs = [request.verb]
        if request.verb == "patch" and request.path not in self.objects:
            verbs.append("create")  # server-side apply of a new object needs both
        for verb in verbs:
            self.seen.add((request.group, request.resource, verb))
            if not self._may(request, verb):
                return status_of(403, request.forbidden(verb), kind=request.resource)
        if request.namespace not in self.namespaces and request.method in ("PATCH", "POST", "PUT"):
            return status_of(404, f'namespaces "{request.namespace}" not found')
        if "/proxy/" in request.path:
            self.proxied.append(headers)
            return self._proxy(request, body)
        try:
            return self._act(request, headers, body)
        except Conflict as conflict:
            return status_of(409, str(conflict))

    def _may(self, request: ApiRequest, verb: str) -> bool:
        return self.rules is None or any(
            request.group in rule["apiGroups"] and request.resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        )

    def _act(self, request: ApiRequest, headers: dict[str, str], body: bytes) -> Response:
        if request.method == "PATCH":
            return self._apply(request, headers, body)
        if request.method == "POST":
            item = json.loads(body)
            return 201, {}, self.store.create(f"{request.path}/{item['metadata']['name']}", item)
        if request.subresource == "log":
            return self._log(request)
        if not request.name:
            return self._watch(request) if request.verb == "watch" else self._list(request)
        if request.path not in self.objects:
            return status_of(404, f'{request.resource} "{request.name}" not found')
        if request.method == "PUT":
            return 200, {}, self.store.replace(request.path, json.loads(body))
        if request.method == "DELETE":
            return self._delete(request, json.loads(body) if body else {})
        return self._read(request.path)

    def _apply(self, request: ApiRequest, headers: dict[str, str], body: bytes) -> Response:
        if headers.get("content-type") != "application/apply-patch+yaml" or "fieldManager" not in request.query:
            return status_of(415, "server-side apply needs its content type and a fieldManager")
        item = yaml.safe_load(body)
        self.webhook(item)
        if request.group in _OWN_GROUPS and (wrong := validation_problem(json.dumps(item))):
            return status_of(400, f"strict decoding error: {wrong}")
        if message := self.quota.get(item["kind"]):
            return status_of(403, f'{request.resource} "{request.name}" is forbidden: exceeded quota: {message}')
        dry, force = request.query.get("dryRun") == "All", request.query.get("force") == "true"
        tried = self.store.apply(request.path, item, request.query["fieldManager"], force, keep=False)
        if causes := immutable_field_causes(self.objects.get(request.path), tried) or validation_causes(tried):
            error = status_of(422, f'{request.resource} "{request.name}" is invalid: {causes[0]["message"]}')
            error[2]["details"]["causes"] = causes
            return error
        kept = self.store.apply(request.path, item, request.query["fieldManager"], force, keep=not dry)
        if not dry:
            self._polls[request.path] = 0
            self.nodes.on_apply(request.path, item)
        return 200, {"Warning": f'299 - "{self.warning}"'} if self.warning else {}, kept

    def _delete(self, request: ApiRequest, options: Object) -> Response:
        gone = self.store.delete(request.path, options.get("preconditions", {}).get("uid", ""))
        if gone["kind"] in POD_OWNERS and options.get("propagationPolicy") in ("Background", "Foreground"):
            self.nodes.on_delete(request.path)
        return 200, {}, gone

    def _list(self, request: ApiRequest) -> Response:
        """List objects without their kinds, as the API does, and page by page if `page` is set."""
        with self.store.changed:
            found = [
                self._shown(item, count=False)
                for item in self.store.below(request.path, request.labels, request.fields)
            ]
            bare = [
                {name: value for name, value in item.items() if name not in ("kind", "apiVersion")} for item in found
            ]
            first = int(request.query.get("continue", "0"))
            metadata = {"resourceVersion": str(self.store.version)}
            if self.page and first + self.page < len(bare):
                metadata["continue"] = str(first + self.page)
            items = bare[first : first + self.page] if self.page else bare
            return 200, {}, {"kind": f"{KINDS[request.plural]}List", "metadata": metadata, "items": items}

    def _read(self, path: str) -> Response:
        return 200, {}, self._shown(self.objects[path], count=True, path=path)

    def _shown(self, item: Object, count: bool, path: str = "") -> Object:
        if "status" in item or item.get("kind") not in ("Deployment", "InferenceService"):
            return item
        self._polls[path] = self._polls.get(path, 0) + count
        ready, scaled = (self._polls[path] > polls for polls in (self.unready_polls, self.unscaled_polls))
        return {**item, "status": self._status_of(item, ready, scaled)}

    def _status_of(self, item: Object, ready: bool, scaled: bool) -> Object:
        if item["kind"] in self.statuses:
            return self.statuses[item["kind"]]
        generation = item["metadata"]["generation"]
        if item["kind"] == "InferenceService":
            conditions = [{"type": "Ready", "status": "True" if ready else "False", "message": "pods start"}]
            return {"observedGeneration": generation, "conditions": conditions}
        wanted = item["spec"].get("replicas", self.nodes.replicas or (self._autoscaled(item) if scaled else 1))
        counts = {"replicas": wanted, "updatedReplicas": wanted, "availableReplicas": wanted if ready else 0}
        return {"observedGeneration": generation, **counts}

    def _autoscaled(self, item: Object) -> int:
        scalers = (other["spec"] for other in self.objects.values() if other["kind"] == "HorizontalPodAutoscaler")
        names = {spec["scaleTargetRef"]["name"]: int(spec["minReplicas"]) for spec in scalers}
        return names.get(item["metadata"]["name"], 1)

    def _watch(self, request: ApiRequest) -> Response:
        since = int(request.query.get("resourceVersion") or 0)
        if since < self.store.oldest:
            gone = status_of(410, f"too old resource version: {since} ({self.store.oldest})")[2]
            return 200, {}, iter([json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"])
        found = mock_streams.watch_events(self.store, request, since, self.closing)
        if self.torn:
            self.torn -= 1
            return 200, {}, mock_streams.torn_stream(found)
        return 200, {}, self._dropped(found)

    def _log(self, request: ApiRequest) -> Response:
        pod = self.nodes.pods.get(request.path)
        if pod is None:
            return status_of(404, f'pods "{request.name}" not found')
        if self.objects[request.path]["status"]["phase"] == "Pending":
            return status_of(400, f'container in pod "{request.name}" is waiting to start: ContainerCreating')
        text = mock_streams.log_lines(self.store, pod, request.query, self.closing)
        if request.query.get("follow") == "true":
            return 200, {"Content-Type": "text/plain"}, self._dropped(text)
        return 200, {"Content-Type": "text/plain"}, b"".join(text).decode()

    def _dropped(self, stream: Iterator[bytes]) -> Iterator[bytes]:
        return mock_streams.cut_stream(stream, self.cut_after.pop(0)) if self.cut_after else stream

    def _proxy(self, request: ApiRequest, body: bytes) -> Response:
        rest = "/" + request.target.partition("/proxy/")[2]
        name, _, port = request.name.removeprefix("https:").partition(":")
        if request.resource == "pods/proxy":
            if f"{request.path.partition('/pods/')[0]}/pods/{name}" not in self.objects:
                return status_of(404, f'pods "{name}" not found')
            self.pod_ports.add(port)
            return self.pod(name, rest, json.loads(body) if body else None)
        names = {"Service": "", "InferenceService": "-predictor"}
        made = [(item["kind"], item["metadata"]["name"]) for item in self.objects.values()]
        if name not in {made_name + names[kind] for kind, made_name in made if kind in names} or port != "http":
            return status_of(404, f'services "{name}:{port}" not found')
        return self.service(rest, json.loads(body) if body else None)


def status_of(code: int, message: str, headers: dict[str, str] | None = None, kind: str = "") -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return code, headers or {}, {**body, "details": {"kind": kind}}
