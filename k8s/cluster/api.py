"""The connection to a Kubernetes API server: address and credentials, requests, lists, and streams of lines.

The `kubernetes` package reads the kubeconfig and refreshes credentials; each request is one function here, so that its
status, headers and body are at hand when an error is to be explained.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from k8s.objects.kustomize import Object
from pipeline.system.errors import ResourceError, missing_extra
from pipeline.system.processes import hide_packages

TRANSIENT_STATUSES = (408, 410, 429, 500, 502, 503, 504)  # 410: a list changed between two of its pages

_CONNECT_TIMEOUT_SECONDS = 5.0
_READ_TIMEOUT_SECONDS = 60.0
_MAX_ATTEMPTS = 6
_MAX_RETRY_AFTER_SECONDS = 20.0
_MAX_QUOTED_CHARACTERS = 80
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_RETRYABLE_METHODS = ("GET", "PATCH", "DELETE")  # sending them twice has the effect of sending them once


class Unreachable(ResourceError):
    """No response, or a transient one; a later request may succeed."""


class StreamBroken(Unreachable):
    """A stream ended in its middle: what was read is valid, and the rest can be requested again."""


class NotKubernetes(ResourceError):
    """A response that is not a JSON object."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the body; raise for what no API server sends, such as a proxy's login page."""
        with contextlib.suppress(ValueError):
            if isinstance(body := json.loads(self.body), dict):
                return body
        raise NotKubernetes(
            "what answers is not a Kubernetes API server, but perhaps a proxy with a login page: "
            f"{self.body.decode(errors='replace').strip()[:_MAX_QUOTED_CHARACTERS]!r}; log in again, or correct the "
            "server in the kubeconfig"
        )

    @property
    def reason(self) -> str:
        """The message of a Kubernetes Status, or the plain text that some proxies return."""
        try:
            return str(self.json()["message"])
        except (NotKubernetes, KeyError, TypeError):
            return self.body.decode(errors="replace").strip()[:300] or f"HTTP {self.status}"


@dataclass(frozen=True)
class Connection:
    context: str
    configuration: Any  # kubernetes.client.Configuration: address, certificates, credentials that refresh themselves
    pool: Any  # urllib3.PoolManager, with the configuration's certificates

    @property
    def server(self) -> str:
        return str(self.configuration.host)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        read_seconds: float = _READ_TIMEOUT_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the response whatever its status; raise only if the server cannot be reached.

        A request is repeated when the server requires it (429 or 503 with Retry-After), and when the connection was cut
        and the method is safe to repeat.
        """
        import urllib3

        headers = {"Content-Type": content_type, **(headers or {})}
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            try:
                raw = self._send(method, path, query, body, headers, read_seconds)
            except urllib3.exceptions.ProtocolError as error:
                if not attempts_left or method not in _RETRYABLE_METHODS:
                    raise self._unreachable(error) from error
                continue
            except urllib3.exceptions.HTTPError as error:
                raise self._unreachable(error) from error
            response = Response(raw.status, _lower_names(raw.headers), raw.data)
            if attempts_left and (pause := retry_after_seconds(response)) is not None:
                time.sleep(pause)
                continue
            break
        return response

    def lines(self, path: str, query: Mapping[str, str], read_seconds: float) -> Lines | Response:
        """Stream the lines of a long response, or return an error response; raise StreamBroken if it is cut."""
        import urllib3

        try:
            raw = self._send("GET", path, query, None, {}, read_seconds, preload_content=False)
            if not 200 <= raw.status < 300:
                return Response(raw.status, _lower_names(raw.headers), raw.read())
        except urllib3.exceptions.HTTPError as error:
            raise StreamBroken(str(error)) from error
        return Lines(raw)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        headers: Mapping[str, str],
        read_seconds: float,
        **options: Any,
    ) -> Any:
        import urllib3

        headers = {"Accept": "application/json", "User-Agent": "pipe", **headers}
        for setting in self.configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"]
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT_SECONDS, read=read_seconds)
        return self.pool.request(method, url, body=body, headers=headers, timeout=timeout, retries=False, **options)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"the Kubernetes API server {self.server} (context {self.context}) does not answer: {error}")


class Lines:
    """The lines of a response that may never end."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        import urllib3

        remainder = b""
        try:
            for chunk in self._response.stream(1 << 16):
                *lines, remainder = (remainder + chunk).split(b"\n")
                yield from lines
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # ValueError: closed by another thread
            raise StreamBroken(str(error)) from error
        finally:
            self._response.close()
        if remainder:
            yield remainder

    def close(self) -> None:
        """Wake up another thread that waits for the next line."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it may have ended by itself
            self._response.shutdown()


@dataclass(frozen=True)
class ObjectList:
    items: list[Object]
    version: str  # the resourceVersion to start a watch from


def list_objects(
    connection: Connection, kind: Mapping[str, str], namespace: str, query: Mapping[str, str]
) -> ObjectList | Response:
    """Return all matching objects, page by page and with the kind that lists leave out; or the first error response."""
    path, items, token = api_path(kind, namespace), list[Object](), ""
    type_fields = {"apiVersion": kind["apiVersion"], "kind": kind["kind"]}
    while True:
        response = connection.request("GET", path, {**query, "continue": token} if token else query)
        if not response.ok:
            return response
        body = response.json()
        items += [{**item, **type_fields} for item in body.get("items") or []]
        token = body["metadata"].get("continue", "")
        if not token:
            return ObjectList(items, str(body["metadata"].get("resourceVersion", "")))


def api_path(item: Mapping[str, Any], namespace: str, name: str = "") -> str:
    """Return the REST path of an object, or without a name that of its collection."""
    version, kind = item["apiVersion"], item["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural(kind)}" + (f"/{name}" if name else "")


def plural(kind: str) -> str:
    """Return the resource name of a kind; every kind used here follows this rule."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("s") else f"{name}s"


