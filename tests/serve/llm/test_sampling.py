from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serve.llm.sampling import (
    Sampling,
    adjust_logits,
    log_softmax,
    nucleus,
    pick,
    sample_token,
    token_logprob,
    token_probabilities,
)

LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))


def _counts(sampling: Sampling, draws: int = 4000) -> list[float]:
    random = np.random.default_rng(1)
    found = np.bincount([sample_token(LOGITS, sampling, random.random) for _ in range(draws)], minlength=4)
    return [float(share) for share in found / draws]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=1e-320)])
def test_greedy_takes_the_most_likely_token(sampling: Sampling) -> None:
    assert _counts(sampling, 20) == [0, 1, 0, 0]


def test_samples_follow_the_models_probabilities() -> None:
    assert _counts(Sampling()) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)


def test_temperature_flattens_and_sharpens() -> None:
    squared = np.array([0.1, 0.5, 0.15, 0.25]) ** 2
    assert _counts(Sampling(temperature=0.5)) == pytest.approx(list(squared / squared.sum()), abs=0.03)


def test_top_k_keeps_the_most_likely() -> None:
    assert _counts(Sampling(top_k=2)) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.03)


def test_top_p_keeps_the_smallest_set() -> None:
    assert _counts(Sampling(top_p=0.7)) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.03)
    assert _counts(Sampling(top_p=0.4)) == [0, 1, 0, 0]
    assert _counts(Sampling(top_p=1e-9)) == [0, 1, 0, 0]


def test_top_k_and_top_p_together() -> None:
    assert _counts(Sampling(top_k=3, top_p=0.8)) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.03)


def test_nucleus_equals_a_full_sort() -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        shares = random.dirichlet(np.full(200, 0.05))
        top_p = float(random.uniform(0.05, 0.999))
        order = np.argsort(-shares, kind="stable")
        count = int(np.searchsorted(np.cumsum(shares[order]), top_p)) + 1
        assert nucleus(shares, top_p) is not None
        assert set(np.asarray(nucleus(shares, top_p)).tolist()) == set(order[:count].tolist())
    assert nucleus(shares, 1.0) is None


def test_probability_zero_is_never_picked() -> None:
    shares = np.array([0.0, 0.5, 0.5, 0.0])
    assert [pick(shares, number) for number in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 2]


def test_masked_tokens_are_never_sampled() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0], np.float32)
    random = np.random.default_rng(2)
    assert {sample_token(logits, Sampling(temperature=2.0), random.random) for _ in range(50)} == {1, 3}


def test_equal_seeds_give_equal_samples() -> None:
    draws = [
        [sample_token(LOGITS, Sampling(), random.random) for _ in range(20)]
        for random in map(np.random.default_rng, (3, 3, 4))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_logprobs_are_those_of_the_model() -> None:
    found = token_logprob(LOGITS * 1.0, token=0, top=2)
    assert found.token == 0
    assert found.logprob == pytest.approx(np.log(0.1), abs=1e-5)
    assert [token for token, _ in found.top] == [1, 3]
    assert [np.exp(value) for _, value in found.top] == pytest.approx([0.5, 0.25], abs=1e-5)
    assert token_logprob(LOGITS, 1, 0).top == ()
    assert len(token_logprob(LOGITS, 1, 20).top) == 4


def test_large_logits_do_not_overflow() -> None:
    assert np.exp(log_softmax(np.array([[800.0, 800.0]]))).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.8),
        Sampling(logit_bias={3: 2.5, 7: -100.0, 0: 1.0}),
        Sampling(0.6, 0.9, 12, 0.05, 1.2, {2: 4.0, 9: -3.0}),
        Sampling(1.7, 0.5, 3, 0.5, 1.05),
    ],
)
def test_probabilities_equal_those_of_transformers(sampling: Sampling) -> None:
    import torch
    from transformers.generation import logits_process

    random = np.random.default_rng(4)
    processors: list[Any] = [
        logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        logits_process.TemperatureLogitsWarper(sampling.temperature),
        *([logits_process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([logits_process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        *([logits_process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
    ]
    if sampling.logit_bias:
        biases = [[[token], bias] for token, bias in sampling.logit_bias.items()]
        processors.insert(0, logits_process.SequenceBiasLogitsProcessor(biases))
    for _ in range(20):
        logits = (3 * random.standard_normal(32)).astype(np.float32)
        context = random.integers(0, 32, 12).tolist()
        scores = torch.from_numpy(logits.astype(np.float64))[None]
        for processor in processors:
            scores = processor(torch.tensor([context]), scores)
        tokens, probabilities = token_probabilities(adjust_logits(logits, sampling, context), sampling)
        found = np.zeros(32)
        found[slice(None) if tokens is None else tokens] = probabilities
        np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), rtol=1e-6, atol=1e-12)


def test_bias_and_penalty_change_the_greedy_token() -> None:
    def draw() -> float:
        raise AssertionError("greedy decoding draws nothing")

    assert sample_token(LOGITS, Sampling(0, logit_bias={0: 5.0}), draw) == 0
    assert sample_token(LOGITS, Sampling(0, repetition_penalty=3.0), draw, [1, 1]) == 3
    assert sample_token(LOGITS, Sampling(0, repetition_penalty=3.0), draw) == 1


def test_top_k_keeps_all_tokens_equal_to_the_last_one() -> None:
    tokens, probabilities = token_probabilities(np.array([1.0, 2.0, 1.0, 0.0]), Sampling(top_k=2))
    assert tokens is not None
    assert (tokens.tolist(), probabilities[0]) == ([0, 1, 2], probabilities[2])
