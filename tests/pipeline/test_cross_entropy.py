from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile

from pipeline import linear_cross_entropy
from pipeline.post_training import IGNORED

TOKENS, WIDTH, VOCABULARY = 512, 16, 2000


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, TOKENS // 4, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    target = torch.randint(VOCABULARY, (4, TOKENS // 4), generator=generator)
    target[0, :50] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), target


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, chunk=50)


def computed(loss: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    hidden, weight, target = inputs(dtype)
    result = loss(hidden, weight, target)
    torch.autograd.backward(3 * result)
    assert hidden.grad is not None
    assert weight.grad is not None
    return result.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_those_of_the_whole_logits(dtype: torch.dtype) -> None:
    for left, right in zip(computed(chunked, dtype), computed(whole, dtype), strict=True):
        torch.testing.assert_close(left.double(), right.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_close_to_full_precision_as_with_whole_logits(dtype: torch.dtype) -> None:
    exact = computed(whole)
    with torch.autocast("cpu", dtype=dtype):
        found, usual = computed(chunked), computed(whole)
    for left, right, reference in zip(found, usual, exact, strict=True):
        assert left.dtype == reference.dtype
        assert (left - reference).norm() <= 1.1 * (right - reference).norm() + 1e-3


def test_without_a_token_that_counts_the_loss_is_zero() -> None:
    hidden, weight, target = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(target, IGNORED))
    torch.autograd.backward(loss)
    assert loss == 0
    assert hidden.grad is not None
    assert hidden.grad.count_nonzero() == 0


def test_evaluation_computes_no_gradients() -> None:
    hidden, weight, target = inputs()
    with torch.no_grad():
        loss = chunked(hidden, weight, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(hidden, weight, target).detach())


def peak_bytes(trace: Path, loss: Callable[..., Tensor], *, trains: bool) -> int:
    """Return the most that a pass has allocated at one time, without its inputs."""
    hidden, weight, target = inputs()
    with profile(profile_memory=True) as profiler, torch.set_grad_enabled(trains):
        result = loss(hidden, weight, target)
        if trains:
            torch.autograd.backward(result)
    profiler.export_chrome_trace(str(trace))
    events = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    )
    peak: int = max(itertools.accumulate(change for _, change in events))
    return peak


@pytest.mark.parametrize("trains", [True, False])
def test_the_logits_of_all_tokens_never_exist(tmp_path: Path, trains: bool) -> None:
    logits = 4 * TOKENS * VOCABULARY
    usual, found = (peak_bytes(tmp_path / "trace.json", loss, trains=trains) for loss in (whole, chunked))
    print(f"{usual / logits:.2f} times the logits, in chunks {found / logits:.2f}")
    assert usual > logits
    assert found < logits / 3
