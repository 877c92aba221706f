from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.spec.errors import ConfigError, StageError

from ..k8s.registry_server import RegistryServer
from .packing import BASE, DIGEST, FAILING, NO_DAEMON, NOT_ALLOWED, PUSHED, WORKING, MakeRun, PutBuilders, pack


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer().start()
    yield server
    server.stop()


def test_without_a_builder_it_says_who_was_looked_for_and_how_to_build_by_hand(
    make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    builders(docker=NO_DAEMON)
    run = make_run()
    record = pack(run)
    assert record["builder"] is None
    assert record["reason"] == (
        "no container builder works: docker is installed but its daemon does not answer "
        "(Cannot connect to the daemon); podman is not installed; buildah is not installed"
    )
    out = capsys.readouterr().out
    assert f"docker build --tag {record['image']} {run.output('package') / 'context'}" in out


def test_a_required_build_without_a_builder_stops_the_road(make_run: MakeRun, builders: PutBuilders) -> None:
    builders()
    with pytest.raises(StageError, match="podman is not installed"):
        pack(make_run(package={"build": "require", "builder": "podman"}))


def test_the_first_builder_that_answers_builds_the_image(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(docker=NO_DAEMON, podman=WORKING)
    record = pack(make_run())
    assert (record["builder"], record["image_digest"], record["reason"]) == ("podman", f"sha256:{DIGEST}", "")


def test_the_index_is_passed_by_name_and_written_nowhere(
    make_run: MakeRun,
    builders: PutBuilders,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = builders(buildah=WORKING)
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@index.example/simple")
    run = make_run()
    pack(run)
    called = (folder / "called").read_text()
    assert "--build-arg PIP_INDEX_URL " in called
    assert "secret" not in called
    assert (
        "building from https://user:secret@index.example/simple" in capfd.readouterr().out
    )  # it did reach the builder
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"user:secret" in path.read_bytes()]


def test_a_failed_build_is_loud_and_the_local_road_goes_on(
    make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    builders(docker=FAILING)
    run = make_run()
    record = pack(run)
    assert (record["builder"], record["image_digest"]) == ("docker", None)
    assert "docker ended with status 3" in record["reason"]
    out, err = capsys.readouterr()
    assert "WARNING" in err
    assert "no space left on device" in err
    assert str(run.log("package")) in err
    assert (out + err).count("Step 4: RUN pip") == 1, "both go to the log"


@pytest.mark.parametrize("sections", [{"package": {"build": "require"}}, {"deploy": {"target": "kubernetes"}}])
def test_a_failed_build_stops_a_road_that_needs_the_image(
    sections: dict[str, Any], make_run: MakeRun, builders: PutBuilders
) -> None:
    builders(docker=FAILING)
    with pytest.raises(StageError, match="docker could not build"):
        pack(make_run(**sections))


REGISTRY = {"image": "r.example/twice", "push": True}


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_what_is_pushed_is_known_by_the_digest_the_registry_gave(
    builder: str, make_run: MakeRun, builders: PutBuilders
) -> None:
    folder = builders(**{builder: WORKING})
    run = make_run(package=REGISTRY)
    record = pack(run)
    assert record["reference"] == f"r.example/twice@sha256:{PUSHED}"
    pushed = [line for line in (folder / "called").read_text().splitlines() if f"{builder} push" in line][-1]
    assert record["image"] in pushed
    assert "tls-verify" not in pushed
    left = {path.name for path in run.partial("package").iterdir()}
    assert left == {"context", "image.json", "sbom.cdx.json"}


def test_a_registry_of_this_machine_is_spoken_to_without_tls(make_run: MakeRun, builders: PutBuilders) -> None:
    folder = builders(podman=WORKING)
    pack(make_run(package={**REGISTRY, "image": "127.0.0.1:5000/twice"}))
    assert "--tls-verify=false" in (folder / "called").read_text()


@pytest.mark.parametrize("builder", ["podman", "buildah", "docker"])
def test_the_bundle_is_in_the_annotations(builder: str, make_run: MakeRun, builders: PutBuilders) -> None:
    folder = builders(**{builder: WORKING})
    (folder / "buildx").write_text("      --annotation stringArray\n")
    run = make_run(package={"builder": builder})
    pack(run)
    (line,) = [line for line in (folder / "called").read_text().splitlines() if "--iidfile" in line]
    assert f"--annotation pipe-road.bundle={run.bundle().digest}" in line
    assert line.startswith("docker buildx build --load" if builder == "docker" else f"{builder} build")


@pytest.mark.parametrize("said", [None, "Usage: docker buildx build, of long ago"], ids=["without", "old"])
def test_docker_without_annotations_says_so(
    said: str | None, make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = builders(docker=WORKING)
    if said:
        (folder / "buildx").write_text(said)
    pack(make_run())
    assert "--annotation" not in (folder / "called").read_text()
    assert "docker build --tag" in (folder / "called").read_text()
    assert "the image's labels alone" in capsys.readouterr().out


def test_a_base_whose_digest_nobody_tells_is_said_aloud(
    make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    builders(podman=WORKING)
    assert pack(make_run())["base_digest"] is None
    assert f"WARNING: package.base={BASE} is a tag" in (said := capsys.readouterr().err)
    assert "127.0.0.1:1 does not answer" in said


def test_the_base_is_taken_by_the_digest_its_registry_gives(
    make_run: MakeRun, builders: PutBuilders, registry: RegistryServer
) -> None:
    folder = builders(podman=WORKING)
    manifest = b'{"schemaVersion": 2}'
    registry.manifests["3.11"] = ("application/vnd.oci.image.index.v1+json", manifest)
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    record = pack(make_run(package={"base": f"{registry.host}/library/python:3.11"}))
    assert record["base_digest"] == digest
    called = (folder / "called").read_text()
    assert "--tls-verify=false" in called, "that registry is on this machine"
    assert f"--build-arg BASE={registry.host}/library/python@{digest}" in called
    assert f"--annotation org.opencontainers.image.base.digest={digest}" in called
    by_digest = {"base": f"registry.invalid/python@{digest}"}
    assert pack(make_run("second", package=by_digest))["base_digest"] == digest, "nobody is asked"


def test_the_bill_of_materials_is_of_the_image_that_was_built(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(buildah=WORKING)
    run = make_run()
    record = pack(run)
    body = json.loads((run.partial("package") / record["sbom"]).read_text())
    assert [part["purl"] for part in body["components"] if "purl" in part] == ["pkg:pypi/numpy@2.0"]
    facts = {fact["name"]: fact["value"] for fact in body["metadata"]["component"]["properties"]}
    assert facts["pipe-road:bundle"] == run.bundle().digest
    assert (facts["pipe-road:source"], facts["pipe-road:image_digest"]) == ("image", f"sha256:{DIGEST}")


def test_without_an_image_the_bill_of_materials_says_what_it_is_of(make_run: MakeRun) -> None:
    run = make_run(package={"build": "never"})
    pack(run)
    body = json.loads((run.partial("package") / "sbom.cdx.json").read_text())
    facts = {fact["name"]: fact["value"] for fact in body["metadata"]["component"]["properties"]}
    assert facts["pipe-road:source"] == "requirements"
    assert "kserve" in {part["name"] for part in body["components"]}


def test_a_refused_push_says_who_refused_and_why(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(podman=NOT_ALLOWED)
    with pytest.raises(StageError, match=r"could not push .*denied: log in first.*podman login r\.example"):
        pack(make_run(package=REGISTRY))


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ({"push": True}, "names no registry"),
        ({**REGISTRY, "build": "never"}, "nothing to push"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_anything_is_built(
    package: dict[str, Any], said: str, make_run: MakeRun, builders: PutBuilders
) -> None:
    folder = builders(podman=WORKING)
    with pytest.raises(ConfigError, match=said):
        pack(make_run(package=package))
    assert not (folder / "called").exists()


def test_a_push_without_a_builder_stops_the_road(make_run: MakeRun, builders: PutBuilders) -> None:
    builders()
    with pytest.raises(StageError, match="no container builder works"):
        pack(make_run(package=REGISTRY))


def test_a_modelcar_needs_no_builder(make_run: MakeRun, builders: PutBuilders) -> None:
    builders()
    run = make_run(package={"modelcar": True})
    car = pack(run)["modelcar"]
    index = json.loads((run.partial("package") / "modelcar" / "index.json").read_text())
    assert index["manifests"][0]["digest"] == car["digest"]
    assert car == {
        "image": f"twice-modelcar:{run.bundle().digest[:12]}",
        "digest": car["digest"],
        "reference": None,
        "uri": None,
    }
