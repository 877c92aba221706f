"""Registry logins, as stored by `docker login`, `podman login` or a credential helper."""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.errors import ConfigError

_HELPER_TIMEOUT_SECONDS = 30
_HUB = "https://index.docker.io/v1/"  # the name under which the login of Docker Hub is stored
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
        (_HUB, "docker.io", "index.docker.io") if host == "docker.io" else (host, f"https://{host}", f"http://{host}")
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
