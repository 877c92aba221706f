from __future__ import annotations

import pytest

from pipeline.contract.errors import BundleError, InvalidPayload
from serve.generate.tokenizer import ChatTemplate
from tests.serve.generate import tiny


def test_template_renders_messages() -> None:
    chat = ChatTemplate(tiny.TEMPLATE, "<s>", "</s>")
    found = chat.render([{"role": "user", "content": "hi"}, {"role": "user", "content": "<b> & {{ 7 * 7 }}"}])
    assert found == "<s><|user|>hi<|user|><b> & {{ 7 * 7 }}<|answer|>"


def test_template_errors_are_client_errors() -> None:
    chat = ChatTemplate(tiny.TEMPLATE, "", "")
    with pytest.raises(InvalidPayload, match="messages: system comes first"):
        chat.render([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
    with pytest.raises(InvalidPayload, match="messages: the model's chat template rejects them: "):
        ChatTemplate("{{ messages[0].content + 1 }}", "", "").render([{"role": "user", "content": "x"}])


def test_templates_have_the_functions_of_transformers() -> None:
    text = (
        "{%- for m in messages -%}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    assert ChatTemplate(text, "", "").render(messages) == '{"role": "user", "content": "é<"}20'


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_template_is_sandboxed(text: str) -> None:
    with pytest.raises(InvalidPayload, match="rejects them"):
        ChatTemplate(text, "", "").render([{"role": "user", "content": "x"}])


def test_invalid_template_is_rejected_when_loaded() -> None:
    with pytest.raises(BundleError, match="the chat template is not valid Jinja: "):
        ChatTemplate("{% for %}", "", "")
