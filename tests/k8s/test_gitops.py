"""The examples for Argo CD and Flux in docs/gitops, and the Job that verifies an image before a sync."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.objects.manifests import write_manifests
from k8s.objects.serving import serving_objects
from pipeline.contract.bundle import Bundle
from pipeline.system.sources import SOURCE_ROOT

from .conftest import Configure
from .invariants import check_pods
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
