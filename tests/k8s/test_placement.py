from __future__ import annotations

from typing import Any

import pytest

from k8s.placement import layers, place, toleration
from pipeline.spec.cluster import Placed
from pipeline.spec.errors import ConfigError

from .conftest import Configure


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("pool", {"key": "pool", "operator": "Exists"}),
        ("pool:NoExecute", {"key": "pool", "operator": "Exists", "effect": "NoExecute"}),
        ("pool=a", {"key": "pool", "operator": "Equal", "value": "a"}),
        ("pool=:NoSchedule", {"key": "pool", "operator": "Equal", "value": "", "effect": "NoSchedule"}),
        (
            "example.com/pool=gpu-a:PreferNoSchedule",
            {"key": "example.com/pool", "operator": "Equal", "value": "gpu-a", "effect": "PreferNoSchedule"},
        ),
    ],
)
def test_a_toleration_is_written_as_kubectl_taint_writes_one(text: str, made: dict[str, str]) -> None:
    assert toleration(text) == made


@pytest.mark.parametrize("text", ["", "a=b:Never", "=a", "a b", "a:NoSchedule:NoExecute"])
def test_what_is_no_toleration_is_refused(text: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.tolerations"):
        configure({"tolerations": [text]})


def test_words_are_added_to_what_the_components_say() -> None:
    pod: dict[str, Any] = {"nodeSelector": {"a": "1"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    container: dict[str, Any] = {"resources": {}}
    place(pod, container, 2, Placed(node_selector={"b": "2"}, tolerations=("pool",)))
    assert pod["nodeSelector"] == {"a": "1", "b": "2"}
    assert [item["key"] for item in pod["tolerations"]] == ["spot", "pool"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_what_stays_empty_is_not_written() -> None:
    pod: dict[str, Any] = {"nodeSelector": {}, "tolerations": []}
    place(pod, {"resources": {}}, 0, Placed())
    assert pod == {}


@pytest.mark.parametrize(
    ("gpus", "spot", "chosen"), [(0, False, ["cpu"]), (1, False, ["gpu"]), (0, True, ["cpu", "spot"])]
)
def test_components_follow_from_the_words(gpus: int, spot: bool, chosen: list[str]) -> None:
    assert layers(gpus, Placed(spot=spot)) == chosen


def test_a_private_registry_is_opened_by_the_secret_that_is_named() -> None:
    pod: dict[str, Any] = {}
    place(pod, {"resources": {}}, 0, Placed(pull_secret="registry"))
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    pod = {}
    place(pod, {"resources": {}}, 0, Placed())
    assert pod == {}
