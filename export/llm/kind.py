"""Export a language model: a graph with a cache that reads a prompt or one further token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from export.checks.cases import evaluated_outputs
from export.checks.everywhere import compare_everywhere
from export.checks.weights_check import compare_weights
from export.compare import Arrays, Graph, Rows, combine, compare
from export.conversion.optimize import Written, write_optimized
from export.conversion.to_onnx import ExportResult
from export.conversion.trace import ExportInput
from export.golden import GOLDEN_REQUESTS, GoldenInputs
from export.llm.cases import cases_of_test_set, random_cases, untraced_cases
from export.llm.decoder import (
    TorchDecoder,
    complete_generation,
    convert_language,
    language_export_input,
    make_generation,
    open_decoder,
    to_decoder,
)
from export.llm.fused_attention import convert_fused
from export.llm.genai import write_genai
from export.llm.greedy import choose_prompts, stable_answer, verify_greedy
from export.llm.texts import read_test_set
from export.llm.variants import DecoderComparison
from export.llm.weight_only import LANGUAGE_CONVERTERS
from export.other_formats import Skipped, write_pt2
from export.report import LastCheck, Report
from export.subject import ModelProperties, RunFeeds, Subject
from export.variants.quantize import Converter
from pipeline.contract.config import Config
from pipeline.contract.golden import Decoder, empty_past, inputs_of, pad
from pipeline.contract.signature import Signature
from pipeline.system.errors import ConfigError
from pipeline.system.files import tokenizer_ids


class LanguageExporter:
    """A model that is compared as it is evaluated, at shapes with a past, and by its greedy answers."""

    original = "torch"
    converters: Mapping[str, Converter] = LANGUAGE_CONVERTERS
    measures_fp32_alone = False  # it was verified token by token

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        task: Any = subject.task
        self.net = task.language_model(subject.model)
        self.generation = make_generation(task, self.net)
        self._task = task
        limits = dict.fromkeys(("sequence", "total"), self.generation.positions_limit)
        self.properties = ModelProperties(axes=limits, generation=self.generation)

    def export_input(self) -> ExportInput:
        return language_export_input(self.net, self.generation)

    def write(self) -> Written:
        config, path = self.subject.config, self.subject.path
        if config.optimize != "transformers":
            return write_optimized(self._convert, path, self.subject.model, config)
        written, optimization = convert_fused(self.export_input(), config, path)
        return Written(written or self._convert(), optimization, self._convert)

    def _convert(self) -> ExportResult:
        return convert_language(self.net, self.generation, self.subject.config, self.subject.path)

    def phases(self, result: ExportResult) -> Iterator[Report]:
        path, config, decoder = self.subject.path, self.subject.config, self._decoder()
        test_set, *shapes = self.compare_decoder(decoder)
        yield Report([test_set], shapes)
        cases = list(random_cases(TorchDecoder(self.net, self.generation), decoder))
        report, largest = compare_everywhere(cases, path, config), max(case.rows for case in cases)
        coverage = [{**row, "batch_size": largest} for row in report.coverage]
        yield replace(report, coverage=coverage, weights=compare_weights(path, result.source.module))

    def compare_decoder(self, decoder: Decoder) -> Rows:
        """Compare on the whole test set, with the outputs of the evaluation, and at untraced shapes."""
        task, model, test, config = self._task, self.subject.model, self.subject.test, self.subject.config
        reference = TorchDecoder(self.net, self.generation)
        cases = cases_of_test_set(
            reference, decoder, test, max(config.batch_sizes), partial(evaluated_outputs, task, model)
        )
        parts = [compare(decoder.run, case, config) for case in cases]
        whole = replace(combine(parts), batch_size=max(part.batch_size for part in parts))
        shapes = (compare(decoder.run, case, config) for case in untraced_cases(reference, decoder, test))
        return [asdict(comparison) for comparison in (whole, *shapes)]

    def last_check(self) -> LastCheck:
        """Compare greedy answers token by token."""
        result = asdict(verify_greedy(self.net, self._decoder(), self._prompts(), self.subject.config))
        line = f"greedy answers to {result['prompts']} prompts are torch's, {result['tokens']} tokens"
        return LastCheck({"greedy": result}, [line])

    def fault_feeds(self) -> Iterator[Arrays]:
        decoder, test = self._decoder(), self.subject.test
        reference = TorchDecoder(self.net, self.generation)
        yield from (case.feed for case in untraced_cases(reference, decoder, test))
        yield from (texts.feed for texts in read_test_set(decoder, test, 4))

    def write_format(self, name: str, folder: Path) -> tuple[Path, Rows]:
        if name == "savedmodel":
            raise Skipped("the decoder of a language model, with its cache, has no SavedModel; other models have")
        if name == "genai":
            return write_genai(self.subject, self.net, self.generation, folder)
        return write_pt2(self, folder)

    def compare_format(self, run_feeds: RunFeeds) -> Rows:
        return self.compare_decoder(
            to_decoder(lambda feed: run_feeds([dict(feed)])[0], self.subject.path, self.generation)
        )

    def open_variants(self, config: Config) -> DecoderComparison:
        size, confidence, subject = max(config.export.batch_sizes), config.evaluate.confidence, self.subject
        return DecoderComparison(
            self._task, subject.model, self.generation, subject.test, subject.path, size, confidence
        )

    def complete(self, properties: ModelProperties, files: Path) -> ModelProperties:
        return replace(properties, generation=complete_generation(self.generation, self._task, files))

    def check_bundle(self, bundle: Path, signature: Signature) -> None:
        check_tokenizer(bundle, signature)

    def golden_inputs(self, graph: Graph, signature: Signature, rounding: float) -> GoldenInputs:
        assert signature.generation is not None
        decoder = Decoder(graph, signature.generation, signature.input_specs)
        prompts = self._prompts()[:GOLDEN_REQUESTS]
        answers = (stable_answer(decoder, prompt, self.subject.config, rounding) for prompt in prompts)
        generated = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
        return GoldenInputs(_with_past(decoder, prompts), generated)

    def _decoder(self) -> Decoder:
        return open_decoder(self.subject.path, self.generation)

    def _prompts(self) -> list[list[int]]:
        return choose_prompts(self._task.prompting().prompts, self.subject.test, self.generation)


def _with_past(decoder: Decoder, prompts: list[list[int]]) -> Arrays:
    """Return inputs that continue prompts whose first half is in the cache already."""
    ids, mask = pad(prompts)
    length = ids.shape[1] // 2
    past: Arrays = empty_past(decoder, len(prompts))
    if length:
        read = decoder.run(inputs_of(decoder.generation, ids[:, :length], mask[:, :length], past))
        past = {cache.input: read[cache.output] for cache in decoder.generation.caches}
    return inputs_of(decoder.generation, ids[:, length:], mask, past)


def check_tokenizer(bundle: Path, signature: Signature) -> None:
    """Check that every id of a language model's tokenizer is one the model has."""
    generation = signature.generation
    assert generation is not None, "of a language model"
    path = bundle / generation.tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the bundle of a language model needs {generation.tokenizer}: let the task's make_files() write it, and "
            'name it in the codec, as in files = ("tokenizer.json",)'
        )
    logits = next(spec for spec in signature.outputs if spec.name == generation.logits)
    vocabulary_size, highest = logits.shape[-1], max((*tokenizer_ids(path), *generation.begin, *generation.end))
    if isinstance(vocabulary_size, int) and highest >= vocabulary_size:
        raise ConfigError(
            f"{path.name}: has the id {highest}, but the model knows {vocabulary_size} ids (0 to {vocabulary_size - 1})"
        )
