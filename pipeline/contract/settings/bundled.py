"""Define the settings of the serve section that travel in the bundle; the service has an option for each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.contract.settings.section import Natural, Positive, Section


class BundledLimits(Section):
    max_batch_size: Positive = Field(1024, description="maximum instances per request")
    max_body_bytes: Positive = Field(64 << 20, description="maximum size of a request body, also after decompression")
    max_waiting: Positive = Field(1024, description="maximum waiting requests; further ones get 503 immediately")
    deadline_seconds: float = Field(
        0.0, ge=0, description="default deadline of requests that specify none; 0: no deadline"
    )
    max_cache_bytes: Positive = Field(
        256 << 20, description="language models: memory for the key-value cache of all running generations"
    )


class BundledRuntime(Section):
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = Field(
        "auto", description="ONNX Runtime execution provider; `cuda` and `tensorrt` never fall back to CPU"
    )
    threads: Natural = Field(0, description="threads per inference; 0: ONNX Runtime's default")
    batch_rows: Positive = Field(
        32, description="maximum instances of a batch merged from waiting requests; 1: no batching"
    )


BUNDLED_SETTINGS = (*BundledLimits.model_fields, *BundledRuntime.model_fields)
