from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import open_bundle, write_manifest
from pipeline.contract.config import parse_config
from pipeline.history import Project
from pipeline.steps.package import package_training
from pipeline.system.errors import BundleError, ConfigError, GateError, StageError
from pipeline.system.files import digest_mapping, digest_tree, write_json

from ...k8s.registry_server import RegistryServer
from ..packing import (
    BASE,
    DIGEST,
    FAILING,
    NO_DAEMON,
    NOT_ALLOWED,
    PUSHED,
    WORKING,
    MakeRun,
    PutBuilders,
    context_of,
    pack,
    record_export,
)

REGISTRY = {"image": "r.example/twice", "push": True}


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer().start()
    yield server
    server.stop()


def test_missing_builder_is_reported_with_the_command_to_build_by_hand(
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


@pytest.mark.parametrize(
    ("scripts", "sections", "message"),
    [
        ({}, {"package": {"builder": "podman"}}, "podman is not installed"),
        ({}, {"package": REGISTRY}, "no container builder works"),
        ({"docker": FAILING}, {"package": {"builder": "docker"}}, "docker could not build"),
        ({"docker": FAILING}, {"deploy": {"target": "kubernetes"}}, "docker could not build"),
    ],
)
def test_pipeline_that_needs_an_image_stops_without_it(
    scripts: dict[str, str], sections: dict[str, Any], message: str, make_run: MakeRun, builders: PutBuilders
) -> None:
    builders(**scripts)
    with pytest.raises(StageError, match=message):
        pack(make_run(**sections))


def test_the_first_builder_that_answers_builds_the_image(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(docker=NO_DAEMON, podman=WORKING)
    record = pack(make_run())
    assert (record["builder"], record["image_digest"], record["reason"]) == ("podman", f"sha256:{DIGEST}", "")


def test_package_index_url_is_passed_by_name_and_never_written(
    make_run: MakeRun, builders: PutBuilders, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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


def test_sigterm_ends_the_builder_and_its_processes(
    make_run: MakeRun, builders: PutBuilders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pip, here a process that keeps a pipe open, must not survive it."""
    sleep, alive = shutil.which("sleep"), tmp_path / "alive"
    os.mkfifo(alive)
    builders(buildah=f'#!/bin/sh\n[ "$1" = info ] && exit\n({sleep} 30; echo survived) > {alive} &\nwait\n')
    run = make_run(package={"builder": "buildah"})
    argv = [sys.executable, "-m", "pipeline.steps.package", str(run.path), "--root", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as step, alive.open() as pip:
        step.terminate()
        assert pip.read() == ""
    assert step.returncode == 128 + signal.SIGTERM


def test_failed_build_is_a_warning_for_a_local_deployment(
    make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    builders(docker=FAILING)
    run = make_run()
    record = pack(run)
    assert (record["builder"], record["image_digest"]) == ("docker", None)
    assert "docker exited with status 3" in record["reason"]
    out, err = capsys.readouterr()
    assert "WARNING" in err
    assert "no space left on device" in err
    assert str(run.log("package")) in err
    assert (out + err).count("Step 4: RUN pip") == 1, "both go to the log"


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_pushed_image_is_referenced_by_the_registrys_digest(
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
    assert left == {"context", "image.json", "provenance.json", "sbom.cdx.json"}


def test_a_registry_of_this_machine_needs_no_tls(make_run: MakeRun, builders: PutBuilders) -> None:
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


@pytest.mark.parametrize("printed", [None, "Usage: docker buildx build, of long ago"], ids=["without", "old"])
def test_docker_without_annotations_is_reported(
    printed: str | None, make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = builders(docker=WORKING)
    if printed:
        (folder / "buildx").write_text(printed)
    pack(make_run())
    assert "--annotation" not in (folder / "called").read_text()
    assert "docker build --tag" in (folder / "called").read_text()
    assert "only the labels of the image" in capsys.readouterr().out


def test_unknown_digest_of_the_base_is_a_warning(
    make_run: MakeRun, builders: PutBuilders, capsys: pytest.CaptureFixture[str]
) -> None:
    builders(podman=WORKING)
    assert pack(make_run())["base_digest"] is None
    assert f"WARNING: package.base_image={BASE} is a tag" in (printed := capsys.readouterr().err)
    assert "127.0.0.1:1 does not answer" in printed


def test_the_base_is_taken_by_the_digest_its_registry_gives(
    make_run: MakeRun, builders: PutBuilders, registry: RegistryServer
) -> None:
    folder = builders(podman=WORKING)
    manifest = b'{"schemaVersion": 2}'
    registry.manifests["3.11"] = ("application/vnd.oci.image.index.v1+json", manifest)
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    record = pack(make_run(package={"base_image": f"{registry.host}/library/python:3.11"}))
    assert record["base_digest"] == digest
    called = (folder / "called").read_text()
    assert "--tls-verify=false" in called, "that registry is on this machine"
    assert f"--build-arg BASE={registry.host}/library/python@{digest}" in called
    assert f"--annotation org.opencontainers.image.base.digest={digest}" in called
    by_digest = {"base_image": f"registry.invalid/python@{digest}"}
    assert pack(make_run("second", package=by_digest))["base_digest"] == digest, "the registry gets no request"


def test_the_bill_of_materials_is_of_the_image_that_was_built(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(buildah=WORKING)
    run = make_run()
    record = pack(run)
    body = json.loads((run.partial("package") / record["sbom"]).read_text())
    assert "uvloop" in {part["name"] for part in body["components"]}
    facts = {fact["name"]: fact["value"] for fact in body["metadata"]["component"]["properties"]}
    assert facts["pipe-road:bundle"] == run.bundle().digest
    assert facts["pipe-road:image_digest"] == f"sha256:{DIGEST}"


def test_refused_push_has_the_registrys_reason_and_the_fix(make_run: MakeRun, builders: PutBuilders) -> None:
    builders(podman=NOT_ALLOWED)
    with pytest.raises(StageError, match=r"could not push .*denied: log in first.*podman login r\.example"):
        pack(make_run(package=REGISTRY))


@pytest.mark.parametrize(
    ("package", "printed"),
    [
        ({"push": True}, "names no registry"),
        ({**REGISTRY, "builder": "none"}, "nothing to push"),
        ({"image": "r.example:5000/twice:1"}, "has a tag"),
        ({"base_image": "python:3.11\nRUN true"}, r"package\.base"),  # would add a line to the Dockerfile
    ],
)
def test_invalid_settings_are_refused_before_the_build(
    package: dict[str, Any], printed: str, make_run: MakeRun, builders: PutBuilders
) -> None:
    folder = builders(podman=WORKING)
    with pytest.raises(ConfigError, match=printed):
        pack(make_run(package=package))
    assert not (folder / "called").exists()


def test_a_modelcar_needs_no_builder(make_run: MakeRun, builders: PutBuilders) -> None:
    builders()
    run = make_run(package={"modelcar": "scratch"})
    car = pack(run)["modelcar"]
    index = json.loads((run.partial("package") / "modelcar" / "index.json").read_text())
    assert index["manifests"][0]["digest"] == car["digest"]
    assert car == {
        "image": f"localhost/twice-modelcar:{run.bundle().digest[:12]}",
        "digest": car["digest"],
        "reference": None,
        "uri": None,
    }


NEVER = {"builder": "none"}


def test_the_context_is_complete_and_its_digest_is_on_record(make_run: MakeRun) -> None:
    run = make_run(package={**NEVER, "base_image": "registry.example/python:3.12-slim"})
    record = pack(run)
    context = context_of(run)
    assert sorted(path.name for path in context.iterdir()) == [
        ".dockerignore", "Dockerfile", "app", "bundle", "requirements-cpu.txt", "requirements-gpu.txt", "slim.py",
        "wheels",
    ]  # fmt: skip
    assert {name: value for name, value in record.items() if value} == {
        "image": f"localhost/twice:{run.bundle().digest[:12]}",
        "bundle": run.bundle().digest,
        "context": digest_mapping(digest_tree(context)),
        "base": "registry.example/python:3.12-slim",
        "accelerator": "cpu",
        "reason": "package.builder is none",
        "sbom": "sbom.cdx.json",
    }
    assert open_bundle(context / "bundle").digest == run.bundle().digest
    assert not [path for path in context.rglob("*") if path.suffix == ".pyc" or path.name == "__pycache__"]
    lines = (context / "Dockerfile").read_text().splitlines()
    assert lines.count("ARG BASE=registry.example/python:3.12-slim") == 2
    assert f"ARG BUNDLE={run.bundle().digest}" in lines
    assert "USER 10001:10001" in lines
    assert not [line for line in lines if "unbuilt" in line]


def test_the_same_bundle_gives_the_same_context_whatever_the_umask(make_run: MakeRun) -> None:
    first = pack(make_run("first", package=NEVER))
    old = os.umask(0o077)
    try:
        run = make_run("second", package=NEVER)
        second = pack(run)
    finally:
        os.umask(old)
    assert first == second
    modes = {path.stat().st_mode & 0o777 for path in context_of(run).rglob("*") if path.is_file()}
    assert modes == {0o644}
    assert {path.stat().st_mode & 0o777 for path in context_of(run).rglob("*") if path.is_dir()} == {0o755}


def test_requirements_are_pinned_and_without_torch(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    for accelerator, runtime in (("cpu", "onnxruntime"), ("gpu", "onnxruntime-gpu")):
        lines = (context_of(run) / f"requirements-{accelerator}.txt").read_text().splitlines()
        names = [line.partition("==")[0].partition("[")[0] for line in lines]
        assert all(line.count("==") == 1 and line.partition("==")[2] for line in lines)
        assert names == sorted(set(names))
        assert {"httptools", "numpy", runtime, "pydantic", "uvloop"} <= set(names)
        assert not {"torch", "onnx", "safetensors", "pipe-road"} & set(names)


def test_codec_requirements_are_pinned_with_their_dependencies(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    needed = f"jsonschema=={version('jsonschema')}"
    signature = run.bundle().signature.model_copy(update={"requires": (needed,)})
    ancestors = run.bundle().manifest.ancestors
    write_json(run.bundle_path / "signature.json", signature.model_dump())
    (run.bundle_path / "files").mkdir()
    (run.bundle_path / "files" / "tokenizer.json").write_text("{}")
    write_manifest(run.bundle_path, "twice", "pass", ancestors)
    record_export(run)
    pack(run)
    for accelerator in ("cpu", "gpu"):
        lines = (context_of(run) / f"requirements-{accelerator}.txt").read_text().splitlines()
        assert {needed, f"referencing=={version('referencing')}"} <= set(lines)
        assert not [line for line in lines if line.startswith(("torch", "transformers"))]
    assert (context_of(run) / "bundle" / "files" / "tokenizer.json").read_text() == "{}"


def test_image_for_gpus_has_cuda(make_run: MakeRun) -> None:
    run = make_run(package=NEVER, deploy={"gpus": 1})
    assert pack(run)["accelerator"] == "gpu"
    assert "ARG ACCELERATOR=gpu" in (context_of(run) / "Dockerfile").read_text().splitlines()


def test_wheels_of_the_project_are_copied(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    (run.path / "wheels").mkdir()
    name = f"numpy-{version('numpy')}-py3-none-any.whl"
    (run.path / "wheels" / name).write_bytes(b"")
    pack(run)
    assert (context_of(run) / "wheels" / name).is_file()


def test_server_starts_from_the_packaged_source_alone(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    app = context_of(run) / "app"
    env = {**os.environ, "PYTHONPATH": str(app), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "serve", "--help"], env=env, cwd=run.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--grpc-port" in done.stdout


@pytest.mark.parametrize("verdict", ["fail", "", "passed"])
def test_bundle_without_a_passing_verdict_is_refused(verdict: str, make_run: MakeRun) -> None:
    with pytest.raises(GateError, match="the gate's verdict is"):
        pack(make_run(verdict=verdict, package=NEVER))


def test_a_tampered_bundle_is_refused(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    with (run.bundle_path / "model.onnx").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(BundleError, match="content changed"):
        pack(run)


def make(project: Project, **package: Any) -> tuple[dict[str, Any], list[str]]:
    """Package the training image; return the record and the reported lines."""
    printed: list[str] = []
    body = {"name": "tiny", "task": "task.py:T", "codec": "codec.py:C", "package": {"base_image": BASE, **package}}
    return package_training(project, parse_config(body, "test"), os.environ, printed.append), printed


def test_a_project_becomes_an_image_named_by_its_context(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    record, printed = make(project)
    folder = project.runs / "images" / f"train-{record['context'][:12]}"
    assert record["image"] == f"localhost/tiny-train:{record['context'][:12]}"
    assert json.loads((folder / "image.json").read_text()) == record
    assert (record["image_digest"], record["accelerator"]) == (f"sha256:{DIGEST}", "cpu")
    assert {path.name for path in folder.iterdir()} == {"context", "image.json", "sbom.cdx.json"}
    assert printed == [f"train.image={record['image']}"]


def test_training_image_that_monitors_reads_samples(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    serve = {"sample": 1, "sample_to": "file:///samples"}

    def pins(**sections: Any) -> str:
        body = {"name": "tiny", "task": "task.py:T", "codec": "codec.py:C", "package": {"base_image": BASE}}
        record = package_training(project, parse_config({**body, **sections}, "test"), os.environ, print)
        folder = project.runs / "images" / f"train-{record['context'][:12]}" / "context"
        return (folder / "requirements-cpu.txt").read_text()

    assert "pyarrow==" not in pins(serve=serve)
    monitored = pins(serve=serve, monitor={"every": "1h"})
    assert "pyarrow==" in monitored
    assert "fsspec==" in monitored


def test_training_image_is_rebuilt_only_for_a_changed_project(project: Project, builders: PutBuilders) -> None:
    called = builders(podman=WORKING) / "called"
    first, _ = make(project)
    builds = called.read_text().count("podman build")
    assert make(project) == (first, [f"unchanged: {first['image']}"])
    assert called.read_text().count("podman build") == builds == 1
    (project.root / "shapes.py").write_text("def size():\n    return 3\n")
    assert make(project)[0]["image"] != first["image"]
    assert called.read_text().count("podman build") == 2
    assert len(list(project.runs.glob("images/train-*/image.json"))) == 2
    assert len(list(project.runs.glob("images/train-*/context"))) == 1, "the old one's record is enough"


def test_unchanged_training_image_is_pushed_if_it_was_not(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    make(project, image="r.example/twice")
    record, printed = make(project, image="r.example/twice", push=True)
    assert record["reference"] == f"r.example/twice-train@sha256:{PUSHED}"
    assert printed == [f"train.image={record['reference']}"]


def test_failed_build_of_a_training_image_is_an_error(project: Project, builders: PutBuilders) -> None:
    builders(podman=FAILING)
    with pytest.raises(StageError, match=r"podman could not build localhost/tiny-train:.*no space left on device"):
        make(project)
    assert not list(project.runs.glob("images/train-*"))


def test_import_that_is_not_installed_is_reported(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    (project.root / "shapes.py").write_text("import not_installed_anywhere\n\n\ndef size():\n    return 2\n")
    assert "not_installed_anywhere" in make(project)[1][0]


def test_training_image_has_project_sources_and_included_files(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    record, _ = make(project, include=["README.md"])
    held = project.runs / "images" / f"train-{record['context'][:12]}" / "context" / "project"
    assert sorted(path.name for path in Path(held).iterdir()) == [
        "README.md", "codec.py", "pipe.yaml", "shapes.py", "task.py",
    ]  # fmt: skip
