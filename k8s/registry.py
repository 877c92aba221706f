"""Images to and from a registry over the OCI distribution API, with no container tool at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

from k8s.login import Login
from k8s.oci import INDEX, MANIFEST, Layout
from k8s.reference import Reference
from k8s.registry_talk import Answer, Ask, Talk
from pipeline.spec.errors import StageError

DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFESTS = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)


class Repository:
    """One repository of a registry."""

    def __init__(self, reference: Reference, login: Login | None, talk: Talk | None = None) -> None:
        self._reference = reference
        scheme = "http" if reference.plain else "https"
        self._base = f"{scheme}://{reference.address}/v2/{reference.repository}/"
        self._talk = talk or Talk(reference, login)

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
    ) -> Answer:  # fmt: skip
        return self._talk.ask(Ask(method, urljoin(self._base, path), headers or {}, body, into))

    def _expect(self, answer: Answer, statuses: tuple[int, ...], what: str) -> None:
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
