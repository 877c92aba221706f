"""Export a language model: a graph with a cache that reads a prompt or one further token, and other formats of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.checks.cases import RANDOM, SHAPES, evaluated_outputs
from export.checks.parity import compare_everywhere
from export.checks.weights_check import compare_weights
from export.compare import Array, Arrays, Case, Graph, Rows, combine, compare
from export.conversion.optimize import Optimization, Written, operators, remove_model, write_optimized
from export.conversion.to_onnx import ExportResult, tensor_specs, write_onnx
from export.conversion.trace import ExportInput
from export.golden import GOLDEN_REQUESTS, GoldenInputs
from export.llm.decoder import (
    MAX_LOGITS,
    TorchDecoder,
    complete_generation,
    convert_language,
    language_export_input,
    make_generation,
    open_decoder,
    read_test_set,
    real_tokens,
    to_decoder,
    vocabulary_size,
)
from export.llm.variants import DecoderComparison
from export.llm.weight_only import LANGUAGE_CONVERTERS
from export.other_formats import Skipped, write_pt2
from export.report import LastCheck, Report
from export.subject import ModelProperties, RunFeeds, Subject
from export.variants.quantize import Converter
from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.golden import Answer, Decoder, empty_past, greedy, inputs_of, pad
from pipeline.contract.prompting import ANSWER_TOKENS
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation, Signature, TensorSpec
from pipeline.system.errors import ConfigError, StageError, install_command
from pipeline.system.files import tokenizer_ids, write_json


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


_FUSED_OPSET = 23  # the first with Attention, RMSNormalization and RotaryEmbedding
_FUSED_OPERATORS = ("Attention", "RMSNormalization", "RotaryEmbedding")
_FUSED_ATTENTION = "onnx_attention"  # our name among the attention functions of `transformers`


def convert_fused(decoder: ExportInput, config: Export, path: Path) -> tuple[ExportResult | None, Optimization]:
    """Write a language model with ONNX's own operators for attention, norms and rotary embeddings to `path`.

    Return None and the reason if that is impossible. ONNX Runtime's GroupQueryAttention was slower, does not continue
    several prompts at once, and is outside the ONNX standard.
    """
    try:
        with _fused_attention(decoder.module):
            written = write_onnx(decoder, config.model_copy(update={"opset": max(config.opset, _FUSED_OPSET)}), path)
    except (StageError, TypeError) as error:  # attention may take other arguments than those of _attend
        remove_model(path)
        return None, Optimization(config.optimize, "none", {}, str(error))
    counts = operators(path)
    fused = {kind: counts[kind] for kind in _FUSED_OPERATORS if kind in counts}
    # Torch cannot run the trace, which has ONNX's operator for attention, to explain a difference.
    return replace(written, program=None), Optimization(config.optimize, config.optimize, fused)


@contextmanager
def _fused_attention(model: nn.Module) -> Iterator[None]:
    """Compute attention by one operator of ONNX within the context, and restore the previous way."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_FUSED_ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FUSED_ATTENTION, sdpa_mask)
    every_config = (getattr(module, "config", None) for module in model.modules())
    configs: list[Any] = [config for config in every_config if hasattr(config, "_attn_implementation")]
    implementations = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _FUSED_ATTENTION
        yield
    finally:
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attend as `transformers` expects it; the heads of keys and values are not repeated for those of the queries."""
    names = {"scaling": "scale", "softcap": "softcap"}
    attended = torch.onnx.ops.symbolic(  # torch.onnx.ops.attention takes the width of queries for that of values
        "Attention",
        (query, key, value, mask),
        {names[name]: float(setting) for name, setting in settings.items() if name in names and setting is not None},
        dtype=query.dtype,
        shape=(*query.shape[:3], value.shape[3]),
        version=_FUSED_OPSET,
    )
    return attended.transpose(1, 2), None


Evaluated = Callable[[Mapping[str, Tensor]], Arrays]  # returns the outputs of the evaluation, by name
_SHORT_SHAPES = 5  # the first shapes below, which cost little
_MAX_POSITIONS = 2048  # of the longest past that is compared; the model's limit may be far higher


def cases_of_test_set(
    reference: TorchDecoder, decoder: Decoder, samples: Samples, size: int, evaluated: Evaluated
) -> Iterator[Case]:
    """Yield the test set with the logits of the evaluation, or with torch's for rows of several texts."""
    logits = decoder.generation.logits
    for texts in read_test_set(decoder, samples, size):
        outputs = evaluated(texts.batch) if texts.has_one_text else {}
        expected = {logits: outputs[logits]} if logits in outputs else None
        yield _case("test set", "the test set", reference, texts.feed, expected)


