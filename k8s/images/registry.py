"""Image names, registry logins and the OCI distribution API: push images and fetch blobs without a container tool.

Logins are read as `docker login`, `podman login` or a credential helper stores them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import json
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urljoin, urlsplit

from k8s.images.oci_layout import INDEX, MANIFEST, Layout
from pipeline.system.errors import ConfigError, PipelineError, StageError
from pipeline.system.files import digest_bytes, digest_file

_HELPER_TIMEOUT_SECONDS = 30
_DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"  # the name under which the login of Docker Hub is stored
_TOKEN_USER = "<token>"  # noqa: S105 - the user name with which a helper returns a token


@dataclass(frozen=True)
class Login:
    user: str
    password: str = field(repr=False)
    token: str = field(default="", repr=False)  # an identity token for OAuth, instead of user and password

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_login(host: str, env: Mapping[str, str]) -> Login | None:
    """Return the login from the first file that has one for the host; None is enough for public registries."""
    for path in login_files(env):
        if path.is_file() and (login := _from_file(path, host, env)) is not None:
            return login
    return None


def login_files(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files in the order in which container tools read them."""
    if file := env.get("REGISTRY_AUTH_FILE"):
        yield Path(file)
    if runtime := env.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    if folder := env.get("DOCKER_CONFIG"):
        yield Path(folder) / "config.json"
    elif home := env.get("HOME"):
        yield Path(home) / ".docker" / "config.json"


def _from_file(path: Path, host: str, env: Mapping[str, str]) -> Login | None:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a file of logins ({error}); log in again") from error
    names = _server_names(host)
    helpers = body.get("credHelpers") or {}
    helper = next((helpers[name] for name in names if name in helpers), body.get("credsStore"))
    if helper:
        login = next((login for name in names if (login := _run_helper(helper, name, env)) is not None), None)
        if login is not None:
            return login
    auths = body.get("auths") or {}
    entry = next((auths[name] for name in names if auths.get(name)), None)
    return _from_entry(entry, path, host) if entry else None


def _server_names(host: str) -> tuple[str, ...]:
    return (
        (_DOCKER_HUB_LOGIN, "docker.io", "index.docker.io")
        if host == "docker.io"
        else (host, f"https://{host}", f"http://{host}")
    )


def _from_entry(entry: Mapping[str, Any], path: Path, host: str) -> Login:
    token = str(entry.get("identitytoken") or "")
    if "auth" not in entry:
        return Login(str(entry.get("username", "")), str(entry.get("password", "")), token)
    try:
        user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the login of {host} is damaged; log in again") from error
    if not colon:
        raise ConfigError(f"{path}: the login of {host} has no password; log in again")
    return Login(user, password.rstrip("\0"), token)


