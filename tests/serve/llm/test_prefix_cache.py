from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.bundle import open_bundle
from serve.llm.engine import Engine, EngineLimits
from serve.llm.kv_cache import BLOCK_TOKENS, CacheLayer, KVCache, PrefixCache, copy_blocks, to_device
from serve.llm.model import LanguageModel, TextGenerator
from serve.llm.sampling import Sampling, TokenLogprob
from serve.llm.sequence import GenerationOptions, SequenceGroup, TextSequence
from serve.runtime.loading import load_predictor
from tests.serve.llm import tiny

LAYER = CacheLayer("past", "present", heads=1, width=1, dtype=np.float32)
BLOCK_BYTES = BLOCK_TOKENS * LAYER.position_bytes
SYSTEM = np.random.default_rng(8).integers(4, tiny.VOCABULARY, 37).tolist()
GREEDY = Sampling(temperature=0)


def _prefix_cache(blocks: int) -> PrefixCache:
    cache = PrefixCache([LAYER])
    cache.limit(blocks * BLOCK_BYTES)
    return cache


def _store(prefix: PrefixCache, tokens: Sequence[int]) -> None:
    """Store tokens whose values are the tokens themselves, after three positions of padding."""
    values = np.array([[99] * 3 + list(tokens)], np.float32).reshape(1, 1, -1, 1)
    prefix.store(tokens, KVCache(np.array([3]), len(tokens) + 3, (to_device(values, "cpu"),)), 0)


def _found(prefix: PrefixCache, tokens: Sequence[int]) -> int:
    return len(prefix.find([*tokens, 0]))


def _text(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK_TOKENS))


def test_common_beginning_is_stored_once() -> None:
    prefix, system = _prefix_cache(9), _text(0, 2)
    _store(prefix, [*system, *_text(500, 1)])
    _store(prefix, [*system, *_text(700, 1), 1, 2])
    assert prefix.bytes == 4 * BLOCK_BYTES
    assert _found(prefix, [*system, *_text(700, 1)]) == 3
    assert _found(prefix, [*system, *_text(900, 1)]) == 2
    assert _found(prefix, _text(500, 1)) == 0, "a block belongs to what comes before it"


def test_blocks_have_the_values_of_their_tokens() -> None:
    prefix, tokens = _prefix_cache(9), _text(0, 3)
    _store(prefix, tokens)
    (copied,) = copy_blocks([LAYER], [prefix.find([*tokens, 0]), []], np.array([1, 5]), 40)
    assert copied[:, 0, :, 0].tolist() == [[0, *tokens[:39]], [0] * 40]


def test_last_token_is_always_read() -> None:
    prefix, tokens = _prefix_cache(9), _text(0, 2)
    _store(prefix, tokens)
    assert len(prefix.find(tokens)) == 1


def test_least_recently_used_blocks_are_removed_first() -> None:
    prefix = _prefix_cache(4)
    first, second, third = _text(0, 2), _text(1000, 2), _text(2000, 2)
    _store(prefix, first)
    _store(prefix, second)
    assert _found(prefix, first) == 2
    _store(prefix, third)
    assert [_found(prefix, text) for text in (second, first, third)] == [0, 2, 2]
    prefix.limit(3 * BLOCK_BYTES)
    assert [_found(prefix, text) for text in (first, third)] == [1, 2], "the end of a text goes before its beginning"
    prefix.limit(-1)
    assert prefix.bytes == 0


def test_text_longer_than_the_memory_keeps_its_beginning() -> None:
    prefix = _prefix_cache(2)
    _store(prefix, _text(0, 1))
    _store(prefix, _text(0, 5))
    assert _found(prefix, _text(0, 5)) == 2
    assert prefix.bytes == 2 * BLOCK_BYTES


@pytest.fixture
def engine(language_model: LanguageModel, pool: Executor) -> Engine:
    return Engine(language_model.graph, EngineLimits(4, 64, 1 << 22, prefill_tokens=16), pool)


def _sequence(prompt: Sequence[int], most: int, **options: Any) -> TextSequence:
    group = SequenceGroup(GenerationOptions(max_tokens=most, sampling=GREEDY, **options))
    return TextSequence(group, 0, prompt, (tiny.END,), lambda ids: "")


def _generate(engine: Engine, *sequences: TextSequence) -> list[list[Any]]:
    async def run() -> list[list[Any]]:
        async def logprobs(sequence: TextSequence) -> list[Any]:
            return [entry async for chunk in engine.generate([sequence]) for entry in chunk.logprobs]

        found = await asyncio.gather(*map(logprobs, sequences))
        while engine._task is not None:
            await asyncio.sleep(0)
        return found

    return asyncio.run(run())


