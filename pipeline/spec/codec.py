"""What a user writes in `codec.py`: numpy only, one file, carried inside the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from pipeline.spec.errors import ConfigError
from pipeline.spec.page import drawing_of
from pipeline.spec.plugin import load_class

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]


class Codec(Protocol):
    """Between what a client sends and what the model eats; training uses the same code.

    A class may also have `page = Drawing(...)` of `pipeline.spec.page`: then people draw instances on the
    service's page.
    """

    def decode(self, instances: Any) -> Arrays:
        """Instances → one array for each model input; raise `InvalidPayload` to refuse them."""

    def encode(self, outputs: Arrays) -> Sequence[Any]:
        """Arrays by output name → one JSON value for each instance."""


def load_codec(reference: str, root: Path, alias: str = "") -> Codec:
    kind = load_class(reference, root, alias)
    for method in ("decode(instances)", "encode(outputs)"):
        if not callable(getattr(kind, method.partition("(")[0], None)):
            raise ConfigError(f"{reference}: has no method {method}; every codec needs it")
    drawing_of(kind, reference)
    codec: Codec = kind()
    return codec
