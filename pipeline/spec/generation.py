"""A language model in a bundle: which tensors of its graph are ids, mask, positions, logits and cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import Field

from pipeline.spec.frozen import Frozen


class Cache(Frozen):
    """One tensor that one layer keeps of every position it has seen."""

    input: str  # of the graph, as `past.0.key`: [batch, heads, past, width]; past may be 0
    output: str  # of the graph, as `present.0.key`: the input, and the new positions behind it


class Prompting(Frozen):
    """What a task says of its language model; all else is read off the model."""

    template: str = ""
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()  # ids that greedy answers are compared for; none: of the test split
    positions_limit: int = Field(0, ge=0)  # 0: as many as the model's own configuration says


class Generation(Frozen):
    """One graph for a prompt (no past) and for every further token (sequence of 1, or of more).

    Rows of different lengths share a batch by padding on the left; a padded place has mask 0.
    """

    ids: str = "input_ids"  # INT64 [batch, sequence]
    mask: str = "attention_mask"  # INT64 [batch, total], total = past + sequence
    positions: str = "position_ids"  # INT64 [batch, sequence]
    logits: str = "logits"  # FP32 [batch, sequence, vocabulary]
    caches: tuple[Cache, ...] = Field(min_length=1)
    tokenizer: str = "files/tokenizer.json"
    template: str = ""  # Jinja; empty: the model answers prompts, and no chat
    begin: tuple[int, ...] = ()  # ids put before a prompt
    end: tuple[int, ...] = ()  # ids that end an answer
    positions_limit: int = Field(ge=1)  # most positions of a prompt and its answer together

    def absent(self, inputs: Collection[str], outputs: Collection[str]) -> Iterator[str]:
        """Tensors it speaks of that a graph of these inputs and outputs does not have."""
        wanted = (self.ids, self.mask, self.positions, *(cache.input for cache in self.caches))
        yield from (name for name in wanted if name not in inputs)
        yield from (name for name in (self.logits, *(cache.output for cache in self.caches)) if name not in outputs)
