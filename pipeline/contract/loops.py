"""Loops around a part of a model that become one node of its ONNX file: `repeat`, and `generate` for token sequences.

A loop in Python is traced step by step, so that its graph is long and has a fixed number of steps. While a model is
exported, these trace the step once, between marks, of which `export/conversion/to_onnx.py` makes an ONNX `Loop`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.system.errors import DataError

Step = Callable[..., Tensor | Sequence[Tensor]]

# Nodes around the trace of a step, with the same attribute `loop`. The first begins with the number of the step, the
# second with whether there is another one.
BEGIN, END = "pipe::LoopBegin", "pipe::LoopEnd"
_loops = itertools.count()


def repeat(
    step: Step, state: Sequence[Tensor], times: int, until: Callable[..., Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Call `state = step(i, *state)` for i = 0, 1, ... up to `times` times, and return the last state.

    A step keeps the shape and the type of each value. `until(*state)` is one bool: whether to stop after a step.
    """
    values = tuple(state)
    number = torch.zeros((), dtype=torch.int64, device=values[0].device)
    if not torch.compiler.is_exporting():
        for _ in range(times):
            values, number = _take_step(step, number, values), number + 1
            if until is not None and bool(until(*values)):
                break
        return values
    loop = next(_loops)
    number, *marked = _mark(BEGIN, (number, *values), loop)
    results = _take_step(step, number, tuple(marked))
    goes_on = torch.ones((), dtype=torch.bool) if until is None else until(*results).logical_not()
    return _mark(END, (goes_on, *results), loop, times)[1:]


def _mark(name: str, values: Sequence[Tensor], loop: int, times: int = 0) -> tuple[Tensor, ...]:
    """Return these values in the trace as those of a node that stands where a loop begins or ends."""
    from torch.onnx.ops import symbolic_multi_out  # slow to import

    types, shapes = [value.dtype for value in values], [value.shape for value in values]
    attributes: dict[str, Any] = {"loop": loop, "times": times}
    return tuple(symbolic_multi_out(name, values, attributes, dtypes=types, shapes=shapes, version=1))


def _take_step(step: Step, number: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = step(number, *state)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    before, after = ([(list(value.shape), value.dtype) for value in values] for values in (state, results))
    if before != after:
        raise DataError(f"repeat(): a step must keep the shape and type of each value; {before} became {after}")
    return results


def generate(
    decode: Callable[..., Tensor],
    memory: Sequence[Tensor],
    begin: int,
    end: int,
    longest: int,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens that a decoder writes, [samples, longest] and filled with `end`, and their score.

    `decode(tokens, *memory)` returns logits [rows, tokens, vocabulary] of what follows each of the tokens, none of
    which may see those behind it. `memory` is what it reads of each sample, such as the encoder's output and its mask.
    One beam is greedy search. The score is the sum of log-probabilities over the number of tokens to the power
    `length_penalty`; the best of all beams is returned.
    """
    samples, device = memory[0].shape[0], memory[0].device
    memory = [value.repeat_interleave(beams, 0) for value in memory]
    places, beam = torch.arange(longest + 1, device=device), torch.arange(beams, device=device)
    first_row = beams * torch.arange(samples, device=device).unsqueeze(1)

    def step(i: Tensor, tokens: Tensor, sums: Tensor, ended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = decode(tokens, *memory).index_select(1, i.reshape(1)).squeeze(1)
        size = logits.shape[1]
        after_end = torch.where(torch.arange(size, device=device) == end, 0.0, -torch.inf).to(logits.dtype)
        gains = torch.where(ended.unsqueeze(1), after_end, logits.log_softmax(1))
        sums, chosen = (sums.reshape(-1, 1) + gains).reshape(-1, beams * size).topk(beams)
        rows, token = (chosen // size + first_row).reshape(-1), (chosen % size).reshape(-1)
        return torch.where(places == i + 1, token.unsqueeze(1), tokens[rows]), sums, ended[rows] | (token == end)

    tokens = torch.where(places == 0, begin, end).expand(samples * beams, -1)
    sums = torch.where(beam == 0, 0.0, -torch.inf).expand(samples, -1)  # the beams differ from the second token on
    state = tokens, sums, torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    tokens, sums, _ = repeat(step, state, longest, until=lambda *state: state[2].all())
    written = tokens.reshape(-1, beams, longest + 1)[:, :, 1:]
    scores = sums / ((written != end).sum(2) + 1).clamp(max=longest) ** length_penalty
    best = scores.argmax(1, keepdim=True)
    chosen = written.gather(1, best.unsqueeze(2).expand(-1, 1, longest)).squeeze(1)
    return chosen, scores.gather(1, best).squeeze(1)
