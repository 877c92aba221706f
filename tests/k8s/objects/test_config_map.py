from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s.objects import network, serving
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.access import Access
from pipeline.contract.signing import Trust, new_key
from pipeline.system.errors import ConfigError

from ..conftest import Configure
from ..schemas import validate


def data(configure: Configure, bundle: Bundle, **deploy: Any) -> dict[str, str]:
    found = serving.serving_objects(configure(deploy), bundle, "twice:1")
    values: dict[str, str] = next(item["data"] for item in found if item["kind"] == "ConfigMap")
    return values


def with_threads(bundle: Bundle, threads: int) -> Bundle:
    runtime = bundle.signature.runtime.model_copy(update={"threads": threads})
    return replace(bundle, signature=bundle.signature.model_copy(update={"runtime": runtime}))


def test_options_are_the_bundles_unless_configured(configure: Configure, bundle: Bundle) -> None:
    plain = data(configure, bundle)
    assert {name for name, text in plain.items() if not text} == {
        "BATCH_DELAY_MS", "BATCH_ROWS", "DEADLINE_SECONDS", "MAX_BATCH_SIZE", "MAX_BODY_BYTES", "MAX_WAITING",
        "THREADS",
    }  # fmt: skip
    given = data(configure, bundle, environment={"DEADLINE_SECONDS": 2.5, "MAX_WAITING": 16})
    assert {**plain, "DEADLINE_SECONDS": "2.5", "MAX_WAITING": "16"} == given


@pytest.mark.parametrize(("cpu", "threads"), [("500m", "1"), ("1500m", "2"), (4, "4")])
def test_threads_follow_the_cpu_request(cpu: Any, threads: str, configure: Configure, bundle: Bundle) -> None:
    open_ = with_threads(bundle, 0)
    assert data(configure, open_, cpu=cpu)["THREADS"] == threads
    assert data(configure, with_threads(bundle, 3), cpu=cpu)["THREADS"] == "", "the bundle sets the number"
    assert data(configure, open_, cpu=cpu, environment={"THREADS": "0"})["THREADS"] == "0"


@pytest.mark.parametrize(
    ("workers", "count", "threads", "memory"),
    [(2, 2, "2", "576Mi"), ("auto", 4, "1", "704Mi"), (8, 8, "1", "1216Mi")],  # one thread: weights are shared
)
def test_workers_divide_the_cpu_request(
    workers: Any, count: int, threads: str, memory: str, configure: Configure, bundle: Bundle
) -> None:
    config = configure({"cpu": 4}, serve={"workers": workers})
    objects = serving.serving_objects(config, with_threads(bundle, 0), "twice:1")
    pods = [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]
    assert f"--workers={count}" in pods[0]["containers"][0]["args"]
    settings = next(item for item in objects if item["kind"] == "ConfigMap")
    assert settings["data"]["THREADS"] == threads
    assert pods[0]["containers"][0]["resources"]["limits"]["memory"] == memory


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAX_WAITING", "many"),
        ("MAX_WAITING", "0"),
        ("BATCH_ROWS", "1.5"),
        ("DEADLINE_SECONDS", "inf"),
        ("THREADS", "-1"),
    ],
)
def test_an_invalid_option_is_refused(name: str, text: str, configure: Configure, bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match=f"deploy.environment.{name}: '{text}' is not"):
        data(configure, bundle, environment={name: text})


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_signature_keys_reach_the_pods(target: str, configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    entry = Access(require_signature=str(tmp_path / "key.pub"))
    found = serving.serving_objects(configure({"target": target}), bundle, "twice:1", entry)
    for item in found:
        validate(item)
    settings = next(item for item in found if item["kind"] == "ConfigMap")
    owner = next(item for item in found if item["kind"] in ("Deployment", "InferenceService"))["spec"]
    pod = owner["template"]["spec"] if target == "kubernetes" else owner["predictor"]
    volume = next(one for one in pod["volumes"] if one["name"] == "signature-keys")["configMap"]
    (item,) = volume["items"]
    container = pod["containers"][0]
    mount = next(one for one in container["volumeMounts"] if one["name"] == "signature-keys")
    assert (volume["name"], mount["readOnly"]) == (settings["metadata"]["name"], True)
    assert settings["data"][item["key"]].startswith("ssh-ed25519 ")
    assert f"--require-signature={mount['mountPath']}/{item['path']}" in container["args"]
    (tmp_path / "keys").write_text(settings["data"][item["key"]])
    assert Trust(tmp_path / "keys").keys() == Trust(tmp_path / "key.pub").keys()
    (secret_words, secrets) = (
        network.create_secret_command(configure(), entry),
        network.access_secrets(configure(), entry),
    )
    assert (secret_words, secrets) == ("", []), "they are public"


def test_signature_keys_cannot_come_from_the_environment_setting(configure: Configure, bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="SIGNATURE_KEYS: is set from the serve section"):
        data(configure, bundle, environment={"SIGNATURE_KEYS": "mine"})
