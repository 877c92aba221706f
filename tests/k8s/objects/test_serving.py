from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k8s.objects import serving
from k8s.objects.manifests import BUNDLE_ANNOTATION
from pipeline.contract.bundle import Bundle, FileEntry
from pipeline.contract.signature import Signature
from pipeline.system.errors import ConfigError
from serve.monitoring.prometheus import exposition
from serve.monitoring.snapshot import Metrics
from tests.serve.llm import tiny

from ..conftest import Configure
from ..invariants import check
from ..schemas import validate

IMAGE = "registry.example:5000/twice:1"
DEPLOYS: tuple[dict[str, Any], ...] = (
    {},
    {"min_replicas": 1, "max_replicas": 1},
    {"min_replicas": 3, "max_replicas": 9, "cpu": "2", "memory": "8Gi", "gpus": 2, "namespace": "models"},
    {"node_selector": {"pool": "a"}, "tolerations": ["pool=a:NoSchedule"]},
    {"gpus": 1, "clients": ["shop"], "egress": ["10.0.0.0/8:4318", "443"]},
    {"environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://10.1.2.3:4318"}},
)
PLAIN: tuple[dict[str, Any], ...] = (
    {"ingress_class": "default"},
    {"hostname": "twice.example", "ingress_class": "nginx"},
    {"gateway": "edge"},
    {"gateway": "infra/edge", "hostname": "twice.example"},
    {"target_concurrency": 4},
)
KSERVE: tuple[dict[str, Any], ...] = (
    {"storage_uri": "pvc://bundles/twice"},
    {"storage_uri": "s3://bundles/twice", "gpus": 1},
    {"storage_uri": "oci://registry.example/twice@sha256:" + "0" * 64},
)
ALL = [
    *({**deploy, "target": target} for target in ("kubernetes", "kserve") for deploy in DEPLOYS),
    *PLAIN,
    *({"target": "kserve", **deploy} for deploy in KSERVE),
]
IN_FLIGHT = "pipe_requests_in_flight"
TARGETS = ("kubernetes", "kserve")


def objects(config: Any, bundle: Bundle) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in serving.serving_objects(config, bundle, IMAGE)}


