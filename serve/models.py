"""The models of the service: a model is a name with versions.

Requests that name no version go to the current one, and to its canary by share. All is loaded at the start: another
bundle is another process, which takes over the ports.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from pipeline.contract import __version__
from serve.errors import Headers, NotFound
from serve.limits import Budget
from serve.model_version import Canary, ModelVersion
from serve.options import Options
from serve.runtime.predictor import Predictor
from serve.shadow import Shadow

_EXTENSIONS = ("binary_tensor_data", "classification", "statistics")  # those of Triton, by its names
_MIN_DIGEST_DIGITS = 8  # that can stand for a version

LoadedModel = tuple[str, Predictor]  # a model's name and one verified version of it
T = TypeVar("T")

log = logging.getLogger(__name__)


class Model:
    """A name, and the versions behind it in the order they were loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, ModelVersion] = {}
        self.current: ModelVersion  # from the first on
        self._numbers = itertools.count(1)

    def add(
        self, predictor: Predictor, pool: Executor, budget: Budget | None = None, canary_share: float = 0.0
    ) -> ModelVersion:
        """Add a version, which gets all requests that name none, or the canary's share of them."""
        version = ModelVersion(self.name, str(next(self._numbers)), predictor, pool, budget)
        if canary_share and self.versions:
            self.current.canary = Canary(version, canary_share)
        else:
            self.current = version
        self.versions[version.version] = version
        return version

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Send copies of the current version's requests to this shadow; the one before ends."""
        if self.current.shadow is not None:
            self.current.shadow.close()
        self.current.shadow = shadow

    def status(self) -> dict[str, Any]:
        """Return the versions and their roles; any thread may ask."""
        canary, shadow = self.current.canary, self.current.shadow
        return {
            "current": self.current.version,
            "canary": {"version": canary.candidate.version, "share": canary.share} if canary else None,
            "shadow": shadow.status() if shadow else None,
            "versions": {number: {"bundle": version.digest} for number, version in self.versions.items()},
        }

    def get_version(self, version: str = "") -> ModelVersion | None:
        """Look a version up by its number or the first digits of its bundle's digest; the current one by default."""
        if not version:
            return self.current
        if version in self.versions or len(version) < _MIN_DIGEST_DIGITS:
            return self.versions.get(version)
        matches = [one for one in self.versions.values() if one.digest.startswith(version.lower())]
        return matches[-1] if len({one.digest for one in matches}) == 1 else None

    def find_version(self, version: str = "") -> ModelVersion:
        if (match := self.get_version(version)) is not None:
            return match
        listed = ", ".join(f"{one.version} ({one.digest[:12]})" for one in self.versions.values())
        raise NotFound(f"model {self.name!r} has no version {version[:64]!r}; there are {listed}")


class ModelRepository:
    """The models by name. It is ready unless it drains or has no model."""

    def __init__(self) -> None:
        self.draining = False
        self._models: dict[str, Model] = {}
        self._readiness_listeners: list[Callable[[], None]] = []

    def drain(self) -> None:
        self.draining = True
        for listener in self._readiness_listeners:
            listener()

    def on_readiness(self, listener: Callable[[], None]) -> None:
        """Call this whenever the service begins to drain, which is all that changes its readiness."""
        self._readiness_listeners.append(listener)

    def add(self, model: Model) -> None:
        self._models[model.name] = model

    def find_model(self, name: str) -> Model:
        if (model := self._models.get(name)) is None:
            raise NotFound(f"no model {name[:200]!r}; there are {', '.join(self._models) or 'none'}")
        return model

    def find_version(self, name: str, version: str = "") -> ModelVersion:
        return self.find_model(name).find_version(version)

    @property
    def models(self) -> list[Model]:
        return list(self._models.values())

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def loaded_versions(self) -> Iterator[tuple[ModelVersion, bool]]:
        """Yield every version, and whether it is its model's current one."""
        for model in self.models:
            for version in model.versions.values():
                yield version, version is model.current

    def identity(self, name: str, version: str = "") -> Headers:
        """Return the headers that name the bundle of this model, or of the only one there is."""
        only = next(iter(self._models.values())) if len(self._models) == 1 else None
        model = self._models.get(name, only)
        match = model and (model.get_version(version) or model.current)
        return match.headers if match else ()

    def status(self) -> dict[str, Any]:
        """Return the versions of each model, and how its shadow compares; any thread may ask."""
        return {"models": {model.name: model.status() for model in self.models}}

    def ready(self) -> bool:
        return bool(self._models) and not self.draining

    def model_ready(self, name: str) -> bool:
        self.find_model(name)
        return not self.draining

    def metadata(self) -> dict[str, Any]:
        return {"name": "pipe", "version": __version__, "extensions": list(_EXTENSIONS)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        model = self.find_model(name)
        return model.find_version(version).metadata(list(model.versions))

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """List the versions as Triton's repository extension does; `ready`: only those of models that are ready."""
        reason = "shutting down" if self.draining else ""
        fields = {"state": "UNAVAILABLE" if reason else "READY", "reason": reason}
        listed = () if ready and reason else self.loaded_versions()
        return [{"name": version.name, "version": version.version, **fields} for version, _ in listed]

    def find_versions(self, name: str = "", version: str = "") -> list[ModelVersion]:
        """Return this version, all versions of this model, or those of all models."""
        if version:
            return [self.find_version(name, version)]
        models = [self.find_model(name)] if name else self.models
        return [one for model in models for one in model.versions.values()]


def make_repository(
    loaded: Sequence[LoadedModel], options: Options, pool: Executor, budget: Budget | None = None
) -> ModelRepository:
    """Return the models; of several versions of a name the last one gets all requests, or the canary's share."""
    repository = ModelRepository()
    for name, predictor in loaded:
        if name not in repository.names:
            repository.add(Model(name))
        repository.find_model(name).add(predictor, pool, budget, options.canary)
    return repository
