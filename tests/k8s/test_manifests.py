"""The YAML files as they stand in k8s/, before any code fills them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import k8s
from k8s.manifest import load

from .schemas import validate

ROOT = Path(k8s.__file__).parent
FOLDERS = ("serve", "kserve", "train")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_valid_as_it_stands(folder: str) -> None:
    for item in load(folder).values():
        validate(item)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_kustomization_lists_every_file(folder: str) -> None:
    listed = yaml.safe_load((ROOT / folder / "kustomization.yaml").read_text())["resources"]
    assert listed == sorted(path.name for path in (ROOT / folder).glob("*.yaml") if path.name != "kustomization.yaml")


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"])
def test_both_ways_of_serving_share_what_surrounds_the_pods(kind: str) -> None:
    assert load("serve")[kind] == load("kserve")[kind]


def test_both_ways_of_serving_run_the_same_pod() -> None:
    plain = load("serve")["Deployment"]["spec"]["template"]["spec"]
    predictor: dict[str, Any] = load("kserve")["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0].pop("name") == "kserve-container"
    plain["containers"][0].pop("name")
    assert {key: predictor[key] for key in plain} == plain


def test_placeholders_never_name_a_moving_image() -> None:
    assert ":latest" not in json.dumps([load(folder) for folder in FOLDERS])
