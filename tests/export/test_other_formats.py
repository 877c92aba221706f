"""Other forms of the model: verified as the bundle is, or not kept; skipped aloud where they cannot be made."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from export import other_formats
from export.llm.decoder import TorchDecoder, convert_language, make_generation
from export.llm.genai import _genai_config
from export.llm.kind import LanguageModel
from export.other_formats import require_formats, saved_model_problem, write_formats
from export.subject import ExportKind, Subject
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Prompting, TensorSpec
from pipeline.system.errors import StageError
from pipeline.system.files import digest_file, write_json

from .conftest import Classes, linear, open_model, pairs
from .languages import PROMPTS, WORDS, Language, causal
from .recurrent import Tags


class Sneaky(nn.Module):
    """A module that behaves differently while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] if torch.compiler.is_compiling() else x[:, :3] * 1.5


def original(folder: Path, net: nn.Module, **settings: Any) -> ExportKind:
    task: Any = Classes(net.eval(), pairs())
    config = Export(batch_sizes=(1, 7, 40), **settings)
    return open_model(task, folder / "model.onnx", config)


def test_torchs_own_form_answers_as_the_model_does_without_its_code(tmp_path: Path) -> None:
    one = original(tmp_path, linear(), formats=("onnx", "pt2"))
    (row,) = write_formats(one, tmp_path / "formats")
    path = tmp_path / row["path"]
    assert (row["passed"], row["reason"], row["path"]) == (True, "equal to torch", "formats/pt2/model.pt2")
    assert row["max_abs_error"] < 1e-5
    assert row["sha256"] == {"model.pt2": digest_file(path)}
    require_formats([row])
    x = torch.from_numpy(pairs()["x"])
    (found,) = torch.export.load(path).module()(x)
    assert np.allclose(found.detach(), one.subject.model(x).detach(), atol=1e-5)
    with zipfile.ZipFile(path) as inside:
        for name in inside.namelist():
            assert str(Path(__file__).parent).encode() not in inside.read(name), "where it was made"
            assert pairs()["x"][:3].tobytes() not in inside.read(name), "samples of the data"


def test_torchs_own_form_has_dynamic_axes_beside_the_batch(tmp_path: Path) -> None:
    task: Any = Tags()
    config = Export(batch_sizes=(1, 7), formats=("onnx", "pt2"))
    (row,) = write_formats(open_model(task, tmp_path / "model.onnx", config), tmp_path / "formats")
    assert (row["passed"], row["reason"]) == (True, "equal to torch")
    letters = torch.arange(26).reshape(2, 13) % 12
    (found,) = torch.export.load(tmp_path / row["path"]).module()(letters, torch.ones_like(letters))
    assert torch.allclose(found, task.net(letters, torch.ones_like(letters)), atol=1e-5)


def test_a_form_that_is_not_the_model_is_not_kept(tmp_path: Path) -> None:
    rows = write_formats(original(tmp_path, Sneaky(), formats=("onnx", "pt2")), tmp_path / "formats")
    assert (rows[0]["passed"], rows[0]["path"], rows[0]["sha256"]) == (False, "", {})
    assert list((tmp_path / "formats").iterdir()) == []
    with pytest.raises(StageError, match=r"export\.formats: pt2 is not kept: it is not the model: \d+ elements differ"):
        require_formats(rows)


def test_a_saved_model_is_skipped_aloud_where_its_library_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_formats, "find_spec", lambda _: None)
    rows = write_formats(original(tmp_path, linear(), formats=("onnx", "savedmodel")), tmp_path / "formats")
    assert (rows[0]["passed"], rows[0]["skipped"]) == (False, True)
    assert rows[0]["reason"].startswith("skipped: onnx2tf and tensorflow not installed here; pip install -c")
    assert "savedmodel is skipped: onnx2tf and tensorflow not installed here" in capsys.readouterr().out
    require_formats(rows)


def test_an_environment_for_it_that_is_not_there_is_named() -> None:
    assert saved_model_problem("/no/such/python").startswith("PIPE_TENSORFLOW_PYTHON=/no/such/python: no such program")


def test_what_its_converter_states_is_reported_where_it_fails(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"onnx2tf does not convert the file: .*Error"):
        other_formats.run_saved_model(sys.executable, tmp_path / "gone.onnx", tmp_path, ("y",), [pairs()])


BYTES = {  # a tokenizer whose tokens are the bytes of ASCII letters
    "model": {"type": "BPE", "vocab": {chr(65 + number): number for number in range(WORDS)}, "merges": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel"},
}


def decoder(folder: Path, architecture: str) -> LanguageModel:
    """A language model with its plain file, which is not verified here."""
    prompting = Prompting(begin=(1,), end=(2,), prompts=PROMPTS)
    task: Any = Language(causal(architecture), settings=prompting)
    write_json(folder / "tokenizer.json", BYTES)
    path, config = folder / "model.onnx", Export(formats=("onnx", "genai"))
    kind = LanguageModel(Subject(task, task.net, open_split(task, "test"), config, path, files=folder))
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
        sequence = [*generator.get_sequence(0).tolist(), 2]  # the end is not part of it
        assert sequence[: len(expected)] == expected
    layer: Any = one.net.get_submodule("model.layers.0.self_attn")
    monkeypatch.setattr(layer, "scaling", 1.0)
    (row,) = write_formats(one, tmp_path / "formats")
    assert "it is not the model" in row["reason"]
    assert not (tmp_path / "formats/genai").exists()


def test_a_cache_of_latents_has_no_folder_for_onnxruntime_genai(tmp_path: Path) -> None:
    made = causal("DeepseekV3")
    caches = [f"past.0.{name}" for name in ("latent", "rope")]
    specs = {name: TensorSpec(name=name, datatype="FP32", shape=("batch", 1, "past", 4)) for name in caches}
    generation = make_generation(Language(made), made)
    with pytest.raises(StageError, match="reads caches of keys and values of one shape"):
        _genai_config(made.config, generation, specs)


@pytest.mark.parametrize("formats", [("pt2",), ("onnx", "pt2", "pt2")])
def test_onnx_is_always_one_and_each_is_named_once(formats: Any) -> None:
    with pytest.raises(ValidationError, match="onnx is always one, and each is named once"):
        Export(formats=formats)


def test_fused_operators_and_a_saved_model_do_not_go_together() -> None:
    with pytest.raises(ValidationError, match="optimize=extended brings others"):
        Export(formats=("onnx", "savedmodel"), optimize="extended")