def untraced_cases(reference: TorchDecoder, decoder: Decoder, samples: Samples) -> Iterator[Case]:
    """Yield shapes that were not traced, of the tokens of the test set."""
    rows = real_tokens(samples.batch(range(min(8, len(samples)))), decoder.generation)
    yield from _shape_cases(SHAPES, reference, decoder, np.concatenate([np.asarray(row, np.int64) for row in rows]))
    yield from _beyond_window(reference, decoder)


def random_cases(reference: TorchDecoder, decoder: Decoder) -> Iterator[Case]:
    """Yield a few of these shapes with random ids."""
    ids = np.random.default_rng(0).integers(0, vocabulary_size(decoder), 64)
    yield from islice(_shape_cases(RANDOM, reference, decoder, ids), _SHORT_SHAPES)


def _beyond_window(reference: TorchDecoder, decoder: Decoder) -> Iterator[Case]:
    """Yield one more position after a past that is longer than the model's sliding window; the past is random."""
    generation, window = decoder.generation, getattr(reference.cached.model.config, "sliding_window", None)
    if not window or window + 2 > generation.positions_limit:
        return
    past_length, random = window + 1, np.random.default_rng(0)
    past = {
        name: random.normal(size=(2, array.shape[1], past_length, array.shape[3])).astype(np.float32)
        for name, array in empty_past(decoder, 2).items()
    }
    ids, mask = np.zeros((2, 1), np.int64), np.ones((2, past_length + 1), np.int64)
    mask[0, :2] = 0
    yield _case(SHAPES, f"past {past_length}, random", reference, inputs_of(generation, ids, mask, past))


