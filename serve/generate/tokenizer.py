"""The words of a language model: its tokenizer, its chat template, and the ids with a meaning of their own.

A conversation as the prompt its model was trained with, by the Jinja template of the bundle, in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError, InvalidPayload, ResourceError
from pipeline.contract.signature import Generation

try:
    from tokenizers import Tokenizer

except ModuleNotFoundError as missing:
    raise ResourceError(
        f"the bundle is a language model, which needs the package {missing.name}; pip install 'pipe-road[serve]'"
    ) from missing


class Language:
    """Safe to be asked from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, vocabulary: int, longest: int) -> None:
        self._tokenizer, self.generation, self.vocabulary = tokenizer, generation, vocabulary
        self._most_characters = generation.positions_limit * longest
        begin = self.text(generation.begin, special=True)
        end = self.text(generation.end[:1], special=True)
        self._chat = Chat(generation.template, begin, end) if generation.template else None

    @classmethod
    def open(cls, bundle: Bundle) -> Language:
        """As the bundle describes it; whatever does not go together is said."""
        generation = bundle.signature.generation
        assert generation is not None, "asked of language models alone"
        path = bundle.path / generation.tokenizer
        if generation.tokenizer not in bundle.manifest.files:
            raise BundleError(f"{path}: signature.json names this tokenizer, the bundle does not hold it; export again")
        tokenizer = _read(path)
        known = tokenizer.get_vocab(with_added_tokens=True)
        (axis,) = (spec.shape[-1] for spec in bundle.signature.outputs if spec.name == generation.logits)
        vocabulary = axis if isinstance(axis, int) else max(known.values(), default=-1) + 1
        if beyond := sorted(token for token, one in known.items() if one >= vocabulary):
            raise BundleError(
                f"{path}: its token {beyond[0]!r} has id {known[beyond[0]]}, the model knows {vocabulary} tokens; "
                "the tokenizer belongs to another model"
            )
        if wrong := [one for one in (*generation.begin, *generation.end) if not 0 <= one < vocabulary]:
            raise BundleError(f"signature.json: id {wrong[0]} of generation is none of the {vocabulary} tokens")
        return cls(tokenizer, generation, vocabulary, max(map(len, known), default=1))

    def prompt(self, text: str, field: str = "prompt") -> list[int]:
        """The ids of a prompt, with those that every prompt begins with."""
        if len(text) > self._most_characters:
            raise InvalidPayload(
                f"{field}: {len(text)} characters are more than the model's "
                f"{self.generation.positions_limit} positions can hold"
            )
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        begin = list(self.generation.begin)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]  # chat templates write them themselves

    def conversation(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._chat is None:
            raise InvalidPayload("this model has no chat template; ask /openai/v1/completions")
        return self.prompt(self._chat.prompt(messages), "messages")

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with the tokens that are no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def token(self, one: int) -> str:
        """A single token as people read it."""
        return self.text([one], special=True)


def _read(path: Path) -> Any:
    try:
        found = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing but plain Exceptions
        raise BundleError(f"{path}: not a tokenizer of the package tokenizers: {error}; export again") from error
    found.no_padding()
    found.no_truncation()
    return found


class Chat:
    """Templates are written for the environment that transformers gives them: this is the same."""

    def __init__(self, template: str, begin: str, end: str) -> None:
        """`begin` and `end`: the texts of the tokens that stand around a text."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise BundleError(f"signature.json: the chat template is no Jinja: {error}; export again") from error
        self._tokens = {"bos_token": begin, "eos_token": end}

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Up to where the model's answer begins."""
        try:
            return self._template.render(messages=messages, tools=None, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # what a template makes of odd messages
            raise InvalidPayload(f"messages: the model's chat template cannot take them: {error}") from error


def _json(value: Any, indent: int | None = None) -> str:
    """Jinja's own would write signs of HTML in another way."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(text: str) -> NoReturn:
    raise InvalidPayload(f"messages: {text}")


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
