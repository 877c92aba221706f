"""Predictions without a service, for notebooks and scripts: `Bundle.load(path).predict(instances)`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.contract import bundle
from pipeline.contract.signing import Trust
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor


class Bundle(bundle.Bundle):
    """A verified bundle that predicts in this process, with the code that the service runs."""

    @classmethod
    def load(cls, path: str | Path, keys: str | Path | None = None) -> Bundle:
        """Verify every file of a bundle and its golden requests; with `keys`, a file of public keys, its signature."""
        verified = bundle.open_bundle(Path(path), None if keys is None else Trust(Path(keys)))
        loaded = cls(verified.path, verified.digest, verified.manifest, verified.signature, verified.override)
        assert loaded._predictor
        return loaded

    def predict(self, instances: Sequence[Any]) -> list[Any]:
        """Return one prediction for each instance, as V1 requests do; raises InvalidPayload for invalid ones."""
        return list(self._predictor.predict(list(instances)))

    @cached_property
    def _predictor(self) -> Predictor:
        return load_predictor(self)
