"""Write the folder of a language model for onnxruntime-genai, and compare its answers with torch's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from export.compare import Array, Arrays, Case, Rows, compare
from export.conversion.to_onnx import tensor_specs
from export.llm.decoder import TorchDecoder, complete_generation
from export.llm.greedy import choose_prompts
from export.other_formats import Skipped
from export.subject import Subject
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.prompting import ANSWER_TOKENS
from pipeline.contract.signature import Generation, TensorSpec
from pipeline.system.errors import StageError, install_command
from pipeline.system.files import write_json

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_genai(subject: Subject, net: nn.Module, generation: Generation, folder: Path) -> tuple[Path, Rows]:
    """Write what onnxruntime-genai runs: the ONNX file, genai_config.json and the files of the tokenizer."""
    if find_spec("onnxruntime_genai") is None:
        raise Skipped(f"onnxruntime_genai is not installed here; to install it: {install_command('genai')}")
    task: Any = subject.task
    core: Any = net
    assert subject.files is not None, "of a language model"
    generation = complete_generation(generation, task, subject.files)
    inputs = {spec.name: spec for spec in tensor_specs(subject.path)[0]}
    write_json(folder / "genai_config.json", _genai_config(core.config, generation, inputs))
    for file in subject.path.parent.glob(f"{subject.path.name}*"):
        shutil.copyfile(file, folder / file.name)
    for file in filter(Path.is_file, (subject.files / name for name in _TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)
    if not (folder / "tokenizer_config.json").exists():
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": generation.template}
        write_json(folder / "tokenizer_config.json", tokenizer)
    prompts = choose_prompts(task.prompting().prompts, subject.test, generation)
    cases = _prompt_cases(TorchDecoder(net, generation), Decoder(dict, generation, inputs), prompts)
    run = _open_genai(folder, generation)
    return folder, [asdict(compare(partial(run, length), case, subject.config)) for length, case in cases]


def _genai_config(config: Any, generation: Generation, inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    specs = [inputs[cache.input] for cache in generation.caches]
    kinds = [cache.input.rpartition(".")[2] for cache in generation.caches]
    if kinds != ["key", "value"] * (len(kinds) // 2) or len({spec.shape[1::2] for spec in specs}) > 1:
        raise StageError("onnxruntime-genai reads caches of keys and values of one shape, and this model has others")
    _, heads, _, width = specs[0].shape
    sampling = generation.sampling
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": generation.positions_limit,
            "bos_token_id": next(iter(generation.begin), 0),
            "eos_token_id": list(generation.end),
            "pad_token_id": next(iter(generation.end), 0),
            "decoder": {
                "filename": "model.onnx",
                "session_options": {},
                "hidden_size": config.hidden_size,
                "head_size": width,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(specs) // 2,
                "inputs": {
                    "input_ids": generation.ids,
                    "attention_mask": generation.mask,
                    "position_ids": generation.positions,
                    "past_key_names": "past.%d.key",
                    "past_value_names": "past.%d.value",
                },
                "outputs": {
                    "logits": generation.logits,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": generation.positions_limit,
            "past_present_share_buffer": False,
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
    }


def _prompt_cases(
    reference: TorchDecoder, decoder: Decoder, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Case]]:
    """Yield the length of each prompt, and a case of the logits of the prompt and each token of torch's answer."""
    generation = reference.generation
    for prompt in prompts:
        answer = reference.greedy(prompt, min(ANSWER_TOKENS, generation.positions_limit - len(prompt)))
        ids = np.array([[*prompt, *answer[:-1]]])
        feed = inputs_of(generation, ids, np.ones_like(ids), empty_past(decoder, 1))
        logits = reference.run(feed)[generation.logits][0, len(prompt) - 1 :]
        text = f"a prompt of {len(prompt)} tokens, run by onnxruntime-genai"
        yield len(prompt), Case("prompts", text, feed, {generation.logits: logits}, chosen=generation.logits)


def _open_genai(folder: Path, generation: Generation) -> Callable[[int, Mapping[str, Array]], Arrays]:
    """Return the folder as a function that reads a prompt of this length at once, then token by token."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    onnxruntime_genai.Tokenizer(model)  # refuses a tokenizer of another kind
    parameters = onnxruntime_genai.GeneratorParams(model)

    def run(length: int, feed: Mapping[str, Array]) -> Arrays:
        generator, logits, ids = onnxruntime_genai.Generator(model, parameters), [], feed[generation.ids][0]
        for tokens in (ids[:length], *([token] for token in ids[length:])):
            generator.append_tokens(np.array([tokens], np.int32))
            logits.append(generator.get_logits()[0, -1])
        return {generation.logits: np.array(logits)}

    return run
