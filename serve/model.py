"""Bundles as the service knows them: each version of a model loaded and proven, the current one answering."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from kserve import Model
from kserve.errors import ModelNotFound
from kserve.protocol.dataplane import DataPlane

from serve.canary import Canary
from serve.refusal import Headers, Unknown
from serve.runtime.predictor import Predictor
from serve.served import Served, described
from serve.shadow import Mirror

_LEAST_DIGITS = 8  # of a digest that can stand for a version


class OnnxModel(Model):  # type: ignore[misc]  # kserve ships no types
    """A name in kserve's registry, and the versions behind it, in the order they were loaded."""

    def __init__(self, name: str, keep: int = 2) -> None:
        """`keep`: most versions that stay loaded because they answer, or did so last."""
        super().__init__(name)
        self._keep = keep
        self.versions: dict[str, Served] = {}
        self.current: Served | None = None
        self._before: tuple[Served, ...] = ()  # the last first; they stay loaded, so that going back takes no time
        self._numbers = itertools.count(1)

    @property
    def previous(self) -> Served | None:
        return self._before[0] if self._before else None

    @property
    def canary(self) -> Canary | None:
        return self.current.canary if self.current else None

    @property
    def mirror(self) -> Mirror | None:
        return self.current.mirror if self.current else None

    def add(self, predictor: Predictor, pool: Executor) -> Served:
        """Beside the current one: it answers under its own URL."""
        served = Served(self.name, str(next(self._numbers)), predictor, pool)
        self.versions[served.version] = served
        return served

    def holding(self, digest: str) -> Served | None:
        """The version made of this bundle, if it is loaded."""
        return next((served for served in self.versions.values() if served.bundle.digest == digest), None)

    def switch(self, served: Served) -> None:
        """From now on requests that name no version are its; those before are kept, as many as may be, older ones go.

        One assignment decides it. A request that came before is answered by whom it met.
        """
        before = self.current
        if served is not before:
            served.mirror = self.mirror
            if before is not None:
                before.canary = before.mirror = None
            past = [one for one in (before, *self._before) if one is not None and one is not served]
            self.current, self._before = served, tuple(past[: self._keep - 1])
        self.share(None)
        self.ready = True

    def share(self, canary: Canary | None) -> None:
        """Begin or end that a candidate gets a part of the requests; without a part it is not kept."""
        assert self.current is not None
        self.current.canary = canary
        kept = {self.current, *self._before, canary.candidate if canary else None}
        self.versions = {version: served for version, served in self.versions.items() if served in kept}

    def show(self, mirror: Mirror | None) -> None:
        """Who gets copies of the current version's requests; the one before ends."""
        assert self.current is not None
        if self.current.mirror is not None:
            self.current.mirror.close()
        self.current.mirror = mirror

    def status(self) -> dict[str, Any]:
        """For the admin interface."""
        canary, mirror = self.canary, self.mirror
        return {
            "current": self.current.version if self.current else "",
            "previous": self.previous.version if self.previous else "",
            "canary": {"version": canary.candidate.version, "share": canary.share} if canary else None,
            "shadow": mirror.status() if mirror else None,
            "versions": {
                version: {"bundle": served.bundle.digest, "path": str(served.bundle.path)}
                for version, served in self.versions.items()
            },
        }

    def find(self, version: str = "") -> Served | None:
        """By its number, or by the first digits of its bundle's digest; the current one where none is named."""
        if not version:
            return self.current
        if version in self.versions or len(version) < _LEAST_DIGITS:
            return self.versions.get(version)
        same = [one for one in self.versions.values() if one.bundle.digest.startswith(version.lower())]
        return same[-1] if len({one.bundle.digest for one in same}) == 1 else None

    def served(self, version: str = "") -> Served:
        if (found := self.find(version)) is not None:
            return found
        listed = ", ".join(f"{one.version} ({one.bundle.digest[:12]})" for one in self.versions.values()) or "none"
        raise Unknown(f"model {self.name!r} has no version {version[:64]!r}; there are {listed}")

    def get_input_types(self) -> list[dict[str, Any]]:
        return [described(spec) for spec in self.served().bundle.signature.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [described(spec) for spec in self.served().bundle.signature.outputs]


class OnnxPlane(DataPlane):  # type: ignore[misc]  # kserve ships no types
    """kserve's data plane, honest about readiness: not ready while draining, nor without a ready model."""

    draining = False

    def served(self, name: str, version: str = "") -> Served:
        return self.model(name).served(version)

    def model(self, name: str) -> OnnxModel:
        model = self.model_registry.get_model(name)
        if not isinstance(model, OnnxModel):
            raise Unknown(f"no model {name[:200]!r}; there are {', '.join(self.names) or 'none'}")
        return model

    @property
    def models(self) -> list[OnnxModel]:
        return list(self.model_registry.get_models().values())

    def loaded(self) -> Iterator[tuple[Served, bool]]:
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
