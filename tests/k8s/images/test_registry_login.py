from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from k8s.images.registry import Login, find_login
from pipeline.system.errors import ConfigError

HELPER = """#!/bin/sh
read server
[ "$server" = r.example ] || { echo "credentials not found"; exit 1; }
echo '{"Username": "kept", "Secret": "safe"}'
"""


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".docker").mkdir()
    return tmp_path


def write(home: Path, **body: Any) -> dict[str, str]:
    (home / ".docker" / "config.json").write_text(json.dumps(body))
    return {"HOME": str(home)}


def test_the_login_of_docker_is_found(home: Path) -> None:
    env = write(home, auths={"r.example": {"auth": encoded("ann:se:cret")}})
    assert find_login("r.example", env) == Login("ann", "se:cret")
    assert find_login("other.example", env) is None


def test_docker_hub_login_is_found_under_its_old_address(home: Path) -> None:
    env = write(home, auths={"https://index.docker.io/v1/": {"auth": encoded("ann:x")}})
    assert find_login("docker.io", env) == Login("ann", "x")


def test_an_identity_token_is_used_for_oauth(home: Path) -> None:
    env = write(home, auths={"r.example": {"auth": encoded("00000000:"), "identitytoken": "long"}})
    login = find_login("r.example", env)
    assert login is not None
    assert login.token == "long"


def test_a_file_named_by_the_environment_comes_first(home: Path, tmp_path: Path) -> None:
    named = tmp_path / "auth.json"
    named.write_text(json.dumps({"auths": {"r.example": {"username": "bob", "password": "y"}}}))
    env = {**write(home, auths={"r.example": {"auth": encoded("ann:x")}}), "REGISTRY_AUTH_FILE": str(named)}
    assert find_login("r.example", env) == Login("bob", "y")


@pytest.mark.parametrize("body", [{"credHelpers": {"r.example": "tests"}}, {"credsStore": "tests"}])
def test_a_credential_helper_is_used(body: dict[str, Any], home: Path) -> None:
    program = home / "docker-credential-tests"
    program.write_text(HELPER)
    program.chmod(0o755)
    env = {**write(home, **body), "PATH": f"{home}:/usr/bin:/bin"}
    assert find_login("r.example", env) == Login("kept", "safe")
    assert find_login("other.example", env) is None


def test_a_missing_credential_helper_is_an_error(home: Path) -> None:
    env = {**write(home, credsStore="gone"), "PATH": str(home)}
    with pytest.raises(ConfigError, match="docker-credential-gone"):
        find_login("r.example", env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        (json.dumps({"auths": {"r.example": {"auth": "%"}}}), "damaged"),
        (json.dumps({"auths": {"r.example": {"auth": encoded("ann")}}}), "no password"),
    ],
)
def test_a_damaged_login_file_is_an_error(text: str, message: str, home: Path) -> None:
    env = write(home)
    (home / ".docker" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_login("r.example", env)


def test_repr_of_a_login_has_no_password() -> None:
    assert "secret" not in repr(Login("ann", "secret", "secret"))
