"""The codec protocol that a user implements in `codec.py`, which travels in the bundle, and its loading."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from pipeline.contract.signature import CODEC_FOLDER, Signature, codec_drawing
from pipeline.contract.task import load_class
from pipeline.system.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]
Redact: TypeAlias = Callable[[dict[str, Array]], Arrays]
Encode: TypeAlias = Callable[[Arrays, Arrays], Sequence[Any]]  # of the outputs and the decoded inputs


_MEDIA_TYPE = re.compile(r"[a-z]+/[a-z0-9][a-z0-9.+-]*")
_PROTOCOL_TYPES = ("application/json", "application/octet-stream", "application/x-www-form-urlencoded")
FILES = "files"  # folder of the shared files in the bundle


class Codec(Protocol):
    """Conversion between a client's JSON and the model's arrays; training uses the same code.

    A class may also have `page = pipeline.Drawing(...)`: then instances can be drawn on the service's page. With
    `files = ("tokenizer.json",)` it is created with the folder of these files, which its task's `make_files` wrote;
    they travel in the bundle. With `requires = ("tokenizers",)` it may import these packages besides numpy. With
    `embeddings = True` a prediction is the vector of a text, and the service has OpenAI's endpoint for them; a model
    whose vectors may be cut to smaller sizes names these, as in `dimensions = (64, 256)`. With
    `media_types = ("image/png", "image/jpeg")` a client may send such a file as the body of a request: `decode` gets it
    as the instance `{"b64": "…"}`, its bytes in base64. Where samples of traffic are kept (`serve.sample`),
    `redact(instance)` gets the arrays of an instance by the names of inputs and outputs, and returns those to keep.
    """

    def decode(self, instances: Any) -> Arrays:
        """Convert instances to one array per model input; raise `InvalidPayload` to reject them.

        Further arrays, with a row for each instance, are only for encode().
        """

    @property
    def encode(self) -> Callable[..., Sequence[Any]]:
        """Convert arrays by output name to one JSON value per instance.

        It is `encode(self, outputs)`, or `encode(self, outputs, inputs)` to get the arrays of `decode` as well.
        """


def load_codec(reference: str, root: Path, package: str = "", files: Path | None = None) -> Codec:
    """Import and create the codec; `files` is the folder of its shared files."""
    return build_codec(codec_class(reference, root, package), reference, files)


def load_bundled_codec(bundle: Path, signature: Signature, package: str) -> Codec:
    """Import and create the codec of a bundle, whose modules are in a package of their own."""
    root = bundle / CODEC_FOLDER if ":" in signature.codec else bundle
    file = (bundle / signature.codec_file).relative_to(root)
    return load_codec(f"{file.as_posix()}:{signature.codec.rpartition(':')[2]}", root, package, bundle / FILES)


class Part(NamedTuple):
    """Instances of a request that run together: their positions in the request, and their arrays."""

    positions: Sequence[int]
    arrays: Arrays  # of the model's inputs
    others: Arrays = MappingProxyType({})  # that decode() made for encode()

    @property
    def decoded(self) -> Arrays:
        return {**self.arrays, **self.others}

    @classmethod
    def split(cls, positions: Sequence[int], decoded: Arrays, inputs: Collection[str]) -> Part:
        others = {name: array for name, array in decoded.items() if name not in inputs}
        return cls(positions, {name: decoded[name] for name in inputs}, others)


def join_equal_shapes(decoded: Sequence[Arrays], inputs: Collection[str]) -> list[Part]:
    """Join instances that were decoded one by one, where their shapes are equal: nothing is padded."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, arrays in enumerate(decoded):
        shapes = tuple((name, array.dtype.str, array.shape) for name, array in arrays.items())
        groups.setdefault(shapes, []).append(position)
    return [
        Part.split(
            positions,
            {name: np.concatenate([decoded[i][name] for i in positions]) for name in decoded[positions[0]]},
            inputs,
        )
        for positions in groups.values()
    ]


