"""The tokenizer of a language model, its special tokens, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.contract.bundle import Bundle
from pipeline.contract.prompting import ChatTemplate
from pipeline.contract.signature import Generation
from pipeline.system.errors import BundleError, ConfigError, InvalidPayload, ResourceError, install_command
from serve.llm.reasoning import BEGIN, END

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


def _read(path: Path) -> Any:
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
