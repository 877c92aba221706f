"""Bundles as the service knows them: each version of a model loaded and proven, the current one answering.

The models of one server and what becomes of them: loaded beside the others, switched to, shared with, let go.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kserve import Model
from kserve.errors import ModelNotFound
from kserve.protocol.dataplane import DataPlane

from pipeline.contract.bundle import Bundle, open_bundle
from serve.errors import Conflict, Headers, Unknown
from serve.loading import prove
from serve.logs import told
from serve.model_version import Canary, ModelVersion, tensor_metadata
from serve.options import Options
from serve.runtime.predictor import Predictor
from serve.shadow import Shadow, incompatibility, open_shadow

_LEAST_DIGITS = 8  # of a digest that can stand for a version


class OnnxModel(Model):  # type: ignore[misc]  # kserve ships no types
    """A name in kserve's registry, and the versions behind it, in the order they were loaded."""

    def __init__(self, name: str, keep: int = 2) -> None:
        """`keep`: most versions that stay loaded because they answer, or did so last."""
        super().__init__(name)
        self._keep = keep
        self.versions: dict[str, ModelVersion] = {}
        self.current: ModelVersion | None = None
        self._before: tuple[
            ModelVersion, ...
        ] = ()  # the last first; they stay loaded, so that going back takes no time
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

    def add(self, predictor: Predictor, pool: Executor) -> ModelVersion:
        """Beside the current one: it answers under its own URL."""
        served = ModelVersion(self.name, str(next(self._numbers)), predictor, pool)
        self.versions[served.version] = served
        return served

    def holding(self, digest: str) -> ModelVersion | None:
        """The version made of this bundle, if it is loaded."""
        return next((served for served in self.versions.values() if served.digest == digest), None)

    def switch(self, served: ModelVersion) -> None:
        """From now on requests that name no version are its; those before are kept, as many as may be, older ones go.

        One assignment decides it. A request that came before is answered by whom it met.
        """
        before = self.current
        if served is not before:
            served.shadow = self.shadow
            if before is not None:
                before.canary = before.shadow = None
            past = [one for one in (before, *self._before) if one is not None and one is not served]
            self.current, self._before = served, tuple(past[: self._keep - 1])
        self.set_canary(None)
        self.ready = True

    def set_canary(self, canary: Canary | None) -> None:
        """Begin or end that a candidate gets a part of the requests; without a part it is not kept."""
        assert self.current is not None
        self.current.canary = canary
        kept = {self.current, *self._before, canary.candidate if canary else None}
        self.versions = {version: served for version, served in self.versions.items() if served in kept}

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Who gets copies of the current version's requests; the one before ends."""
        assert self.current is not None
        if self.current.shadow is not None:
            self.current.shadow.close()
        self.current.shadow = shadow

    def status(self) -> dict[str, Any]:
        """For the admin interface."""
        canary, shadow = self.canary, self.shadow
        return {
            "current": self.current.version if self.current else "",
            "previous": self.previous.version if self.previous else "",
            "canary": {"version": canary.candidate.version, "share": canary.share} if canary else None,
            "shadow": shadow.status() if shadow else None,
            "versions": {
                version: {"bundle": served.digest, "path": str(served.bundle.path)}
                for version, served in self.versions.items()
            },
        }

    def find(self, version: str = "") -> ModelVersion | None:
        """By its number, or by the first digits of its bundle's digest; the current one where none is named."""
        if not version:
            return self.current
        if version in self.versions or len(version) < _LEAST_DIGITS:
            return self.versions.get(version)
        same = [one for one in self.versions.values() if one.digest.startswith(version.lower())]
        return same[-1] if len({one.digest for one in same}) == 1 else None

    def served(self, version: str = "") -> ModelVersion:
        if (found := self.find(version)) is not None:
            return found
        listed = ", ".join(f"{one.version} ({one.digest[:12]})" for one in self.versions.values()) or "none"
        raise Unknown(f"model {self.name!r} has no version {version[:64]!r}; there are {listed}")

    def get_input_types(self) -> list[dict[str, Any]]:
        return [tensor_metadata(spec) for spec in self.served().bundle.signature.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [tensor_metadata(spec) for spec in self.served().bundle.signature.outputs]


class OnnxPlane(DataPlane):  # type: ignore[misc]  # kserve ships no types
    """kserve's data plane, honest about readiness: not ready while draining, nor without a ready model."""

    draining = False

    def served(self, name: str, version: str = "") -> ModelVersion:
        return self.model(name).served(version)

    def model(self, name: str) -> OnnxModel:
        model = self.model_registry.get_model(name)
        if not isinstance(model, OnnxModel):
            raise Unknown(f"no model {name[:200]!r}; there are {', '.join(self.names) or 'none'}")
        return model

    @property
    def models(self) -> list[OnnxModel]:
        return list(self.model_registry.get_models().values())

    def loaded(self) -> Iterator[tuple[ModelVersion, bool]]:
        """Every version there is, and whether it is the one that answers by default."""
        for model in self.model_registry.get_models().values():
            for served in model.versions.values():
                yield served, served is model.current

    @property
    def names(self) -> list[str]:
        return list(self.model_registry.get_models())

    def identity(self, name: str, version: str = "") -> Headers:
        """Which bundle answers: that of the model asked, or of the only one."""
        models = self.model_registry.get_models()
        model = models.get(name) or (next(iter(models.values())) if len(models) == 1 else None)
        served = model and (model.find(version) or model.current)
        return served.headers if served else ()

    async def ready(self) -> bool:
        models = self.model_registry.get_models().values()
        return not self.draining and bool(models) and all(model.ready for model in models)

    async def model_ready(self, model_name: str, disable_predictor_health_check: bool = False) -> bool:  # noqa: ARG002
        return bool(self.model(model_name).ready) and not self.draining

    def metadata(self) -> dict[str, Any]:
        return {"name": "pipe", "version": self._server_version, "extensions": ["binary_tensor_data"]}

    async def model_metadata(self, model_name: str, version: str = "") -> dict[str, Any]:
        model = self.model(model_name)
        return model.served(version).metadata(list(model.versions))

    def index(self) -> list[dict[str, str]]:
        """As Triton's repository extension lists them."""
        return [
            {"name": served.name, "version": served.version, "state": "READY", "reason": ""}
            for served, _ in self.loaded()
        ]

    async def infer(self, *_: Any, **__: Any) -> Any:
        raise ModelNotFound("requests go to a version of a model, not through the data plane")


Loaded = tuple[str, Predictor]  # a model's name, and one version of it that is proven

log = logging.getLogger(__name__)


class Fleet:
    """Belongs to the event loop: every change of who answers is one step of it, so no request meets half of one."""

    def __init__(self, plane: OnnxPlane, options: Options, pool: Executor, loaded: Sequence[Loaded]) -> None:
        self._plane, self._options, self._pool = plane, options, pool
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")  # one after the other, beside the predictions
        for name, predictor in loaded:
            self._begin(name, predictor)
        # what gRPC is told at its start, and for good
        self.max_body_bytes = max(predictor.signature.limits.max_body_bytes for _, predictor in loaded)

    def _begin(self, name: str, predictor: Predictor) -> None:
        """Of several versions the last gets all requests, or the canary's share of them."""
        if (model := self._plane.model_registry.get_model(name)) is None:
            self._plane.model_registry.update(model := OnnxModel(name, self._options.keep_versions))
        candidate = model.add(predictor, self._pool)
        if self._options.canary and model.current is not None:
            model.set_canary(Canary(candidate, self._options.canary))
        else:
            model.switch(candidate)

    def set_shadow(self, shadow: Shadow) -> None:
        self._plane.model(shadow.name).set_shadow(shadow)

    async def load(self, name: str, path: Path) -> ModelVersion:
        """Proven in full while the others answer on; nothing changes for anybody yet."""
        model = self._plane.model(name)
        found = await self._background(self._prove, model, path)
        if isinstance(found, ModelVersion):
            return found
        held = model.holding(found.bundle.digest) or model.add(found, self._pool)
        log.info("loaded", extra=_about(held))
        return held

    def _prove(self, model: OnnxModel, path: Path) -> ModelVersion | Predictor:
        bundle = self._options.overrides.of(open_bundle(path, self._options.trust))
        if (held := model.holding(bundle.digest)) is not None:
            return held
        self._check(bundle)
        return prove(bundle, self._options.provider, self._options.threads)

    def _check(self, bundle: Bundle) -> None:
        if (most := bundle.signature.limits.max_body_bytes) > self.max_body_bytes:
            raise Conflict(f"its max_body_bytes is {most}, this process was started for {self.max_body_bytes}; restart")

    def switch(self, name: str, version: str) -> ModelVersion:
        """All requests that name no version; a canary ends."""
        model = self._plane.model(name)
        served = model.served(version)
        if model.shadow and (why := incompatibility(served.predictor.signature, model.shadow.signature)):
            log.warning("the shadow ends: %s", why, extra=told(model=name, bundle=model.shadow.digest[:12]))
            model.set_shadow(None)
        model.switch(served)
        log.info("switched", extra=_about(served))
        return served

    def set_canary(self, name: str, version: str, share: float) -> None:
        """A share of them for that version; 0 takes it back."""
        model = self._plane.model(name)
        candidate = model.served(version)
        if candidate is model.current:
            raise Conflict(f"version {version} of {name} gets all requests already")
        model.set_canary(Canary(candidate, share) if share else None)
        log.info("canary", extra=_about(candidate, share=share))

    def unload_unused(self, name: str) -> None:
        """What was loaded and gets no requests."""
        model = self._plane.model(name)
        model.set_canary(model.canary)

    async def start_shadow(self, name: str, path: Path | None, share: float) -> None:
        """A candidate that gets a copy of requests and answers nobody."""
        model = self._plane.model(name)
        shadow = None
        if path is not None:
            shadow = await self._background(self._open_shadow, model, path, share)
        if shadow is not model.shadow:
            model.set_shadow(shadow)
        log.info("shadow", extra=told(model=name, bundle=shadow.digest[:12] if shadow else "none", share=share))

    def _open_shadow(self, model: OnnxModel, path: Path, share: float) -> Shadow:
        shadow, trust = model.shadow, self._options.trust  # the same again goes on with its counts
        if shadow is not None and (shadow.digest, shadow.share) == (open_bundle(path, trust).digest, share):
            return shadow
        return open_shadow(model.name, path, model.served().predictor.signature, share, trust)

    def status(self) -> dict[str, Any]:
        return {"models": {model.name: model.status() for model in self._plane.models}}

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        for model in self._plane.models:
            model.set_shadow(None)

    async def _background(self, work: Any, *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work, *words)


def _about(served: ModelVersion, **more: Any) -> dict[str, Any]:
    return told(model=served.name, version=served.version, bundle=served.digest[:12], **more)
