"""Tiny models of known families as a task, and functions to train it in several ways by the same processes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.metrics import MetricsLog
from train.optim import seed_step
from train.pretrained.random_weights import create_split
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

from ..distributed import trainer

SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 7, "lr": 0.1, "optimizer": "sgd", "log_every": 1}


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 16}
OTHERS = {"initializer_range": 0.2, "use_cache": False}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
MIXTURE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {**LATENT, **MIXTURE, "q_lora_rank": 12, "n_group": 1, "topk_group": 1},
    "DeepseekV2": {**LATENT, **MIXTURE, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    "Qwen2": {"num_key_value_heads": 2},
    "TiedQwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Llama": {"num_key_value_heads": 2},
}
# Layers with LoRA adapters; nothing else is trained.
ADAPTED = {
    "AdaptedLlama": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    "AdaptedDeepseekV3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "LatentDeepseekV3": ["q_a_proj", "kv_a_proj_with_mqa"],
}


class LanguageModel(nn.Module):
    def __init__(self, kind: str) -> None:
        import transformers

        super().__init__()
        family = re.sub("^(Tied|Adapted|Latent)", "", kind)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **OTHERS, **KINDS.get(kind, KINDS[family])})
        self.inner = getattr(transformers, f"{family}ForCausalLM")(config)
        if kind in ADAPTED:
            from peft import LoraConfig, inject_adapter_in_model

            self.inner.requires_grad_(False)
            inject_adapter_in_model(LoraConfig(r=2, target_modules=ADAPTED[kind]), self.inner)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens).logits
        return logits


class Language:
    """A task with seven samples in a batch: two processes have three and four of them."""

    inputs = ("tokens",)
    outputs = ("logits",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def model(self) -> nn.Module:
        return LanguageModel(self._kind)

    def data(self, split: str) -> dict[str, Any]:
        tokens = np.random.default_rng(len(split)).integers(0, 16, size=(7 if split == "train" else 3, 6))
        return {"tokens": tokens[:, :-1], "target": tokens[:, 1:]}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch["target"].flatten())

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": (outputs.argmax(2) == batch["target"]).float().mean(1)}


def single() -> ProcessGroup:
    return ProcessGroup(Rank(0, 0, 1), torch.device("cpu"))


def store(directory: Path, group: ProcessGroup) -> CheckpointStore:
    return CheckpointStore(directory / "checkpoints", 99, {}, group)


def trained_in(group: ProcessGroup, directory: Path, **settings: Any) -> Tensor | None:
    """Train two steps and keep the checkpoints; at least one process returns the model's outputs."""
    fresh, progress = _prepare(group, directory, 0, settings)
    return _fit(fresh, group, directory, progress)


def resumed_in(group: ProcessGroup, directory: Path, **settings: Any) -> Tensor | None:
    """Continue from a checkpoint of the first step."""
    fresh, progress = _prepare(group, directory, 1, settings)
    return _fit(fresh, group, directory, progress)


def _prepare(group: ProcessGroup, directory: Path, step: int, settings: dict[str, Any]) -> tuple[Trainer, Progress]:
    settings = {**SETTINGS, **settings}
    task = Language(settings.pop("kind", "DeepseekV3"))
    sparse = partial(create_split, task.model, partial(seed_step, 0, -1, 0), group, bool(step), resident_bytes=0)
    fresh = trainer(group, task, build=sparse if settings.pop("sparse", False) else None, **settings)
    if not step:
        return fresh, Progress()
    saved = store(directory, group).load(step)
    fresh.restore(saved)
    return fresh, saved.progress


def _fit(fresh: Trainer, group: ProcessGroup, directory: Path, progress: Progress) -> Tensor | None:
    journal = None
    if group.rank.first:
        directory.mkdir(parents=True, exist_ok=True)
        journal = MetricsLog(directory, progress.step)
    fresh.fit(progress, store(directory, group), journal)
    if journal:
        journal.close()
    fresh.strategy.model.eval()
    with torch.no_grad():
        outputs = fresh.strategy.predict({"tokens": torch.arange(20).view(4, 5) % 16})
    assert outputs is None or isinstance(outputs, Tensor)
    return outputs