def _reference(path: Path, sequence: TextSequence) -> list[int]:
    return tiny.greedy_tokens(path, sequence.prompt, sequence.group.options.max_tokens)


def _answer(sequence: TextSequence) -> list[int]:
    return sequence.tokens[len(sequence.prompt) :]


def test_requests_with_the_same_beginning_read_only_the_rest(engine: Engine, tiny_path: Path) -> None:
    first = _sequence([*SYSTEM, 7, 8], 20)
    _generate(engine, first)
    others = [_sequence(prompt, 20) for prompt in ([*SYSTEM, 9], [*SYSTEM, 7, 8, 5, 6], [5, *SYSTEM], [4, 5])]
    _generate(engine, *others)
    for sequence in (first, *others):
        assert _answer(sequence) == _reference(tiny_path, sequence)
    # The first two are read together, from the column on where the longer one is not cached.
    assert [sequence.cached_tokens for sequence in (first, *others)] == [0, 29, 32, 0, 0]
    metrics = engine.metrics
    assert (metrics.prefix_hits, metrics.prefix_queries) == (29 + 32, 39 + 38 + 41 + 38 + 2)
    assert 0 < engine.prefix.bytes <= engine.limits.cache_bytes


def test_next_turn_of_a_chat_finds_the_last_answer(engine: Engine, tiny_path: Path) -> None:
    turn = _sequence(SYSTEM, 30)
    _generate(engine, turn)
    following = _sequence([*turn.tokens, 7, 7, 7], 10)
    _generate(engine, following)
    assert following.cached_tokens == (len(turn.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert _answer(following) == _reference(tiny_path, following)


def test_logprobs_of_a_prompt_are_computed_although_it_is_cached(engine: Engine) -> None:
    _generate(engine, _sequence(SYSTEM, 2))
    plain = _generate(
        Engine(engine._graph, engine.limits, engine._pool), _sequence(SYSTEM, 2, top_logprobs=0, echo=True)
    )
    echo, other = _sequence(SYSTEM, 2, top_logprobs=0, echo=True), _sequence([*SYSTEM, 5], 2)
    found = _generate(engine, echo, other)
    assert echo.cached_tokens == 0
    assert len(found[0]) == len(SYSTEM) + 2
    for entry, expected in zip(found[0][1:], plain[0][1:], strict=True):
        assert isinstance(entry, TokenLogprob)
        assert entry.token == expected.token
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_logits_differ_only_by_rounding(engine: Engine) -> None:
    prompt = [*SYSTEM, 5, 6]
    (plain,) = _generate(engine, _sequence(prompt, 8, top_logprobs=5))
    (cached,) = _generate(engine, _sequence(prompt, 8, top_logprobs=5))
    assert engine.metrics.prefix_hits == 32
    for entry, expected in zip(cached, plain, strict=True):
        assert [token for token, _ in entry.top] == [token for token, _ in expected.top]
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in expected.top], abs=1e-4)


def test_failed_sequence_leaves_nothing_in_the_prefix_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine._graph.run

    def spoiled(cache: Any, ids: Any) -> Any:
        logits, after = run(cache, ids)
        return np.full_like(logits, np.nan), after

    monkeypatch.setattr(engine._graph, "run", spoiled)
    with pytest.raises(ArithmeticError):
        _generate(engine, _sequence(SYSTEM, 8))
    assert engine.prefix.bytes == 0


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModel]:
    """A model whose rows influence each other."""
    path = tiny.build(tmp_path_factory.mktemp("leak") / "bundle", leak=0.3)
    model = load_predictor(open_bundle(path), None, None).language_model
    assert isinstance(model, LanguageModel)
    return path, model


def test_prefixes_serve_models_that_generate_one_by_one(one_by_one: tuple[Path, LanguageModel], pool: Executor) -> None:
    path, model = one_by_one
    engine = TextGenerator(model, open_bundle(path), pool).engine
    assert engine.limits.sequences == 1
    sequences = [_sequence([*SYSTEM, token], 12) for token in (5, 6, 7)]
    _generate(engine, *sequences)
    assert [sequence.cached_tokens for sequence in sequences] == [0, 32, 32]
    assert [_answer(sequence) for sequence in sequences] == [_reference(path, sequence) for sequence in sequences]