def in_order(parts: Sequence[Part], predictions: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the predictions of all parts in the order of the request."""
    ordered: list[Any] = [None] * sum(len(part.positions) for part in parts)
    for part, values in zip(parts, predictions, strict=True):
        for position, value in zip(part.positions, values, strict=True):
            ordered[position] = value
    return ordered


def codec_class(reference: str, root: Path, package: str = "") -> Any:
    kind = load_class(reference, root, package)
    for method in ("decode(instances)", "encode(outputs)"):
        if not callable(getattr(kind, method.partition("(")[0], None)):
            raise ConfigError(f"{reference}: has no method {method}; every codec needs it")
    codec_drawing(kind, reference)
    embedding_sizes(kind, reference)
    media_types(kind, reference)
    return kind


def build_codec(kind: Any, reference: str, files: Path | None) -> Codec:
    """Create the codec, with the folder of its shared files if it has any."""
    names = shared_files(kind, reference)
    if not names:
        codec: Codec = kind()
        return codec
    if files is None:
        raise ConfigError(f"{reference}: needs {', '.join(names)}; build it with the folder that use_files() was given")
    if missing := [name for name in names if not (files / name).is_file()]:
        raise ConfigError(f"{reference}: needs {', '.join(missing)}, which is not in {files}")
    codec_with_files: Codec = kind(files)
    return codec_with_files


def encode_method(codec: Codec, reference: str) -> Encode:
    """Return `encode` as a function of outputs and decoded inputs, which a method with one argument does not get."""
    encode = codec.encode
    try:
        parameters = list(inspect.signature(encode).parameters.values())
    except ValueError:  # a function in C without a signature
        parameters = []
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_inputs = any(one.default is one.empty or one.name == "inputs" for one in positional[1:2])
    if [one for one in parameters if one not in positional[:2] and _is_required(one)]:
        raise ConfigError(f"{reference}: encode() must take (outputs) or (outputs, inputs), no other argument")
    return encode if takes_inputs else lambda outputs, _inputs: encode(outputs)


def redact_method(codec: object, reference: str) -> Redact | None:
    """Return `redact`, which removes from an instance what must not be kept; None if the codec has none."""
    redact = getattr(codec, "redact", None)
    if redact is not None and not callable(redact):
        raise ConfigError(f"{reference}: write `redact` as a method redact(instance), found {redact!r}")
    return redact


def embedding_sizes(codec: object, reference: str) -> tuple[int, ...] | None:
    """Return the sizes to which vectors may be cut, besides the whole one; None if the codec embeds no texts."""
    embeds, sizes = getattr(codec, "embeddings", False), getattr(codec, "dimensions", ())
    if not isinstance(embeds, bool):
        raise ConfigError(f"{reference}: write `embeddings = True`, found {embeds!r}")
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{reference}: write `dimensions = (64, 256)`, found {sizes!r}")
    return tuple(sizes) if embeds else None


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def shared_files(kind: Any, reference: str) -> tuple[str, ...]:
    """Return the names of its shared files; a path out of the folder is an error."""
    names = _words(kind, reference, "files", '("tokenizer.json",)')
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.as_posix() != name or "\\" in name or name == ".":
            raise ConfigError(f"{reference}: `files` has {name!r}; name files below the folder, as in tokenizer.json")
    return names


def required_packages(kind: Any, reference: str) -> tuple[str, ...]:
    """Return the packages that a codec imports besides numpy."""
    return _words(kind, reference, "requires", '("tokenizers",)')


def media_types(kind: Any, reference: str) -> tuple[str, ...]:
    """Return the types of files that are an instance as they are."""
    names = _words(kind, reference, "media_types", '("image/png",)')
    for name in names:
        if not _MEDIA_TYPE.fullmatch(name) or name in _PROTOCOL_TYPES:
            raise ConfigError(f"{reference}: `media_types` has {name!r}; name types of files, as in image/png")
    return names


def _words(kind: Any, reference: str, attribute: str, example: str) -> tuple[str, ...]:
    value = getattr(kind, attribute, ())
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{reference}: write `{attribute} = {example}`, found {value!r}")
    return tuple(value)
