from __future__ import annotations

import pytest

from pipeline.contract.errors import ConfigError, InvalidPayload
from pipeline.contract.prompting import ChatTemplate, check_chat_template
from tests.serve.generate import tiny

USER = {"role": "user", "content": "x"}
CHAT = [USER, {"role": "assistant", "content": " a <b> "}, {"role": "user", "content": "é"}]
MARKED = """{{ bos_token }}
{%- set seen = namespace(count=0) -%}
{%- for message in messages -%}
    {%- set seen.count = seen.count + 1 -%}
    {%- if message.role == 'assistant' -%}
        <|answer|>
        {%- generation -%}
            {{ message.content | trim }}{{ eos_token }}
        {%- endgeneration -%}
    {%- else -%}
        <|user|>{{ message | tojson(ensure_ascii=True, indent=1, separators=(',', ':')) }}
    {%- endif -%}
{%- endfor -%}
{{ seen.count }}
{%- if add_generation_prompt %}<|answer|>{% endif %}
{% if documents is none and tools is none %}none{% endif %}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_template_renders_messages() -> None:
    messages = [USER, {"role": "user", "content": "<b> & {{ 7 * 7 }}"}]
    assert ChatTemplate(tiny.TEMPLATE, TOKENS).render(messages) == "<s><|user|>x<|user|><b> & {{ 7 * 7 }}<|answer|>"


def test_templates_render_as_in_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for template in (MARKED, tiny.TEMPLATE):
        rendered = utils.render_jinja_template(
            conversations=[CHAT], chat_template=template, add_generation_prompt=True, **TOKENS
        )
        assert ChatTemplate(template, TOKENS).render(CHAT) == rendered[0][0]


def test_template_errors_are_client_errors() -> None:
    chat = ChatTemplate(tiny.TEMPLATE, {})
    with pytest.raises(InvalidPayload, match="messages: system comes first"):
        chat.render([USER, {"role": "system", "content": "y"}])
    with pytest.raises(InvalidPayload, match="messages: the model's chat template rejects them: "):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([USER])


def test_templates_have_the_functions_of_transformers() -> None:
    text = (
        "{%- for m in messages -%}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    assert ChatTemplate(text, {}).render(messages) == '{"role": "user", "content": "é<"}20'


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% generation %}{{ ''.__class__.__base__.__subclasses__() }}{% endgeneration %}",
    ],
)
def test_template_is_sandboxed(text: str) -> None:
    with pytest.raises(InvalidPayload, match="rejects them"):
        ChatTemplate(text, {}).render([USER])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "the chat template is not valid Jinja: "),
        ("{% generation %}", "the chat template is not valid Jinja: "),
        ("{{ messages | no_filter }}", "the chat template is not valid Jinja: No filter named 'no_filter'"),
        ("{{ no_function() }}", "renders no message of a user: .*'no_function' is undefined"),
        ("{{ messages[0].content[0].text.missing }}", "renders no message of a user: "),
        ("{{ 1 / 0 }}", "renders no message of a user: .*division by zero"),
        ("{{ raise_exception('only tools') }}", "renders no message of a user: only tools"),
        ("{% if false %}x{% endif %}", "renders nothing"),
    ],
)
def test_template_that_cannot_work_is_refused(template: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_chat_template(template, {})


@pytest.mark.parametrize(
    "template",
    [
        tiny.TEMPLATE,
        MARKED,
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}",
    ],
)
def test_template_that_renders_some_conversation_is_accepted(template: str) -> None:
    check_chat_template(template, TOKENS)
