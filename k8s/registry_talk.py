"""Asking a registry over HTTP: tokens fetched where it wants one, patience where it is busy, redirects followed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

from k8s.login import Login
from k8s.reference import Reference, is_local
from pipeline.spec.errors import StageError

_BUSY = (408, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_SECONDS = 30.0
_REDIRECTS = 5
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Ask:
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | Path | None = None
    into: Path | None = None  # where a long answer goes


@dataclass(frozen=True)
class Answer:
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
class Talk:
    reference: Reference
    login: Login | None
    pause: Callable[[float], None] = time.sleep
    tries: int = 5
    timeout_seconds: float = 60
    _token: str = field(default="", repr=False)  # the last Authorization header that was good

    def ask(self, ask: Ask) -> Answer:
        """Until there is an answer worth having."""
        answer = self._patiently(ask)
        if answer.status == 401 and (challenge := answer.headers.get("www-authenticate")):
            self._token = ""  # a token may be given by the very host that no longer takes the last one
            self._token = self._authorization(challenge)
            if self._token:
                answer = self._patiently(ask)
        return answer

    def _patiently(self, ask: Ask) -> Answer:
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
            if answer.status not in _BUSY or attempt == self.tries:
                return answer
            self.pause(_patience(answer, attempt))
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, ask: Ask) -> Answer:
        """What we are is told to the registry alone, not to the storage it sends us to."""
        url, home = ask.url, urlsplit(ask.url).netloc
        for _ in range(_REDIRECTS):
            place = urlsplit(url)
            known = {"Authorization": self._token} if self._token else {}
            headers = {**known, **ask.headers}
            if place.netloc != home:
                headers.pop("Authorization", None)
            answer = _once(ask, place, headers, self.timeout_seconds)
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

    def _token_question(self, realm: SplitResult, asked: Mapping[str, str]) -> Ask:
        url = realm.geturl()
        if self.login and self.login.token:
            form = {**asked, "grant_type": "refresh_token", "refresh_token": self.login.token, "client_id": "pipe"}
            body = urlencode(form).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            return Ask("POST", url, headers, body)
        headers = {"Authorization": self.login.basic} if self.login else {}
        return Ask("GET", f"{url}{'&' if realm.query else '?'}{urlencode(asked)}", headers)


def _once(ask: Ask, place: SplitResult, headers: Mapping[str, str], timeout_seconds: float) -> Answer:
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
        return Answer(response.status, found, content, place.geturl())


def _patience(answer: Answer, attempt: int) -> float:
    asked = answer.headers.get("retry-after", "")
    return min(float(asked) if asked.isdigit() else 0.5 * 2**attempt, _LONGEST_PAUSE_SECONDS)
