"""What a model eats and answers: names, types, shapes and limits, in the words of the Open Inference Protocol.

What a bundle says of its service: how much it takes, and how it runs the model.

A language model in a bundle: which tensors of its graph are ids, mask, positions, logits and cache.

What a codec may say of the service's page: how a person makes an instance there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.section import Frozen


class Limits(Frozen):
    max_batch_size: int
    max_body_bytes: int
    max_waiting: int = 1024
    deadline_seconds: float = 0.0  # of requests that name none; 0: none
    max_cache_bytes: int = 256 << 20  # of a language model, for the keys and values of all texts being written
    axes: Mapping[str, int] = {}  # how long a named axis may be, as the task says it


class Runtime(Frozen):
    """How the service should run the model unless told otherwise at its start."""

    provider: Literal["auto", "cpu", "cuda"]
    threads: int
    batch_rows: int = 32
    batch_delay_ms: float = 0.0


# Words of the serve section that travel in the bundle.
SEALED = tuple(name for name in (*Limits.model_fields, *Runtime.model_fields) if name not in ("axes", "batch_delay_ms"))


class Cache(Frozen):
    """One tensor that one layer keeps of every position it has seen."""

    input: str  # of the graph, as `past.0.key`: [batch, heads, past, width]; past may be 0
    output: str  # of the graph, as `present.0.key`: the input, and the new positions behind it


class Prompting(Frozen):
    """What a task says of its language model; all else is read off the model."""

    template: str = ""
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()  # ids that greedy answers are compared for; none: of the test split
    positions_limit: int = Field(0, ge=0)  # 0: as many as the model's own configuration says


class Generation(Frozen):
    """One graph for a prompt (no past) and for every further token (sequence of 1, or of more).

    Rows of different lengths share a batch by padding on the left; a padded place has mask 0.
    """

    ids: str = "input_ids"  # INT64 [batch, sequence]
    mask: str = "attention_mask"  # INT64 [batch, total], total = past + sequence
    positions: str = "position_ids"  # INT64 [batch, sequence]
    logits: str = "logits"  # FP32 [batch, sequence, vocabulary]
    caches: tuple[Cache, ...] = Field(min_length=1)
    tokenizer: str = "files/tokenizer.json"
    template: str = ""  # Jinja; empty: the model answers prompts, and no chat
    begin: tuple[int, ...] = ()  # ids put before a prompt
    end: tuple[int, ...] = ()  # ids that end an answer
    positions_limit: int = Field(ge=1)  # most positions of a prompt and its answer together

    def absent(self, inputs: Collection[str], outputs: Collection[str]) -> Iterator[str]:
        """Tensors it speaks of that a graph of these inputs and outputs does not have."""
        wanted = (self.ids, self.mask, self.positions, *(cache.input for cache in self.caches))
        yield from (name for name in wanted if name not in inputs)
        yield from (name for name in (self.logits, *(cache.output for cache in self.caches)) if name not in outputs)


# The names of numpy's types for the protocol's datatypes. numpy has no bfloat16; float32 holds all its values.
NUMPY_TYPES: dict[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "float32",
    "BYTES": "object",
}
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip


class TensorSpec(Frozen):
    """One input or output; a string in the shape is a named dynamic axis."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]

    @property
    def protocol_shape(self) -> list[int]:
        """As the protocol's metadata says it: -1 for a dynamic axis."""
        return [axis if isinstance(axis, int) else -1 for axis in self.shape]


class Signature(Frozen):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    codec: str  # class name in the bundle's codec.py
    requires: tuple[str, ...] = ()  # name==version of the packages the codec needs beside numpy
    limits: Limits
    runtime: Runtime
    generation: Generation | None = None  # what makes it a language model
    variant: str = "fp32"  # what the file was made of: the same tensors go in and come out of all of them

    @model_validator(mode="after")
    def _speaks_of_its_own_tensors(self) -> Signature:
        names = ({spec.name for spec in self.inputs}, {spec.name for spec in self.outputs})
        if self.generation and (absent := list(self.generation.absent(*names))):
            raise ValueError(f"generation names tensors that the graph does not have: {', '.join(absent)}")
        return self

    @cached_property
    def input_specs(self) -> dict[str, TensorSpec]:
        """By name: asked for at every request."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def fitting(self) -> set[tuple[tuple[int, ...], ...]]:
        """Shapes of all inputs together that were found to fit, kept by who serves: few, and asked again and again."""
        return set()

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    @property
    def why_alone(self) -> str:
        """Why several requests cannot be one batch; empty where every input and output has the same first axis."""
        if self.variant == "int8-dynamic":
            return "int8-dynamic rounds by the range of the whole batch: one client's values would coarsen another's"
        first = {spec.shape[:1] for spec in (*self.inputs, *self.outputs)}
        shared = len(first) == 1 and first != {()} and all(isinstance(axis, str) for shape in first for axis in shape)
        return "" if self.inputs and shared else "its inputs and outputs do not share a first axis"


Side = Annotated[int, Field(ge=1, le=128)]


class Drawing(Frozen):
    """An instance is `height` lists of `width` grey values, from 0 for paper to `top` for ink: people draw it."""

    width: Side
    height: Side
    top: float = Field(gt=0, allow_inf_nan=False)
    fit: bool = False  # move and enlarge what is drawn until it fills the picture, as the model's samples do
    pen: float = Field(1.5, gt=0, le=16, allow_inf_nan=False)  # width of a stroke, in pixels of the picture


def drawing_of(codec: object, reference: str) -> Drawing | None:
    """The codec's `page`, where it has one."""
    page = getattr(codec, "page", None)
    if page is None or isinstance(page, Drawing):
        return page
    raise ConfigError(f"{reference}: page must be a pipeline.Drawing, found {type(page).__name__}")
