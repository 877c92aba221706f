"""Tiny random language models of the official architectures, as tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.checks.verify import write_and_compare
from export.kinds import open_exporter
from export.llm.decoder import open_decoder
from export.llm.kind import LanguageExporter
from export.report import Report
from export.subject import Subject
from pipeline.contract.data import open_split
from pipeline.contract.golden import Decoder
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation, Prompting

WORDS, COUNT, LENGTH, POSITIONS = 61, 9, 11, 40
MASKED = ("input_ids", "attention_mask")
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3), (5,), (8, 9, 7, 9))
CODEC = """
class Codec:
    files = ("tokenizer.json",)

    def __init__(self, folder):
        self.folder = folder

    def decode(self, instances):
        return {}

    def encode(self, outputs):
        return []
"""


@dataclass
class Text:
    """A task around any net that takes ids; its text is random, and padded on the left."""

    net: nn.Module
    inputs: tuple[str, ...] = ("input_ids",)
    outputs: tuple[str, ...] = ("logits",)

    def model(self) -> nn.Module:
        return self.net

    def data(self, split: str) -> dict[str, Any]:
        ids = np.random.default_rng(0).integers(0, WORDS, size=(COUNT, LENGTH))
        mask = np.arange(LENGTH) >= np.arange(COUNT)[:, None] % 4
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return torch.zeros(())

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ones": torch.ones(COUNT)}


@dataclass
class Language(Text):
    """A task whose model generates text."""

    settings: Prompting = field(default_factory=Prompting)

    def model(self) -> nn.Module:
        return Masked(self.net)

    def language_model(self, model: nn.Module) -> nn.Module:
        return self.net

    def prompting(self) -> Prompting:
        return self.settings


class Masked(nn.Module):
    """The evaluated model: without a cache."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return found


def causal(kind: str, head: str = "CausalLM", **settings: Any) -> Any:
    """Return a model with large random weights, so that the most likely token is so by far."""
    import transformers

    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
    body = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(
        **{**size, **_KINDS[kind], **settings}
    )
    net = getattr(transformers, f"{kind}For{head}")(body).eval()
    for weight in net.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.4)
    return net


@dataclass(frozen=True)
class Made:
    task: Language
    kind: LanguageExporter
    report: Report

    @property
    def path(self) -> Path:
        return self.kind.subject.path

    @property
    def generation(self) -> Generation:
        return self.kind.generation

    def decoder(self, path: Path | None = None) -> Decoder:
        return open_decoder(path or self.path, self.generation)


def make(architecture: str, folder: Path, config: Export | None = None, **settings: Any) -> Made:
    prompting = Prompting(begin=(1,), end=(2,), prompts=PROMPTS)
    task: Any = Language(causal(architecture, **settings), inputs=MASKED, settings=prompting)
    test, path = open_split(task, "test"), folder / "model.onnx"
    kind: Any = open_exporter(Subject(task, task.model(), test, config or Export(), path))
    return Made(task, kind, write_and_compare(kind))


def tokenizer(folder: Path, words: int = WORDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"model": {"type": "BPE", "vocab": {f"w{index}": index for index in range(words)}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps({**body, "added_tokens": []}))


_DENSE = {"intermediate_size": 24, "num_hidden_layers": 1, "num_key_value_heads": 2}
_LATENT = {
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_TWO_LAYERS = {**_DENSE, "num_hidden_layers": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SLIDING = {**_TWO_LAYERS, "sliding_window": 6}
_KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": _DENSE,
    "Llama": _DENSE,
    "Mistral": _SLIDING,
    "Mixtral": {**_SLIDING, "num_local_experts": 4},
    "Qwen3Moe": {**_TWO_LAYERS, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {name: value for name, value in _SLIDING.items() if name != "head_dim"},
    "Gemma": _TWO_LAYERS,
    "Gemma2": _SLIDING,
    "Gemma3": _SLIDING,
    "GptOss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV32": {**_LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "pad_token_id": 0},
    "DeepseekV3": _LATENT,
}
