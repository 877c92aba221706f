from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from pipeline.spec.signature import NUMPY_TYPES, Datatype, Limits, Runtime, Signature, TensorSpec


def test_every_datatype_has_a_type_of_numpy_and_only_bf16_shares_one() -> None:
    assert set(NUMPY_TYPES) == set(get_args(Datatype))
    assert len({np.dtype(kind) for name, kind in NUMPY_TYPES.items() if name != "BF16"}) == len(NUMPY_TYPES) - 1
    assert np.dtype(NUMPY_TYPES["BF16"]) == np.float32


def test_the_names_of_a_signature_are_at_hand_and_are_no_part_of_its_file() -> None:
    spec = TensorSpec(name="x", datatype="BF16", shape=("batch",))
    limits, runtime = Limits(max_batch_size=1, max_body_bytes=1), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(spec,), outputs=(spec,), codec="C", limits=limits, runtime=runtime)
    assert signature.input_specs == {"x": spec}
    assert signature.output_names == ("x",)
    assert set(signature.model_dump()) == {"inputs", "outputs", "codec", "limits", "runtime"}


def test_a_named_axis_is_minus_one_in_the_protocol() -> None:
    assert TensorSpec(name="x", datatype="FP32", shape=("batch", 3, "time")).protocol_shape == [-1, 3, -1]


def test_a_datatype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="datatype"):
        TensorSpec(name="x", datatype="FP31", shape=())
