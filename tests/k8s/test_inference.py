from __future__ import annotations

from typing import Any

import pytest

from k8s import serving
from k8s.inference import promoted, with_canary
from k8s.manifest import BUNDLE_ANNOTATION
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import ConfigError

from .conftest import Configure
from .schemas import validate

IMAGE = "registry.example/serve@sha256:" + "1" * 64
MODE = {"mode": "inferenceservice"}


def service(configure: Configure, bundle: Bundle, **deploy: Any) -> dict[str, Any]:
    made = serving.objects(configure({**MODE, **deploy}), bundle, IMAGE)
    return next(item for item in made if item["kind"] == "InferenceService")


def version(configure: Configure, bundle: Bundle, digest: str, **deploy: Any) -> dict[str, Any]:
    """As rendered of another bundle."""
    made = service(configure, bundle, **deploy)
    made["spec"]["predictor"]["annotations"][BUNDLE_ANNOTATION] = digest
    if "model" in made["spec"]["predictor"]:
        made["spec"]["predictor"]["model"]["storageUri"] = f"pvc://bundles/{digest}"
    return made


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
    stable = version(configure, bundle, "a" * 64, kserve_mode="Knative")
    candidate = version(configure, bundle, "b" * 64, kserve_mode="Knative")
    split = with_canary(stable, candidate, 10)
    validate(split)
    assert split["spec"]["predictor"]["canaryTrafficPercent"] == 10
    assert split["spec"]["predictor"]["annotations"][BUNDLE_ANNOTATION] == "b" * 64
    assert "canaryTrafficPercent" not in candidate["spec"]["predictor"]
    assert promoted(candidate) == candidate


def test_a_standard_canary_stands_beside_the_stable_version(configure: Configure, bundle: Bundle) -> None:
    stable, candidate = (version(configure, bundle, letter * 64, storage_uri="pvc://bundles/twice") for letter in "ab")
    split = with_canary(stable, candidate, 10)
    validate(split)
    assert split["spec"]["predictor"] == stable["spec"]["predictor"]
    (entry,) = split["spec"]["canary"]
    assert entry["trafficPercent"] == 10
    assert entry["predictor"]["name"] == "v-bbbbbbbb"
    assert entry["predictor"]["model"]["storageUri"].endswith("b" * 64)
    assert not {"maxReplicas", "scaleMetric", "scaleTarget"} & set(entry["predictor"])


def test_promoting_keeps_the_canarys_own_pods(configure: Configure, bundle: Bundle) -> None:
    """By the predictor's name, which its Deployment is named after."""
    stable, candidate = (version(configure, bundle, letter * 64, storage_uri="pvc://bundles/twice") for letter in "ab")
    (entry,) = with_canary(stable, candidate, 50)["spec"]["canary"]
    made = promoted(candidate)
    validate(made)
    assert made["spec"]["predictor"]["name"] == entry["predictor"]["name"]
    assert "canary" not in made["spec"]
    assert made["spec"]["predictor"]["maxReplicas"] == 6


def test_what_standard_mode_cannot_tell_apart_is_refused(configure: Configure, bundle: Bundle) -> None:
    stable, candidate = (version(configure, bundle, letter * 64) for letter in "ab")
    with pytest.raises(ConfigError, match=r"set deploy\.storage_uri"):
        with_canary(stable, candidate, 10)


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_share_is_a_share(percent: int, configure: Configure, bundle: Bundle) -> None:
    made = service(configure, bundle, kserve_mode="Knative")
    with pytest.raises(ConfigError, match="0 to 100"):
        with_canary(made, made, percent)
