"""Images to and from a registry over the OCI distribution API, with no container tool at all.

Asking a registry over HTTP: tokens fetched where it wants one, patience where it is busy, redirects followed.

Names of images: the registry, the repository in it, a tag or a digest.

The image that others are built on, by digest: what its tag means today is asked of its registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ipaddress
import json
import re
import shutil
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urljoin, urlsplit

from k8s.images.oci_layout import INDEX, MANIFEST, Layout
from k8s.images.registry_login import Login, find_login
from pipeline.contract.errors import ConfigError, PipelineError, StageError

DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFESTS = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)


class Repository:
    """One repository of a registry."""

    def __init__(self, reference: Reference, login: Login | None, talk: RegistryClient | None = None) -> None:
        self._reference = reference
        scheme = "http" if reference.plain else "https"
        self._base = f"{scheme}://{reference.address}/v2/{reference.repository}/"
        self._talk = talk or RegistryClient(reference, login)

    def push(self, layout: Layout, digest: str, tag: str) -> str:
        """The image with all it names, what is named first. Returns the digest the registry gives."""
        body = layout.read(digest)
        for child in body.get("manifests", ()):
            self.push(layout, child["digest"], child["digest"])
        if "config" in body:
            for part in (body["config"], *body["layers"]):
                self._push_blob(layout.file(part["digest"]), part["digest"], part["size"])
        content = layout.file(digest).read_bytes()
        headers = {"Content-Type": body["mediaType"], "Content-Length": str(len(content))}
        answer = self._ask("PUT", f"manifests/{tag}", headers, content)
        self._expect(answer, (200, 201, 202), f"the manifest {tag} was refused")
        given = answer.headers.get("docker-content-digest", digest)
        if given != digest:
            raise StageError(f"{self._where}: {tag} got the digest {given}, but {digest} was sent; do not trust it")
        return given

    def digest_of(self, tag: str) -> str | None:
        """Of what a tag means now; None where there is no such tag."""
        answer = self._ask("GET", f"manifests/{tag}", {"Accept": ", ".join(_MANIFESTS)})
        if answer.status == 404:
            return None
        self._expect(answer, (200,), f"the manifest {tag} is not given")
        return f"sha256:{hashlib.sha256(answer.body).hexdigest()}"

    def manifest(self, name: str) -> dict[str, Any]:
        """By tag or digest; what is asked for by digest must have it."""
        answer = self._ask("GET", f"manifests/{name}", {"Accept": ", ".join(_MANIFESTS)})
        self._expect(answer, (200,), f"the manifest {name} is not given")
        if name.startswith("sha256:"):
            self._check(f"sha256:{hashlib.sha256(answer.body).hexdigest()}", name)
        body: dict[str, Any] = json.loads(answer.body)
        return body

    def fetch(self, digest: str, target: Path) -> None:
        """A blob, into a file that gets its name once every byte is proven."""
        waiting = target.with_name(f"{target.name}.part")
        answer = self._ask("GET", f"blobs/{digest}", into=waiting)
        self._expect(answer, (200,), f"the blob {digest} is not given")
        with waiting.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        self._check(f"sha256:{found}", digest)
        shutil.move(waiting, target)

    def _push_blob(self, file: Path, digest: str, size: int) -> None:
        if self._ask("HEAD", f"blobs/{digest}").status == 200:
            return
        opened = self._ask("POST", "blobs/uploads/", {"Content-Length": "0"})
        self._expect(opened, (202,), "no upload is allowed")
        place = urljoin(opened.url, opened.headers.get("location", ""))
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": digest}, quote_via=quote)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        answer = self._ask("PUT", place, headers, file)
        self._expect(answer, (201,), f"the upload of {digest} was refused")

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | Path | None = None,
        into: Path | None = None,
    ) -> Response:  # fmt: skip
        return self._talk.ask(Request(method, urljoin(self._base, path), headers or {}, body, into))

    def _expect(self, answer: Response, statuses: tuple[int, ...], what: str) -> None:
        if answer.status in statuses:
            return
        host, name = self._reference.host, self._reference.repository
        if answer.status in (401, 403):
            raise StageError(
                f"{self._where}: {what} ({answer.status}: {answer.reason}); `docker login {host}` with an account "
                f"that may write to {name}"
            )
        raise StageError(f"{self._where}: {what} ({answer.status}: {answer.reason})")

    def _check(self, found: str, wanted: str) -> None:
        if found != wanted:
            raise StageError(f"{self._where}: asked for {wanted}, got {found}; the registry or the way to it is broken")

    @property
    def _where(self) -> str:
        return f"{self._reference.host}/{self._reference.repository}"


_REPOSITORY = re.compile(
    r"^[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*$", re.ASCII
)
_HOST = re.compile(r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::\d+)?$", re.ASCII)
_TAG = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_HUB, _HUB_HOST = "docker.io", "registry-1.docker.io"


@dataclass(frozen=True)
class Reference:
    host: str  # as people write it
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def address(self) -> str:
        """Where the registry of that name really answers."""
        return _HUB_HOST if self.host == _HUB else self.host

    @property
    def plain(self) -> bool:
        """A registry on this very machine is spoken to without TLS."""
        return is_local(self.host)

    def at(self, digest: str) -> str:
        return f"{self.host}/{self.repository}@{digest}"


def parse_reference(text: str) -> Reference:
    """As every container tool reads it: a first part with a dot or a port is a host, else it is Docker Hub's."""
    rest, at, digest = text.partition("@")
    first, slash, after = rest.partition("/")
    named = bool(slash) and ("." in first or ":" in first or first == "localhost")
    host, path = (first, after) if named else (_HUB, rest)
    repository, _, tag = path.partition(":")
    if host == _HUB and "/" not in repository:
        repository = f"library/{repository}"
    checks = [(_HOST, host), (_REPOSITORY, repository), *([(_TAG, tag)] if ":" in path else [])]
    if not all(pattern.fullmatch(part) for pattern, part in [*checks, *([(_DIGEST, digest)] if at else [])]):
        raise ConfigError(
            f"image {text!r}: not a container image name; write it as host/name:tag or host/name@sha256:…"
        )
    return Reference(host, repository, tag, digest)


