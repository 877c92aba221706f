"""A conversation as the prompt its model was trained with, by the Jinja template of the bundle, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.spec.errors import BundleError, InvalidPayload


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
