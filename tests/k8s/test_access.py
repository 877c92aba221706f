from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from k8s import access, serving
from k8s.deploy import deploy
from pipeline.spec.access import Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import ConfigError

from .api_server import ApiServer
from .conftest import Configure
from .invariants import check
from .schemas import validate

KEY, PRIVATE = "a-key-of-the-tests", "-----BEGIN PRIVATE KEY-----\nsecret\n"


@pytest.fixture
def entry(tmp_path: Path) -> Access:
    for name, text in (("keys", f"{KEY}\n"), ("crt", "-----BEGIN CERTIFICATE-----\n"), ("key", PRIVATE)):
        (tmp_path / name).write_text(text)
    return Access(api_keys=str(tmp_path / "keys"), tls_certificate=str(tmp_path / "crt"), tls_key=str(tmp_path / "key"))


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = next(item for item in objects if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    return pod


def test_the_service_finds_the_secret_where_it_is_told_to_look(
    configure: Configure, bundle: Bundle, entry: Access
) -> None:
    objects = serving.objects(configure(), bundle, "twice:1", entry)
    (secret,) = access.secrets(configure(), entry)
    for item in (*objects, secret):
        validate(item)
    pod = _pod(objects)
    container = pod["containers"][0]
    mount = next(one for one in container["volumeMounts"] if one["name"] == "access")
    volume = next(one for one in pod["volumes"] if one["name"] == "access")
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert mount["readOnly"]
    words = container["args"][-6:]  # after those of the ConfigMap
    paths = words[1::2]
    assert words[::2] == ["--api-keys", "--tls-certificate", "--tls-key"]
    assert sorted(paths) == sorted(f"{mount['mountPath']}/{name}" for name in secret["data"])


def test_probes_follow_to_https(configure: Configure, bundle: Bundle, entry: Access) -> None:
    def schemes(given: Access) -> set[str | None]:
        container = _pod(serving.objects(configure(), bundle, "twice:1", given))["containers"][0]
        return {
            container[probe]["httpGet"].get("scheme") for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        }

    assert schemes(entry) == {"HTTPS"}
    assert schemes(Access(api_keys=entry.api_keys)) == {None}


def test_the_secret_holds_hashes_of_the_keys(configure: Configure, entry: Access) -> None:
    (secret,) = access.secrets(configure(), entry)
    data = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert data["api-keys"] == f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n"
    assert data["tls.key"] == PRIVATE


def test_without_keys_and_tls_there_is_no_secret(configure: Configure, bundle: Bundle) -> None:
    assert access.secrets(configure(), Access()) == []
    assert access.command(configure(), Access()) == ""
    pod = _pod(serving.objects(configure(), bundle, "twice:1"))
    assert not [word for word in pod["containers"][0]["args"] if word.startswith(("--api", "--tls"))]
    assert [volume["name"] for volume in pod["volumes"]] == ["tmp"]


def test_behind_kserve_tls_is_the_gateways(configure: Configure, bundle: Bundle, entry: Access) -> None:
    config = configure({"mode": "inferenceservice"})
    with pytest.raises(ConfigError, match="KServe's gateway ends TLS"):
        serving.objects(config, bundle, "twice:1", entry)
    for item in serving.objects(config, bundle, "twice:1", Access(api_keys=entry.api_keys)):
        validate(item)


def test_a_deployment_applies_the_secret_first_and_asks_with_a_key(
    api: ApiServer, model: Any, configure: Configure, bundle: Bundle, entry: Access, tmp_path: Path
) -> None:
    api.service, api.unready_polls = model, 0
    record = deploy(configure(), bundle, "twice:1", tmp_path / "out", False, print, entry)
    assert record["applied"][0] == "secret/twice-access"
    assert {headers["x-api-key"] for headers in api.proxied} == {KEY}
    assert any("/services/https:twice:http/proxy/" in path for _, path, _, _ in api.requests)


@pytest.mark.usefixtures("no_cluster")
def test_what_is_secret_is_in_no_file_that_is_rendered(
    configure: Configure, bundle: Bundle, entry: Access, tmp_path: Path
) -> None:
    said: list[str] = []
    deploy(configure(), bundle, "twice:1", tmp_path / "out", True, said.append, entry)
    written = "".join(file.read_text() for file in (tmp_path / "out").iterdir())
    assert KEY not in written
    assert "PRIVATE" not in written
    assert "twice-access" in written
    wanted = "kubectl --namespace default create secret generic twice-access --from-file=api-keys="
    assert any(wanted in line and f"--from-file=tls.key={entry.tls_key}" in line for line in said)


def test_what_a_deployment_says_of_the_service_reaches_its_command_line(
    configure: Configure, bundle: Bundle, entry: Access
) -> None:
    config = configure(serve={"page": False, "log_requests": 0.01})
    objects = serving.objects(config, bundle, "twice:1", Access(api_keys=entry.api_keys))
    container, settings = _pod(objects)["containers"][0], next(item for item in objects if item["kind"] == "ConfigMap")
    assert container["args"][-3:] == ["--no-page", "--api-keys", "/access/api-keys"]
    assert settings["data"]["LOG_REQUESTS"] == "0.01"
    check(objects)  # the service takes this command line


@pytest.mark.parametrize("word", ["canary", "shadow"])
def test_what_a_cluster_cannot_do_is_refused(configure: Configure, bundle: Bundle, word: str) -> None:
    config = configure(serve={word: "10%"})
    with pytest.raises(ConfigError, match=rf"serve\.{word}: is for the local service"):
        serving.objects(config, bundle, "twice:1")
