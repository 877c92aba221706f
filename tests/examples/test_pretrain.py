"""The task and codec of examples/deepseek/pretrain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.data import Samples, as_task_outputs, forward, name_outputs, one_text_per_row, pack_texts
from pipeline.contract.task import load_class
from pipeline.system.errors import DataError, InvalidPayload

from .conftest import DEEPSEEK, TEXTS, Module

INPUTS = ("input_ids", "attention_mask", "position_ids")


def logits_of(task: Any, model: Any, rows: Any) -> Tensor:
    found = forward(model, task, batch_of(rows))
    assert isinstance(found, Tensor)
    return found


def alone_logits(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids]), position_ids=torch.arange(len(ids))[None]).logits
    return logits


def batch_of(rows: Any) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(a) for name, a in zip(INPUTS, (rows.ids, rows.segments, rows.positions), strict=True)
    }


@pytest.fixture
def model(pretrain: Any) -> Any:
    torch.manual_seed(0)
    return pretrain.model().eval()


@torch.no_grad()
def test_packed_document_has_the_logits_of_the_document_alone(pretrain: Any, model: Any) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 280, size).tolist() for size in (5, 9, 14, 3, 11, 2)]
    packed = pack_texts(documents, 48, pad=2)
    assert packed.segments.max() == 6
    together = logits_of(pretrain, model, packed)
    for number, document in enumerate(documents, 1):
        alone = alone_logits(model, document)
        torch.testing.assert_close(together[0][torch.from_numpy(packed.segments[0]) == number], alone[0])


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(pretrain: Any, model: Any) -> None:
    rows = one_text_per_row([[5, 6, 7, 8], [9, 10]], 7, pad=2)
    found = logits_of(pretrain, model, rows)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, 3:], alone_logits(model, [5, 6, 7, 8])[0])
    torch.testing.assert_close(found[1, 5:], alone_logits(model, [9, 10])[0])


def test_data_has_packed_rows_with_their_byte_counts(pretrain: Any) -> None:
    samples = Samples("train", pretrain.data("train"))
    whole = samples.batch(range(len(samples)))
    assert whole["input_ids"].shape == (len(samples), 48)
    assert (whole["attention_mask"] == 0).float().mean() < 0.15
    # Every byte once, except those of the first token of each piece of a long document, which nothing predicts.
    assert 0.9 < whole["bytes"].sum().item() / sum(map(len, TEXTS["train"])) <= 1


def test_bits_per_byte_count_all_but_first_tokens(pretrain: Any) -> None:
    samples = Samples("test", pretrain.data("test"))
    batch = samples.batch([0, 1])
    logits = torch.randn(2, 48, 280)
    expected = []
    for row in range(2):
        bits = 0.0
        for place in range(1, 48):
            if batch["attention_mask"][row, place] and batch["position_ids"][row, place]:
                odds = logits[row, place - 1].log_softmax(0)[batch["input_ids"][row, place]]
                bits -= odds.item() / np.log(2)
        expected.append(-bits / batch["bytes"][row].item())
    found = pretrain.metrics(logits, batch)
    assert found["minus_bits_per_byte"].tolist() == pytest.approx(expected, rel=1e-4)
    assert ((found["next_token"] >= 0) & (found["next_token"] <= 1)).all()


def test_loss_of_a_batch_is_the_mean_of_its_parts(pretrain: Any, model: Any) -> None:
    samples = Samples("train", pretrain.data("train"))
    whole, parts = samples.batch([0, 1, 2, 3]), [samples.batch([0]), samples.batch([1, 2, 3])]
    losses = [pretrain.loss(forward(model, pretrain, batch), batch).item() for batch in (whole, *parts)]
    assert losses[0] == pytest.approx(losses[1] / 4 + losses[2] * 3 / 4, rel=1e-5)


def test_baseline_predicts_the_next_token(pretrain: Any) -> None:
    samples = Samples("train", pretrain.data("train"))
    batch = samples.batch(range(len(samples)))
    answers = as_task_outputs(pretrain, name_outputs(pretrain, pretrain.baseline()(batch)))
    assert isinstance(answers, Tensor)
    torch.testing.assert_close(answers.exp().sum(dim=2), torch.ones(len(samples), 48))
    nothing_known = torch.zeros(len(samples), 48, 280)
    found, blind = (-pretrain.metrics(one, batch)["minus_bits_per_byte"].mean() for one in (answers, nothing_known))
    assert found < 0.4 * blind, "it has read these very texts"


def test_baseline_with_the_best_validation_is_chosen(
    pretrain: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, splits = pretrain.data, set[str]()

    def seen(split: str) -> Any:
        splits.add(split)
        return data(split)

    monkeypatch.setattr(pretrain, "data", seen)
    bits = {}
    for order in pretrain.orders:
        pretrain.orders = (order,)
        pretrain.baseline()
        bits[order] = float(capsys.readouterr().out.split(", ")[-1].split()[0])
    pretrain.orders = tuple(bits)
    pretrain.baseline()
    best = min(bits, key=bits.__getitem__)
    assert capsys.readouterr().out.startswith(f"baseline: order {best}, discount ")
    assert len(set(bits.values())) > 1
    assert splits == {"validation"}


def test_files_have_the_official_layout_and_are_reproducible(pretrain: Any, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    pretrain.make_files(again)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (again / name).read_bytes() == (tmp_path / "files" / name).read_bytes()
    config = json.loads((again / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DeepseekV3ForCausalLM"], "deepseek_v3")


def test_error_without_files_states_what_to_do() -> None:
    task = load_class("task.py:Pretrain", DEEPSEEK / "pretrain")()
    for ask in (task.model, lambda: task.data("train"), task.baseline):
        with pytest.raises(DataError, match=r"no tokenizer and no config.json yet: call use_files\(folder\)"):
            ask()


def test_a_tokenizer_of_another_model_is_refused(pretrain: Any, tmp_path: Path) -> None:
    path = tmp_path / "files" / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 280', '"vocab_size": 200'))
    with pytest.raises(DataError, match=r"highest token is 279, but config.json has an embedding of 200 rows"):
        pretrain.use_files(tmp_path / "files")
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer of the package tokenizers: Model missing"):
        pretrain.use_files(tmp_path / "files")


@pytest.fixture
def codec(pretrain: Any, tmp_path: Path) -> Any:
    return load_class("codec.py:TextCodec", DEEPSEEK / "pretrain")(tmp_path / "files")


def test_texts_are_encoded_as_in_training_with_left_padding(codec: Any, pretrain: Any, pretrain_module: Module) -> None:
    arrays = codec.decode(["def add_1(", "for"])
    encode = pretrain_module("vocabulary").encode
    for row, text in enumerate(["def add_1(", "for"]):
        own = arrays["attention_mask"][row] == 1
        assert [*arrays["input_ids"][row][own]] == encode(pretrain._tokenizer, [text])[0][:-1]
        assert [*arrays["position_ids"][row][own]] == list(range(own.sum()))
        assert own[-1] and (np.diff(own.astype(int)) >= 0).all()


def test_most_likely_next_tokens_are_returned_with_probabilities(codec: Any) -> None:
    logits = np.zeros((1, 3, 280), np.float32)
    logits[0, -1, 40] = 20
    [found] = codec.encode({"logits": logits})
    assert found["next"][0]["token"] == 40
    assert found["next"][0]["probability"] == pytest.approx(1, abs=1e-5)
    assert len(found["next"]) == 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"instances\[1\]: the text is empty"),
        (7, r"instances\[1\]: must be a text, found int"),
        (None, r"instances\[1\]: must be a text, found NoneType"),
        ("x = '\ud800'", r"instances\[1\]: no valid UTF-8: half a character at position 5"),
        ("if x: " * 100, r"instances\[1\]: \d+ tokens, but the model takes at most 48"),
    ],
)
def test_invalid_text_is_refused_with_its_index(codec: Any, text: Any, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        codec.decode(["fine", text])
