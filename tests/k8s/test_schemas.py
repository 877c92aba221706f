"""The JSON schemas of these tests detect mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from k8s.objects.manifests import load_manifests

from . import schemas
from .schemas import CRDS, FILES, validate


@pytest.mark.parametrize(
    ("folder", "layers", "kind", "path"),
    [
        ("serve", [], "ConfigMap", ()),
        ("serve", [], "Deployment", ("spec", "template", "spec")),
        ("serve", [], "HorizontalPodAutoscaler", ("spec", "metrics", 0)),
        ("serve", ["httproute"], "HTTPRoute", ("spec", "rules", 0)),
        ("serve", ["ingress"], "Ingress", ("spec",)),
        ("kserve", [], "InferenceService", ("spec", "predictor")),
        ("kserve", ["storage"], "ServingRuntime", ("spec", "containers", 0)),
        ("train", [], "Job", ("spec", "template", "spec")),
        ("train/jobset", [], "JobSet", ("spec", "replicatedJobs", 0, "template", "spec")),
        ("train/trainjob", [], "TrainingRuntime", ("spec", "mlPolicy")),
        ("train/trainjob", [], "TrainJob", ("spec", "trainer")),
    ],
)
def test_a_misspelt_field_is_detected(folder: str, layers: list[str], kind: str, path: tuple[Any, ...]) -> None:
    item = load_manifests(folder, layers)[kind]
    validate(item)
    place: Any = item
    for name in path:
        place = place[name]
    place["serviceAcountName"] = "typo"
    with pytest.raises(jsonschema.ValidationError, match="serviceAcountName"):
        validate(item)


def test_a_wrong_type_and_a_missing_field_are_detected() -> None:
    job = load_manifests("train/jobset")["JobSet"]
    job["spec"]["replicatedJobs"][0]["replicas"] = "one"
    with pytest.raises(jsonschema.ValidationError, match="'one' is not of type 'integer'"):
        validate(job)
    trained = load_manifests("train/trainjob")["TrainJob"]
    del trained["spec"]["runtimeRef"]
    with pytest.raises(jsonschema.ValidationError, match="'runtimeRef' is a required property"):
        validate(trained)


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"no CRDs at {CRDS} to check custom resources with")
def test_each_kind_has_one_published_crd() -> None:
    assert {kind: len(list(CRDS.glob(pattern))) for kind, pattern in FILES.items()} == dict.fromkeys(FILES, 1)


@pytest.mark.parametrize("kind", sorted(FILES))
def test_each_custom_resource_is_judged_without_crds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "CRDS", Path("/nonexistent"))
    with pytest.raises(jsonschema.ValidationError, match="is a required property"):
        validate({"kind": kind, "metadata": {}})
