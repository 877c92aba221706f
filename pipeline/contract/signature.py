"""The signature of a bundle: inputs, outputs, limits and runtime, in the terms of the Open Inference Protocol.

A language model's signature names the tensors of its graph: ids, mask, positions, logits and cache. `Drawing` describes
instances that people draw on the service's page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipeline.contract.settings.bundled import BundledLimits, BundledRuntime
from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import ConfigError


class Limits(BundledLimits):
    axes: Mapping[str, int] = {}  # maximum size of each named axis, from the task
    shortest: Mapping[str, int] = {}  # minimum size of named axes; 1 for the others


class Runtime(BundledRuntime):
    batch_delay_ms: float = Field(0.0, ge=0, description="longest wait for more requests to merge, under load only")


# What the service has an option for.
OPTIONS = BundledLimits.model_fields | Runtime.model_fields


def parse_option(name: str, text: str) -> Any:
    """Parse one of the options; empty, as a variable that is not set, it is None: the bundle's value."""
    model = Limits if name in Limits.model_fields else Runtime
    try:
        return getattr(model.model_validate({name: text}), name) if text else None
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(f"{text!r} is not valid: {message[:1].lower()}{message[1:]}") from None


class Cache(Frozen):
    """One cache tensor of a layer: its keys or values of all previous positions."""

    input: str  # of the graph, as `past.0.key`: [batch, heads, past, width]; past may be 0
    output: str  # of the graph, as `present.0.key`: the input followed by the new positions


class SamplingDefaults(Frozen):
    """How the service chooses tokens where a request does not state it."""

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: no limit
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)


class Prompting(Frozen):
    """What a task declares about its language model. The rest follows from the model and the shared files."""

    template: str = ""
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = {}  # texts for the template, as `bos_token`
    sampling: SamplingDefaults = SamplingDefaults()
    prompts: tuple[tuple[int, ...], ...] = ()  # ids, whose greedy answers are verified; none: from the test split
    positions_limit: int = Field(0, ge=0)  # 0: the maximum of the model's configuration


MAX_SCORES_BYTES = 64 << 20  # attention scores of one layer in one run; a graph keeps several arrays of this size
SCORE_BYTES = 4


class Generation(Frozen):
    """The decoder's graph, which takes a prompt without past, and then one or more tokens at a time.

    Rows of different lengths share a batch by padding on the left; padding has mask 0.
    """

    ids: str = "input_ids"  # INT64 [batch, sequence]
    mask: str = "attention_mask"  # INT64 [batch, total], total = past + sequence
    positions: str = "position_ids"  # INT64 [batch, sequence]
    logits: str = "logits"  # FP32 [batch, sequence, vocabulary]
    caches: tuple[Cache, ...] = Field(min_length=1)
    tokenizer: str = "files/tokenizer.json"
    template: str = ""  # Jinja; empty: the model completes prompts, without chat
    begin: tuple[int, ...] = ()  # ids before a prompt
    end: tuple[int, ...] = ()  # ids that end an answer
    special_tokens: Mapping[str, str] = {}  # texts for the template; empty: those of `begin` and `end`
    sampling: SamplingDefaults = SamplingDefaults()
    positions_limit: int = Field(ge=1)  # maximum positions of a prompt and its answer together
    attention_heads: int = Field(1, ge=1)  # of queries

    def missing_tensors(self, inputs: Collection[str], outputs: Collection[str]) -> Iterator[str]:
        """Yield the tensors it names that a graph with these inputs and outputs does not have."""
        input_names = (self.ids, self.mask, self.positions, *(cache.input for cache in self.caches))
        yield from (name for name in input_names if name not in inputs)
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
FLOATS = ("FP16", "BF16", "FP32", "FP64")
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip


class TensorSpec(Frozen):
    """One input or output; a string in the shape is a named dynamic axis."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    allows_missing: bool = False  # an input whose data have NaN, which is null in JSON
    labels: tuple[str, ...] = ()  # an output with one value for each class: the names of the classes

    @property
    def protocol_shape(self) -> list[int]:
        """Return the shape as in the protocol's metadata, with -1 for dynamic axes."""
        return [axis if isinstance(axis, int) else -1 for axis in self.shape]


CODEC_FOLDER = "codec"  # of a bundle: the codec and the files it imports, by their paths in the project


def codec_file(codec: str) -> str:
    """Return the path in the bundle of a codec, as the signature names it."""
    file, separator, _ = codec.partition(":")
    return f"{CODEC_FOLDER}/{file}" if separator else "codec.py"


class Signature(Frozen):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    codec: str  # a class in the bundle's codec.py, or `file.py:Class` in its folder codec/
    requires: tuple[str, ...] = ()  # name==version of the packages the codec needs besides numpy
    limits: Limits
    runtime: Runtime
    generation: Generation | None = None  # present for language models
    variant: str = "fp32"  # of the ONNX file; all variants have the same inputs and outputs
    padding: str = ""  # how padding changes answers, or that it is unknown; empty: it does not
    separate_lengths: bool = False  # run the instances of a request without padding them for each other

    @model_validator(mode="after")
    def _tensors_exist(self) -> Signature:
        names = ({spec.name for spec in self.inputs}, {spec.name for spec in self.outputs})
        if self.generation and (missing := list(self.generation.missing_tensors(*names))):
            raise ValueError(f"generation names tensors that the graph does not have: {', '.join(missing)}")
        return self

    @property
    def codec_file(self) -> str:
        return codec_file(self.codec)

    @cached_property
    def input_specs(self) -> dict[str, TensorSpec]:
        """The inputs by name, cached because every request needs them."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def validated_shapes(self) -> set[tuple[tuple[int, ...], ...]]:
        """Input shapes that the service has validated before."""
        return set()

    @property
    def missing_inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that may have missing numbers."""
        return tuple(spec.name for spec in self.inputs if spec.allows_missing)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    @property
    def unbatched_reason(self) -> str:
        """Return why requests cannot share a batch; empty if all inputs and outputs share their first axis."""
        if self.variant == "int8-dynamic":
            return "int8-dynamic rounds by the range of the whole batch: one client would reduce another's precision"
        batch_axes = {spec.shape[:1] for spec in (*self.inputs, *self.outputs)}
        is_shared = (
            len(batch_axes) == 1
            and batch_axes != {()}
            and all(isinstance(axis, str) for shape in batch_axes for axis in shape)
        )
        return "" if self.inputs and is_shared else "its inputs and outputs do not share a first axis"


Side = Annotated[int, Field(ge=1, le=128)]


class Drawing(Frozen):
    """An instance that people draw: `height` lists of `width` grey values, from 0 for paper to `top` for ink."""

    width: Side
    height: Side
    top: float = Field(gt=0, allow_inf_nan=False)
    fit: bool = False  # move and scale the drawing until it fills the picture, as in the training data
    pen: float = Field(1.5, gt=0, le=16, allow_inf_nan=False)  # width of a stroke, in pixels of the picture


def codec_drawing(codec: object, reference: str) -> Drawing | None:
    """Return the codec's `page`, if it has one."""
    page = getattr(codec, "page", None)
    if page is None or isinstance(page, Drawing):
        return page
    raise ConfigError(f"{reference}: page must be a pipeline.Drawing, found {type(page).__name__}")
