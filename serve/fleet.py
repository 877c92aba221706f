"""The models of one server and what becomes of them: loaded beside the others, switched to, shared with, let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.spec.bundle import Bundle, open_bundle
from serve.canary import Canary
from serve.loading import prove
from serve.logs import told
from serve.model import OnnxModel, OnnxPlane
from serve.options import Options
from serve.refusal import Conflict
from serve.runtime.predictor import Predictor
from serve.served import Served
from serve.shadow import Mirror, open_mirror, unlike

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
            model.share(Canary(candidate, self._options.canary))
        else:
            model.switch(candidate)

    def mirror(self, mirror: Mirror) -> None:
        self._plane.model(mirror.name).show(mirror)

    async def load(self, name: str, path: Path) -> Served:
        """Proven in full while the others answer on; nothing changes for anybody yet."""
        model = self._plane.model(name)
        found = await self._background(self._prove, model, path)
        if isinstance(found, Served):
            return found
        held = model.holding(found.bundle.digest) or model.add(found, self._pool)
        log.info("loaded", extra=_about(held))
        return held

    def _prove(self, model: OnnxModel, path: Path) -> Served | Predictor:
        bundle = self._options.overrides.of(open_bundle(path, self._options.trust))
        if (held := model.holding(bundle.digest)) is not None:
            return held
        self._check(bundle)
        return prove(bundle, self._options.provider, self._options.threads)

    def _check(self, bundle: Bundle) -> None:
        if (most := bundle.signature.limits.max_body_bytes) > self.max_body_bytes:
            raise Conflict(f"its max_body_bytes is {most}, this process was started for {self.max_body_bytes}; restart")

    def switch(self, name: str, version: str) -> Served:
        """All requests that name no version; a canary ends."""
        model = self._plane.model(name)
        served = model.served(version)
        if model.mirror and (why := unlike(served.predictor.signature, model.mirror.signature)):
            log.warning("the shadow ends: %s", why, extra=told(model=name, bundle=model.mirror.digest[:12]))
            model.show(None)
        model.switch(served)
        log.info("switched", extra=_about(served))
        return served

    def share(self, name: str, version: str, share: float) -> None:
        """A share of them for that version; 0 takes it back."""
        model = self._plane.model(name)
        candidate = model.served(version)
        if candidate is model.current:
            raise Conflict(f"version {version} of {name} gets all requests already")
        model.share(Canary(candidate, share) if share else None)
        log.info("canary", extra=_about(candidate, share=share))

    def forget(self, name: str) -> None:
        """What was loaded and gets no requests."""
        model = self._plane.model(name)
        model.share(model.canary)

    async def shadow(self, name: str, path: Path | None, share: float) -> None:
        """A candidate that gets a copy of requests and answers nobody."""
        model = self._plane.model(name)
        mirror = None
        if path is not None:
            mirror = await self._background(self._open_mirror, model, path, share)
        if mirror is not model.mirror:
            model.show(mirror)
        log.info("shadow", extra=told(model=name, bundle=mirror.digest[:12] if mirror else "none", share=share))

    def _open_mirror(self, model: OnnxModel, path: Path, share: float) -> Mirror:
        mirror, trust = model.mirror, self._options.trust  # the same again goes on with its counts
        if mirror is not None and (mirror.digest, mirror.share) == (open_bundle(path, trust).digest, share):
            return mirror
        return open_mirror(model.name, path, model.served().predictor.signature, share, trust)

    def status(self) -> dict[str, Any]:
        return {"models": {model.name: model.status() for model in self._plane.models}}

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        for model in self._plane.models:
            model.show(None)

    async def _background(self, work: Any, *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work, *words)


def _about(served: Served, **more: Any) -> dict[str, Any]:
    return told(model=served.name, version=served.version, bundle=served.bundle.digest[:12], **more)
