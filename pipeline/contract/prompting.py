"""How a language model is prompted: its chat template, special tokens and defaults of sampling.

They come from the task or, as in transformers, from the files of the model and its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError

from pipeline.contract.signature import Generation, Prompting, SamplingDefaults
from pipeline.contract.task import Generates
from pipeline.system.errors import ConfigError, DataError, InvalidPayload
from pipeline.system.files import TOKENIZER_FILE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.contract.data import Samples
    from pipeline.contract.settings.stages import Export

Messages: TypeAlias = "Sequence[Mapping[str, str]]"

ANSWER_TOKENS = 16  # of each greedy answer that the export compares
LEAST_POSITIONS = 12  # which the export traces

_REJECTS = "the model's chat template rejects them: "
_USER = {"role": "user", "content": "hello"}
_ANSWER = {"role": "assistant", "content": "hello"}
# What clients send. A template may refuse some of these, such as one that needs a system message.
_TRIALS: tuple[Messages, ...] = ([_USER], [{"role": "system", "content": "be brief"}, _USER], [_USER, _ANSWER, _USER])


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

    def render(self, messages: Messages, variables: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the prompt, up to where the model's answer begins. `variables` are further ones of the template."""
        context = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        if reserved := sorted(variables.keys() & context.keys()):
            raise InvalidPayload(f"chat_template_kwargs: {reserved[0]} cannot be set; leave it out")
        try:
            return self._template.render({**self._special_tokens, **variables, **context})
        except InvalidPayload:
            raise
        except Exception as error:  # whatever the template's code raises
            raise InvalidPayload(f"messages: {_REJECTS}{error}") from error


def check_prompting(task: object, folder: Path) -> None:
    """Refuse a language model that cannot be served as its task and files state, before it is trained."""
    if isinstance(task, Generates):
        prompting = read_prompting(task.prompting(), folder)
        try:
            if prompting.template:
                check_chat_template(prompting.template, prompting.special_tokens)
        except ConfigError as error:
            raise ConfigError(
                f"prompting(): {error}; to fix it: return Prompting(template=...) with a template that works, or with "
                "an empty one for a model without chat"
            ) from error


def check_decoder(task: Generates, model: nn.Module, export: Export, splits: Iterable[Samples]) -> None:
    """Refuse a causal model that cannot be exported as a decoder with a cache, before it is trained."""
    limit = positions_limit(task.prompting(), model)
    empty_cache(model)
    core: Any = model
    if str(dtype := core.get_input_embeddings().weight.dtype) != "torch.float32":
        raise ConfigError(f"the language model has weights of {dtype}; build it with dtype=torch.float32")
    if "genai" in export.formats and getattr(core.config, "kv_lora_rank", None):
        raise ConfigError(
            "export.formats: onnxruntime-genai reads caches of keys and values, and this model caches what they are "
            "computed from (kv_lora_rank); leave genai out"
        )
    for samples in splits:
        check_ids(samples.batch([0]), Generation.model_fields["ids"].default, limit, samples.split)


def positions_limit(declared: Prompting, model: nn.Module) -> int:
    """Return the longest text of the exported model, in which every prompt to compare has room for its answer."""
    maximum = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    maximum = declared.positions_limit if maximum is None else maximum  # some models have no longest text
    if not maximum or not isinstance(maximum, int):
        raise ConfigError(
            f"language_model() gives a {type(model).__name__} without config.max_position_embeddings; "
            "give the causal model of `transformers` itself"
        )
    if declared.positions_limit > maximum:
        raise ConfigError(
            f"prompting() allows {declared.positions_limit} positions, but the model's configuration ends at "
            f"{maximum} (max_position_embeddings): beyond it the model was never trained"
        )
    if (limit := declared.positions_limit or maximum) < LEAST_POSITIONS:
        raise ConfigError(f"a language model of {limit} positions is too short; {LEAST_POSITIONS} at least")
    longest = limit - ANSWER_TOKENS
    if too_long := next((prompt for prompt in declared.prompts if not 0 < len(prompt) <= longest), None):
        raise ConfigError(
            f"prompting() has a prompt of {len(too_long)} ids; give 1 to {longest}, so that an answer fits"
        )
    return limit


def empty_cache(model: nn.Module) -> Any:
    """Return a cache of all positions; layers with a sliding window mask what is before it."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    sliding = () if getattr(model.config, "attention_chunk_size", None) else (DynamicSlidingWindowLayer,)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, *sliding):
            raise ConfigError(
                f"layer {index} of the language model keeps a {type(layer).__name__}, which cannot be exported; choose "
                "a model whose layers cache the keys and values of all positions or of a sliding window"
            )
        cache.layers[index] = DynamicLayer()
    return cache


def check_ids(batch: Mapping[str, Tensor], name: str, limit: int, split: str) -> None:
    """Check that samples have ids of texts that the exported model can read."""
    if name not in batch:
        raise DataError(f"the {split} data of a language model need a column `{name}`; found {', '.join(batch)}")
    if batch[name].ndim != 2 or batch[name].shape[1] > limit:
        raise DataError(
            f"the {split} data's `{name}` has shape {list(batch[name].shape)}, the model takes [batch, sequence] of "
            f"{limit} positions at most"
        )


def read_prompting(declared: Prompting, folder: Path) -> Prompting:
    """Return what the task declares, completed from the shared files as transformers reads them."""
    config, tokenizer_config = _read_object(folder / "config.json"), _read_object(folder / "tokenizer_config.json")
    generation = _read_object(folder / "generation_config.json")
    tokenizer = _read_object(folder / TOKENIZER_FILE)
    texts = _special_tokens({**_read_object(folder / "special_tokens_map.json"), **tokenizer_config})
    ids = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or []}
    found: dict[str, Any] = {
        "template": _read_template(folder / "chat_template.jinja", tokenizer_config),
        "begin": _begin_ids(tokenizer, tokenizer_config, ids.get(texts.get("bos_token", ""))),
        "end": _end_ids(generation, config, ids.get(texts.get("eos_token", ""))),
        "special_tokens": texts,
        "sampling": {
            name: generation[name] for name in SamplingDefaults.model_fields if generation.get(name) is not None
        },
    }
    declared_fields = {name: value for name, value in declared if name in declared.model_fields_set}
    try:
        return Prompting.model_validate({**found, **declared_fields})
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise DataError(f"{folder}: {name.removeprefix('sampling.')}: {problem['msg']}") from error


def _read_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Return the chat template of a tokenizer; the one called `default` of several."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), "")


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by name; some files describe them as objects with their content."""
    named = {**settings, **(extra if isinstance(extra := settings.get("extra_special_tokens"), dict) else {})}
    texts = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def _begin_ids(tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any], bos: int | None) -> list[int]:
    """Return the ids that the tokenizer puts before a text."""
    if isinstance(added := tokenizer_config.get("add_bos_token"), bool):
        return [bos] if added and bos is not None else []
    processor = tokenizer.get("post_processor") or {}
    for step in processor.get("processors") or [processor]:
        if step.get("type") == "TemplateProcessing":
            pieces = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            return [token for piece in pieces for token in step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]]
    return []


def _end_ids(generation: Mapping[str, Any], config: Mapping[str, Any], eos: int | None) -> list[int]:
    """Return all ids that end a text: those of generation_config.json or else config.json, and the tokenizer's."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return listed if eos is None or eos in listed else [*listed, eos]


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise DataError(f"{path}: must hold a mapping, found {type(body).__name__}")
    return body


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
