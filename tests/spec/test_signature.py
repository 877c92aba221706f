from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from pipeline.spec.signature import NUMPY_TYPES, Datatype, TensorSpec


def test_every_datatype_has_a_type_of_numpy_of_its_own() -> None:
    assert set(NUMPY_TYPES) == set(get_args(Datatype))
    assert len({np.dtype(kind) for kind in NUMPY_TYPES.values()}) == len(NUMPY_TYPES)


def test_a_named_axis_is_minus_one_in_the_protocol() -> None:
    assert TensorSpec(name="x", datatype="FP32", shape=("batch", 3, "time")).protocol_shape == [-1, 3, -1]


def test_a_datatype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="datatype"):
        TensorSpec(name="x", datatype="FP31", shape=())