def pod_of(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return labels and spec of the serving pods."""
    if "Deployment" in parts:
        template = parts["Deployment"]["spec"]["template"]
        return template["metadata"]["labels"], template["spec"]
    predictor = parts["InferenceService"]["spec"]["predictor"]
    return predictor["labels"], predictor


@pytest.mark.parametrize("deploy", ALL, ids=lambda deploy: "-".join(deploy) or "default")
def test_objects_of_any_configuration_are_valid_and_agree(
    deploy: dict[str, Any], configure: Configure, bundle: Bundle
) -> None:
    made = serving.serving_objects(configure(deploy), bundle, IMAGE)
    for item in made:
        validate(item)
    check(made)
    namespaces = {item["metadata"]["namespace"] for item in made}
    assert namespaces == {deploy.get("namespace", "default")}


@pytest.mark.parametrize("target", TARGETS)
def test_the_bundle_is_named_on_the_objects_and_on_the_pods(target: str, configure: Configure, bundle: Bundle) -> None:
    parts = objects(configure({"target": target}), bundle)
    owner = parts["Deployment"]["spec"]["template"]["metadata"] if target == "kubernetes" else pod_of(parts)[1]
    assert owner["annotations"][BUNDLE_ANNOTATION] == bundle.digest
    assert "app.kubernetes.io/version" not in parts.pop("ConfigMap")["metadata"]["labels"], "versions may share it"
    assert all(item["metadata"]["annotations"][BUNDLE_ANNOTATION] == bundle.digest for item in parts.values())
    assert all(item["metadata"]["labels"]["app.kubernetes.io/version"] == bundle.digest[:12] for item in parts.values())


@pytest.mark.parametrize(
    ("target", "kind"), [("kubernetes", "HorizontalPodAutoscaler"), ("kserve", "InferenceService")]
)
def test_the_autoscaler_keeps_the_configured_replica_bounds(
    target: str, kind: str, configure: Configure, bundle: Bundle
) -> None:
    spec = objects(configure({"target": target, "min_replicas": 3, "max_replicas": 5}), bundle)[kind]["spec"]
    scaler = spec.get("predictor", spec)
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seconds", [1, 300])
def test_a_deleted_pod_keeps_serving_and_still_has_time_to_drain(
    target: str, seconds: int, configure: Configure, bundle: Bundle
) -> None:
    parts = objects(configure({"target": target, "pre_stop_seconds": seconds}), bundle)
    check([*parts.values()])
    assert pod_of(parts)[1]["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": seconds}}}


@pytest.mark.parametrize("target", TARGETS)
def test_resources_come_from_the_configuration(target: str, configure: Configure, bundle: Bundle) -> None:
    deploy = {"target": target, "cpu": "2", "memory": "3Gi", "gpus": 1}
    spec = pod_of(objects(configure(deploy), bundle))[1]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "3Gi"},
        "limits": {"memory": "3Gi", "nvidia.com/gpu": "1"},
    }
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "tolerations" not in pod_of(objects(configure({"target": target}), bundle))[1]


@pytest.mark.parametrize("tag", ["", ":latest", ":1"])
def test_a_bundle_image_by_movable_tag_is_refused(tag: str, configure: Configure, bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="another image"):
        serving.serving_objects(
            configure({"target": "kserve", "storage_uri": f"oci://r.example/a{tag}"}), bundle, IMAGE
        )


MIB = 1 << 20


def _with_files(bundle: Bundle, sizes: dict[str, int], signature: Signature | None = None) -> Bundle:
    """Return a bundle whose manifest has files of these sizes in MiB, by the beginning of their names."""
    entries = {f"{name}.onnx": FileEntry(sha256="0" * 64, bytes=size * MIB) for name, size in sizes.items()}
    manifest = bundle.manifest.model_copy(update={"files": entries})
    return replace(bundle, manifest=manifest, signature=signature or bundle.signature)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sizes", "memory"),
    [({"model": 1}, "512Mi"), ({"model": 300}, "896Mi"), ({"model": 1, "weights": 16_000}, "20288Mi")],
)
def test_memory_follows_the_size_of_the_bundle(
    sizes: dict[str, int], memory: str, target: str, configure: Configure, bundle: Bundle
) -> None:
    spec = pod_of(objects(configure({"target": target}), _with_files(bundle, sizes)))[1]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "500m", "memory": memory},
        "limits": {"memory": memory},
    }


@pytest.mark.parametrize("target", TARGETS)
def test_a_large_bundle_has_more_time_to_start(target: str, configure: Configure, bundle: Bundle) -> None:
    found = []
    for sizes in ({"model": 1000}, {"model": 10, "weights": 30 * 1024}):
        parts = objects(configure({"target": target}), _with_files(bundle, sizes))
        container = pod_of(parts)[1]["containers"][0]
        probe = container["startupProbe"]
        found.append(probe["periodSeconds"] * probe["failureThreshold"])
        if target == "kubernetes":
            assert parts["Deployment"]["spec"]["progressDeadlineSeconds"] == found[-1] + 300
    assert found == [600, 600 + 30 * 60]


def test_memory_of_a_language_model_includes_its_cache(configure: Configure, bundle: Bundle) -> None:
    language_model = _with_files(bundle, {"model": 300}, tiny.signature(max_cache_bytes=2048 * MIB))
    spec = pod_of(objects(configure(), language_model))[1]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "2944Mi"}
    spec = pod_of(objects(configure({"memory": "9Gi"}), language_model))[1]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "9Gi"}


@pytest.mark.parametrize(
    ("deploy", "key"),
    [
        ({"min_replicas": 7, "max_replicas": 6}, "max_replicas"),
        ({"memory": "lots"}, "deploy.memory"),
        ({"cpu": "-1"}, "deploy.cpu"),
        ({"namespace": "My_Models"}, "deploy.namespace"),
        ({"storage_uri": "pvc://a/b"}, "deploy.storage_uri: only KServe"),
        ({"gateway": "edge", "ingress_class": "nginx"}, "are both set"),
        ({"target": "kserve", "ingress_class": "default"}, "deploy.ingress_class=default: KServe creates"),
        ({"target": "kserve", "target_concurrency": 4}, "deploy.target_concurrency"),
        ({"environment": {"LOG_FORMAT": "text"}}, "deploy.environment.LOG_FORMAT: is set"),
    ],
)
def test_settings_that_a_cluster_would_refuse_are_refused(
    deploy: dict[str, Any], key: str, configure: Configure, bundle: Bundle
) -> None:
    with pytest.raises(ConfigError, match=key):
        serving.serving_objects(configure(deploy), bundle, IMAGE)


def test_the_autoscaler_uses_requests_in_flight_with_a_target(configure: Configure, bundle: Bundle) -> None:
    def metrics(deploy: dict[str, Any]) -> list[Any]:
        found: list[Any] = objects(configure(deploy), bundle)["HorizontalPodAutoscaler"]["spec"]["metrics"]
        return found

    assert [metric["type"] for metric in metrics({})] == ["Resource"]
    _, pods = metrics({"target_concurrency": 4})
    assert pods["pods"] == {"metric": {"name": IN_FLIGHT}, "target": {"type": "AverageValue", "averageValue": "4"}}


def test_the_metric_of_the_autoscaler_is_one_the_service_has() -> None:
    assert IN_FLIGHT in exposition(Metrics(list).snapshot())[0].decode()


def test_a_change_of_the_config_map_rolls_out(configure: Configure, bundle: Bundle) -> None:
    def note(**serve: Any) -> str:
        template = objects(configure(serve=serve), bundle)["Deployment"]["spec"]["template"]
        return str(template["metadata"]["annotations"]["pipe-road/options"])

    assert note() == note() != note(log_requests=0.5)