def _shape_cases(kind: str, reference: TorchDecoder, decoder: Decoder, tokens: Array) -> Iterator[Case]:
    """Yield cases of several numbers of rows, lengths and paddings, with a past computed by torch."""
    generation = decoder.generation
    longest = min(generation.positions_limit, _MAX_POSITIONS, max(16, MAX_LOGITS // vocabulary_size(decoder)))
    shapes = [
        (1, 0, 1, 0),
        (2, 0, 9, 2),
        (4, 6, 1, 3),
        (2, 1, 1, 0),
        (3, 4, 7, 4),
        (1, longest - 1, 1, 0),
        (1, 0, longest, 2),
    ]
    for rows, past_length, sequence, padding in shapes:
        total = past_length + sequence
        ids = np.resize(tokens, (rows, total))
        mask = np.ones_like(ids)
        mask[::2, : padding if rows > 1 or past_length == 0 else 0] = 0
        past = empty_past(decoder, rows)
        if past_length:
            outputs = reference.run(inputs_of(generation, ids[:, :past_length], mask[:, :past_length], past))
            past = {cache.input: outputs[cache.output] for cache in generation.caches}
        text = f"past {past_length}, sequence {sequence}, {padding} padded"
        yield _case(kind, text, reference, inputs_of(generation, ids[:, past_length:], mask, past))


def _case(kind: str, text: str, reference: TorchDecoder, feed: Arrays, expected: Arrays | None = None) -> Case:
    """Return a case that compares logits and the new cache, except padding."""
    generation = reference.generation
    expected = expected or reference.run(feed)
    is_real = feed[generation.mask] == 1  # of the past, too
    masks = {generation.logits: is_real[:, -feed[generation.ids].shape[1] :]}
    for name in expected.keys() - {generation.logits}:  # [batch, heads, positions, width]
        masks[name] = np.broadcast_to(is_real[:, None], expected[name].shape[:3])
    return Case(kind, text, feed, expected, masks, generation.logits)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_genai(subject: Subject, net: nn.Module, generation: Generation, folder: Path) -> tuple[Path, Rows]:
    """Write what onnxruntime-genai runs: the ONNX file, genai_config.json and the files of the tokenizer."""
    if find_spec("onnxruntime_genai") is None:
        raise Skipped(f"onnxruntime_genai is not installed here; to install it: {install_command('genai')}")
    task: Any = subject.task
    core: Any = net
    assert subject.files is not None, "of a language model"
    generation = complete_generation(generation, task, subject.files)
    inputs = {spec.name: spec for spec in tensor_specs(subject.path)[0]}
    write_json(folder / "genai_config.json", _genai_config(core.config, generation, inputs))
    for file in subject.path.parent.glob(f"{subject.path.name}*"):
        shutil.copyfile(file, folder / file.name)
    for file in filter(Path.is_file, (subject.files / name for name in _TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)
    if not (folder / "tokenizer_config.json").exists():
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": generation.template}
        write_json(folder / "tokenizer_config.json", tokenizer)
    prompts = choose_prompts(task.prompting().prompts, subject.test, generation)
    cases = _prompt_cases(TorchDecoder(net, generation), Decoder(dict, generation, inputs), prompts)
    run = _open_genai(folder, generation)
    return folder, [asdict(compare(partial(run, length), case, subject.config)) for length, case in cases]


def _genai_config(config: Any, generation: Generation, inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    specs = [inputs[cache.input] for cache in generation.caches]
    kinds = [cache.input.rpartition(".")[2] for cache in generation.caches]
    if kinds != ["key", "value"] * (len(kinds) // 2) or len({spec.shape[1::2] for spec in specs}) > 1:
        raise StageError("onnxruntime-genai reads caches of keys and values of one shape, and this model has others")
    _, heads, _, width = specs[0].shape
    sampling = generation.sampling
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": generation.positions_limit,
            "bos_token_id": next(iter(generation.begin), 0),
            "eos_token_id": list(generation.end),
            "pad_token_id": next(iter(generation.end), 0),
            "decoder": {
                "filename": "model.onnx",
                "session_options": {},
                "hidden_size": config.hidden_size,
                "head_size": width,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(specs) // 2,
                "inputs": {
                    "input_ids": generation.ids,
                    "attention_mask": generation.mask,
                    "position_ids": generation.positions,
                    "past_key_names": "past.%d.key",
                    "past_value_names": "past.%d.value",
                },
                "outputs": {
                    "logits": generation.logits,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": generation.positions_limit,
            "past_present_share_buffer": False,
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
    }


def _prompt_cases(
    reference: TorchDecoder, decoder: Decoder, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Case]]:
    """Yield the length of each prompt, and a case of the logits of the prompt and each token of torch's answer."""
    generation = reference.generation
    for prompt in prompts:
        answer = reference.greedy(prompt, min(ANSWER_TOKENS, generation.positions_limit - len(prompt)))
        ids = np.array([[*prompt, *answer[:-1]]])
        feed = inputs_of(generation, ids, np.ones_like(ids), empty_past(decoder, 1))
        logits = reference.run(feed)[generation.logits][0, len(prompt) - 1 :]
        text = f"a prompt of {len(prompt)} tokens, run by onnxruntime-genai"
        yield len(prompt), Case("prompts", text, feed, {generation.logits: logits}, chosen=generation.logits)


def _open_genai(folder: Path, generation: Generation) -> Callable[[int, Mapping[str, Array]], Arrays]:
    """Return the folder as a function that reads a prompt of this length at once, then token by token."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    onnxruntime_genai.Tokenizer(model)  # refuses a tokenizer of another kind
    parameters = onnxruntime_genai.GeneratorParams(model)

    def run(length: int, feed: Mapping[str, Array]) -> Arrays:
        generator, logits, ids = onnxruntime_genai.Generator(model, parameters), [], feed[generation.ids][0]
        for tokens in (ids[:length], *([token] for token in ids[length:])):
            generator.append_tokens(np.array([tokens], np.int32))
            logits.append(generator.get_logits()[0, -1])
        return {generation.logits: np.array(logits)}

    return run


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
