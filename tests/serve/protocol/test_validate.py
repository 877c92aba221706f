from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.contract.signature import Cache, Generation, Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.errors import TooLarge
from serve.protocol.validate import check_arrays, check_bytes, check_names, check_shape, check_shapes

LIMITS = Limits(max_batch_size=4, max_body_bytes=1000)
IMAGE = TensorSpec(name="image", datatype="FP32", shape=("batch", 2))
TEXT = TensorSpec(name="tokens", datatype="INT64", shape=("batch", "length"))
MASK = TensorSpec(name="mask", datatype="BOOL", shape=("batch", "length"))


def _signature(*inputs: TensorSpec) -> Signature:
    runtime = Runtime(provider="cpu", threads=1)
    return Signature(inputs=inputs, outputs=(IMAGE,), codec="C", limits=LIMITS, runtime=runtime)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "inputs: 'image' is missing; the model takes 'image', 'tokens'"),
        (["image"], "inputs: 'tokens' is missing"),
        (["image", "tokens", "extra"], "inputs: unknown input 'extra'"),
        (["image", "tokens", "image"], "inputs: 'image' is given 2 times"),
    ],
)
def test_wrong_input_names_are_rejected(names: list[str], sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=re.escape(sentence)):
        check_names(names, [IMAGE, TEXT])


def test_largest_batch_is_accepted() -> None:
    check_shape((4, 2), IMAGE, LIMITS)


@pytest.mark.parametrize(
    ("length", "shortest", "fits"),
    [(0, 1, False), (1, 1, True), (3, 1, True), (4, 1, False), (1, 2, False), (2, 2, True), (4, 2, False)],
)
def test_named_axis_beyond_its_limits_is_rejected(length: int, shortest: int, fits: bool) -> None:
    shortest_sizes = {"length": shortest} if shortest > 1 else {}
    limits = LIMITS.model_copy(update={"axes": {"length": 3}, "shortest": shortest_sizes})
    if fits:
        check_shape((2, length), TEXT, limits)
        return
    with pytest.raises(InvalidPayload, match=f"tokens: axis 'length' is {length}; it may be {shortest} to 3 long"):
        check_shape((2, length), TEXT, limits)


@pytest.mark.parametrize(("past", "sequence", "total"), [(0, 3, 3), (2, 1, 3), (2, 3, 3), (0, 1, 3)])
def test_attention_mask_covers_past_and_sequence(past: int, sequence: int, total: int) -> None:
    shapes = {"input_ids": (1, sequence), "attention_mask": (1, total), "position_ids": (1, sequence)}
    axes = {"input_ids": "sequence", "attention_mask": "total", "position_ids": "sequence"}
    specs = [TensorSpec(name=name, datatype="INT64", shape=("batch", axis)) for name, axis in axes.items()]
    cache = TensorSpec(name="past", datatype="FP32", shape=("batch", 1, "past", 2))
    outputs = [cache.model_copy(update={"name": name}) for name in ("logits", "present")]
    signature = _signature(*specs, cache).model_copy(
        update={
            "outputs": tuple(outputs),
            "generation": Generation(caches=(Cache(input="past", output="present"),), positions_limit=9),
        }
    )
    if past + sequence == total:
        check_shapes({**shapes, "past": (1, 1, past, 2)}, signature)
        return
    with pytest.raises(InvalidPayload, match=f"attention_mask: covers 3 positions, but there are {past} in the past"):
        check_shapes({**shapes, "past": (1, 1, past, 2)}, signature)


def test_wrong_array_type_is_rejected() -> None:
    with pytest.raises(InvalidPayload, match="image: type float64 is not the model's FP32"):
        check_arrays({"image": np.zeros((1, 2))}, _signature(IMAGE))


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [((3, 5), "mask: axis 'batch' is 3, but 2 in 'tokens'"), ((2, 4), "mask: axis 'length' is 4, but 5 in 'tokens'")],
)
def test_axes_of_one_name_must_have_one_size(mask: tuple[int, int], sentence: str) -> None:
    arrays = {"tokens": np.zeros((2, 5), np.int64), "mask": np.zeros(mask, np.bool_)}
    with pytest.raises(InvalidPayload, match=sentence):
        check_arrays(arrays, _signature(TEXT, MASK))


def test_valid_arrays_are_accepted_with_nan() -> None:
    arrays = {"tokens": np.zeros((2, 5), np.int64), "mask": np.zeros((2, 5), np.bool_)}
    check_arrays(arrays, _signature(TEXT, MASK))
    check_arrays({"image": np.full((2, 2), np.nan, np.float32)}, _signature(IMAGE))


def test_oversized_tensors_are_rejected_before_allocation() -> None:
    signature = _signature(TEXT, MASK)  # 9 bytes for each token
    check_bytes({"tokens": (1, 111), "mask": (1, 111)}, signature)
    with pytest.raises(TooLarge, match="tensors of 1008 bytes are larger than the limit of 1000 bytes"):
        check_bytes({"tokens": (1, 112), "mask": (1, 112)}, signature)
    with pytest.raises(TooLarge):
        check_bytes({"tokens": (1, 2**62), "mask": (1, 2**62)}, signature)
    with pytest.raises(TooLarge):  # empty, but the other axis is larger than any array's
        check_bytes({"tokens": (0, 2**62), "mask": (0, 2**62)}, signature)
