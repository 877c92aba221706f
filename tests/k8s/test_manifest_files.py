"""The YAML files in k8s/manifests as they are, before any code fills them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.objects import serving
from k8s.objects.kustomize import build
from k8s.objects.manifests import load_manifests
from k8s.objects.training import as_jobset, as_trainjob
from pipeline.contract.config import parse_config

from .invariants import check
from .objects.test_kustomize import FOLDERS, ROOT
from .schemas import validate

DIGEST = re.compile(r"^registry\.example/(model|trainer)@sha256:[0-9a-f]{64}$")


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_folder_is_valid_and_names_images_by_digest(folder: Path) -> None:
    objects = build(ROOT / folder)
    for item in objects:
        validate(item)
    check(objects)
    images = re.findall(r'"image": "([^"]*)"', json.dumps(objects))
    assert images or folder.name in ("access", "pods", "volume")
    assert all(DIGEST.match(image) for image in images)


@pytest.mark.parametrize("file", sorted(ROOT.rglob("kustomization.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_kustomization_lists_every_file_beside_it(file: Path) -> None:
    listed = [name for name in yaml.safe_load(file.read_text()).get("resources", []) if name.endswith(".yaml")]
    assert listed == sorted(path.name for path in file.parent.glob("*.yaml") if path != file)


@pytest.mark.parametrize("layer", ["cpu", "gpu"])
def test_serve_and_kserve_run_the_same_pod(layer: str) -> None:
    plain = load_manifests("serve", [layer])["Deployment"]["spec"]["template"]["spec"]
    predictor: dict[str, Any] = load_manifests("kserve", [layer])["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0].pop("name") == "kserve-container"
    plain["containers"][0].pop("name")
    assert {key: predictor[key] for key in plain} == plain


def test_a_stored_bundle_is_served_by_the_same_container() -> None:
    parts = load_manifests("kserve")
    runtime = load_manifests("kserve", ["storage"])["ServingRuntime"]
    folder_objects = json.loads(json.dumps(runtime))
    deploy = {"target": "kserve", "storage_uri": "pvc://model-bundles/model"}
    config = parse_config({"name": "m", "task": "t.py:T", "codec": "c.py:C", "deploy": deploy}, "test")
    serving.use_storage(parts, runtime, config.deploy, "run")
    assert parts["ServingRuntime"] == folder_objects
    assert parts["InferenceService"] == load_manifests("kserve", ["storage"])["InferenceService"]


def test_the_jobset_and_trainjob_folders_match_the_job() -> None:
    job = json.loads(
        json.dumps(load_manifests("train")["Job"]).replace(
            "model-train-0.model-train", "model-train-node-0-0.model-train"
        )
    )
    folder_objects = {item["kind"]: item for name in ("jobset", "trainjob") for item in build(ROOT / "train" / name)}
    made = {item["kind"]: item for item in (as_jobset(job), *as_trainjob(job))}
    assert {kind: folder_objects[kind] for kind in made} == made