def is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


_RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
_MAX_RETRY_PAUSE_SECONDS = 30.0
_MAX_REDIRECTS = 5
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Request:
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | Path | None = None
    into: Path | None = None  # where a long answer goes


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    url: str

    @property
    def reason(self) -> str:
        """In the registry's own words, where it has any."""
        try:
            errors = json.loads(self.body)["errors"]
            return "; ".join(f"{error.get('code', '')} {error.get('message', '')}".strip() for error in errors)
        except (ValueError, KeyError, TypeError, AttributeError):
            return http.client.responses.get(self.status, "no reason given")


@dataclass
class RegistryClient:
    reference: Reference
    login: Login | None
    pause: Callable[[float], None] = time.sleep
    tries: int = 5
    timeout_seconds: float = 60
    _token: str = field(default="", repr=False)  # the last Authorization header that was good

    def ask(self, ask: Request) -> Response:
        """Until there is an answer worth having."""
        answer = self._patiently(ask)
        if answer.status == 401 and (challenge := answer.headers.get("www-authenticate")):
            self._token = ""  # a token may be given by the very host that no longer takes the last one
            self._token = self._authorization(challenge)
            if self._token:
                answer = self._patiently(ask)
        return answer

    def _patiently(self, ask: Request) -> Response:
        for attempt in range(1, self.tries + 1):
            try:
                answer = self._follow(ask)
            except (OSError, http.client.HTTPException) as error:
                if attempt == self.tries or isinstance(error, ssl.SSLCertVerificationError):
                    host = urlsplit(ask.url).netloc
                    raise StageError(
                        f"registry {host} does not answer: {error}; is its name right, and is it up?"
                    ) from error
                self.pause(0.5 * 2**attempt)
                continue
            if answer.status not in _RETRYABLE_STATUSES or attempt == self.tries:
                return answer
            self.pause(_retry_pause_seconds(answer, attempt))
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, ask: Request) -> Response:
        """What we are is told to the registry alone, not to the storage it sends us to."""
        url, home = ask.url, urlsplit(ask.url).netloc
        for _ in range(_MAX_REDIRECTS):
            place = urlsplit(url)
            known = {"Authorization": self._token} if self._token else {}
            headers = {**known, **ask.headers}
            if place.netloc != home:
                headers.pop("Authorization", None)
            answer = _send_once(ask, place, headers, self.timeout_seconds)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            url = urljoin(url, answer.headers.get("location", ""))
        raise StageError(f"registry {home} sends us in circles: {url}")

    def _authorization(self, challenge: str) -> str:
        """What the registry wants to hear, from what it says it wants."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return self.login.basic if self.login and not self.login.token else ""
        if scheme.lower() != "bearer":
            raise StageError(f"registry {self.reference.host} asks for {scheme!r}, which is neither Basic nor Bearer")
        return f"Bearer {self._fetch_token(dict(_PARAMETER.findall(rest)))}"

    def _fetch_token(self, wanted: Mapping[str, str]) -> str:
        realm = urlsplit(wanted.get("realm", ""))
        if realm.scheme != "https" and not is_local(realm.netloc):
            raise StageError(f"registry {self.reference.host} wants our login sent in the clear, to {realm.geturl()}")
        asked = {key: wanted[key] for key in ("service", "scope") if key in wanted}
        answer = self._patiently(self._token_question(realm, asked))
        if answer.status != 200:
            raise StageError(
                f"registry {self.reference.host} gives no token ({answer.status}: {answer.reason}); "
                f"`docker login {self.reference.host}`"
            )
        body = json.loads(answer.body)
        return str(body.get("token") or body["access_token"])

    def _token_question(self, realm: SplitResult, asked: Mapping[str, str]) -> Request:
        url = realm.geturl()
        if self.login and self.login.token:
            form = {**asked, "grant_type": "refresh_token", "refresh_token": self.login.token, "client_id": "pipe"}
            body = urlencode(form).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            return Request("POST", url, headers, body)
        headers = {"Authorization": self.login.basic} if self.login else {}
        return Request("GET", f"{url}{'&' if realm.query else '?'}{urlencode(asked)}", headers)


def _send_once(ask: Request, place: SplitResult, headers: Mapping[str, str], timeout_seconds: float) -> Response:
    kind = http.client.HTTPConnection if place.scheme == "http" else http.client.HTTPSConnection
    path = f"{place.path}?{place.query}" if place.query else place.path
    with (
        contextlib.closing(kind(place.netloc, timeout=timeout_seconds)) as connection,
        contextlib.ExitStack() as open_,
    ):
        body = open_.enter_context(ask.body.open("rb")) if isinstance(ask.body, Path) else ask.body
        connection.request(ask.method, path, body=body, headers=dict(headers))
        response = connection.getresponse()
        content = b""
        if ask.into is not None and response.status == 200:
            with ask.into.open("wb") as file:
                shutil.copyfileobj(response, file)
        else:
            content = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, found, content, place.geturl())


def _retry_pause_seconds(answer: Response, attempt: int) -> float:
    asked = answer.headers.get("retry-after", "")
    return min(float(asked) if asked.isdigit() else 0.5 * 2**attempt, _MAX_RETRY_PAUSE_SECONDS)


_BASE_TIMEOUT_SECONDS = 10  # nothing depends on the answer but how firmly the base is named


@dataclass(frozen=True)
class BaseImage:
    name: str  # for the builder
    digest: str | None
    reason: str = ""  # why there is no digest


def resolve_base_image(name: str, env: Mapping[str, str]) -> BaseImage:
    """A tag may mean another image tomorrow; what is built is built on the one that was asked for today."""
    try:
        reference = parse_reference(name)
        if reference.digest:
            return BaseImage(name, reference.digest)
        talk = RegistryClient(
            reference, find_login(reference.host, env), tries=1, timeout_seconds=_BASE_TIMEOUT_SECONDS
        )
        digest = Repository(reference, None, talk).digest_of(reference.tag or "latest")
    except PipelineError as error:
        return BaseImage(name, None, str(error))
    if digest is None:
        return BaseImage(name, None, f"{reference.host} has no {reference.repository}:{reference.tag or 'latest'}")
    return BaseImage(reference.at(digest), digest)
