from __future__ import annotations

from pathlib import Path

import pytest

from k8s.images.modelcar import write_modelcar
from k8s.images.oci_layout import Layout
from k8s.images.registry import Login, Reference, RegistryClient, Repository, is_local, parse_reference
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError, StageError

from ..registry_server import RegistryServer

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("python:3.11", Reference("docker.io", "library/python", "3.11")),
        ("ann/model", Reference("docker.io", "ann/model")),
        ("localhost/model:1", Reference("localhost", "model", "1")),
        ("127.0.0.1:5000/a/b__c:1", Reference("127.0.0.1:5000", "a/b__c", "1")),
        ("[::1]:5000/a:1", Reference("[::1]:5000", "a", "1")),
        (f"r.example/a@{DIGEST}", Reference("r.example", "a", digest=DIGEST)),
        (f"r.example/a:1@{DIGEST}", Reference("r.example", "a", "1", DIGEST)),
    ],
)
def test_image_names_are_parsed_like_container_tools(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A/b",
        "r.example/",
        "r.example/A:1",
        "a:",
        "a:1:2",
        "a@sha256:12",
        "a@",
        "a b",
        "-r.example/a",
        "a/../b",
        "a\n",
    ],
)
def test_an_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a container image name"):
        parse_reference(text)


def test_docker_hub_images_have_its_registry_address() -> None:
    assert parse_reference("ann/model").address == "registry-1.docker.io"
    assert parse_reference("r.example/model").address == "r.example"


def test_a_name_by_digest_has_no_tag() -> None:
    assert parse_reference("r.example:5000/a:1").at(DIGEST) == f"r.example:5000/a@{DIGEST}"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:1", True), ("127.9.9.9", True), ("[::1]:5000", True),
        ("r.example", False), ("localhost.example:5000", False), ("10.0.0.1:5000", False), ("[::2]:5000", False),
    ],
)  # fmt: skip
def test_plain_http_is_only_for_registries_on_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local


ANN = Login("ann", "secret")


@pytest.fixture(scope="module")
def image(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, str]:
    directory = tmp_path_factory.mktemp("layout") / "image"
    return Layout(directory), write_modelcar(bundle, directory, "twice:1").digest


def repository(registry: RegistryServer, login: Login | None = None) -> Repository:
    reference = parse_reference(f"{registry.host}/twice:1")
    return Repository(reference, login, RegistryClient(reference, login, pause=lambda _: None))


def test_a_pushed_image_keeps_its_digest(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    layout, digest = image
    assert repository(registry).push(layout, digest, "1") == digest
    sent = registry.manifests | registry.blobs
    assert {path.name for path in (layout.path / "blobs" / "sha256").iterdir()} == {
        name.removeprefix("sha256:") for name in sent if name != "1"
    }
    assert repository(registry).digest_of("1") == digest
    assert repository(registry).digest_of("2") is None


def test_existing_blobs_are_not_sent_again(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    layout, digest = image
    repository(registry).push(layout, digest, "1")
    first = len(registry.methods("uploads"))
    repository(registry).push(layout, digest, "2")
    assert first == 2 * 3  # a layer that two images share, and a configuration each
    assert len(registry.methods("uploads")) == first


@pytest.mark.parametrize(("auth", "login"), [("basic", ANN), ("bearer", ANN), ("bearer", Login("", "", "an-identity"))])
def test_a_login_allows_pushing(auth: str, login: Login, registry: RegistryServer, image: tuple[Layout, str]) -> None:
    registry.auth = auth
    assert repository(registry, login).push(*image, "1") == image[1]


@pytest.mark.parametrize(
    ("auth", "login", "message"),
    [
        ("basic", None, "UNAUTHORIZED who are you"),
        ("basic", Login("ann", "wrong"), "UNAUTHORIZED who are you"),
        ("bearer", Login("ann", "wrong"), "DENIED wrong password"),
    ],
)
def test_a_refused_login_names_the_command_to_log_in(
    auth: str, login: Login | None, message: str, registry: RegistryServer, image: tuple[Layout, str]
) -> None:
    registry.auth = auth
    with pytest.raises(StageError, match=f"{message}.*`docker login {registry.host}`"):
        repository(registry, login).push(*image, "1")
    assert registry.blobs == {}


def test_credentials_are_not_sent_over_plain_http(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    registry.auth, registry.realm = "bearer", "http://tokens.example/token"
    with pytest.raises(StageError, match=r"over plain HTTP to http://tokens\.example"):
        repository(registry, ANN).push(*image, "1")


def test_a_busy_registry_is_retried(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    registry.busy = [429, 503]
    assert repository(registry).push(*image, "1") == image[1]


def test_retries_end_when_a_registry_stays_busy(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    registry.busy = [503] * 100
    with pytest.raises(StageError, match="503: Service Unavailable"):
        repository(registry).push(*image, "1")
    assert len(registry.requests) < 20


def test_an_unreachable_registry_is_named(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    asking = repository(registry)
    host = registry.host
    registry.stop()
    try:
        with pytest.raises(StageError, match=f"registry {host} does not answer"):
            asking.push(*image, "1")
    finally:
        registry.start()  # for the fixture to stop


def test_a_registry_that_reports_another_digest_is_an_error(
    registry: RegistryServer, image: tuple[Layout, str]
) -> None:
    registry.lie = "sha256:" + "0" * 64
    with pytest.raises(StageError, match="do not trust it"):
        repository(registry).push(*image, "1")


def test_a_fetched_blob_must_have_its_digest(
    registry: RegistryServer, image: tuple[Layout, str], tmp_path: Path
) -> None:
    layout, digest = image
    asking = repository(registry)
    asking.push(layout, digest, "1")
    config = asking.manifest(asking.manifest(digest)["manifests"][0]["digest"])["config"]["digest"]
    asking.fetch(config, tmp_path / "config")
    assert (tmp_path / "config").read_bytes() == layout.file(config).read_bytes()
    registry.blobs[config] += b" "
    with pytest.raises(StageError, match="the registry or a proxy is broken"):
        asking.fetch(config, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_manifest_named_by_digest_must_have_it(registry: RegistryServer, image: tuple[Layout, str]) -> None:
    layout, digest = image
    asking = repository(registry)
    asking.push(layout, digest, "1")
    assert asking.manifest(digest) == layout.read(digest)
    media_type, content = registry.manifests[digest]
    registry.manifests[digest] = media_type, content + b" "
    with pytest.raises(StageError, match="the registry or a proxy is broken"):
        asking.manifest(digest)


def test_credentials_are_not_sent_after_a_redirect(
    registry: RegistryServer, image: tuple[Layout, str], tmp_path: Path
) -> None:
    registry.auth = "basic"
    asking = repository(registry, ANN)
    asking.push(*image, "1")
    storage = RegistryServer(blobs=registry.blobs).start()
    try:
        registry.redirect = f"http://{storage.host}"
        digest = next(iter(registry.blobs))
        asking.fetch(digest, tmp_path / "blob")
    finally:
        storage.stop()
    assert (tmp_path / "blob").read_bytes() == registry.blobs[digest]
    assert [given for _, _, given in storage.requests] == [""]
