"""Tag each word of a text: persons, cities and dates in messages. Replace data/ and model()."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from codec import LONGEST, TAGS, VOCABULARY, Codec, split_words
from torch import Tensor, nn
from torch.nn import functional

from pipeline import TaggedText, read_jsonl


class Net(nn.Module):
    """Embedding and two convolutions over neighboring words. Replace: your network, such as a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64, padding_idx=0)
        self.first, self.second = nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, len(TAGS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[:, None].float()  # padding must not change the answer
        hidden = self.first(self.embedding(input_ids).transpose(1, 2) * mask).relu() * mask
        hidden = self.second(hidden).relu() * mask
        scores: Tensor = self.head(hidden.transpose(1, 2))
        return scores


class Task:
    inputs = ("input_ids", "attention_mask")  # columns of data() that the model takes, in order
    outputs = ("scores",)  # names for what it returns
    axes = {
        "input_ids": ("batch", "words"),
        "attention_mask": ("batch", "words"),
        "scores": ("batch", "words", len(TAGS)),
    }
    longest = {"words": LONGEST}

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        texts, tags = _messages(split)
        columns = Codec().decode(texts)
        labels = np.zeros_like(columns["input_ids"])
        for row, names in zip(labels, tags, strict=True):
            row[: len(names)] = [TAGS.index(name) for name in names]
        return {**columns, "label": labels, "index": np.arange(len(texts))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(outputs.transpose(1, 2), batch["label"], reduction="none")
        return _mean_over_words(losses, batch).mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        right = (outputs.argmax(dim=2) == batch["label"]).float()
        correct = _mean_over_words(right, batch)
        return {"correct": correct, "all_correct": (correct == 1).float()}

    # Optional: what the report shows of a sample.
    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        texts, tags = _messages("test")
        rows = []
        for index, answer in zip(batch["index"].tolist(), outputs.argmax(dim=2).tolist(), strict=True):
            words = split_words(texts[index])
            names = [TAGS[tag] for tag in answer[: len(words)]]
            rows.append({"answer": TaggedText(words, names), "target": TaggedText(words, tags[index])})
        return rows

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        train, counts = self.data("train"), np.zeros((VOCABULARY, len(TAGS)), np.float32)
        np.add.at(counts, (train["input_ids"], train["label"]), 1)
        return lambda batch: torch.from_numpy(counts)[batch["input_ids"]]

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        texts, _ = _messages("test")
        return [texts[index] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return [TAGS.index(tag) for tag in prediction["tags"]]

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=2)

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return ["April meets Paris in Florence on 3 June.", "June will be in Paris in April."]


def _mean_over_words(values: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"]
    return (values * mask).sum(dim=1) / mask.sum(dim=1)


@cache
def _messages(split: str) -> tuple[list[str], list[list[str]]]:
    """Return texts and the tags of their words."""
    rows = list(read_jsonl(f"data/{split}.jsonl"))
    return [" ".join(row["words"]) for row in rows], [row["tags"] for row in rows]
