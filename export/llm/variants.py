"""Compare a variant of a language model with the verified file, both as graphs with a cache.

On the test set: the task's metrics, perplexity, and logits of its first samples. Beyond it: a text read token by token
must give the logits of the text read at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.checks.cases import evaluated_outputs
from export.compare import Array, Arrays
from export.llm.decoder import open_decoder, read_test_set
from export.variants.judge import Answers, BatchSizeResult, Deviation, compare_scores, measure_deviation, output_scale
from pipeline.contract.data import Samples, as_task_outputs, open_split
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.settings.stages import Cost
from pipeline.contract.signature import Generation
from pipeline.contract.task import Batch, Task
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import Interval, metric_interval
from pipeline.statistics.scores import Columns, actual_columns, score_batch
from pipeline.system.errors import ConfigError

_COMPARED_LOGITS = 1 << 24  # of the first test samples, whose logits are compared one by one
_LABELS, _IGNORED = "labels", -100  # as transformers name the tokens of a loss
_READ_TOKENS = 12  # of a text that is read token by token
_TIMED_PAST = 128  # positions in the cache of a timed step


PERPLEXITY_INCREASE = 0.01  # largest, relative to the verified file, unless export.budget has another


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of the test texts, or of the tokens that their `labels` do not ignore.

    `increase` is relative to the verified file's, over the same tokens.
    """

    value: float
    reference: float
    increase: Interval | None  # None: there are too few texts to estimate it

    def __str__(self) -> str:
        change = "" if self.increase is None else f", {_percent(self.increase)} than fp32"
        return f"perplexity {self.value:#.4g}{change}"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def faults(self, budget: Mapping[Cost, float]) -> Iterator[str]:
        """Yield a sentence if the increase may be above its limit."""
        limit = budget.get("perplexity", PERPLEXITY_INCREASE)
        if self.increase is None:
            yield "perplexity differs in too few test texts to estimate how much it increases"
        elif not self.increase.high <= limit:
            yield (
                f"{self} ({self.increase.low:+.2%} to {self.increase.high:+.2%}), over export.budget "
                f"perplexity={limit:g}"
            )


