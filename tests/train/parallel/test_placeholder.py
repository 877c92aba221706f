"""Placeholders: what is computed from them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from train.parallel.placeholder import NoValuesError, Placeholder, has_placeholder

CPU = torch.device("cpu")


def placeholder(*shape: int, device: torch.device = CPU) -> Placeholder:
    return Placeholder(torch.empty(shape, device="meta"), device)


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "broadcast": lambda x: torch.ones(5, 1, 1, 1) * x,
    "views": lambda x: x.transpose(1, 2).reshape(2, -1)[:, 1:],
    "in place": lambda x: x.clone().add_(torch.ones(3, 4)).mul_(2),
    "assignment": lambda x: _assign(x.clone(), torch.zeros(2, 4)),
    "shape in place": lambda x: x.clone().unsqueeze_(1).transpose_(0, 2),
    "linear": nn.Linear(4, 7),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "type": lambda x: x.to(torch.bfloat16),
    "parts": lambda x: torch.chunk(x, 2, dim=2)[1],
    "values": lambda x: x.topk(2).indices,
    "lookup": lambda x: torch.randn(9, 6)[x.long()],
    "real mask": lambda x: x[torch.tensor([True, False]), :, torch.tensor([0, 2, 2])],
    "real mask in place": lambda x: _assign(x.clone(), torch.tensor(0.0), torch.tensor([[True, False, True]] * 2)),
    "selection": lambda x: torch.where(x > 0, torch.zeros(4), 1.0),
    "new out": lambda x: torch.add(x, x, out=torch.empty_like(x) + x),
}


def _assign(x: Tensor, value: Tensor, index: Any = (slice(None), 1)) -> Tensor:
    x[index] = value
    return x


@pytest.mark.parametrize("name", RESULTS)
@torch.no_grad()
def test_result_has_the_shape_of_the_real_one_and_no_values(name: str) -> None:
    expected, result = (RESULTS[name](x) for x in (torch.rand(2, 3, 4), placeholder(2, 3, 4)))
    assert isinstance(result, Placeholder)
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_result_is_on_the_device_of_the_placeholder() -> None:
    x = placeholder(2, device=torch.device("cuda:1"))
    assert (x + 1).device == (torch.ones(2, device="cpu") * x).device == torch.device("cuda:1")
    assert x.to("cpu").device == x.to(CPU).device == CPU
    assert not x.is_meta


FACTORIES: list[Callable[[Tensor], Tensor]] = [
    torch.zeros_like,
    torch.ones_like,
    lambda x: torch.full_like(x, 7, dtype=torch.int64),
    lambda x: torch.empty_like(x).fill_(3),
    lambda x: x.new_zeros(5),
    lambda x: x.new_ones((2, 5)),
    lambda x: x.new_full((5,), 2.0),
    lambda x: x.new_empty(5).zero_(),
    lambda x: x.new_tensor([1, 2]),
    lambda x: torch.arange(x.shape[1], device=x.device, dtype=x.dtype),
    lambda x: torch.ones(3, 4).expand_as(x),
]


@pytest.mark.parametrize("make", FACTORIES)
def test_what_needs_only_shape_and_type_is_real(make: Callable[[Tensor], Tensor]) -> None:
    real = make(placeholder(2, 3, 4))
    assert type(real) is Tensor
    torch.testing.assert_close(real, make(torch.rand(2, 3, 4)))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: range(x.sum().long()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "pointer": lambda x: x.data_ptr(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "real with mask": lambda x: torch.ones(2, 3)[x > 0],
    "unique": torch.unique,
    "equal": lambda x: torch.equal(x, torch.ones(2, 3)),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat": lambda x: torch.repeat_interleave(x[0].long()),
    "copy": lambda x: torch.zeros(2, 3).copy_(x),
    "add": lambda x: torch.zeros(2, 3).add_(x),
    "assign": lambda x: _assign(torch.zeros(2, 3), x[:, 1]),
    "out": lambda x: torch.add(x, x, out=torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", READS)
def test_use_of_values_is_refused(name: str) -> None:
    READS[name](torch.rand(2, 3))
    with pytest.raises(NoValuesError, match="needs the values of a placeholder"):
        READS[name](placeholder(2, 3))


def test_wrong_shapes_fail_as_they_do_with_values() -> None:
    for x in (torch.rand(2, 3), placeholder(2, 3)):
        with pytest.raises(RuntimeError, match=r"must match the size|broadcast"):
            x + torch.ones(4)


def test_placeholder_can_be_a_parameter() -> None:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(placeholder(2, 3), requires_grad=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert isinstance(layer.state_dict()["weight"], Placeholder)
    assert isinstance(layer.to(CPU).weight, Placeholder)
    assert isinstance(layer.to(torch.bfloat16).weight, Placeholder)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.rand(4, 3))
    assert (out.shape, out.dtype, isinstance(out, Placeholder)) == ((4, 2), torch.bfloat16, True)


def test_placeholder_prints_its_shape_and_is_found_in_containers() -> None:
    x = placeholder(2, 3)
    assert f"{x}" == repr(x) == "Placeholder(shape=(2, 3), dtype=torch.float32, device=cpu)"
    assert has_placeholder({"logits": [torch.ones(2), (x, 3)]})
    assert not has_placeholder({"logits": torch.ones(2)})
