from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.contract.codec import load_codec
from pipeline.contract.signature import (
    NUMPY_TYPES,
    Cache,
    Datatype,
    Drawing,
    Generation,
    Limits,
    Runtime,
    Signature,
    TensorSpec,
    codec_drawing,
)
from pipeline.system.errors import ConfigError


class Drawn:
    page = Drawing(width=8, height=4, top=1)


class Plain:
    pass


def test_drawing_of_a_codec_is_optional() -> None:
    assert codec_drawing(Drawn(), "codec.py:Drawn") == Drawing(width=8, height=4, top=1, fit=False)
    assert codec_drawing(Plain(), "codec.py:Plain") is None


@pytest.mark.parametrize("wrong", [{"width": 0}, {"height": 1000}, {"top": 0}, {"top": float("inf")}, {"pen": -1}])
def test_invalid_drawing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Drawing(**{"width": 8, "height": 8, "top": 16, **wrong})


def test_page_that_is_no_drawing_is_refused_when_the_codec_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "pagecodec.py").write_text(
        "class C:\n page = {}\n def decode(self, x): ...\n def encode(self, x): ...\n"
    )
    with pytest.raises(ConfigError, match=r"pagecodec\.py:C: page must be a pipeline\.Drawing, found dict"):
        load_codec("pagecodec.py:C", tmp_path)


def test_every_datatype_has_its_own_numpy_type_except_bf16() -> None:
    assert set(NUMPY_TYPES) == set(get_args(Datatype))
    assert len({np.dtype(kind) for name, kind in NUMPY_TYPES.items() if name != "BF16"}) == len(NUMPY_TYPES) - 1
    assert np.dtype(NUMPY_TYPES["BF16"]) == np.float32


def test_batching_needs_a_shared_axis_and_no_dynamic_quantization() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    limits, runtime = Limits(max_batch_size=1, max_body_bytes=1), Runtime(provider="cpu", threads=1)
    whole = Signature(inputs=(spec,), outputs=(spec,), codec="C", limits=limits, runtime=runtime)
    assert whole.unbatched_reason == whole.model_copy(update={"variant": "int8-static"}).unbatched_reason == ""
    assert "the range of the whole batch" in whole.model_copy(update={"variant": "int8-dynamic"}).unbatched_reason
    for shape in (("rows", 2), (4, 2), ()):
        other = spec.model_copy(update={"shape": shape})
        assert "do not share a first axis" in whole.model_copy(update={"outputs": (other,)}).unbatched_reason


def test_generation_with_unknown_tensors_is_refused_naming_them() -> None:
    ids = TensorSpec(name="input_ids", datatype="INT64", shape=("batch", "sequence"))
    parts = {
        "inputs": (
            ids,
            *(ids.model_copy(update={"name": name}) for name in ("attention_mask", "position_ids", "past")),
        ),
        "outputs": (ids.model_copy(update={"name": "logits"}), ids.model_copy(update={"name": "present"})),
        "codec": "C",
        "limits": Limits(max_batch_size=1, max_body_bytes=1),
        "runtime": Runtime(provider="cpu", threads=1),
    }
    cache = Cache(input="past", output="present")
    whole = Signature(**parts, generation=Generation(caches=(cache,), positions_limit=8))
    assert Signature.model_validate_json(whole.model_dump_json()) == whole
    for absent in ({"caches": (Cache(input="past.1", output="present"),)}, {"logits": "scores"}, {"mask": "m"}):
        kinds = {"caches": (cache,), "positions_limit": 8, **absent}
        with pytest.raises(ValueError, match=r"that the graph does not have: (past\.1|scores|m)"):
            Signature(**parts, generation=Generation(**kinds))
