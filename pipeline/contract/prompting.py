"""How a language model is prompted: its chat template, in the environment that transformers provides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.contract.errors import ConfigError, InvalidPayload
from pipeline.contract.task import Generates

Messages: TypeAlias = "Sequence[Mapping[str, str]]"

_REJECTS = "the model's chat template rejects them: "
_USER = {"role": "user", "content": "hello"}
_ANSWER = {"role": "assistant", "content": "hello"}
# What clients send. A template may refuse some of these, such as one that needs a system message.
_TRIALS: tuple[Messages, ...] = (
    [_USER],
    [{"role": "system", "content": "be brief"}, _USER],
    [_USER, _ANSWER, _USER],
)


class ChatTemplate:
    """A template from a task or a bundle, rendered in a sandbox. `special_tokens`: texts by name, as `bos_token`."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages) -> str:
        """Return the prompt, up to where the model's answer begins."""
        try:
            return self._template.render(
                **self._special_tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        except InvalidPayload:
            raise
        except Exception as error:  # whatever the template's code raises
            raise InvalidPayload(f"messages: {_REJECTS}{error}") from error


def check_prompting(task: object) -> None:
    """Refuse a language model that cannot be served with its chat template, before it is trained."""
    if isinstance(task, Generates) and (template := task.prompting().template):
        check_chat_template(template, {})


def check_chat_template(template: str, special_tokens: Mapping[str, str]) -> None:
    """Refuse a template that is not valid, or that renders no conversation."""
    chat = ChatTemplate(template, special_tokens)
    rejections = []
    for messages in _TRIALS:
        try:
            if not chat.render(messages):
                raise ConfigError("the chat template renders nothing for a message of the user")
            return
        except InvalidPayload as error:
            rejections.append(str(error).removeprefix("messages: ").removeprefix(_REJECTS))
    raise ConfigError(f"the chat template renders no message of a user: {rejections[0]}")


class _GenerationBlock(Extension):
    """`{% generation %}` of transformers, which marks the assistant's answers for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's `tojson`, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> NoReturn:
    raise InvalidPayload(f"messages: {text}")


def _now(date_format: str) -> str:
    return datetime.now(UTC).strftime(date_format)
