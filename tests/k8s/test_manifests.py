"""The YAML files as they stand in k8s/, before any code fills them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import k8s
from k8s.objects import inference_service
from k8s.objects.kustomize import build
from k8s.objects.manifests import load
from k8s.objects.training import as_jobset, as_trainjob
from pipeline.contract.config import parse_config

from .invariants import check
from .objects.test_kustomize import FOLDERS
from .schemas import validate

ROOT = Path(k8s.__file__).parent
DIGEST = re.compile(r"^registry\.example/(model|trainer)@sha256:[0-9a-f]{64}$")


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_overlay_is_valid_as_it_stands(folder: Path) -> None:
    objects = build(ROOT / folder)
    for item in objects:
        validate(item)
    check(objects)


@pytest.mark.parametrize("file", sorted(ROOT.rglob("kustomization.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_kustomization_lists_every_file_beside_it(file: Path) -> None:
    listed = [name for name in yaml.safe_load(file.read_text()).get("resources", []) if name.endswith(".yaml")]
    assert listed == sorted(path.name for path in file.parent.glob("*.yaml") if path != file)


@pytest.mark.parametrize("family", ["serve", "kserve", "train"])
def test_there_is_an_overlay_for_each_kind_of_node(family: str) -> None:
    there = {path.name for path in (ROOT / family / "overlays").iterdir()}
    assert {"cpu", "gpu", "spot"} <= there
    assert family == "train" or "istio-free" in there


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"])
def test_both_ways_of_serving_share_what_surrounds_the_pods(kind: str) -> None:
    assert load("serve")[kind] == load("kserve")[kind]


@pytest.mark.parametrize("layers", [["cpu"], ["gpu"], ["cpu", "spot"]], ids="-".join)
def test_both_ways_of_serving_run_the_same_pod(layers: list[str]) -> None:
    plain = load("serve", layers)["Deployment"]["spec"]["template"]["spec"]
    predictor: dict[str, Any] = load("kserve", layers)["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0].pop("name") == "kserve-container"
    plain["containers"][0].pop("name")
    assert {key: predictor[key] for key in plain} == plain


def test_a_stored_bundle_is_served_by_the_same_container() -> None:
    """What the code makes of the plain service is what lies in the folder."""
    parts = load("kserve")
    runtime = load("kserve", ["storage"])["ServingRuntime"]
    standing = json.loads(json.dumps(runtime))
    deploy = {"mode": "inferenceservice", "storage_uri": "pvc://model-bundles/model"}
    config = parse_config({"name": "m", "task": "t.py:T", "codec": "c.py:C", "deploy": deploy}, "test")
    inference_service.stored(parts, runtime, config.deploy, "run")
    assert parts["ServingRuntime"] == standing
    assert parts["InferenceService"] == load("kserve", ["storage"])["InferenceService"]


def test_a_jobset_and_a_trainjob_hold_the_jobs_own_pods() -> None:
    job = json.loads(
        json.dumps(load("train")["Job"]).replace("model-train-0.model-train", "model-train-node-0-0.model-train")
    )
    standing = {item["kind"]: item for name in ("jobset", "trainjob") for item in build(ROOT / "train" / name)}
    made = {item["kind"]: item for item in (as_jobset(job), *as_trainjob(job))}
    assert {kind: standing[kind] for kind in made} == made
    assert standing["PersistentVolumeClaim"] == load("train")["PersistentVolumeClaim"]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name != "access"], ids=str)  # has no pods
def test_images_are_named_by_digest(folder: Path) -> None:
    images = re.findall(r'"image": "([^"]*)"', json.dumps(build(ROOT / folder)))
    assert images
    assert all(DIGEST.match(image) for image in images)
