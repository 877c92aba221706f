"""The `export` section of `pipe.yaml`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pipeline.spec.section import Fraction, Positive, Section

VariantName = Literal["fp32", "fp16", "int8-dynamic", "int8-static"]
FormatName = Literal["onnx", "pt2", "savedmodel"]
Cost = Literal["p50_ms", "p99_ms", "megabytes"]
FASTEST: Literal["fastest-that-passes"] = "fastest-that-passes"


class Export(Section):
    """How the ONNX file is made and what it must agree on."""

    opset: Annotated[int, Field(ge=18, le=25)] = Field(20, description="ONNX operator set")
    rtol: float = Field(1e-3, ge=0, description="relative tolerance against torch")
    atol: float = Field(1e-4, ge=0, description="absolute tolerance against torch")
    batch_sizes: tuple[Positive, ...] = Field((1, 2, 7, 256), min_length=1, description="sizes the test set is run at")
    external_data: Literal["auto", "always"] = Field("auto", description="`auto` keeps weights inside up to 1 GiB")
    optimize: Literal["none", "basic", "extended", "transformers"] = Field(
        "none",
        description="passes over the file before it is verified: ONNX Runtime's for any device, its fusions for the "
        "CPU too, or fusions of attention and norms; what does not verify is not used",
    )
    formats: tuple[FormatName, ...] = Field(
        ("onnx",), description="forms of the model beside the bundle: pt2 is torch's own, savedmodel TensorFlow's"
    )
    tensorflow_python: str = Field(
        "", description="python of an environment with onnx2tf and tensorflow, for savedmodel; empty: this one"
    )
    golden: Positive = Field(4, description="test samples kept in the bundle as golden requests")
    variants: tuple[VariantName, ...] = Field(
        ("fp32",), description="files made of the model, each judged by itself; fp32 is always one"
    )
    choose: VariantName | Literal["fastest-that-passes"] = Field("fp32", description="the variant that is shipped")
    variant_margin: Annotated[float, Field(ge=0)] | Literal["evaluate.margin"] = Field(
        "evaluate.margin", description="how much worse than torch a variant may be in `evaluate.metric`"
    )
    least_gain: Fraction = Field(
        0.1, description="fastest-that-passes: time a variant must save against fp32, beyond doubt, to be chosen"
    )
    fp16_tolerance: float = Field(
        0.05, gt=0, description="largest error of fp16, in standard deviations of the output it is in"
    )
    int8_noise: float = Field(
        0.5, gt=0, le=1, description="largest error of int8 (root mean square), in standard deviations of the output"
    )
    int8_weight_bits: Literal[7, 8] = Field(
        7, description="8 is finer, but sums overflow on processors without VNNI, where it was not judged"
    )
    calibration_samples: Positive = Field(256, description="training samples that int8-static takes its ranges from")
    timing_seconds: float = Field(2, gt=0, le=600, description="time spent on timing each variant")
    budget: dict[Cost, Annotated[float, Field(gt=0)]] = Field(
        {}, description="what is shipped may cost, as in `{p50_ms: 2, p99_ms: 5, megabytes: 20}`; times of one instance"
    )

    @model_validator(mode="after")
    def _what_is_chosen_is_made(self) -> Export:
        if len(set(self.variants)) != len(self.variants):
            _conflict(f"variants={list(self.variants)}: a variant is named twice")
        if self.choose not in ("fp32", FASTEST, *self.variants):
            _conflict(f"choose={self.choose} is not made: add it to variants={list(self.variants)}")
        return self

    @model_validator(mode="after")
    def _the_bundle_holds_onnx(self) -> Export:
        if "onnx" not in self.formats or len(set(self.formats)) != len(self.formats):
            _conflict(f"formats={list(self.formats)}: onnx is always one, and each is named once")
        if "savedmodel" in self.formats and self.optimize in ("extended", "transformers"):
            _conflict(f"formats: savedmodel takes ONNX's own operators, and optimize={self.optimize} brings others")
        return self

    @property
    def made(self) -> tuple[VariantName, ...]:
        """fp32 first: it is what the others are held against."""
        return ("fp32", *(name for name in self.variants if name != "fp32"))


def _conflict(problem: str) -> None:
    raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
