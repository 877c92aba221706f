"""A decoder of Qwen2 with random weights in the form that each contender reads: all compute in float32."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from export.conversion.to_onnx import tensor_specs
from export.kinds import open_exporter
from export.llm.decoder import convert_language, language_export_input, make_generation
from export.llm.kind import convert_fused
from export.other_formats import require_formats, write_formats
from export.sessions import open_session, run
from export.subject import Subject
from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Decoder, Golden, empty_past, inputs_of
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation, Limits, Prompting, Runtime, Signature
from pipeline.system.files import digest_file, write_json

POSITIONS = 1024
_HEAD = 64


def _settings(vocab: int, layers: int, wide: int, inner: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": wide,
        "intermediate_size": inner,
        "num_attention_heads": wide // _HEAD,
        "num_key_value_heads": wide // _HEAD // 4 or 1,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


SIZES: Mapping[str, dict[str, Any]] = {
    "1m": _settings(512, 2, 128, 352),  # to try the programs
    "28m": _settings(8192, 7, 512, 1408),
    "100m": _settings(16384, 12, 768, 2048),
}


def write_models(size: str, folder: Path, threads: int) -> int:
    """Write all forms; return the number of weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    net = Qwen2ForCausalLM(Qwen2Config(**SIZES[size])).eval()
    net.save_pretrained(folder / "transformers")
    _write_arrays(net, folder)
    task: Any = SimpleNamespace(
        prompting=lambda: Prompting(prompts=((1, 2, 3), (4,))), language_model=lambda model: model
    )
    generation = make_generation(task, net)
    plain, fused = folder / "plain" / "model.onnx", folder / "fused" / "model.onnx"
    for path in (plain, fused):
        path.parent.mkdir()
    convert_language(net, generation, Export(), plain)
    convert_fused(language_export_input(net, generation), Export(optimize="transformers"), fused)
    write_json(folder / "tokenizer.json", _tokenizer(net.config.vocab_size))
    test: Any = None  # the task has prompts
    formats = Export(formats=("onnx", "genai"))
    kind = open_exporter(Subject(task, net, test, formats, fused, files=folder))
    require_formats(write_formats(kind, folder / "formats"))
    _set_threads(folder / "formats" / "genai" / "genai_config.json", threads)
    for path in (plain, fused):
        _complete_bundle(path, generation, folder / "tokenizer.json", threads)
    return sum(weight.numel() for weight in net.parameters())


def _tokenizer(words: int) -> dict[str, Any]:
    vocabulary = {f"w{number}": number for number in range(words)}
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}


def _set_threads(path: Path, threads: int) -> None:
    text = path.read_text()
    path.write_text(text.replace('"session_options": {}', f'"session_options": {{"intra_op_num_threads": {threads}}}'))


def _complete_bundle(path: Path, generation: Generation, tokenizer: Path, threads: int) -> None:
    """Add the other files of a bundle, which the service reads."""
    folder = path.parent
    (folder / "files").mkdir()
    shutil.copy(tokenizer, folder / "files")
    (folder / "card.md").write_text("# decoder\n\nRandom weights, to measure with.\n")
    inputs, outputs = tensor_specs(path)
    signature = Signature(
        inputs=inputs,
        outputs=outputs,
        codec="",
        limits=Limits(max_batch_size=64, max_body_bytes=1 << 20),
        runtime=Runtime(provider="cpu", threads=threads),
        generation=generation,
    )
    write_json(folder / "signature.json", signature.model_dump())
    decoder = Decoder(lambda _: {}, generation, signature.input_specs)
    ids = np.arange(2, 10).reshape(2, 4)
    feed = inputs_of(generation, ids, np.ones_like(ids), empty_past(decoder, 2))
    Golden(feed, run(open_session(path), feed), [], [], rtol=1e-2, atol=1e-3).write(folder)
    ancestors = Ancestors(code="", data="", checkpoint="", verdict="", onnx=digest_file(path))
    write_manifest(folder, "decoder", "no-baseline", ancestors)


def _write_arrays(net: Any, folder: Path) -> None:
    """Write what the loop of llama.cpp makes its file from, in an environment without torch."""
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in net.state_dict().items()})
    settings = {**net.config.to_dict(), "rope_theta": net.config.rope_parameters["rope_theta"]}
    names = (*SIZES["1m"], "rope_theta", "rms_norm_eps")
    write_json(folder / "config.json", {name: settings[name] for name in names})
