from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s.objects import serving
from k8s.objects.manifests import BUNDLE_ANNOTATION
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ConfigError

from ..conftest import Configure
from ..schemas import validate

IMAGE = "registry.example/serve@sha256:" + "1" * 64
MODE = {"mode": "inferenceservice"}


def service(configure: Configure, bundle: Bundle, **deploy: Any) -> dict[str, Any]:
    made = serving.objects(configure({**MODE, **deploy}), bundle, IMAGE)
    return next(item for item in made if item["kind"] == "InferenceService")


def test_a_stored_bundle_needs_no_image_of_its_own(configure: Configure, bundle: Bundle) -> None:
    config = configure({**MODE, "storage_uri": "s3://bundles/twice", "storage_secret": "store", "gpus": 1})
    parts = {item["kind"]: item for item in serving.objects(config, bundle, IMAGE)}
    runtime, predictor = parts["ServingRuntime"]["spec"], parts["InferenceService"]["spec"]["predictor"]
    assert "containers" not in predictor
    assert predictor["model"]["storageUri"] == "s3://bundles/twice"
    assert predictor["model"]["modelFormat"] in runtime["supportedModelFormats"]
    (container,) = runtime["containers"]
    assert container["image"] == IMAGE
    assert container["command"][:4] == ["python", "-m", "serve", "/mnt/models"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert parts["ServiceAccount"]["secrets"] == [{"name": "store"}]


@pytest.mark.parametrize("uri", ["ftp://a/b", "pvc:/a", "twice", "s3://"])
def test_a_place_that_kserve_does_not_know_is_refused(uri: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.storage_uri"):
        configure({**MODE, "storage_uri": uri})


def test_knative_scales_by_requests_and_gets_nothing_that_it_refuses(configure: Configure, bundle: Bundle) -> None:
    made = service(configure, bundle, kserve_mode="Knative", in_flight=3)
    predictor = made["spec"]["predictor"]
    assert (predictor["scaleMetric"], predictor["scaleTarget"]) == ("concurrency", 3)
    (container,) = predictor["containers"]
    assert len(container["ports"]) == 1
    assert not {"lifecycle", "startupProbe"} & set(container)
    assert not {"terminationGracePeriodSeconds", "topologySpreadConstraints", "securityContext"} & set(predictor)


def test_a_knative_canary_gets_its_share_of_the_newest_revision(configure: Configure, bundle: Bundle) -> None:
    made = service(configure, bundle, kserve_mode="Knative", canary_percent=10, render=True)
    validate(made)
    whole = service(configure, bundle, kserve_mode="Knative", render=True)
    assert made["spec"]["predictor"] == {**whole["spec"]["predictor"], "canaryTrafficPercent": 10}


def test_a_standard_canary_stands_beside_the_stable_version(configure: Configure, bundle: Bundle) -> None:
    uris = {"storage_uri": "pvc://bundles/new", "stable_uri": "pvc://bundles/old"}
    made = service(configure, bundle, **uris, canary_percent=10, render=True)
    validate(made)
    stable, (entry,) = made["spec"]["predictor"], made["spec"]["canary"]
    assert entry["trafficPercent"] == 10
    assert stable["model"]["storageUri"] == "pvc://bundles/old"
    assert entry["predictor"]["model"]["storageUri"] == "pvc://bundles/new"
    assert entry["predictor"]["name"] == f"v-{bundle.digest[:8]}"
    assert not {"maxReplicas", "scaleMetric", "scaleTarget"} & set(entry["predictor"])
    assert entry["predictor"]["annotations"][BUNDLE_ANNOTATION] == bundle.digest
    assert bundle.digest[:12] not in str(stable), "its pods are of another bundle"
    assert stable["model"]["runtime"] == entry["predictor"]["model"]["runtime"] == "twice"


@pytest.mark.parametrize(
    ("deploy", "said"),
    [
        ({"render": False, "kserve_mode": "Knative"}, "render the manifests"),
        ({"mode": "deployment"}, "set deploy.mode=inferenceservice"),
        ({}, "set deploy.storage_uri and deploy.stable_uri"),
        ({"storage_uri": "pvc://a/b"}, "set deploy.storage_uri and deploy.stable_uri"),
        ({"storage_uri": "pvc://a/b", "stable_uri": "pvc://a/b"}, "set deploy.storage_uri and deploy.stable_uri"),
    ],
)
def test_a_canary_that_kserve_cannot_have_is_refused(
    deploy: dict[str, Any], said: str, configure: Configure, bundle: Bundle
) -> None:
    with pytest.raises(ConfigError, match=said):
        serving.objects(configure({**MODE, "render": True, "canary_percent": 10, **deploy}), bundle, IMAGE)


@pytest.mark.parametrize("percent", [-1, 100, 101])
def test_a_share_is_a_share(percent: int, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.canary_percent"):
        configure({**MODE, "canary_percent": percent})


def test_a_host_name_that_kserve_could_not_make_is_refused(configure: Configure, bundle: Bundle) -> None:
    service(configure, bundle, namespace="a" * 47)
    with pytest.raises(ConfigError, match=r"twice-predictor-a+' .*at most 63 letters \(this one 64\)"):
        service(configure, bundle, namespace="a" * 48)
    serving.objects(configure({"namespace": "a" * 48}), bundle, IMAGE)


def test_a_bundle_on_the_volume_of_the_runs_is_found_by_the_name_of_its_run(
    configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    kept = replace(bundle, path=tmp_path / "wf-abcde" / "export" / "bundle")
    made = service(configure, kept, storage_uri="pvc://twice-runs/{run}/export/bundle")
    assert made["spec"]["predictor"]["model"]["storageUri"] == "pvc://twice-runs/wf-abcde/export/bundle"
