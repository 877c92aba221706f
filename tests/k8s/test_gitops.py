"""The examples for Argo CD and Flux in docs/gitops, and the Job that verifies an image before a sync."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.images.cosign import attest_image, image_statement, open_image, sign_image
from k8s.images.modelcar import write_modelcar
from k8s.images.oci_layout import Layout
from k8s.objects.manifests import write_manifests
from k8s.objects.serving import serving_objects
from pipeline.contract.bundle import Bundle
from pipeline.contract.signing import new_key, private_key
from pipeline.system.sources import SOURCE_ROOT

from .conftest import Configure
from .invariants import check_pods
from .registry_server import RegistryServer
from .schemas import validate

EXAMPLES = SOURCE_ROOT / "docs" / "gitops"
IMAGE = "registry.example/team/digits@sha256:" + "1" * 64


def load(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture
def repository(bundle: Bundle, configure: Configure, tmp_path: Path) -> Path:
    """The example with the manifests of a model."""
    folder = tmp_path / "repository"
    shutil.copytree(EXAMPLES, folder)
    write_manifests(serving_objects(configure({"gpus": 1}), bundle, IMAGE), folder / "manifests")
    return folder


@pytest.mark.parametrize("name", ["argocd.yaml", "flux.yaml", "gated/gate.yaml"])
def test_the_examples_are_valid_objects(name: str) -> None:
    objects = load(EXAMPLES / name)
    for item in objects:
        validate(item)
    check_pods(objects)


def test_the_examples_name_folders_and_objects_that_exist(repository: Path) -> None:
    (application,) = load(repository / "argocd.yaml")
    source, gate, model = load(repository / "flux.yaml")
    paths = [application["spec"]["source"]["path"], gate["spec"]["path"], model["spec"]["path"]]
    assert all((repository / path / "kustomization.yaml").is_file() for path in paths)
    assert {item["spec"]["sourceRef"]["name"] for item in (gate, model)} == {source["metadata"]["name"]}
    assert model["spec"]["dependsOn"] == [{"name": gate["metadata"]["name"]}]
    assert (gate["spec"]["wait"], gate["spec"]["force"]) == (True, True), "the Job must succeed, and be replaceable"
    (job,) = load(repository / "gated" / "gate.yaml")
    assert job["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "PreSync"


def test_the_replacement_copies_the_image_of_the_model(repository: Path) -> None:
    (replacement,) = yaml.safe_load((repository / "gated" / "kustomization.yaml").read_text())["replacements"]
    names = yaml.safe_load((repository / "manifests" / "kustomization.yaml").read_text())["resources"]
    rendered = [load(repository / "manifests" / name)[0] for name in names]
    (source,) = [item for item in rendered if item["kind"] == replacement["source"]["kind"]]
    assert value_at(source, replacement["source"]["fieldPath"]) == IMAGE
    (target,) = replacement["targets"]
    (job,) = load(repository / "gated" / "gate.yaml")
    assert (job["kind"], job["metadata"]["name"]) == (target["select"]["kind"], target["select"]["name"])
    (path,) = target["fieldPaths"]
    assert value_at(job, path) == "set-by-kustomize"
    assert "$(IMAGE)" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def value_at(item: Any, path: str) -> Any:
    """Return the field that a path of kustomize names."""
    for part in path.split("."):
        if part.startswith("["):
            name, _, value = part.strip("[]").partition("=")
            (item,) = [entry for entry in item if entry[name] == value]
        else:
            item = item[int(part)] if part.isdigit() else item[part]
    return item


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed: nothing builds replacements")
def test_the_folders_build_with_kustomize(repository: Path) -> None:
    def build(folder: str) -> list[dict[str, Any]]:
        argv = ["kubectl", "kustomize", str(repository / folder)]
        return list(yaml.safe_load_all(subprocess.run(argv, capture_output=True, text=True, check=True).stdout))

    gated, gate, manifests = build("gated"), build("gate"), build("manifests")
    (job,) = gate
    validate(job)
    assert job["spec"]["template"]["spec"]["containers"][0]["env"][0] == {"name": "IMAGE", "value": IMAGE}
    assert [item for item in gated if item["kind"] != "Job"] == manifests
    assert job in gated


def test_the_job_passes_only_with_an_image_that_the_key_signed(
    bundle: Bundle, registry: RegistryServer, tmp_path: Path
) -> None:
    index = write_modelcar(bundle, tmp_path / "car", "twice:1")
    image = f"{registry.host}/twice@{index.digest}"
    reference, store = open_image(image)
    store.push(Layout(tmp_path / "car"), index.digest, "1")
    for name in ("team.key", "other"):
        new_key(tmp_path / name)
    assert "is not signed by a key of" in run_gate(image, tmp_path).stderr
    for name, expected in (("other", 2), ("team.key", 0)):
        sign_image(reference, index.digest, store, private_key(tmp_path / name))
        statement = image_statement(f"{registry.host}/twice", [index.digest], bundle, {}, {})
        attest_image(index.digest, statement, store, private_key(tmp_path / name))
        done = run_gate(image, tmp_path)
        assert done.returncode == expected, done.stderr
    assert f"{image} is signed by" in done.stdout


def run_gate(image: str, keys: Path) -> subprocess.CompletedProcess[str]:
    """Run the Job's command, away from any project, with its volumes in a folder."""
    (container,) = load(EXAMPLES / "gated" / "gate.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pipeline"]
    arguments = [word.replace("$(IMAGE)", image).replace("/keys", str(keys)) for word in container["args"]]
    env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), "DOCKER_CONFIG": str(keys / "login")}
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, cwd=keys, env=env, capture_output=True, text=True, timeout=120, check=False)
