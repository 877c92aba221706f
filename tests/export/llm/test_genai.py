"""The folder for onnxruntime-genai generates torch's tokens, or is not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.llm.decoder import TorchDecoder, convert_language, make_generation
from export.llm.kind import LanguageExporter, _genai_config
from export.other_formats import write_formats
from export.subject import Subject
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Prompting, TensorSpec
from pipeline.system.errors import StageError
from pipeline.system.files import write_json

from .languages import PROMPTS, WORDS, Language, causal

BYTES = {  # a tokenizer whose tokens are the bytes of ASCII letters
    "model": {"type": "BPE", "vocab": {chr(65 + number): number for number in range(WORDS)}, "merges": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel"},
}


def decoder(folder: Path, architecture: str) -> LanguageExporter:
    """A language model with its plain file, which is not verified here."""
    prompting = Prompting(begin=(1,), end=(2,), prompts=PROMPTS)
    task: Any = Language(causal(architecture), settings=prompting)
    write_json(folder / "tokenizer.json", BYTES)
    path, config = folder / "model.onnx", Export(formats=("onnx", "genai"))
    kind = LanguageExporter(Subject(task, task.net, open_split(task, "test"), config, path, files=folder))
    convert_language(task.net, kind.generation, Export(), path)
    return kind


@pytest.mark.long
def test_onnxruntime_genai_generates_torchs_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="the extra `genai` is not installed")
    one = decoder(tmp_path, "Qwen2")
    (row,) = write_formats(one, tmp_path / "formats")
    assert (row["passed"], row["reason"], row["path"]) == (True, "equal to torch", "formats/genai")
    names = ["genai_config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(row["sha256"]) == names
    assert row["max_abs_error"] < 1e-4
    assert json.loads((tmp_path / row["path"] / "genai_config.json").read_text())["model"]["eos_token_id"] == [2]
    model = genai.Model(str(tmp_path / row["path"]))
    assert list(genai.Tokenizer(model).encode("DBE")) == [3, 1, 4]
    reference = TorchDecoder(one.net, one.generation)
    for prompt in PROMPTS:
        expected = [*prompt, *reference.greedy(prompt, 6)]
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=len(prompt) + 6)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(np.array([prompt], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        sequence = [*generator.get_sequence(0).tolist(), 2]  # without the end token
        assert sequence[: len(expected)] == expected
    layer: Any = one.net.get_submodule("model.layers.0.self_attn")
    monkeypatch.setattr(layer, "scaling", 1.0)
    (row,) = write_formats(one, tmp_path / "formats")
    assert "it is not the model" in row["reason"]
    assert not (tmp_path / "formats/genai").exists()


def test_cached_latents_are_refused_by_genai(tmp_path: Path) -> None:
    made = causal("DeepseekV3")
    caches = [f"past.0.{name}" for name in ("latent", "rope")]
    specs = {name: TensorSpec(name=name, datatype="FP32", shape=("batch", 1, "past", 4)) for name in caches}
    generation = make_generation(Language(made), made)
    with pytest.raises(StageError, match="reads caches of keys and values of one shape"):
        _genai_config(made.config, generation, specs)
