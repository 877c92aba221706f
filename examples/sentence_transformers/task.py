"""Serve a sentence-transformers model as it is: its weights are frozen. Replace PAIRS to measure it on your texts."""

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
from transformers import AutoConfig, AutoModel

MODULES = Path(__file__).parent / "modules"  # the small files of the model's folder, copied by `pipe init`


class Net(nn.Module):
    """A transformer, then the pooling and the normalization that modules.json names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = AutoModel.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        self.encoder.requires_grad_(False)  # remove this line to train the encoder
        self.scale = nn.Parameter(torch.tensor(4.0))  # of the vectors in training: all that is trained
        kinds = {module["type"].rpartition(".")[2]: module["path"] for module in _read("modules.json")}
        self.pooling = _modes(_read(f"{kinds['Pooling']}/config.json"))
        self.normalizes = "Normalize" in kinds

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        hidden = self.encoder(ids, attention_mask=mask).last_hidden_state
        vectors = torch.cat([_pool(mode, hidden, mask) for mode in self.pooling], dim=1)
        if self.normalizes or self.training:
            vectors = functional.normalize(vectors)
        if self.training:
            vectors = vectors * self.scale
        return vectors.unflatten(0, input_ids.shape[:2])


def _read(name: str) -> Any:
    return json.loads((MODULES / name).read_text())


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the modes of pooling in the order in which their vectors are joined."""
    names = {
        "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
    }  # fmt: skip
    if "pooling_mode" in config:
        return [config["pooling_mode"]]
    return [mode for mode, name in names.items() if config.get(f"pooling_mode_{name}", False)]


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
    axes = {"input_ids": ("batch", "texts", "tokens"), "attention_mask": ("batch", "texts", "tokens")}
    longest = {"texts": 3, "tokens": _read("sentence_bert_config.json")["max_seq_length"]}

    def make_files(self, folder: Path) -> None:
        shutil.copyfile(MODULES / "sentence_bert_config.json", folder / "sentence_bert_config.json")

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def adapt(self, folder: Path) -> nn.Module:
        """Build the model; the weights of model.pretrained are loaded by name afterwards."""
        return Net(folder)

    def data(self, split: str) -> dict[str, Any]:
        """A sample is a text, one that means the same, and one that does not."""
        # Replace: read yours, for example with `pipeline.read_jsonl(f"{split}.jsonl")`.
        part = {"train": slice(0, 8), "validation": slice(8, 16), "test": slice(16, None)}[split]
        pairs = PAIRS[part]
        columns = self.codec.rows([[*pair, pairs[i - 1][1]] for i, pair in enumerate(pairs)])
        return {**columns, "index": np.arange(len(PAIRS))[part]}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Contrastive loss: of the other texts of a sample, the first means the same."""
        similarities = (outputs[:, :1] * outputs[:, 1:]).sum(dim=2)
        return functional.cross_entropy(similarities, torch.zeros_like(similarities[:, 0], dtype=torch.long))

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compare the cosine similarities of the first text to the others."""
        vectors = functional.normalize(outputs, dim=2)
        similarities = (vectors[:, :1] * vectors[:, 1:]).sum(dim=2)
        return {"first_hit": (similarities[:, 0] > similarities[:, 1]).float()}

    # With these three, the gate compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return [PAIRS[index][0] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return prediction

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]  # of the first text of each sample

    def example(self) -> list[Any]:
        return ["How do I change my password?", "A dog runs across the meadow.", "Yes"]


PAIRS = [
    ("How do I reset my password?", "I forgot my login and need a new one."),
    ("The cat sleeps on the sofa.", "A kitten is resting on the couch."),
    ("It will rain tomorrow.", "The forecast for the next day is wet."),
    ("Cheap flights to Rome", "Low-cost plane tickets to the Italian capital"),
    ("She plays the violin in an orchestra.", "The woman is a musician with a string instrument."),
    ("The meeting was moved to Friday.", "We will meet at the end of the week instead."),
    ("My phone does not charge.", "The battery of my mobile stays empty."),
    ("He is cooking dinner.", "A man prepares a meal in the evening."),
    ("Where can I park my car?", "Is there a garage near here?"),
    ("The children play football in the park.", "Kids are kicking a ball on the grass."),
    ("The shop closes at eight.", "You cannot buy anything there after 8 p.m."),
    ("Doctors recommend more sleep.", "Physicians advise people to rest longer."),
    ("The train is late again.", "Once more, there is a delay on the railway."),
    ("I would like a refund.", "Please give me my money back."),
    ("This soup is too salty.", "There is far too much salt in the broth."),
    ("The river flooded the village.", "Water from the stream covered the small place."),
    ("How old is the universe?", "The cosmos began 13.8 billion years ago."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci is the artist of the famous portrait in the Louvre."),
    ("A dog runs across the meadow.", "A puppy is racing over the field."),
    ("The engine makes a strange noise.", "My motor sounds odd."),
    (
        "Stocks fell sharply on Monday.",
        "At the start of the week, share prices dropped a lot, and traders were worried.",
    ),
    ("Best way to learn Spanish", "Tips for studying a foreign language such as Spanish"),
    ("The baby is crying.", "An infant weeps."),
    ("Lock the door before you leave.", "When going out, make sure that the house is shut and that you have the key."),
    ("She wrote a novel about the war.", "Her book is a story of soldiers."),
    ("The mountain is covered with snow.", "The peak is white."),
    ("What is the capital of France?", "Paris"),
    ("He lost his job last year.", "Twelve months ago the company dismissed him."),
]
