from __future__ import annotations

import numpy as np
import pytest

from pipeline.spec.signature import NUMPY_TYPES, TensorSpec, datatype_of


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_every_datatype_is_found_again_from_its_array(name: str) -> None:
    assert datatype_of(np.empty(0, NUMPY_TYPES[name])) == name


@pytest.mark.parametrize("kind", [np.complex64, "U3", "M8[s]"])
def test_a_type_the_protocol_does_not_know_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match="no protocol datatype"):
        datatype_of(np.empty(0, kind))


def test_a_named_axis_is_minus_one_in_the_protocol() -> None:
    assert TensorSpec(name="x", datatype="FP32", shape=("batch", 3, "time")).protocol_shape == [-1, 3, -1]


def test_a_datatype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="datatype"):
        TensorSpec(name="x", datatype="FP31", shape=())
