from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from pipeline.contract.prompting import ChatTemplate, check_chat_template, read_prompting
from pipeline.contract.signature import Prompting, SamplingDefaults
from pipeline.system.errors import ConfigError, DataError, InvalidPayload
from tests.serve.llm import tiny

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


def test_templates_render_as_in_transformers() -> None:
    messages = [USER, {"role": "user", "content": "<b> & {{ 7 * 7 }}"}]
    assert ChatTemplate(tiny.TEMPLATE, TOKENS).render(messages) == "<s><|user|>x<|user|><b> & {{ 7 * 7 }}<|answer|>"
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for template in (MARKED, tiny.TEMPLATE):
        rendered = utils.render_jinja_template(
            conversations=[CHAT], chat_template=template, add_generation_prompt=True, **TOKENS
        )
        assert ChatTemplate(template, TOKENS).render(CHAT) == rendered[0][0]


def test_variables_of_the_request_reach_the_template() -> None:
    chat = ChatTemplate("{{ bos_token }}{% if thinking %}<think>{% endif %}", TOKENS)
    assert chat.render([USER], {"thinking": True}) == "<s><think>"
    assert chat.render([USER], {"thinking": False}) == "<s>"
    with pytest.raises(InvalidPayload, match="chat_template_kwargs: messages cannot be set"):
        chat.render([USER], {"messages": []})


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


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small files of a model, as transformers saves them."""
    import transformers

    folder = tmp_path_factory.mktemp("official")
    body: Tokenizer = tiny.tokenizer()
    body.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny.BEGIN)])
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=body, bos_token="<s>", eos_token="</s>", pad_token="<|user|>", chat_template=MARKED
    )
    tokenizer.save_pretrained(folder)
    generation = transformers.GenerationConfig(
        eos_token_id=[tiny.ANSWER, tiny.USER], temperature=0.6, top_p=0.95, top_k=20, do_sample=True
    )
    generation.save_pretrained(folder)
    return folder


def test_prompting_is_read_from_the_files_as_by_transformers(official: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(official)
    found = read_prompting(Prompting(), official)
    assert found.template == tokenizer.chat_template == MARKED
    assert found.special_tokens == tokenizer.special_tokens_map
    assert [*found.begin, *tokenizer("x", add_special_tokens=False).input_ids] == tokenizer("x").input_ids
    assert found.end == (tiny.ANSWER, tiny.USER, tiny.END)
    assert found.sampling == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(found.template, found.special_tokens).render(CHAT) == rendered


def test_declarations_of_the_task_take_precedence(official: Path) -> None:
    declared = Prompting(begin=(), end=(7,), template="{{ messages }}", sampling=SamplingDefaults(top_k=3))
    found = read_prompting(declared, official)
    assert (found.begin, found.end, found.template, found.sampling) == ((), (7,), "{{ messages }}", declared.sampling)


def test_without_files_the_tasks_declarations_apply(tmp_path: Path) -> None:
    declared = Prompting(begin=(1,), prompts=((3,),), positions_limit=9)
    assert read_prompting(declared, tmp_path / "files") == declared
    assert read_prompting(Prompting(), tmp_path) == Prompting()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 5}}, {"end": (5,)}),
        ({"config": {"eos_token_id": [5, 6]}}, {"end": (5, 6)}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6]}}, {"end": (6,)}),
        ({"generation_config": {"temperature": None, "top_k": None, "min_p": 0.1, "repetition_penalty": 1.05}},
         {"sampling": SamplingDefaults(min_p=0.1, repetition_penalty=1.05)}),
        ({"tokenizer_config": {"chat_template": [{"name": "t", "template": ""}, {"name": "default", "template": "d"}]}},
         {"template": "d"}),
        ({"tokenizer_config": {"bos_token": {"content": "<b>"}, "add_bos_token": True, "eos_token": "<e>"},
          "tokenizer": {"added_tokens": [{"id": 8, "content": "<b>"}, {"id": 9, "content": "<e>"}]}},
         {"begin": (8,), "end": (9,), "special_tokens": {"bos_token": "<b>", "eos_token": "<e>"}}),
        ({"special_tokens_map": {"bos_token": "<a>"},
          "tokenizer_config": {"extra_special_tokens": {"image_token": "<i>"}}},
         {"special_tokens": {"bos_token": "<a>", "image_token": "<i>"}}),
    ],
)  # fmt: skip
def test_other_layouts_of_the_files_are_read(files: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    for name, body in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    found = read_prompting(Prompting(), tmp_path)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "generation_config.json: not valid JSON"),
        ("[]", "generation_config.json: must hold a mapping, found list"),
        ('{"temperature": -1}', "temperature: Input should be greater than or equal to 0"),
        ('{"eos_token_id": "x"}', r"end.0: Input should be a valid integer"),
    ],
)
def test_invalid_files_are_named(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_prompting(Prompting(), tmp_path)
