from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipeline import linear_cross_entropy, log_probs_in_training, mask_between_texts
from pipeline.contract.settings.stages import Model
from pipeline.system.errors import ConfigError
from pipeline.user.post_training import IGNORED, answer_log_probs, dpo_loss, token_log_probs
from train.pretrained.adapter import add_adapter

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

    def run() -> None:
        with torch.set_grad_enabled(trains):
            result = loss(hidden, weight, target)
            if trains:
                torch.autograd.backward(result)

    return measure_peak(trace, run)


def measure_peak(trace: Path, run: Callable[[], object]) -> int:
    with profile(profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    )
    peak: int = max(itertools.accumulate(change for _, change in events))
    return peak


@pytest.mark.parametrize("trains", [True, False])
def test_chunked_loss_never_allocates_all_logits(tmp_path: Path, trains: bool) -> None:
    logits = 4 * TOKENS * VOCABULARY
    usual, found = (peak_bytes(tmp_path / "trace.json", loss, trains=trains) for loss in (whole, chunked))
    print(f"{usual / logits:.2f} times the logits, in chunks {found / logits:.2f}")
    assert usual > logits
    assert found < logits / 3


ROWS, LENGTH, CHUNK = 4, 24, 10  # 92 tokens have one before them: no chunk divides them
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def qwen2(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return mask_between_texts(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **sizes}))).train()


def chunked_qwen2(**sizes: Any) -> Any:
    return log_probs_in_training(qwen2(**sizes), CHUNK)


def tokens() -> dict[str, Tensor]:
    """Return rows with two texts and labels of some tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (ROWS, LENGTH), generator=generator)
    labels = ids.where(torch.rand(ROWS, LENGTH, generator=generator) < 0.6, IGNORED)
    positions = torch.cat([torch.arange(LENGTH // 2)] * 2).expand(ROWS, -1)
    segments = torch.ones(ROWS, LENGTH, dtype=torch.long)
    segments[:, LENGTH // 2 :] = 2
    labels[positions == 0] = IGNORED
    return {"input_ids": ids, "attention_mask": segments, "position_ids": positions, "labels": labels}


def predict(model: Any) -> Tensor:
    batch = tokens()
    outputs: Tensor = model(batch["input_ids"], batch["attention_mask"], batch["position_ids"]).logits
    return outputs


def sft_loss(model: Any) -> Tensor:
    labels = tokens()["labels"]
    return -token_log_probs(predict(model), labels).sum() / (labels[:, 1:] != IGNORED).sum()


def preference_loss(model: Any) -> Tensor:
    batch = tokens()
    log_probs = answer_log_probs(predict(model), batch["labels"], batch["attention_mask"], texts=2)
    return dpo_loss(log_probs, log_probs.detach().flip(1), beta=0.1)[0].mean()


def learned(model: Any, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Return the loss and all gradients."""
    model.zero_grad()
    result = loss(model)
    torch.autograd.backward(result)
    return {"": result.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).norm() <= tolerance * expected[name].norm() + 1e-9, name


@pytest.mark.parametrize("loss", [sft_loss, preference_loss])
@pytest.mark.parametrize("tied", [True, False])
def test_log_probabilities_in_chunks_have_the_loss_and_gradients_of_logits(
    loss: Callable[[Any], Tensor], tied: bool
) -> None:
    whole = qwen2(tie_word_embeddings=tied)
    chunked = chunked_qwen2(tie_word_embeddings=tied)
    assert predict(chunked).shape == (ROWS, LENGTH - 1)
    assert_equal(learned(chunked, loss), learned(whole, loss))
    again = copy.deepcopy(chunked)
    assert_equal(learned(again, loss), learned(whole, loss))
    assert again.lm_head.weight.grad is not chunked.lm_head.weight.grad


def test_bf16_is_as_close_to_full_precision_as_with_logits() -> None:
    exact = learned(qwen2(), sft_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, usual = learned(chunked_qwen2(), sft_loss), learned(qwen2(), sft_loss)
    for name, tensor in found.items():
        assert (tensor - exact[name]).norm() <= 1.2 * (usual[name] - exact[name]).norm() + 1e-3, name


def test_evaluation_returns_the_same_logits() -> None:
    whole, chunked = qwen2().eval(), chunked_qwen2().eval()
    assert torch.equal(predict(whole), predict(chunked))
    assert predict(chunked.train()).ndim == 2
    assert torch.equal(predict(whole), predict(chunked.eval()))


def test_adapters_train_the_same() -> None:
    whole, chunked = (add_adapter(model, Model(adapter="lora")) for model in (qwen2(), chunked_qwen2()))
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    chunked.load_state_dict(whole.state_dict())
    found = learned(chunked, sft_loss)
    assert any("lora_A" in name for name in found)
    assert "lm_head.weight" not in found, "the head is frozen"
    assert_equal(found, learned(whole, sft_loss))


def test_logits_that_are_not_those_of_the_head_are_refused() -> None:
    adapted = chunked_qwen2(tie_word_embeddings=False)
    add_adapter(adapted, Model(adapter="lora", targets=["lm_head"]))
    capped = log_probs_in_training(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)), CHUNK).train()
    for model in (adapted, capped):
        with pytest.raises(ConfigError, match="are not what its head returns"):
            predict(model)
    with pytest.raises(ConfigError, match="Qwen2Model has no head"):
        log_probs_in_training(qwen2().model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_model_trains_the_same() -> None:
    chunked = chunked_qwen2()
    compiled = torch.compile(chunked, backend="aot_eager")
    assert_equal(learned(chunked, lambda model: sft_loss(compiled)), learned(qwen2(), sft_loss))


def test_the_memory_of_training_does_not_have_all_logits(tmp_path: Path) -> None:
    vocabulary = 32_000
    logits = 4 * ROWS * LENGTH * vocabulary
    models = [qwen2(vocab_size=vocabulary), chunked_qwen2(vocab_size=vocabulary)]
    usual, found = (measure_peak(tmp_path / "trace.json", partial(learned, model, sft_loss)) for model in models)
    weight = 4 * vocabulary * SIZES["hidden_size"]
    print(f"{usual / logits:.2f} times the logits, in chunks {found / logits:.2f}; a gradient {weight / logits:.2f}")
    assert found < usual - logits
