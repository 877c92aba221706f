"""Names of images: the registry, the repository in it, a tag or a digest."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from pipeline.spec.errors import ConfigError

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


def parse(text: str) -> Reference:
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
