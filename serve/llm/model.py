"""A language model of a bundle: tokenizer, graph and engine. Loading checks that sequences may share a batch."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Array
from pipeline.contract.prompting import ChatTemplate
from pipeline.contract.signature import Generation
from pipeline.system.errors import BundleError, ConfigError, InvalidPayload, ResourceError, install_command
from serve.llm.engine import Engine, EngineLimits
from serve.llm.kv_cache import DecoderGraph, KVCache
from serve.llm.openai_api import ChatRequest, CompletionRequest, generation_options
from serve.llm.reasoning import BEGIN, END
from serve.llm.sequence import GenerationOptions, SequenceGroup, TextSequence
from serve.monitoring.metrics import Tokens
from serve.runtime.session import Session

MAX_SEQUENCES = 128  # of one request, whatever the bundle's limit
_INLINE_CHARACTERS = 512  # of prompts, or token ids, that are encoded faster than a thread is reached
_CHECK_PROMPT_TOKENS = 12  # enough for padding to matter
_CHECK_STEPS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanguageModel:
    """A loaded and checked language model."""

    tokenizer: ModelTokenizer
    graph: DecoderGraph
    unbatched_reason: str  # why sequences must not share a batch; empty where they may

    def open(self, bundle: Bundle, pool: Executor) -> TextGenerator:
        return TextGenerator(self, bundle, pool)


class TextGenerator:
    """Turns parsed requests into sequences and runs them."""

    def __init__(self, model: LanguageModel, bundle: Bundle, pool: Executor) -> None:
        limits, reason = bundle.signature.limits, model.unbatched_reason
        self.tokenizer, self._pool = model.tokenizer, pool
        rows = 1 if reason else bundle.signature.runtime.batch_rows
        self.engine = Engine(model.graph, EngineLimits(rows, limits.max_waiting, limits.max_cache_bytes), pool)
        self.batching = f"one by one: {reason}" if reason else "together"  # shown in the model's metadata
        self._max_sequences = min(MAX_SEQUENCES, limits.max_batch_size)

    def tokens(self) -> Tokens:
        engine = self.engine
        return Tokens(
            engine.metrics,
            engine.running,
            engine.waiting,
            engine.cache_bytes,
            engine.limits.cache_bytes,
            engine.prefix.bytes,
        )

    async def encode_prompts(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Return the token ids of each prompt; long prompts are encoded in a thread."""
        count = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        if count * request.n > self._max_sequences:
            raise InvalidPayload(f"n: {count} prompts times {request.n} are more than {self._max_sequences} texts")
        if isinstance(request, CompletionRequest) and sum(map(len, request.prompts)) <= _INLINE_CHARACTERS:
            return self._encode(request)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, request)

    def options(self, request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]]) -> GenerationOptions:
        """Return the options, limited by the model's positions and by memory."""
        longest, limit = max(map(len, prompts)), self.tokenizer.generation.positions_limit
        if longest > limit - (request.token_limit != 0):
            field = "prompt" if isinstance(request, CompletionRequest) else "messages"
            raise InvalidPayload(f"{field}: {longest} tokens; the model has {limit} positions for them and its answer")
        room = max(1, min(limit, self.engine.max_positions) - longest)
        options = generation_options(request, room, self.tokenizer.generation.sampling)
        self._check_ids("logit_bias", options.sampling.logit_bias)
        self._check_ids("stop_token_ids", options.stop_token_ids)
        if longest + options.max_tokens > limit:
            raise InvalidPayload(
                f"max_tokens: {longest} tokens of the prompt and {options.max_tokens} of the answer "
                f"are more than the model's {limit} positions"
            )
        self.engine.check_fits(longest + options.max_tokens)
        return options

    def sequences(self, group: SequenceGroup, prompts: Sequence[Sequence[int]], count: int) -> list[TextSequence]:
        """Return `count` sequences of each prompt, in OpenAI's order."""
        end, decode = (*self.tokenizer.generation.end, *group.options.stop_token_ids), self.tokenizer.text
        repeated = [prompt for prompt in prompts for _ in range(count)]
        return [TextSequence(group, index, prompt, end, decode) for index, prompt in enumerate(repeated)]

    def _encode(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            prompts = [self.tokenizer.encode_chat(request.template_messages, request.chat_template_kwargs)]
        else:
            prompts = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]
        for ids in prompts:
            if not ids:
                raise InvalidPayload("prompt: must have at least one token; give a text")
            self._check_ids("prompt", ids)
        return prompts

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocabulary = self.tokenizer.vocabulary
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            raise InvalidPayload(f"{field}: {wrong[0]} is not a token id; the model's are 0 to {vocabulary - 1}")


def load_language_model(bundle: Bundle, session: Session) -> LanguageModel:
    """Load and check a language model; every defect of the bundle is raised here, before the first request."""
    tokenizer, graph = ModelTokenizer.open(bundle), DecoderGraph(session, bundle.signature)
    try:
        reason = batching_problem(bundle, graph)
    except BundleError:
        raise
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise BundleError(
            f"{bundle.path}: the model cannot generate text: {' '.join(str(error).split())}; export again"
        ) from error
    if reason:
        log.warning("model=%s texts=one-by-one reason=%r", bundle.name, reason)
    return LanguageModel(tokenizer, graph, reason)


