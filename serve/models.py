"""The models of the service: the versions of each, and every change of what answers.

A model is a name with versions; requests that name no version go to the current one, and to its canary by share. A
change is one step of the event loop, so that no request meets half of one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pipeline.contract import __version__
from pipeline.contract.bundle import Bundle, open_bundle
from serve.errors import Conflict, Headers, NotFound
from serve.memory import MemoryBudget
from serve.model_version import Canary, ModelVersion
from serve.monitoring.logs import log_fields
from serve.options import Options
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor
from serve.shadow import Shadow, incompatibility, open_shadow

_EXTENSIONS = ("binary_tensor_data", "classification", "statistics")  # those of Triton, by its names
_MIN_DIGEST_DIGITS = 8  # that can stand for a version

LoadedModel = tuple[str, Predictor]  # a model's name and one verified version of it
T = TypeVar("T")

log = logging.getLogger(__name__)


class Model:
    """A name, and the versions behind it in the order they were loaded."""

    def __init__(self, name: str, keep: int = 2) -> None:
        """`keep` versions stay loaded: the current one and those before it, so that going back takes no time."""
        self.name, self._keep = name, keep
        self.versions: dict[str, ModelVersion] = {}
        self.current: ModelVersion | None = None
        self._before: tuple[ModelVersion, ...] = ()  # the last one first
        self._numbers = itertools.count(1)

    @property
    def previous(self) -> ModelVersion | None:
        return self._before[0] if self._before else None

    @property
    def canary(self) -> Canary | None:
        return self.current.canary if self.current else None

    @property
    def shadow(self) -> Shadow | None:
        return self.current.shadow if self.current else None

    def add(self, predictor: Predictor, pool: Executor, budget: MemoryBudget | None = None) -> ModelVersion:
        """Add a version beside the current one; it answers requests that name it."""
        version = ModelVersion(self.name, str(next(self._numbers)), predictor, pool, budget)
        self.versions[version.version] = version
        return version

    def switch(self, version: ModelVersion) -> None:
        """Send all requests that name no version to this one; requests that came before are answered by the old one."""
        before = self.current
        if version is not before:
            version.shadow = self.shadow
            if before is not None:
                before.canary = before.shadow = None
            past = [one for one in (before, *self._before) if one is not None and one is not version]
            self.current, self._before = version, tuple(past[: self._keep - 1])
        self.set_canary(None)

    def set_canary(self, canary: Canary | None) -> None:
        """Begin or end a canary, and unload the versions that get no requests."""
        assert self.current is not None
        self.current.canary = canary
        kept = {self.current, *self._before, canary.candidate if canary else None}
        self.versions = {number: version for number, version in self.versions.items() if version in kept}

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Send copies of the current version's requests to this shadow; the one before ends."""
        assert self.current is not None
        if self.current.shadow is not None:
            self.current.shadow.close()
        self.current.shadow = shadow

    def status(self) -> dict[str, Any]:
        """Return the versions and their roles, for the admin interface; any thread may ask."""
        canary, shadow = self.canary, self.shadow
        return {
            "current": self.current.version if self.current else "",
            "previous": self.previous.version if self.previous else "",
            "canary": {"version": canary.candidate.version, "share": canary.share} if canary else None,
            "shadow": shadow.status() if shadow else None,
            "versions": {
                number: {"bundle": version.digest, "path": str(version.bundle.path)}
                for number, version in self.versions.copy().items()
            },
        }

    def version_of_bundle(self, digest: str) -> ModelVersion | None:
        """Return the version that was made of this bundle, if it is loaded."""
        return next((version for version in self.versions.values() if version.digest == digest), None)

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
        listed = ", ".join(f"{one.version} ({one.digest[:12]})" for one in self.versions.values()) or "none"
        raise NotFound(f"model {self.name!r} has no version {version[:64]!r}; there are {listed}")


