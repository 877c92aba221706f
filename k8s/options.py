"""What may change without a new image: options and variables of the service, in a ConfigMap beside the pods."""

from __future__ import annotations

from typing import Any

from k8s.manifest import Object
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import watching

OPTIONS_ANNOTATION = "pipe-road/options"


def fill(item: Object, config: Config) -> None:
    """The ConfigMap's data; OTEL_ variables are read by the service itself."""
    data: dict[str, str] = item["data"]
    if taken := sorted(data.keys() & config.deploy.environment.keys()):
        raise ConfigError(f"deploy.environment.{taken[0]}: is set from the serve section; leave it out here")
    data["LOG_REQUESTS"] = f"{config.serve.log_requests:g}"
    item["data"] = dict(sorted({**data, **config.deploy.environment}.items()))


def refer(container: Object, name: str, config: Config) -> None:
    """The pods read it when they start; a flag without a value cannot come from there."""
    container["envFrom"][0]["configMapRef"]["name"] = name
    container["args"] += [word for word in watching(config.serve) if word == "--no-page"]


def digest(item: Object) -> str:
    """On the pods, so that a change of the ConfigMap rolls out as a new image does."""
    data: dict[str, Any] = item["data"]
    return digest_mapping(data)[:16]
