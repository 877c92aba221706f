from __future__ import annotations

import numpy as np
import pytest

from serve.generate.sampling import Sampling, log_softmax, nucleus, pick, sample_token, token_logprob

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
