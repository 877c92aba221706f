"""Language models that return log-probabilities in training, split over processes and settings of the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import log_probs_in_training, mask_between_texts, token_log_probs
from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.device.memory import estimate_memory
from train.process_group import ProcessGroup

from ..quick import quick
from .distributed import run_distributed, trainer

CPU = ProcessGroup(Rank(), torch.device("cpu"))
LENGTH, CHUNK = 12, 10  # a batch of 4 rows has 44 tokens with a predecessor


class Text:
    inputs = ("input_ids", "attention_mask", "position_ids")
    outputs = ("logits",)
    vocabulary, chunk = 64, 0

    def model(self) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = Qwen2ForCausalLM(config)
        return mask_between_texts(log_probs_in_training(model, self.chunk) if self.chunk else model)

    def data(self, split: str) -> dict[str, Any]:
        ids = torch.randint(64, (40, LENGTH), generator=torch.Generator().manual_seed(len(split)))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(LENGTH).repeat(len(ids), 1),
        }

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return -token_log_probs(outputs, batch["input_ids"]).mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"log_prob": token_log_probs(outputs, batch["input_ids"]).mean(dim=1)}


class Chunked(Text):
    chunk = CHUNK


def losses(group: ProcessGroup, task: type[Text], settings: dict[str, Any]) -> list[float]:
    made = trainer(group, task(), **{"batch_size": 8, "lr": 0.01, **settings})
    for step in range(10):
        made._step(step)
    return [sum(group.gather(float(loss))) / 8 for loss in made._window.losses]


@pytest.mark.parametrize(
    "settings",
    quick(
        [{"strategy": "fsdp"}],
        [
            {},
            {"strategy": "fsdp"},
            {"strategy": "fsdp", "recompute": "blocks", "accumulate": 2},
            {"tensor_parallel": 2},
            {"pipeline_parallel": 2, "accumulate": 4},
        ],
    ),
)
def test_chunked_processes_learn_the_same_as_one_with_logits(settings: dict[str, Any]) -> None:
    alone = losses(CPU, Text, {})
    found = run_distributed(losses, 2, Chunked, settings)
    print(f"logits {alone}, in chunks {found[0]}")
    assert found[0] == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < 0.97 * alone[0]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_follows_logits_in_bf16(strategy: str) -> None:
    settings = {"strategy": strategy, "precision": "bf16"}
    whole, chunked = (run_distributed(losses, 2, task, settings)[0] for task in (Text, Chunked))
    assert chunked == pytest.approx(whole, rel=0.01)


class Wide(Chunked):
    vocabulary = 8192


class WideLogits(Text):
    vocabulary = 8192


def test_the_estimate_of_memory_counts_the_logits_of_a_chunk() -> None:
    estimates = []
    tasks: list[Any] = [WideLogits(), Wide()]
    for task in tasks:
        config = parse_config(
            {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {"batch_size": 8, "device": "cpu"}},
            source="test",
        )
        estimates.append(estimate_memory(task, config, CPU, task.model, Samples("train", task.data("train"))).bytes)
    logits = 4 * 8 * LENGTH * Wide.vocabulary
    print(f"estimates {estimates}, logits {logits}")
    assert estimates[1] < estimates[0] - logits
