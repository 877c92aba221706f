from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from export.bundle import check_decoded
from pipeline.spec.errors import ConfigError
from pipeline.spec.signature import TensorSpec

SPECS = (TensorSpec(name="x", datatype="FP32", shape=("batch", 4)),)


def refusal(arrays: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_decoded(arrays, SPECS, 2)
    return str(caught.value)


def test_arrays_that_the_model_takes_are_accepted() -> None:
    check_decoded({"x": np.zeros((2, 4), np.float32), "more": None}, SPECS, 2)


@pytest.mark.parametrize("kind", ["float64", "int64", "float16", "U3", "object"])
def test_an_array_of_another_type_is_refused_with_both_types(kind: str) -> None:
    text = refusal({"x": np.zeros((2, 4), kind)})
    assert np.dtype(kind).name in text or str(np.dtype(kind)) in text
    assert text.endswith("the model takes FP32")


@pytest.mark.parametrize("shape", [(), (4,), (2, 5), (3, 4), (2, 4, 1)])
def test_an_array_of_another_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    assert f"of shape {list(shape)}, the model takes ['batch', 4]" in refusal({"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize("arrays", [{}, {"y": np.zeros((2, 4), np.float32)}, {"x": [[0.0] * 4] * 2}])
def test_an_input_without_an_array_is_named(arrays: Any) -> None:
    assert "gives no array `x`" in refusal(arrays)


@pytest.mark.parametrize("arrays", [None, np.zeros((2, 4), np.float32), [1]])
def test_a_codec_that_gives_no_mapping_is_refused(arrays: Any) -> None:
    assert "not a mapping of input names to arrays" in refusal(arrays)
