from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s.objects import serving
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import ConfigError

from ..conftest import Configure

IMAGE = "registry.example/serve@sha256:" + "1" * 64
MODE = {"target": "kserve"}


def _with_canary(config: Config, percent: float) -> Config:
    return config.model_copy(update={"rollout": Rollout(canary_percent=percent)})


def service(configure: Configure, bundle: Bundle, canary_percent: float = 0, **deploy: Any) -> dict[str, Any]:
    made = serving.serving_objects(_with_canary(configure({**MODE, **deploy}), canary_percent), bundle, IMAGE)
    return next(item for item in made if item["kind"] == "InferenceService")


def test_a_stored_bundle_is_served_by_the_runtime_image(configure: Configure, bundle: Bundle) -> None:
    config = configure({**MODE, "storage_uri": "s3://bundles/twice", "gpus": 1})
    parts = {item["kind"]: item for item in serving.serving_objects(config, bundle, IMAGE)}
    runtime, predictor = parts["ServingRuntime"]["spec"], parts["InferenceService"]["spec"]["predictor"]
    assert "containers" not in predictor
    assert predictor["model"]["storageUri"] == "s3://bundles/twice"
    assert predictor["model"]["modelFormat"] in runtime["supportedModelFormats"]
    (container,) = runtime["containers"]
    assert container["image"] == IMAGE
    assert container["command"][:4] == ["python", "-m", "serve", "/mnt/models"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("uri", ["ftp://a/b", "pvc:/a", "twice", "s3://"])
def test_an_unknown_storage_scheme_is_refused(uri: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.storage_uri"):
        configure({**MODE, "storage_uri": uri})


@pytest.mark.parametrize("render", [True, False])
def test_a_canary_on_kserve_is_refused(configure: Configure, bundle: Bundle, render: bool) -> None:
    with pytest.raises(ConfigError, match=r"set deploy\.target=kubernetes, or .* spec\.canary by deploy\.overlay"):
        service(configure, bundle, render=render, canary_percent=10)


def test_a_host_name_that_is_too_long_is_refused(configure: Configure, bundle: Bundle) -> None:
    service(configure, bundle, namespace="a" * 47)
    with pytest.raises(ConfigError, match=r"twice-predictor-a+' .*has 64 characters, but at most 63"):
        service(configure, bundle, namespace="a" * 48)
    serving.serving_objects(configure({"namespace": "a" * 48}), bundle, IMAGE)


def test_a_storage_uri_gets_the_name_of_the_run(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    kept = replace(bundle, path=tmp_path / "wf-abcde" / "export" / "bundle")
    made = service(configure, kept, storage_uri="pvc://twice-runs/{run}/export/bundle")
    assert made["spec"]["predictor"]["model"]["storageUri"] == "pvc://twice-runs/wf-abcde/export/bundle"
