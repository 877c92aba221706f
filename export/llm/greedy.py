"""Compare greedy answers: each prompt alone, in one batch and read in chunks must get torch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from export.llm.decoder import TorchDecoder, real_tokens
from pipeline.contract.data import Samples
from pipeline.contract.golden import Answer, Decoder, greedy
from pipeline.contract.prompting import ANSWER_TOKENS
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation
from pipeline.system.errors import StageError


@dataclass
class GreedyComparison:
    """Result of comparing greedy generation, for parity.json."""

    prompts: int = 0
    tokens: int = 0
    ways: list[str] = field(default_factory=list)
    ties: int = 0  # answers that differ where the two likeliest tokens are equal within tolerance


def verify_greedy(
    model: nn.Module, decoder: Decoder, prompts: Sequence[Sequence[int]], config: Export
) -> GreedyComparison:
    """Check that each prompt gets torch's tokens: run alone, in one batch, and read in chunks."""
    reference, result = TorchDecoder(model, decoder.generation), GreedyComparison(prompts=len(prompts))
    count = min(ANSWER_TOKENS, decoder.generation.positions_limit - max(map(len, prompts)))
    expected = [reference.greedy(prompt, count) for prompt in prompts]
    result.tokens = sum(map(len, expected))
    one_by_one = [greedy(decoder, [prompt], count)[0] for prompt in prompts]
    methods = {
        "each prompt alone": one_by_one,
        "all in one batch, padded on the left": greedy(decoder, prompts, count),
        "read three positions at a time": greedy(decoder, prompts, count, chunk=3),
    }
    for method, answers in methods.items():
        result.ways.append(method)
        result.ties += sum(
            _count_tie(method, *arguments, config) for arguments in zip(prompts, expected, answers, strict=True)
        )
    return result


def choose_prompts(requested: Sequence[Sequence[int]], samples: Samples, generation: Generation) -> list[list[int]]:
    """Return the task's prompts, or else beginnings of test samples of unequal lengths."""
    if requested:
        return [list(prompt) for prompt in requested]
    longest = generation.positions_limit - ANSWER_TOKENS
    count = min(4, len(samples))
    rows = real_tokens(samples.batch(range(count)), generation)
    return [row[: max(1, min(3 + 4 * index, longest))] for index, row in enumerate(rows)]


def stable_answer(decoder: Decoder, prompt: Sequence[int], config: Export, rounding: float = 0.0) -> list[int]:
    """Return the greedy answer up to the first token that another machine could change, which differs by `rounding`."""
    count = min(ANSWER_TOKENS, decoder.generation.positions_limit - len(prompt))
    answer = greedy(decoder, [prompt], count)[0]
    is_tie = [
        lead <= max(_tie_margin(top, config), 2 * rounding)
        for lead, top in zip(answer.leads, answer.highest, strict=True)
    ]
    return answer.tokens[: is_tie.index(True)] if True in is_tie else answer.tokens


def _tie_margin(logit: float, config: Export) -> float:
    """Return the largest difference of two logits that is a tie: each may be off by the tolerance."""
    return 2 * (config.atol + config.rtol * abs(logit))


def _count_tie(method: str, prompt: Sequence[int], expected: Sequence[int], answer: Answer, config: Export) -> int:
    """Return 1 if an answer differs from torch's at a tie and 0 if it is equal; raise if it differs otherwise."""
    if answer.tokens == list(expected):
        return 0
    pairs = enumerate(zip(expected, answer.tokens, strict=False))
    difference = next(
        (position for position, pair in pairs if pair[0] != pair[1]), min(len(expected), len(answer.tokens))
    )
    last_position = min(difference, len(answer.tokens) - 1)
    if answer.leads[last_position] <= _tie_margin(answer.highest[last_position], config):
        return 1
    raise StageError(
        f"the ONNX file does not generate what torch does ({method}): for the prompt of {len(prompt)} ids "
        f"{list(prompt)[:8]}… torch's greedy answer is {list(expected)}, ONNX Runtime's {answer.tokens}"
    )