def retry_after_seconds(response: Response) -> float | None:
    """Return how long the server wants us to wait; None if it does not ask for a retry."""
    value = response.headers.get("retry-after", "")
    if response.status not in (429, 503) or not value.isdecimal():
        return None
    return min(float(value), _MAX_RETRY_AFTER_SECONDS)


def response_warnings(response: Response) -> list[str]:
    """Return the texts of the Warning headers, which are joined by commas."""
    return [text.replace('\\"', '"') for text in _WARNING.findall(response.headers.get("warning", ""))]


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): headers[name] for name in headers}


def import_client() -> Any:
    try:
        with hide_packages("kubernetes_validate"):
            from kubernetes import client
    except ImportError as error:
        raise missing_extra(error) or error from error
    return client


def connect(context: str) -> Connection:
    """Connect by the kubeconfig, or inside a cluster by the pod's service account; no request is sent yet."""
    client = import_client()
    configuration = client.Configuration()
    name = _load_configuration(configuration, context)
    return Connection(name, configuration, client.ApiClient(configuration).rest_client.pool_manager)


def _load_configuration(configuration: Any, context: str) -> str:
    """Fill the configuration and return the context's name."""
    import yaml
    from kubernetes import config

    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
            name = _context_name(files, context)
            config.load_kube_config(files, name, configuration, persist_config=False)
            if not str(configuration.host).startswith(("https://", "http://")):
                raise ResourceError(
                    f"kubeconfig {files}: the cluster of context {name} has no server; write its https://…"
                )
            return name
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ResourceError(f"no kubeconfig at {files}; set KUBECONFIG or log in to a cluster")
        config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError) as error:  # ValueError: a bad certificate
        text = " ".join(str(error).split())
        raise ResourceError(f"kubeconfig {files} cannot be used: {text}") from error
    return "in-cluster"


def _context_name(files: str, context: str) -> str:
    """Return the named context, or the current one; an error lists the contexts there are."""
    from kubernetes.config.kube_config import KubeConfigMerger

    try:
        merged = KubeConfigMerger(files).config
        body = merged.value if merged is not None else {}
        names = [str(item["name"]) for item in body.get("contexts") or []]
        name = context or str(body.get("current-context") or "")
    except (TypeError, AttributeError, KeyError) as error:
        raise ResourceError(f"kubeconfig {files} cannot be used: it is not what `kubectl config view` shows") from error
    available = f"there are {', '.join(names)}" if names else "it has none"
    if not name:
        raise ResourceError(f"kubeconfig {files} has no current context; choose one with `--context`: {available}")
    if name not in names:
        raise ResourceError(f"kubeconfig {files} has no context {name}; {available}")
    return name
