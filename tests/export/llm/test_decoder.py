"""Language models in ONNX: one graph reads prompts and continues them like torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import DynamicCache

from export.bundle import Sources, fill_bundle
from export.compare import require_equal
from export.llm.decoder import TorchDecoder, make_generation
from export.llm.kind import _count_tie, choose_prompts, verify_greedy
from export.model_card import render_card
from pipeline.contract.bundle import Ancestors, Bundle, open_bundle, write_manifest
from pipeline.contract.config import Config
from pipeline.contract.data import Samples, mask_between_texts, open_split
from pipeline.contract.golden import Answer, empty_past, greedy, inputs_of
from pipeline.contract.prompting import check_decoder
from pipeline.contract.results import Facts
from pipeline.contract.run import RunFile
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Prompting, SamplingDefaults
from pipeline.system.errors import BundleError, ConfigError, DataError, StageError
from pipeline.system.files import digest_file
from serve.runtime.selfcheck import check_golden_requests
from serve.runtime.session import Session

from .languages import CODEC, LENGTH, MASKED, POSITIONS, PROMPTS, WORDS, Language, Made, causal, make, tokenizer


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("DeepseekV3", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture
def bundle(deepseek: Made, tmp_path: Path) -> Bundle:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(deepseek.path.read_bytes())
    (tmp_path / "talk_codec.py").write_text(CODEC)
    tokenizer(tmp_path / "files")
    return seal(deepseek, folder, tmp_path)


def seal(made: Made, folder: Path, root: Path) -> Bundle:
    config = Config.model_validate({"name": "talk", "task": "t.py:T", "codec": "talk_codec.py:Codec"})
    fill_bundle(folder, made.kind, config, Sources(root, root / "files"), made.kind.properties)
    (folder / "card.md").write_text("# talk\n")
    onnx_digest = digest_file(folder / "model.onnx")
    write_manifest(folder, "talk", "pass", Ancestors(code="c", data="d", checkpoint="k", verdict="v", onnx=onnx_digest))
    return open_bundle(folder)


def test_bundle_has_template_and_sampling_of_the_models_files(deepseek: Made, bundle: Bundle, tmp_path: Path) -> None:
    assert bundle.signature.generation is not None
    assert bundle.signature.generation.sampling == SamplingDefaults()
    (tmp_path / "files" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "files" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [5, 6]}')
    generation = seal(deepseek, bundle.path, tmp_path).signature.generation
    assert generation is not None
    assert (generation.template, generation.sampling) == (
        "{{ messages[0].content }}",
        SamplingDefaults(temperature=0.6),
    )
    assert (generation.begin, generation.end) == ((1,), (2,)), "the task declares them"
    assert generation.caches == deepseek.generation.caches


def test_prompt_and_past_are_dynamic_and_latents_are_cached(deepseek: Made) -> None:
    deepseek.report.require(Export())
    specs = deepseek.decoder().specs
    assert {name: spec.shape for name, spec in specs.items()} == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "total"),
        "position_ids": ("batch", "sequence"),
        "past.0.latent": ("batch", 1, "past", 6),
        "past.0.rope": ("batch", 1, "past", 4),
    }
    assert [cache.output for cache in deepseek.generation.caches] == ["present.0.latent", "present.0.rope"]
    assert deepseek.generation.positions_limit == POSITIONS
    assert deepseek.kind.properties.axes == {"sequence": POSITIONS, "total": POSITIONS}


def test_untraced_shapes_and_the_test_set_are_compared(deepseek: Made) -> None:
    places = [found["worst"].partition(" at ")[2] for found in (*deepseek.report.test_set, *deepseek.report.shapes)]
    assert places[0] == "the test set"
    assert {"past 0, sequence 1, 0 padded", f"past 0, sequence {POSITIONS}, 2 padded"} <= set(places)
    assert "past 6, sequence 1, 3 padded" in places
    assert all(found["max_abs_error"] < 1e-4 for found in deepseek.report.rows)
    greedy_record = deepseek.report.last_check.record["greedy"]
    assert greedy_record == {
        "prompts": 4,
        "tokens": greedy_record["tokens"],
        "ways": ["each prompt alone", "all in one batch, padded on the left", "read three positions at a time"],
        "ties": 0,
    }


def test_greedy_answers_equal_generate_of_transformers(deepseek: Made) -> None:
    answers = greedy(deepseek.decoder(), PROMPTS[:2], 6, chunk=2)
    for prompt, answer in zip(PROMPTS[:2], answers, strict=True):
        ids = torch.tensor([prompt])
        found = deepseek.task.net.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=2, pad_token_id=0
        )
        assert found[0, len(prompt) :].tolist() == answer.tokens


def test_no_expert_weights_are_gathered_by_token(deepseek: Made) -> None:
    """Loops read one expert at a time; outside of them nothing is gathered from stacked experts."""
    graph = onnx.load(deepseek.path).graph
    stacks = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 3 and tensor.dims[0] == 4}
    for node in graph.node:
        if node.op_type == "Transpose" and set(node.input) & stacks:
            stacks |= set(node.output)
    assert stacks
    assert sum(node.op_type == "Loop" for node in graph.node) == 2
    assert not [node.name for node in graph.node if node.op_type == "Gather" and set(node.input) & stacks]


def damaged(made: Made, name: str, path: Path) -> Path:
    """Change one weight by more than rounding could."""
    model = onnx.load(made.path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    values = numpy_helper.to_array(tensor).copy()
    values[..., 0] += 2.0
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    path.write_bytes(model.SerializeToString())
    return path


def weights(made: Made, axes: int) -> list[str]:
    return [
        tensor.name
        for tensor in onnx.load(made.path).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) >= axes
    ]


def test_damage_to_one_expert_is_noticed(deepseek: Made, tmp_path: Path) -> None:
    name = weights(deepseek, axes=3)[-1]
    decoder = deepseek.decoder(damaged(deepseek, name, tmp_path / "model.onnx"))
    with pytest.raises(StageError, match="the ONNX file is not the model"):
        require_equal(deepseek.kind.compare_decoder(decoder), Export())


@pytest.mark.long
def test_damage_to_any_weight_is_noticed(deepseek: Made, tmp_path: Path) -> None:
    names = weights(deepseek, axes=2)
    assert len(names) > 8
    for name in names:
        decoder = deepseek.decoder(damaged(deepseek, name, tmp_path / "model.onnx"))
        with pytest.raises(StageError, match=r"the ONNX file is not the model|ONNX Runtime cannot run the file"):
            require_equal(deepseek.kind.compare_decoder(decoder), Export())


def test_differing_greedy_answers_are_reported(deepseek: Made) -> None:
    honest = deepseek.decoder()

    def lying(feed: Any) -> Any:
        found = dict(honest.run(feed))
        found["logits"] = np.roll(found["logits"], 1, axis=-1)
        return found

    with pytest.raises(StageError, match=r"does not generate what torch does \(each prompt alone\): .* ONNX Runtime's"):
        verify_greedy(deepseek.task.net, replace(honest, run=lying), PROMPTS[:1], Export())


def test_reference_answers_equally_with_masks_between_texts() -> None:
    model = causal("Qwen2")
    decoder = TorchDecoder(model, make_generation(Language(model), model))
    expected = decoder.greedy(PROMPTS[0], 5)
    mask_between_texts(model)
    assert decoder.greedy(PROMPTS[0], 5) == expected


def test_prompts_from_the_test_set_have_no_padding() -> None:
    task: Any = Language(causal("Qwen2"), inputs=MASKED)
    ids = task.data("test")["input_ids"].tolist()
    prompts = choose_prompts((), open_split(task, "test"), make_generation(task, task.net))
    assert prompts == [ids[row][row:][: 3 + 4 * row] for row in range(4)]  # row N begins with N padding ids


def test_greedy_answers_may_differ_only_at_ties() -> None:
    tie, ahead = Answer([4, 7], [1.0, 1e-5], [2.0, 2.0]), Answer([4, 7], [1.0, 1.0], [2.0, 2.0])
    assert _count_tie("way", [1], [4, 7], ahead, Export()) == 0
    assert _count_tie("way", [1], [4, 8], tie, Export()) == 1
    with pytest.raises(StageError, match=r"torch's greedy answer is \[4, 8\], ONNX Runtime's \[4, 7\]"):
        _count_tie("way", [1], [4, 8], ahead, Export())


def test_bundle_answers_golden_requests_with_past_and_prompts(bundle: Bundle) -> None:
    golden = bundle.golden()
    assert golden.inputs["past.0.latent"].shape[2] == 3
    assert [one["prompt"] for one in golden.generated] == [list(prompt) for prompt in PROMPTS]
    assert all(one["answer"] for one in golden.generated)
    assert bundle.signature.generation is not None
    assert (bundle.signature.generation.begin, bundle.signature.generation.end) == ((1,), (2,))
    check_golden_requests(bundle, Session(bundle, "cpu", 1))


def test_card_states_the_longest_text(bundle: Bundle) -> None:
    file = RunFile(id="one", created="2026-01-01", wanted=(), config={"name": "talk"}, environment={})
    text = render_card(Facts(file), bundle.signature, bundle.manifest.ancestors)
    assert f"Axis `total`: 1 to {POSITIONS}." in text
    assert "A language model: it continues prompts" in text


def test_bundle_with_other_answers_is_refused(bundle: Bundle) -> None:
    golden = bundle.golden()
    golden.generated[1]["answer"][-1] ^= 1
    golden.write(bundle.path)
    with pytest.raises(BundleError, match=r"golden requests: generated\[1\]: expected .*, found"):
        check_golden_requests(bundle, Session(bundle, "cpu", 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: tokenizer(root / "files", WORDS + 1), f"has the id {WORDS}, but the model knows {WORDS} ids"),
        (lambda root: (root / "files/tokenizer.json").write_text("{}"), "not a tokenizer of the `tokenizers` package"),
        (
            lambda root: (root / "talk_codec.py").write_text(
                CODEC.replace('("tokenizer.json",)', "()").replace("folder)", "folder=None)")
            ),
            "the bundle of a language model needs files/tokenizer.json",
        ),
    ],
)
def test_tokenizer_of_another_model_is_refused(deepseek: Made, tmp_path: Path, spoil: Any, message: str) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/model.onnx").write_bytes(deepseek.path.read_bytes())
    (tmp_path / "talk_codec.py").write_text(CODEC)
    tokenizer(tmp_path / "files")
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        seal(deepseek, tmp_path / "bundle", tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Prompting(positions_limit=POSITIONS + 1), f"allows {POSITIONS + 1} positions, but .* ends at {POSITIONS}"),
        (Prompting(positions_limit=LENGTH), f"a language model of {LENGTH} positions is too short; 12 at least"),
        (Prompting(prompts=((1,) * 25,)), "has a prompt of 25 ids; give 1 to 24, so that an answer fits"),
    ],
)
def test_texts_that_do_not_fit_are_refused_before_training(settings: Prompting, message: str) -> None:
    task: Any = Language(causal("Llama"), settings=settings)
    with pytest.raises(ConfigError, match=message):
        check_decoder(task, task.net, Export(), [])
    with pytest.raises(ConfigError, match=message):
        make_generation(task, task.net)


def test_samples_that_are_longer_than_the_model_are_refused_before_training() -> None:
    task: Any = Language(causal("Llama"), inputs=MASKED)
    check_decoder(task, task.net, Export(), [open_split(task, "validation")])
    columns = {name: np.tile(column, (1, 4)) for name, column in task.data("validation").items()}
    long = Samples("validation", columns)
    with pytest.raises(
        DataError, match=r"validation data's `input_ids` has shape \[1, 44\], .* of 40 positions at most"
    ):
        check_decoder(task, task.net, Export(), [long])


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("DeepseekV32", torch.float32, "layer 0 of the language model keeps a DynamicIndexedLayer, which cannot be"),
        ("Llama", torch.bfloat16, "has weights of torch.bfloat16; build it with dtype=torch.float32"),
    ],
)
def test_models_without_a_decoder_are_refused_before_training(kind: str, dtype: torch.dtype, message: str) -> None:
    task: Any = Language(causal(kind).to(dtype))
    with pytest.raises(ConfigError, match=message):
        check_decoder(task, task.net, Export(), [])


def test_only_decoders_with_keys_and_values_run_in_onnxruntime_genai() -> None:
    config = Export(formats=("onnx", "genai"))
    task: Any = Language(causal("Llama"))
    check_decoder(task, task.net, config, [])
    task.net = causal("DeepseekV3")
    with pytest.raises(ConfigError, match=r"this model caches what they are computed from \(kv_lora_rank\)"):
        check_decoder(task, task.net, config, [])


def test_model_without_a_configuration_is_refused() -> None:
    task: Any = Language(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"gives a Linear without config\.max_position_embeddings"):
        check_decoder(task, task.net, Export(), [])


@pytest.mark.parametrize(
    "kind",
    [
        "Mistral",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("Mixtral", "Phi3", "Gemma2", "Gemma3", "GptOss", "Qwen3Moe", "Gemma")
        ),
    ],
)
@pytest.mark.long
def test_texts_beyond_the_sliding_window_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    made = make(kind, tmp_path)
    made.report.require(Export())
    decoder, generation, net = made.decoder(), made.generation, made.task.net
    ids = np.random.default_rng(1).integers(3, WORDS, (1, 24))
    parts = [ids[:, :20], *np.split(ids[:, 20:], 4, axis=1)]  # a prompt, and four tokens one by one
    found, past = [], empty_past(decoder, 1)
    for part in parts:
        total = past[generation.caches[0].input].shape[2] + part.shape[1]
        outputs = decoder.run(inputs_of(generation, part, np.ones((1, total), np.int64), past))
        past = {cache.input: outputs[cache.output] for cache in generation.caches}
        found.append(outputs[generation.logits])
    with torch.no_grad():
        cache: Any = DynamicCache(config=net.config)  # limited to the window
        steps = [net(torch.from_numpy(part), past_key_values=cache).logits.numpy() for part in parts]
        whole = net(torch.from_numpy(ids), use_cache=False).logits.numpy()
    for expected in (np.concatenate(steps, axis=1), whole):
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-4, rtol=1e-4)
    places = [row["worst"].partition(" at ")[2] for row in (*made.report.test_set, *made.report.shapes)]
    assert ("past 7, random" in places) == bool(getattr(net.config, "sliding_window", None))
