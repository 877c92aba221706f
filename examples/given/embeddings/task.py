"""A sentence-transformers model with its weights as they are. To finetune it, return data() in pairs and add loss()."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoTokenizer

FACTS = Path(__file__).parent / "model.json"  # read from the files of the model
SAMPLES = 12  # texts on which the ONNX file is compared with torch; replace: your own in data()
EXAMPLES = ["How do I change my password?", "A dog runs across the meadow.", "Yes", "A long text. " * 200]


class Net(nn.Module):
    """A transformer, then pooling and perhaps normalization."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        facts = json.loads(FACTS.read_text())
        config = AutoConfig.from_pretrained(folder)
        # "eager": a token whose window has only padding gets the same numbers from torch and the ONNX file.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.encoder = AutoModel.from_config(config, **options)
        self.pooling, self.normalizes = facts["pooling"], facts["normalizes"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        vectors = torch.cat([_pool(mode, hidden, attention_mask) for mode in self.pooling], dim=1)
        return functional.normalize(vectors) if self.normalizes else vectors


def _pool(mode: str, hidden: Tensor, attention_mask: Tensor) -> Tensor:
    mask = attention_mask[..., None].to(hidden.dtype)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "max":
        return hidden.masked_fill(mask == 0, -1e9).amax(dim=1)
    if mode == "lasttoken":
        last = mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)
        return (hidden * mask * last).sum(dim=1)
    if mode == "weightedmean":
        mask = mask * mask.cumsum(dim=1)  # padding is on the right
    total, count = (hidden * mask).sum(dim=1), mask.sum(dim=1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


class Task:
    inputs = ("input_ids", "attention_mask")
    outputs = ("vectors",)
    axes = {"input_ids": ("batch", "tokens"), "attention_mask": ("batch", "tokens")}
    longest = {"tokens": json.loads(FACTS.read_text())["longest"]}

    def make_files(self, folder: Path) -> None:
        shutil.copyfile(FACTS, folder / "model.json")

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(folder)

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> Any:
        """Return token ids of random texts of many lengths; the longest could fix the axis."""
        rng, lengths = np.random.default_rng(0), np.linspace(3, self.codec.longest - 1, SAMPLES).astype(int)
        size = self.codec.tokenizer.get_vocab_size()
        return self.codec.decode([rng.integers(0, size, length).tolist() for length in lengths])

    def example(self) -> list[Any]:
        return EXAMPLES

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the vectors of sentence-transformers if it is installed, else of each text alone."""
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            return [self._vector(text, model) for text in instances]
        vectors: list[Any] = (
            SentenceTransformer(json.loads(FACTS.read_text())["folder"], device="cpu").encode(instances).tolist()
        )
        return vectors

    def _vector(self, text: str, model: nn.Module) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        text = text.strip().lower() if self.codec.lowercase else text.strip()
        tokens = tokenizer(text, truncation=True, max_length=self.codec.longest, return_tensors="pt")
        with torch.inference_mode():
            return model(tokens["input_ids"], tokens["attention_mask"])[0].tolist()
