from __future__ import annotations

import numpy as np
import pytest

from serve.llm.engine import Batch, Prefill, prefill_batch_size
from serve.llm.kv_cache import PrefixCache
from serve.llm.model import LanguageModel
from serve.llm.sampling import Sampling, TokenLogprob
from serve.llm.sequence import GenerationOptions, SequenceGroup, TextSequence
from tests.serve.llm import tiny


def _writing(prompt: list[int], *, top: int | None = None, echo: bool = False) -> TextSequence:
    order = GenerationOptions(max_tokens=1, sampling=Sampling(temperature=0), top_logprobs=top, echo=echo)
    return TextSequence(SequenceGroup(order), 0, prompt, (), lambda ids: "")


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([5], 1), ([5, 5, 5], 3), ([10, 9, 8, 2], 3), ([2, 10], 1), ([10, 2], 1), ([60, 60], 1), ([200, 3], 1)],
)
def test_prompts_are_batched_when_little_is_padding(lengths: list[int], count: int) -> None:
    waiting = [_writing(list(range(place, place + size))) for place, size in enumerate(lengths)]
    assert prefill_batch_size(waiting, max_tokens=100, max_sequences=9) == count


def test_empty_queue_gives_an_empty_batch() -> None:
    assert prefill_batch_size([], 100, 9) == 0


def test_equal_prompts_take_one_row() -> None:
    assert prefill_batch_size([_writing([1] * 60)] * 9, max_tokens=100, max_sequences=9) == 9
    assert prefill_batch_size([_writing([1] * 60)] * 9, max_tokens=100, max_sequences=4) == 4


def _batch(language_model: LanguageModel) -> Batch:
    prefix = PrefixCache(language_model.graph.layers)
    prefix.limit(1 << 20)
    return Batch(language_model.graph, prefix)


@pytest.mark.parametrize("part", [1, 5, 100])
def test_prefill_result_does_not_depend_on_the_parts(language_model: LanguageModel, part: int) -> None:
    prompts = [list(range(10, 22)), list(range(40, 49)), list(range(10, 22))]
    sequences = [_writing(one, top=1, echo=True) for one in prompts]
    prefill = Prefill(_batch(language_model), sequences)
    while not prefill.done:
        prefill.advance(part)
    assert prefill.cache is not None
    assert prefill.cache.rows == 2
    assert prefill.rows(sequences) == [0, 1, 0]
    for one in sequences:
        ids = np.array([one.prompt])
        logits, _ = language_model.graph.run(language_model.graph.empty_cache([0]), ids)
        assert np.allclose(prefill.next_logits(one), logits[0, -1], atol=1e-4)
        first, *rest = prefill.logprobs(one)
        assert first == one.prompt[0]
        wanted = [_logprob(logits[0, place], token) for place, token in enumerate(one.prompt[1:])]
        found = [other for other in rest if isinstance(other, TokenLogprob)]
        assert [other.token for other in found] == list(one.prompt[1:])
        assert [other.logprob for other in found] == pytest.approx(wanted, abs=1e-4)


def test_parts_become_shorter_to_limit_the_attention_scores(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.llm.kv_cache.MAX_SCORES_BYTES", 8 * 4 * tiny.HEADS * 4)
    prefill, read = Prefill(_batch(language_model), [_writing(list(range(10, 24)))]), [0]
    while not prefill.done:
        prefill.advance(8)
        assert prefill.cache is not None
        read.append(prefill.cache.past)
    assert read == [0, 4, 6, 8, 10, 11, 12, 13, 14]


def _logprob(logits: np.ndarray[tuple[int], np.dtype[np.float32]], token: int) -> float:
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def test_prompt_logprobs_only_on_request(language_model: LanguageModel) -> None:
    sequence = _writing([4, 5], top=1)
    prefill = Prefill(_batch(language_model), [sequence])
    prefill.advance(10)
    assert prefill.logprobs(sequence) == []
    assert tiny.POSITIONS > prefill.longest == 2
