"""One connection to a Kubernetes API server: where it is, who we are, and single requests with clear errors.

A collection of the API server, whole: page after page, each object with the kind that a list leaves out.
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
from pipeline.contract.errors import ResourceError
from pipeline.contract.processes import without

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0

_MOST_TRIES = 6  # of a request that an overloaded server puts off
_LONGEST_PAUSE_SECONDS = 20.0
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_REPEATABLE = ("GET", "PATCH", "DELETE")  # a second time they find done what the first did


class Unreachable(ResourceError):
    """No answer, or none that means anything; another one may come later."""


class Broken(Unreachable):
    """A stream ended in its middle: what it told so far holds, and the rest can be asked for again."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """What a Kubernetes Status says, or the plain text some layers answer with."""
        try:
            return str(self.json()["message"])
        except (ValueError, KeyError, TypeError):
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
        read_seconds: float = _READ_SECONDS,
        more: Mapping[str, str] | None = None,
    ) -> Answer:
        """Any status is an answer; only a server that cannot be reached is an error.

        What the server puts off (429, or 503 with a time to come again) is asked again, as is what a connection
        that was cut may be asked twice.
        """
        import urllib3

        headers = {"Content-Type": content_type, **(more or {})}
        for left in reversed(range(_MOST_TRIES)):
            try:
                response = self._send(method, path, query, body, headers, read_seconds)
            except urllib3.exceptions.ProtocolError as error:
                if not left or method not in _REPEATABLE:
                    raise self._silent(error) from error
                continue
            except urllib3.exceptions.HTTPError as error:
                raise self._silent(error) from error
            answer = Answer(response.status, _lower(response.headers), response.data)
            if left and (pause := pause_of(answer)) is not None:
                time.sleep(pause)
                continue
            break
        return answer

    def lines(self, path: str, query: Mapping[str, str], read_seconds: float) -> Lines | Answer:
        """The lines of a long answer as they come, or a refusal; a cut connection or silence raises Broken."""
        import urllib3

        try:
            response = self._send("GET", path, query, None, {}, read_seconds, preload_content=False)
            if not 200 <= response.status < 300:
                return Answer(response.status, _lower(response.headers), response.read())
        except urllib3.exceptions.HTTPError as error:
            raise Broken(str(error)) from error
        return Lines(response)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        more: Mapping[str, str],
        read_seconds: float,
        **options: Any,
    ) -> Any:
        import urllib3

        headers = {"Accept": "application/json", "User-Agent": "pipe", **more}
        for setting in self.configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"]
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds)
        return self.pool.request(method, url, body=body, headers=headers, timeout=timeout, retries=False, **options)

    def _silent(self, error: Exception) -> Unreachable:
        return Unreachable(f"the Kubernetes API server {self.server} (context {self.context}) does not answer: {error}")


def client_package() -> Any:
    try:
        with without("kubernetes_validate"):
            from kubernetes import client
    except ImportError as error:
        raise ResourceError("the Kubernetes client is not installed; `pip install kubernetes`") from error
    return client


def connect(context: str) -> Connection:
    """By kubeconfig, or by the service account when we run inside the cluster."""
    client = client_package()
    configuration = client.Configuration()
    name = _load(configuration, context)
    return Connection(name, configuration, client.ApiClient(configuration).rest_client.pool_manager)


def path_of(item: Mapping[str, Any], namespace: str, name: str = "") -> str:
    """The REST path of an object, or without a name of its collection."""
    version, kind = item["apiVersion"], item["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural(kind)}" + (f"/{name}" if name else "")


def plural(kind: str) -> str:
    """As the API serves a kind; all that we make follow the rule."""
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}es" if word.endswith("s") else f"{word}s"


def pause_of(answer: Answer) -> float | None:
    """Seconds to wait before the same request may be made again; None where that is not the answer's meaning."""
    asked = answer.headers.get("retry-after", "")
    if answer.status not in (429, 503) or not asked.isdecimal():
        return None
    return min(float(asked), _LONGEST_PAUSE_SECONDS)


def warnings_of(answer: Answer) -> list[str]:
    """The texts of the Warning headers (several come joined by commas)."""
    return [text.replace('\\"', '"') for text in _WARNING.findall(answer.headers.get("warning", ""))]


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): headers[name] for name in headers}  # repeated ones come joined


class Lines:
    """The lines of an answer that may go on for ever."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        import urllib3

        rest = b""
        try:
            for part in self._response.stream(1 << 16):
                *whole, rest = (rest + part).split(b"\n")
                yield from whole
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # the last of a socket closed meanwhile
            raise Broken(str(error)) from error
        finally:
            self._response.close()
        if rest:
            yield rest

    def close(self) -> None:
        """From another thread: whoever waits for the next line stops waiting."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it may have ended by itself
            self._response.shutdown()


def _load(configuration: Any, context: str) -> str:
    """Fill the configuration; returns the context's name."""
    import yaml
    from kubernetes import config

    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
            name = _chosen(files, context)
            config.load_kube_config(files, name, configuration, persist_config=False)
            if not str(configuration.host).startswith(("https://", "http://")):
                raise ResourceError(
                    f"kubeconfig {files}: the cluster of context {name} has no server; write its https://…"
                )
            return name
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ResourceError(f"no kubeconfig at {files}; set KUBECONFIG or log in to a cluster")
        config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError) as error:  # the last of certificates
        text = " ".join(str(error).split())
        raise ResourceError(f"kubeconfig {files} cannot be used: {text}") from error
    return "in-cluster"


def _chosen(files: str, context: str) -> str:
    """The context that is named, else the current one; one that is not there is told with those that are."""
    from kubernetes.config.kube_config import KubeConfigMerger

    try:
        merged = KubeConfigMerger(files).config
        body = merged.value if merged is not None else {}
        known = [str(one["name"]) for one in body.get("contexts") or []]
        name = context or str(body.get("current-context") or "")
    except (TypeError, AttributeError, KeyError) as error:
        raise ResourceError(f"kubeconfig {files} cannot be used: it is not what `kubectl config view` shows") from error
    there = f"there are {', '.join(known)}" if known else "it has none"
    if not name:
        raise ResourceError(f"kubeconfig {files} has no current context; choose one with `--context`: {there}")
    if name not in known:
        raise ResourceError(f"kubeconfig {files} has no context {name}; {there}")
    return name


PASSING = (408, 410, 429, 500, 502, 503, 504)  # busy, restarting, or a list that grew too old between two pages


@dataclass(frozen=True)
class Listed:
    items: list[Object]
    version: str  # where a watch goes on


def listed(
    connection: Connection, kind: Mapping[str, str], namespace: str, query: Mapping[str, str]
) -> Listed | Answer:
    """All that match, or the refusal of one of the pages."""
    path, found, more = path_of(kind, namespace), list[Object](), ""
    own = {"apiVersion": kind["apiVersion"], "kind": kind["kind"]}
    while True:
        answer = connection.request("GET", path, {**query, "continue": more} if more else query)
        if not answer.ok:
            return answer
        body = answer.json()
        found += [{**item, **own} for item in body.get("items") or []]
        more = body["metadata"].get("continue", "")
        if not more:
            return Listed(found, str(body["metadata"].get("resourceVersion", "")))