class ModelRepository:
    """The models by name. It is ready unless it drains, has no model, or a model has no current version."""

    def __init__(self) -> None:
        self._draining = False
        self._models: dict[str, Model] = {}
        self._readiness_listeners: list[Callable[[], None]] = []

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        for listener in self._readiness_listeners:
            listener()

    def on_readiness(self, listener: Callable[[], None]) -> None:
        """Call this whenever the service begins to drain, which is all that changes its readiness."""
        self._readiness_listeners.append(listener)

    def add(self, model: Model) -> None:
        self._models[model.name] = model

    def get_model(self, name: str) -> Model | None:
        return self._models.get(name)

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

    def ready(self) -> bool:
        return bool(self._models) and all(map(self.model_ready, self._models))

    def model_ready(self, name: str) -> bool:
        return self.find_model(name).current is not None and not self.draining

    def metadata(self) -> dict[str, Any]:
        return {"name": "pipe", "version": __version__, "extensions": list(_EXTENSIONS)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        model = self.find_model(name)
        return model.find_version(version).metadata(list(model.versions))

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """List the versions as Triton's repository extension does; `ready`: only those of models that are ready."""
        return [
            {"name": version.name, "version": version.version, "state": "READY", "reason": ""}
            if self.model_ready(version.name)
            else {"name": version.name, "version": version.version, "state": "UNAVAILABLE", "reason": "shutting down"}
            for version, _ in self.loaded_versions()
            if self.model_ready(version.name) or not ready
        ]

    def find_versions(self, name: str = "", version: str = "") -> list[ModelVersion]:
        """Return this version, all versions of this model, or those of all models."""
        if version:
            return [self.find_version(name, version)]
        models = [self.find_model(name)] if name else self.models
        return [one for model in models for one in model.versions.values()]


class ModelManager:
    """Loads bundles and decides which versions answer; belongs to the event loop."""

    def __init__(
        self,
        repository: ModelRepository,
        options: Options,
        pool: Executor,
        loaded: Sequence[LoadedModel],
        budget: MemoryBudget | None = None,
    ) -> None:
        self._repository, self._options, self._pool, self._budget = repository, options, pool, budget
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")  # one at a time, beside the predictions
        for name, predictor in loaded:
            self._add(name, predictor)
        # The gRPC port gets it at its start and keeps it.
        self.max_body_bytes = max(predictor.signature.limits.max_body_bytes for _, predictor in loaded)

    def _add(self, name: str, predictor: Predictor) -> None:
        """Of several versions of a name the last one gets all requests, or the canary's share of them."""
        if (model := self._repository.get_model(name)) is None:
            self._repository.add(model := Model(name, self._options.keep_versions))
        candidate = model.add(predictor, self._pool, self._budget)
        if self._options.canary and model.current is not None:
            model.set_canary(Canary(candidate, self._options.canary))
        else:
            model.switch(candidate)

    async def load(self, name: str, path: Path) -> ModelVersion:
        """Load and verify a bundle while the others answer; it gets no requests yet that do not name it."""
        model = self._repository.find_model(name)
        loaded = await self._in_loader(self._load, model, path)
        if isinstance(loaded, ModelVersion):
            return loaded
        version = model.version_of_bundle(loaded.bundle.digest) or model.add(loaded, self._pool, self._budget)
        log.info("loaded", extra=_version_fields(version))
        return version

    def _load(self, model: Model, path: Path) -> ModelVersion | Predictor:
        bundle = self._options.open(path)
        if (version := model.version_of_bundle(bundle.digest)) is not None:
            return version
        self._check_limits(bundle)
        return load_predictor(bundle, self._options.provider, self._options.intra_op_threads(bundle))

    def _check_limits(self, bundle: Bundle) -> None:
        if (size := bundle.signature.limits.max_body_bytes) > self.max_body_bytes:
            raise Conflict(f"its max_body_bytes is {size}, this process was started for {self.max_body_bytes}; restart")

    def switch(self, name: str, version: str) -> ModelVersion:
        """Send all requests that name no version to this one; a canary ends."""
        model = self._repository.find_model(name)
        chosen = model.find_version(version)
        if model.shadow and (why := incompatibility(chosen.predictor.signature, model.shadow.signature)):
            log.warning("the shadow ends: %s", why, extra=log_fields(model=name, bundle=model.shadow.digest[:12]))
            model.set_shadow(None)
        model.switch(chosen)
        log.info("switched", extra=_version_fields(chosen))
        return chosen

    def set_canary(self, name: str, version: str, share: float) -> None:
        """Send a share of the requests to this version; 0 ends the canary."""
        model = self._repository.find_model(name)
        candidate = model.find_version(version)
        if candidate is model.current:
            raise Conflict(f"version {version} of {name} gets all requests already")
        model.set_canary(Canary(candidate, share) if share else None)
        log.info("canary", extra=_version_fields(candidate, share=share))

    def unload_unused(self, name: str) -> None:
        """Unload the versions that were loaded and get no requests."""
        model = self._repository.find_model(name)
        model.set_canary(model.canary)

    def set_shadow(self, shadow: Shadow) -> None:
        self._repository.find_model(shadow.name).set_shadow(shadow)

    async def start_shadow(self, name: str, path: Path | None, share: float) -> None:
        """Send copies of a share of the requests to this bundle; without a path the shadow ends."""
        model = self._repository.find_model(name)
        shadow = None if path is None else await self._in_loader(self._open_shadow, model, path, share)
        if shadow is not model.shadow:
            model.set_shadow(shadow)
        digest = shadow.digest[:12] if shadow else "none"
        log.info("shadow", extra=log_fields(model=name, bundle=digest, share=share))

    def _open_shadow(self, model: Model, path: Path, share: float) -> Shadow:
        shadow, trust = model.shadow, self._options.trust
        if shadow is not None and (shadow.digest, shadow.share) == (open_bundle(path, trust).digest, share):
            return shadow  # the same again goes on with its counts
        return open_shadow(model.name, path, model.find_version().predictor.signature, share, trust)

    def status(self) -> dict[str, Any]:
        return {"models": {model.name: model.status() for model in self._repository.models}}

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        for model in self._repository.models:
            model.set_shadow(None)

    async def _in_loader(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work, *args)


def _version_fields(version: ModelVersion, **more: Any) -> dict[str, Any]:
    return log_fields(model=version.name, version=version.version, bundle=version.digest[:12], **more)
