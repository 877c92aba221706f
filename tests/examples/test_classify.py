"""The task and codec of examples/deepseek/classify, on tiny random checkpoints of every official kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.contract.data import Samples, forward
from pipeline.contract.task import Classifier, HasBaseline, HasExample, load_class
from pipeline.system.errors import ConfigError, InvalidPayload

from .conftest import DEEPSEEK
from .test_codecs import assert_codec_is_compared, lies

CLASSIFY = DEEPSEEK / "classify"
FILES = {
    f"{package}/part{i}": "\n\n".join(
        f"def {package}_{i}_{j}(value):\n    one = {package}.open(value, {j})\n    return one.{package}()\n    # {j}"
        for j in range(12)
    )
    for package in ("asyncio", "xml", "email")
    for i in range(3)
} | {"xml/same": "def shared():\n    a\n    b\n    c", "zlib": "def alone():\n    a\n    b\n    d"}
HEAD = ("score.", "bag.")
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_mtp_layers": 0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as written by pretraining, with the configuration and the tokenizer."""
    load_class("task.py:Classify", CLASSIFY)
    folder = tmp_path / "official"
    folder.mkdir()
    importlib.import_module("vocabulary").train_tokenizer(FILES.values(), 280, folder)
    write_config(folder, "deepseek_v3", n_routed_experts=4, moe_intermediate_size=8, first_k_dense_replace=1, **LATENT)
    return folder


def write_config(folder: Path, kind: str, **more: int | None) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(
        kind, vocab_size=280, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, pad_token_id=2, **more,
    ).save_pretrained(folder)  # fmt: skip


@pytest.fixture
def task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return built("Classify", folder, monkeypatch)


def built(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind: Any = load_class(f"task.py:{name}", CLASSIFY)
    monkeypatch.setattr(kind.model.__globals__["corpus"], "files", lambda: FILES)
    task = kind()
    task.make_files(folder)
    task.use_files(folder)
    return task


def begun(task: Any, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = task.adapt(folder)
    return module


def test_snippets_are_labelled_by_package_and_in_one_split_only(task: Any) -> None:
    splits = task._snippets
    texts = [text for split in splits.values() for text, _ in split]
    assert all(splits.values())
    assert len(texts) == len(set(texts)) == 3 * 3 * 12 + 1
    assert not [text for text in texts if "alone" in text], "a module is in no package"
    assert all(
        task.classes[label] in text for split in splits.values() for text, label in split if "shared" not in text
    )


def test_examples_fit_the_limits_of_the_service(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest = min((text for text, _ in task._snippets["test"]), key=lambda text: len(task._codec.tokens(text)))
    room = len(task._codec.tokens(shortest))
    monkeypatch.setitem(type(task).example.__globals__, "LONGEST", room)
    assert shortest in task.example()
    assert all(len(task._codec.tokens(text)) <= room for text in task.example())


def test_task_is_a_classifier_with_a_text_baseline(task: Any) -> None:
    assert {isinstance(task, part) for part in (Classifier, HasBaseline, HasExample)} == {True}
    samples = Samples("test", task.data("test"))
    batch = samples.batch(range(len(samples)))
    right = task.metrics(task.baseline()(batch), batch)["accuracy"].mean()
    assert right > 0.8, "each package is called by its name"
    assert set(task.example()) <= {text for text, _ in task._snippets["test"]}


def test_baseline_with_the_best_validation_is_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here only characters, and not words, predict the label."""
    load_class("task.py:Classify", CLASSIFY)
    tfidf = importlib.import_module("tfidf")
    train = [(f"{'left' if i % 2 else 'right'}{i}", i % 2) for i in range(40)]
    validation = [(f"{'left' if i % 2 else 'right'}{i}", i % 2) for i in range(40, 60)]
    logs, labels = tfidf.fit_best(train, validation)(["left99", "right98"])
    assert capsys.readouterr().out.startswith("baseline: {'analyzer': 'char_wb'")
    assert labels.tolist() == [0, 1]
    assert logs.argmax(axis=1).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "learning"), [("Classify", lambda name: True), ("Frozen", lambda name: name.startswith(HEAD))]
)
def test_one_step_changes_only_trainable_parameters(
    name: str, learning: Callable[[str], bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = built(name, folder, monkeypatch)
    model = begun(task, folder)
    batch = Samples("train", task.data("train")).batch(range(6))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    bag = [value for name, value in trained.items() if name.startswith("bag.")]  # has large gradients
    rest = [value for name, value in trained.items() if not name.startswith("bag.")]
    groups: list[dict[str, Any]] = [{"params": bag, "lr": 1e-4}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    task.loss(forward(model, task, batch), batch).backward()
    optimizer.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert {name for name in before if learning(name)} >= moved
    assert {"score.weight", "bag.tokens.weight", "bag.triples.weight"} <= moved
    assert ("model.embed_tokens.weight" in moved) == (name == "Classify")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@torch.no_grad()
def test_distilled_models_work_with_the_same_head(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(folder, kind, num_key_value_heads=1)
    task = built("Classify", folder, monkeypatch)
    model = begun(task, folder).eval()
    batch = Samples("test", task.data("test")).batch([0, 1])
    together = forward(model, task, batch)
    own = batch["attention_mask"][0] == 1
    alone = forward(model, task, {name: batch[name][:1, own] for name in task.inputs})
    torch.testing.assert_close(together[0], alone[0])  # type: ignore[index]


def test_error_without_pretrained_files_states_where_to_find_some(tmp_path: Path) -> None:
    task = load_class("task.py:Classify", CLASSIFY)()
    with pytest.raises(ConfigError, match=r"set model.pretrained to their folder"):
        task.model()
    with pytest.raises(
        ConfigError, match=r"no config.json came with model.pretrained; name ../pretrain, one of its runs"
    ):
        task.make_files(tmp_path)


@pytest.fixture
def codec(task: Any, folder: Path) -> Any:
    return load_class("codec.py:SnippetCodec", CLASSIFY)(folder)


def test_codec_is_compared_with_the_data(task: Any, codec: Any, folder: Path) -> None:
    assert_codec_is_compared(task, codec, lies(task.classes), folder, lambda: begun(task, folder))


def test_probabilities_come_with_the_names_of_the_packages(codec: Any, task: Any, folder: Path) -> None:
    model = begun(task, folder).eval()
    arrays = codec.decode(task.example())
    with torch.no_grad():
        logits = model(*[torch.from_numpy(arrays[name]) for name in task.inputs]).numpy()
    for prediction, row in zip(codec.encode({"logits": logits}), logits, strict=True):
        assert prediction["package"] == task.classes[row.argmax()]
        assert sum(prediction["probabilities"].values()) == pytest.approx(1)
        assert list(prediction["probabilities"]) == list(task.classes)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" \n", r"instances\[1\]: the text is empty"),
        (["import os"], r"instances\[1\]: must be a text, found list"),
        ("\udc80import", r"instances\[1\]: no valid UTF-8: half a character at position 0"),
        ("value = 1\n" * 100, r"instances\[1\]: \d+ tokens, but the model takes at most 192"),
    ],
)
def test_invalid_text_is_refused_with_its_index(codec: Any, text: Any, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        codec.decode(["import os", text])
