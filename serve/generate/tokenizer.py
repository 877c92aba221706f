"""The tokenizer of a language model, its special tokens, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError, InvalidPayload, ResourceError, install_command
from pipeline.contract.signature import Generation

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
        begin = self.text(generation.begin, special=True)
        end = self.text(generation.end[:1], special=True)
        self._chat_template = ChatTemplate(generation.template, begin, end) if generation.template else None

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
        tokenizer = _read(path)
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

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Return the ids of a prompt, with the model's begin tokens."""
        if len(text) > self._max_characters:
            raise InvalidPayload(
                f"{field}: {len(text)} characters do not fit in the model's {self.generation.positions_limit} positions"
            )
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        begin = list(self.generation.begin)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]  # chat templates include them

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._chat_template is None:
            raise InvalidPayload("this model has no chat template; use /openai/v1/completions")
        return self.encode(self._chat_template.render(messages), "messages")

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids; `special` includes special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def token(self, token_id: int) -> str:
        """Return the text of a single token."""
        return self.text([token_id], special=True)


def _read(path: Path) -> Any:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise BundleError(f"{path}: not a file of the package tokenizers: {error}; export again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class ChatTemplate:
    """A Jinja template from the bundle, rendered in a sandbox with the environment that transformers provides."""

    def __init__(self, template: str, begin: str, end: str) -> None:
        """`begin` and `end` are the texts of the special tokens."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise BundleError(f"signature.json: the chat template is not valid Jinja: {error}; export again") from error
        self._tokens = {"bos_token": begin, "eos_token": end}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt, up to where the model's answer begins."""
        try:
            return self._template.render(messages=messages, tools=None, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # raised by the template
            raise InvalidPayload(f"messages: the model's chat template rejects them: {error}") from error


def _json(value: Any, indent: int | None = None) -> str:
    """Replace Jinja's `tojson`, which escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(text: str) -> NoReturn:
    raise InvalidPayload(f"messages: {text}")


def _now(date_format: str) -> str:
    return datetime.now(UTC).strftime(date_format)
