"""Texts that a model cannot process, tokenizers of other models, and the validation loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.processes import Rank
from train.optim import Precision
from train.parallel.base import Objective, Strategy
from train.process_group import ProcessGroup
from train.trainer import Trainer
from train.validation import check_texts, check_tokenizer, validate

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


class Words:
    inputs: tuple[str, ...] = ("input_ids",)
    outputs = ("logits",)

    def model(self) -> nn.Module:
        config = LlamaConfig(**SIZES, vocab_size=16, max_position_embeddings=12, use_cache=False)
        made: nn.Module = LlamaForCausalLM(config)
        return made

    def data(self, split: str) -> dict[str, Any]:
        return {"input_ids": np.arange(24).reshape(2, 12) % 16}

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()

    def metrics(self, outputs: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        return {"x": outputs.mean(dim=(1, 2))}


TASK: Any = Words()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Words().model()


def split(**columns: Any) -> Samples:
    return Samples("train", columns)


def test_valid_texts_are_accepted(model: nn.Module) -> None:
    task: Any = Words()
    check_texts(task, model, [split(**task.data("train"))])
    check_texts(task, nn.Linear(2, 2), [split(input_ids=np.full((1, 99), 99))])  # not a model of transformers


@pytest.mark.parametrize(("value", "named"), [(16, 16), (-100, -100)])
def test_token_id_beyond_the_embedding_is_an_error(model: nn.Module, value: int, named: int) -> None:
    ids = np.ones((2, 4), int)
    ids[1, 2] = value
    with pytest.raises(DataError, match=rf"data\('train'\).*`input_ids` has the id {named}.* embedding has 16 rows"):
        check_texts(TASK, model, [split(input_ids=ids)])


def test_text_beyond_the_models_positions_is_an_error(model: nn.Module) -> None:
    task: Any = Words()
    ids = np.ones((1, 13), int)
    with pytest.raises(DataError, match=r"a text has 13 positions, but the model has 12 \(max_position_embeddings"):
        check_texts(task, model, [split(input_ids=ids)])
    task.inputs = ("input_ids", "position_ids")
    check_texts(task, model, [split(input_ids=ids, position_ids=[[*range(12), 0]])])
    with pytest.raises(DataError, match="a text has 13 positions"):
        check_texts(task, model, [split(input_ids=ids, position_ids=[[*range(13)]])])


def test_first_item_of_a_dataset_is_checked(model: nn.Module) -> None:
    class Items(list[dict[str, Any]]):
        pass

    with pytest.raises(DataError, match="has the id 16"):
        check_texts(TASK, model, [Samples("train", Items([{"input_ids": torch.tensor([16])}]))])


def test_training_refuses_before_its_first_step() -> None:
    task: Any = Words()
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {"batch_size": 2, "device": "cpu"}}
    texts = split(input_ids=np.full((2, 3), 40))
    with pytest.raises(DataError, match="has the id 40"):
        Trainer(task, parse_config(values, source="test"), ProcessGroup(Rank(), torch.device("cpu")), texts, texts, 2)


def tokenizer(folder: Path, highest: int) -> Path:
    body = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": highest}]}
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return folder


def test_a_tokenizer_of_another_model_is_reported_with_its_file(model: nn.Module, tmp_path: Path) -> None:
    check_tokenizer(tmp_path, model)
    check_tokenizer(tokenizer(tmp_path, 15), model)
    with pytest.raises(DataError, match=r"tokenizer.json: its highest id is 16, but the model's embedding has 16 rows"):
        check_tokenizer(tokenizer(tmp_path, 16), model)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match=r"tokenizer.json: not a tokenizer of the `tokenizers` package"):
        check_tokenizer(tmp_path, model)


CPU = torch.device("cpu")


class Echo:
    """A task whose loss of a sample is its value, so that every mean is known."""

    inputs = ("x",)
    outputs = ("y",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"square": outputs[:, 0] ** 2}


def run(
    values: list[float],
    size: int,
    task: Any = None,
    model: nn.Module | None = None,
    group: ProcessGroup = ProcessGroup(Rank(), CPU),  # noqa: B008  # frozen
) -> dict[str, float]:
    samples = Samples("validation", {"x": torch.tensor(values)[:, None]})
    task = task or Echo()
    strategy = Strategy(model or nn.Identity(), Objective(task, Precision("fp32", CPU)), group, Train())
    return validate(task, strategy, samples, group, size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_validation_mean_is_over_samples(size: int) -> None:
    assert run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 28.0], size) == {
        "loss": pytest.approx(7.0),
        "square": pytest.approx(875 / 7),
    }


def test_every_batch_of_validation_is_progress_for_the_watchdog() -> None:
    group, positions = ProcessGroup(Rank(), CPU), list[object]()

    class Watched(Echo):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            positions.append(group.heartbeat.position)
            return super().loss(outputs, batch)

    run([1.0] * 6, 2, task=Watched(), group=group)
    assert len(set(map(id, positions))) == 3


def test_validation_uses_eval_mode_and_restores_train_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9)).train()
    assert run([1.0] * 50, 10, model=model)["loss"] == 1.0
    assert model.training


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(DataError, match="the validation loss is"):
        run([1.0, value], 1)


def test_a_metric_that_is_no_value_per_sample_is_named() -> None:
    class Averaged(Echo):
        def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"square": outputs.mean()}

    with pytest.raises(DataError, match="square must have one value per sample"):
        run([1.0, 2.0], 2, task=Averaged())