def token_losses(logits: Array, ids: Array, segments: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the negative log-likelihood of the chosen tokens that are not the first of a text, and which these are."""
    is_counted = (segments[:, 1:] == segments[:, :-1]) & chosen[:, 1:]
    scores = torch.from_numpy(logits[:, :-1]).float().log_softmax(-1)
    likelihoods = scores.gather(-1, torch.from_numpy(ids[:, 1:, None]))[..., 0].double().numpy()
    return np.where(is_counted, -likelihoods, 0.0), is_counted


def relative_increase(losses: Array, reference: Array, tokens: Array, confidence: float) -> Interval | None:
    """Return the relative increase of perplexity, paired by sample: samples count by their tokens."""
    differences = (losses - reference) / max(tokens.mean(), 1e-9)
    if not differences.any():
        return Interval(0.0, 0.0, 0.0)
    if (interval := metric_interval(Mean(differences), confidence)) is None:
        return None
    return Interval(*(float(np.expm1(value)) for value in (interval.estimate, interval.low, interval.high)))


def _percent(increase: Interval) -> str:
    return f"{abs(increase.estimate):.2%} {'higher' if increase.estimate >= 0 else 'lower'}"


@dataclass(frozen=True)
class DecoderScores:
    """What a file does on the test set."""

    columns: Columns  # the task's metrics of each sample
    losses: Array  # the negative log-likelihood of each sample's tokens
    tokens: Array  # the number of those tokens
    logits: Array  # of the first samples

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.sum() / max(1, self.tokens.sum())))


class DecoderComparison:
    """Compares files with the verified one on the test set."""

    def __init__(
        self,
        task: Any,
        model: nn.Module,
        generation: Generation,
        test: Samples,
        path: Path,
        size: int,
        confidence: float,
    ) -> None:
        self._task, self._model, self._test, self._path = task, model, test, path
        self._size, self._confidence = size, confidence
        self.generation = generation
        if self.generation.logits not in task.outputs:
            raise ConfigError(
                f"export.variants: a variant of a language model is judged by the output `{self.generation.logits}`, "
                f"which the task does not have (it has {', '.join(task.outputs)})"
            )

    def answers(self, path: Path) -> Answers:
        """Return the results on the test set, the deviation of reading token by token, and the perplexity."""
        reference, scores = self.reference, self._score(path)
        labels = actual_columns(self._task, self._test.batch(range(len(self._test))), len(self._test))
        deviation = measure_deviation({"logits": reference.logits}, {"logits": scores.logits}, self.scale)
        metrics = compare_scores(self._task, scores.columns, reference.columns | labels)
        perplexity = Perplexity(
            scores.perplexity,
            reference.perplexity,
            relative_increase(scores.losses, reference.losses, scores.tokens, self._confidence),
        )
        return Answers([BatchSizeResult(self._size, deviation, metrics)], [self._read_by_token(path)], perplexity)

    @cached_property
    def scale(self) -> Mapping[str, float]:
        return {"logits": output_scale(self.reference.logits)}

    def timed_feed(self, rows: int) -> Arrays:
        """Return the inputs of a further token, after a past of random caches."""
        decoder, past = self._open(self._path), min(_TIMED_PAST, self.generation.positions_limit - 1)
        generator = np.random.default_rng(0)
        caches = {
            name: generator.standard_normal((*empty.shape[:2], past, *empty.shape[3:])).astype(empty.dtype)
            for name, empty in empty_past(decoder, rows).items()
        }
        ids, mask = np.ones((rows, 1), np.int64), np.ones((rows, past + 1), np.int64)
        return inputs_of(decoder.generation, ids, mask, caches)

    def calibration_feeds(self, count: int) -> list[Arrays]:
        """Return texts of the training split as inputs, evenly spaced, without padding."""
        samples, decoder, generation = open_split(self._task, "train"), self._open(self._path), self.generation
        samples = samples.rearranged(sorted({index * len(samples) // count for index in range(count)}))
        feeds = []
        for case in read_test_set(decoder, samples, 1):
            for number in range(1, int(case.segments.max()) + 1):
                ids = case.feed[generation.ids][case.segments == number][None]
                feeds.append(inputs_of(generation, ids, np.ones_like(ids), empty_past(decoder, 1)))
        return feeds[:count]

    def fault_feed(self) -> Arrays:
        return next(read_test_set(self._open(self._path), self._test, 4)).feed

    @cached_property
    def reference(self) -> DecoderScores:
        return self._score(self._path)

    def _open(self, path: Path) -> Decoder:
        return open_decoder(path, self.generation)

    def _score(self, path: Path) -> DecoderScores:
        decoder, generation = self._open(path), self.generation
        columns: dict[str, list[Array]] = defaultdict(list)
        losses, tokens, kept, count = [], [], list[Array](), 0
        for case in read_test_set(decoder, self._test, self._size):
            logits = decoder.run(case.feed)[generation.logits]
            for name, values in self._score_batch(case.batch, logits).items():
                columns[name].append(values)
            labels = case.batch.get(_LABELS)
            is_counted = case.segments != 0 if labels is None else labels.numpy() != _IGNORED
            loss, is_counted = token_losses(logits, case.feed[generation.ids], case.segments, is_counted)
            losses.append(loss.sum(axis=1))
            tokens.append(is_counted.sum(axis=1))
            real = logits[case.is_real]
            kept.append(real[: max(0, _COMPARED_LOGITS // real.shape[-1] - count)])
            count += len(kept[-1])
        return DecoderScores(
            {name: np.concatenate(parts) for name, parts in columns.items()},
            *(np.concatenate(parts) for parts in (losses, tokens, kept)),
        )

    def _score_batch(self, batch: Batch, logits: Array) -> Columns:
        """Score the file's logits; other outputs of the task, which the file does not have, are torch's."""
        task: Task = self._task
        arrays = {self.generation.logits: logits}
        if len(task.outputs) > 1:
            arrays = evaluated_outputs(task, self._model, batch) | arrays
        outputs = as_task_outputs(task, {name: torch.from_numpy(array) for name, array in arrays.items()})
        return score_batch(task, lambda _: outputs, batch)

    def _read_by_token(self, path: Path) -> Deviation:
        decoder, generation = self._open(path), self.generation
        case = next(read_test_set(decoder, self._test, 1))
        ids, mask = (case.feed[name][:, -_READ_TOKENS:] for name in (generation.ids, generation.mask))
        past = empty_past(decoder, len(ids))
        at_once = decoder.run(inputs_of(generation, ids, mask, past))[generation.logits]
        steps = []
        for end in range(1, ids.shape[1] + 1):
            outputs = decoder.run(inputs_of(generation, ids[:, end - 1 : end], mask[:, :end], past))
            past = {cache.input: outputs[cache.output] for cache in generation.caches}
            steps.append(outputs[generation.logits])
        is_real = mask == 1
        expected, actual = at_once[is_real], np.concatenate(steps, axis=1)[is_real]
        return measure_deviation({"logits": expected}, {"logits": actual}, self.scale)
