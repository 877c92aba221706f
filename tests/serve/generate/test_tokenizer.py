from __future__ import annotations

import pytest

from pipeline.contract.errors import BundleError, InvalidPayload
from serve.generate.tokenizer import Chat
from tests.serve.generate import tiny


def test_messages_become_the_prompt_the_model_was_trained_with() -> None:
    chat = Chat(tiny.TEMPLATE, "<s>", "</s>")
    found = chat.prompt([{"role": "user", "content": "hi"}, {"role": "user", "content": "<b> & {{ 7 * 7 }}"}])
    assert found == "<s><|user|>hi<|user|><b> & {{ 7 * 7 }}<|answer|>"


def test_what_the_template_refuses_is_the_client_s_to_mend() -> None:
    chat = Chat(tiny.TEMPLATE, "", "")
    with pytest.raises(InvalidPayload, match="messages: system comes first"):
        chat.prompt([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
    with pytest.raises(InvalidPayload, match="messages: the model's chat template cannot take them: "):
        Chat("{{ messages[0].content + 1 }}", "", "").prompt([{"role": "user", "content": "x"}])


def test_templates_have_what_transformers_gives_them() -> None:
    text = (
        "{%- for m in messages -%}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    assert Chat(text, "", "").prompt(messages) == '{"role": "user", "content": "é<"}20'


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages(text: str) -> None:
    with pytest.raises(InvalidPayload, match="cannot take them"):
        Chat(text, "", "").prompt([{"role": "user", "content": "x"}])


def test_a_template_that_is_none_is_told_at_the_start() -> None:
    with pytest.raises(BundleError, match="the chat template is no Jinja: "):
        Chat("{% for %}", "", "")
