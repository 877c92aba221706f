from __future__ import annotations

import pytest

from k8s.reference import Reference, is_local, parse
from pipeline.spec.errors import ConfigError

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
def test_a_name_is_read_as_container_tools_read_it(text: str, reference: Reference) -> None:
    assert parse(text) == reference


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
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a container image name"):
        parse(text)


def test_docker_hub_answers_under_another_name() -> None:
    assert parse("ann/model").address == "registry-1.docker.io"
    assert parse("r.example/model").address == "r.example"


def test_a_name_by_digest_has_no_tag() -> None:
    assert parse("r.example:5000/a:1").at(DIGEST) == f"r.example:5000/a@{DIGEST}"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:1", True), ("127.9.9.9", True), ("[::1]:5000", True),
        ("r.example", False), ("localhost.example:5000", False), ("10.0.0.1:5000", False), ("[::2]:5000", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_spoken_to_without_tls(host: str, local: bool) -> None:
    assert is_local(host) is local