def batching_problem(bundle: Bundle, graph: DecoderGraph) -> str:
    """Return why sequences must not share a batch; empty where padding and other rows change no logits."""
    generation, golden = bundle.signature.generation, bundle.golden()
    assert generation is not None, "only for language models"
    if generation.positions_limit < _CHECK_STEPS + 2:
        return "the model has too few positions to check whether its results depend on the batch"
    tokens = golden.inputs[generation.ids][0].tolist()
    long = np.resize(tokens[::-1], min(_CHECK_PROMPT_TOKENS, generation.positions_limit - _CHECK_STEPS)).tolist()
    short = tokens[: max(1, len(long) // 2)]
    single = _greedy_logits(graph, [short])
    batched = _greedy_logits(graph, [short, long])
    for step, (one, both) in enumerate(zip(single, batched, strict=True)):
        if not np.allclose(one[0], both[0], rtol=golden.rtol, atol=golden.atol):
            difference = float(np.abs(one[0] - both[0]).max())
            return f"the logits of token {step} differ by {difference:.3g} when another text is in the batch"
    return ""


def _greedy_logits(graph: DecoderGraph, prompts: list[list[int]]) -> list[Array]:
    """Return the logits [rows, vocabulary] of the first steps of greedy decoding."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = np.array([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)], np.int64)
    cache: KVCache = graph.empty_cache(pads)
    steps: list[Array] = []
    for _ in range(_CHECK_STEPS):
        logits, cache = graph.run(cache, ids)
        steps.append(logits[:, -1])
        ids = logits[:, -1].argmax(axis=1)[:, None]
    return steps


try:
    from tokenizers import Tokenizer

except ModuleNotFoundError as missing:
    raise ResourceError(
        f"serving a language model needs the package {missing.name}; to install it: {install_command('serve')}"
    ) from missing


class ModelTokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, vocabulary: int, max_token_characters: int
    ) -> None:
        self._tokenizer, self.generation, self.vocabulary = tokenizer, generation, vocabulary
        self._max_characters = generation.positions_limit * max_token_characters
        self._chat_template = self._load_template()

    @classmethod
    def open(cls, bundle: Bundle) -> ModelTokenizer:
        """Load the tokenizer of a bundle and check that it matches the model."""
        generation = bundle.signature.generation
        assert generation is not None, "only for language models"
        path = bundle.path / generation.tokenizer
        if generation.tokenizer not in bundle.manifest.files:
            raise BundleError(
                f"{path}: signature.json names this tokenizer, but the bundle does not contain it; export again"
            )
        tokenizer = _read_tokenizer(path)
        token_ids = tokenizer.get_vocab(with_added_tokens=True)
        (axis,) = (spec.shape[-1] for spec in bundle.signature.outputs if spec.name == generation.logits)
        vocabulary = axis if isinstance(axis, int) else max(token_ids.values(), default=-1) + 1
        if beyond := sorted(token for token, token_id in token_ids.items() if token_id >= vocabulary):
            raise BundleError(
                f"{path}: its token {beyond[0]!r} has id {token_ids[beyond[0]]}, but the model has "
                f"{vocabulary} tokens; the tokenizer belongs to another model"
            )
        special = (*generation.begin, *generation.end)
        if wrong := [token_id for token_id in special if not 0 <= token_id < vocabulary]:
            raise BundleError(
                f"signature.json: token id {wrong[0]} in generation is not in the vocabulary of {vocabulary} tokens"
            )
        return cls(tokenizer, generation, vocabulary, max(map(len, token_ids), default=1))

    def _load_template(self) -> ChatTemplate | None:
        generation = self.generation
        if not generation.template:
            return None
        begin, end = (self.text(ids, special=True) for ids in (generation.begin, generation.end[:1]))
        try:
            special_tokens = generation.special_tokens or {"bos_token": begin, "eos_token": end}
            return ChatTemplate(generation.template, special_tokens)
        except ConfigError as error:
            raise BundleError(f"signature.json: {error}; export again") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the model's begin tokens."""
        ids, begin = self._encode(text, "prompt"), list(self.generation.begin)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def encode_chat(
        self, messages: Sequence[dict[str, str]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Return the ids of a chat; only its template adds special tokens, as in transformers."""
        if self._chat_template is None:
            raise InvalidPayload("this model has no chat template; use /openai/v1/completions")
        return self._encode(self._chat_template.render(messages, variables), "messages")

    def _encode(self, text: str, field: str) -> list[int]:
        if len(text) > self._max_characters:
            raise InvalidPayload(
                f"{field}: {len(text)} characters do not fit in the model's {self.generation.positions_limit} positions"
            )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids; `special` includes special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def token(self, token_id: int) -> str:
        """Return the text of a single token."""
        return self.text([token_id], special=True)


def _read_tokenizer(path: Path) -> Any:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        for token in body.get("added_tokens") or []:  # special tokens are left out of texts
            token["special"] = token["special"] and token["content"] not in (BEGIN, END)
        tokenizer = Tokenizer.from_str(json.dumps(body))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise BundleError(f"{path}: not a file of the package tokenizers: {error}; export again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