def _run_helper(helper: str, name: str, env: Mapping[str, str]) -> Login | None:
    """Ask a credential helper: it reads a server's name, prints JSON, and fails if it has no login."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=name, capture_output=True, text=True, timeout=_HELPER_TIMEOUT_SECONDS, check=False,
            env=dict(env),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{program}, the credential helper configured here, does not run: {error}; install it or log in again"
        ) from error
    if done.returncode != 0:
        return None
    body = json.loads(done.stdout)
    user, secret = str(body.get("Username", "")), str(body.get("Secret", ""))
    return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)


DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFESTS = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)

_RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
_MAX_RETRY_PAUSE_SECONDS = 30.0
_MAX_REDIRECTS = 5
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_BASE_TIMEOUT_SECONDS = 10  # short: without the digest the build goes on, on the tag
_REPOSITORY = re.compile(
    r"^[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*$", re.ASCII
)
_HOST = re.compile(r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::\d+)?$", re.ASCII)
_TAG = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_HUB, _HUB_HOST = "docker.io", "registry-1.docker.io"


class Repository:
    """One repository of a registry."""

    def __init__(self, reference: Reference, login: Login | None, client: RegistryClient | None = None) -> None:
        self._reference = reference
        scheme = "http" if reference.plain else "https"
        self._base = f"{scheme}://{reference.address}/v2/{reference.repository}/"
        self._client = client or RegistryClient(reference, login)

    def push(self, layout: Layout, digest: str, tag: str) -> str:
        """Push an image after everything it refers to; return the digest that the registry reports."""
        body = layout.read(digest)
        for child in body.get("manifests", ()):
            self.push(layout, child["digest"], child["digest"])
        if "config" in body:
            for part in (body["config"], *body["layers"]):
                self._push_blob(layout.file(part["digest"]), part["digest"], part["size"])
        content = layout.file(digest).read_bytes()
        headers = {"Content-Type": body["mediaType"], "Content-Length": str(len(content))}
        response = self._send("PUT", f"manifests/{tag}", headers, content)
        self._expect(response, (200, 201, 202), f"the manifest {tag} was refused")
        reported = response.headers.get("docker-content-digest", digest)
        if reported != digest:
            raise StageError(f"{self._where}: {tag} got the digest {reported}, but {digest} was sent; do not trust it")
        return reported

    def digest_of(self, tag: str) -> str | None:
        """Return the digest that a tag has now; None if there is no such tag."""
        response = self._send("GET", f"manifests/{tag}", {"Accept": ", ".join(_MANIFESTS)})
        if response.status == 404:
            return None
        self._expect(response, (200,), f"the manifest {tag} is not given")
        return f"sha256:{digest_bytes(response.body)}"

    def manifest(self, name: str) -> dict[str, Any]:
        """Fetch a manifest by tag, or by a digest, which is verified."""
        response = self._send("GET", f"manifests/{name}", {"Accept": ", ".join(_MANIFESTS)})
        self._expect(response, (200,), f"the manifest {name} is not given")
        if name.startswith("sha256:"):
            self._check(f"sha256:{digest_bytes(response.body)}", name)
        body: dict[str, Any] = json.loads(response.body)
        return body

    def fetch(self, digest: str, target: Path) -> None:
        """Fetch a blob into a file, which gets its name once its digest is verified."""
        partial = target.with_name(f"{target.name}.part")
        response = self._send("GET", f"blobs/{digest}", into=partial)
        self._expect(response, (200,), f"the blob {digest} is not given")
        self._check(f"sha256:{digest_file(partial)}", digest)
        shutil.move(partial, target)

    def _push_blob(self, file: Path, digest: str, size: int) -> None:
        if self._send("HEAD", f"blobs/{digest}").status == 200:
            return
        opened = self._send("POST", "blobs/uploads/", {"Content-Length": "0"})
        self._expect(opened, (202,), "no upload is allowed")
        url = urljoin(opened.url, opened.headers.get("location", ""))
        url += ("&" if urlsplit(url).query else "?") + urlencode({"digest": digest}, quote_via=quote)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        response = self._send("PUT", url, headers, file)
        self._expect(response, (201,), f"the upload of {digest} was refused")

    def _send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | Path | None = None,
        into: Path | None = None,
    ) -> Response:  # fmt: skip
        return self._client.send(Request(method, urljoin(self._base, path), headers or {}, body, into))

    def _expect(self, response: Response, statuses: tuple[int, ...], what: str) -> None:
        if response.status in statuses:
            return
        host, name = self._reference.host, self._reference.repository
        if response.status in (401, 403):
            raise StageError(
                f"{self._where}: {what} ({response.status}: {response.reason}); `docker login {host}` with an account "
                f"that may write to {name}"
            )
        raise StageError(f"{self._where}: {what} ({response.status}: {response.reason})")

    def _check(self, actual: str, expected: str) -> None:
        if actual != expected:
            raise StageError(f"{self._where}: requested {expected}, got {actual}; the registry or a proxy is broken")

    @property
    def _where(self) -> str:
        return f"{self._reference.host}/{self._reference.repository}"


@dataclass(frozen=True)
class Reference:
    host: str  # as in image names
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def address(self) -> str:
        """The host to connect to, which differs for Docker Hub."""
        return _HUB_HOST if self.host == _HUB else self.host

    @property
    def plain(self) -> bool:
        """Whether to use plain HTTP: only for registries on this machine."""
        return is_local(self.host)

    def at(self, digest: str) -> str:
        return f"{self.host}/{self.repository}@{digest}"


def parse_reference(text: str) -> Reference:
    """Parse a name like container tools: a first part with a dot or a port is a host, else the host is Docker Hub."""
    rest, at, digest = text.partition("@")
    first, slash, after = rest.partition("/")
    has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    host, path = (first, after) if has_host else (_HUB, rest)
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


@dataclass(frozen=True)
class Request:
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | Path | None = None
    into: Path | None = None  # a file for a long response


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    url: str

    @property
    def reason(self) -> str:
        """The registry's messages, or the name of the status."""
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
    _token: str = field(default="", repr=False)  # the last Authorization header that worked

    def send(self, request: Request) -> Response:
        """Send a request, retrying on busy responses and refreshing the token once."""
        response = self._send_with_retries(request)
        if response.status == 401 and (challenge := response.headers.get("www-authenticate")):
            self._token = ""  # the host that issues tokens may be the one that rejected the old token
            self._token = self._authorization(challenge)
            if self._token:
                response = self._send_with_retries(request)
        return response

    def _send_with_retries(self, request: Request) -> Response:
        for attempt in range(1, self.tries + 1):
            try:
                response = self._follow_redirects(request)
            except (OSError, http.client.HTTPException) as error:
                if attempt == self.tries or isinstance(error, ssl.SSLCertVerificationError):
                    host = urlsplit(request.url).netloc
                    raise StageError(
                        f"registry {host} does not answer: {error}; to fix it: check its name, and that it is up"
                    ) from error
                self.pause(0.5 * 2**attempt)
                continue
            if response.status not in _RETRYABLE_STATUSES or attempt == self.tries:
                return response
            self.pause(_retry_pause_seconds(response, attempt))
        raise AssertionError("the last attempt returns or raises")

    def _follow_redirects(self, request: Request) -> Response:
        """Follow redirects; credentials are sent only to the registry, not to the storage it redirects to."""
        url, home = request.url, urlsplit(request.url).netloc
        for _ in range(_MAX_REDIRECTS):
            target = urlsplit(url)
            credentials = {"Authorization": self._token} if self._token else {}
            headers = {**credentials, **request.headers}
            if target.netloc != home:
                headers.pop("Authorization", None)
            response = _send_once(request, target, headers, self.timeout_seconds)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            url = urljoin(url, response.headers.get("location", ""))
        raise StageError(f"registry {home} redirects too often, at last to {url}")

    def _authorization(self, challenge: str) -> str:
        """Return the Authorization header for a challenge; empty if we have no suitable login."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return self.login.basic if self.login and not self.login.token else ""
        if scheme.lower() != "bearer":
            raise StageError(
                f"registry {self.reference.host} requires {scheme!r} authentication; supported are Basic and Bearer"
            )
        return f"Bearer {self._fetch_token(dict(_PARAMETER.findall(rest)))}"

    def _fetch_token(self, challenge: Mapping[str, str]) -> str:
        realm = urlsplit(challenge.get("realm", ""))
        if realm.scheme != "https" and not is_local(realm.netloc):
            raise StageError(
                f"refusing to send credentials of registry {self.reference.host} over plain HTTP to {realm.geturl()}"
            )
        scope = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        response = self._send_with_retries(self._token_request(realm, scope))
        if response.status != 200:
            raise StageError(
                f"registry {self.reference.host} issues no token ({response.status}: {response.reason}); "
                f"`docker login {self.reference.host}`"
            )
        body = json.loads(response.body)
        return str(body.get("token") or body["access_token"])

    def _token_request(self, realm: SplitResult, scope: Mapping[str, str]) -> Request:
        url = realm.geturl()
        if self.login and self.login.token:
            form = {**scope, "grant_type": "refresh_token", "refresh_token": self.login.token, "client_id": "pipe"}
            body = urlencode(form).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            return Request("POST", url, headers, body)
        headers = {"Authorization": self.login.basic} if self.login else {}
        return Request("GET", f"{url}{'&' if realm.query else '?'}{urlencode(scope)}", headers)


def _send_once(request: Request, target: SplitResult, headers: Mapping[str, str], timeout_seconds: float) -> Response:
    kind = http.client.HTTPConnection if target.scheme == "http" else http.client.HTTPSConnection
    path = f"{target.path}?{target.query}" if target.query else target.path
    with (
        contextlib.closing(kind(target.netloc, timeout=timeout_seconds)) as connection,
        contextlib.ExitStack() as open_,
    ):
        body = open_.enter_context(request.body.open("rb")) if isinstance(request.body, Path) else request.body
        connection.request(request.method, path, body=body, headers=dict(headers))
        response = connection.getresponse()
        content = b""
        if request.into is not None and response.status == 200:
            with request.into.open("wb") as file:
                shutil.copyfileobj(response, file)
        else:
            content = response.read()
        lower = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, lower, content, target.geturl())


def _retry_pause_seconds(response: Response, attempt: int) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value) if value.isdigit() else 0.5 * 2**attempt, _MAX_RETRY_PAUSE_SECONDS)


@dataclass(frozen=True)
class BaseImage:
    name: str  # for the builder
    digest: str | None
    reason: str = ""  # why there is no digest


def resolve_base_image(name: str, env: Mapping[str, str]) -> BaseImage:
    """Resolve a base image's tag to its digest, so that the build uses the image that the tag has now."""
    try:
        reference = parse_reference(name)
        if reference.digest:
            return BaseImage(name, reference.digest)
        client = RegistryClient(
            reference, find_login(reference.host, env), tries=1, timeout_seconds=_BASE_TIMEOUT_SECONDS
        )
        digest = Repository(reference, None, client).digest_of(reference.tag or "latest")
    except PipelineError as error:
        return BaseImage(name, None, str(error))
    if digest is None:
        return BaseImage(name, None, f"{reference.host} has no {reference.repository}:{reference.tag or 'latest'}")
    return BaseImage(reference.at(digest), digest)
