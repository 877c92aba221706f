"""What a user writes in `codec.py`: one file, numpy and what it declares, carried inside the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeAlias

import numpy as np

from pipeline.contract.errors import ConfigError
from pipeline.contract.signature import drawing_of
from pipeline.contract.task import load_class

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]


FILES = "files"  # folder in the bundle of what the codec shares with the model


class Codec(Protocol):
    """Between what a client sends and what the model eats; training uses the same code.

    A class may also have `page = pipeline.Drawing(...)`: then people draw instances on the
    service's page. With `files = ("tokenizer.json",)` it is built with the folder that holds these, which its task's
    `make_files` wrote; they travel in the bundle. With `requires = ("tokenizers",)` it may import these packages.
    """

    def decode(self, instances: Any) -> Arrays:
        """Instances → one array for each model input; raise `InvalidPayload` to refuse them."""

    def encode(self, outputs: Arrays) -> Sequence[Any]:
        """Arrays by output name → one JSON value for each instance."""


def load_codec(reference: str, root: Path, alias: str = "", files: Path | None = None) -> Codec:
    """Import and build it; `files` is the folder of what it shares with the model."""
    return build_codec(codec_class(reference, root, alias), reference, files)


def codec_class(reference: str, root: Path, alias: str = "") -> Any:
    kind = load_class(reference, root, alias)
    for method in ("decode(instances)", "encode(outputs)"):
        if not callable(getattr(kind, method.partition("(")[0], None)):
            raise ConfigError(f"{reference}: has no method {method}; every codec needs it")
    drawing_of(kind, reference)
    return kind


def build_codec(kind: Any, reference: str, files: Path | None) -> Codec:
    """A codec with files is given their folder."""
    names = shared_files(kind, reference)
    if not names:
        plain: Codec = kind()
        return plain
    if files is None:
        raise ConfigError(f"{reference}: needs {', '.join(names)}; build it with the folder that use_files() was given")
    if missing := [name for name in names if not (files / name).is_file()]:
        raise ConfigError(f"{reference}: needs {', '.join(missing)}, which is not in {files}")
    fed: Codec = kind(files)
    return fed


def shared_files(kind: Any, reference: str) -> tuple[str, ...]:
    """Names below the folder; nothing that could lead out of it."""
    names = _words(kind, reference, "files", '("tokenizer.json",)')
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.as_posix() != name or "\\" in name or name == ".":
            raise ConfigError(f"{reference}: `files` has {name!r}; name files below the folder, as in tokenizer.json")
    return names


def required(kind: Any, reference: str) -> tuple[str, ...]:
    """Packages a codec imports beside numpy."""
    return _words(kind, reference, "requires", '("tokenizers",)')


def _words(kind: Any, reference: str, attribute: str, example: str) -> tuple[str, ...]:
    value = getattr(kind, attribute, ())
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{reference}: write `{attribute} = {example}`, found {value!r}")
    return tuple(value)
