"""Embed texts so that a query is near the text that answers it. Replace data/ and model()."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from codec import LONGEST, VOCABULARY, Codec
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Embedding, read_jsonl

WRONG = 7  # texts that do not answer the query, in each sample
SHARPNESS = 20.0  # of the softmax over cosine similarities


class Net(nn.Module):
    """The mean of word vectors. Replace: your encoder, such as a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        mean = (self.embedding(input_ids) * mask).sum(dim=2) / mask.sum(dim=2).clamp(min=1)
        return functional.normalize(self.layers(mean), dim=2)


class Task:
    inputs = ("input_ids", "attention_mask")  # columns of data() that the model takes, in order
    outputs = ("vectors",)  # names for what it returns
    axes = {"input_ids": ("batch", "texts", "words"), "attention_mask": ("batch", "texts", "words")}
    longest = {"texts": WRONG + 2, "words": LONGEST}

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, Any]:
        """A sample is a query, the text that answers it, and some that do not."""
        rows = _samples(split)
        return {"texts": rows, "index": range(len(rows))}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Make a batch of samples: texts become word ids, padded to the longest of the batch."""
        columns = Codec().rows([sample["texts"] for sample in samples])
        index = torch.tensor([sample["index"] for sample in samples])
        return {name: torch.from_numpy(column) for name, column in columns.items()} | {"index": index}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Contrastive loss: of all texts of the sample, the first answers the query."""
        similarities = _similarities(outputs)
        return functional.cross_entropy(
            SHARPNESS * similarities, torch.zeros_like(similarities[:, 0], dtype=torch.long)
        )

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        similarities = _similarities(outputs)
        better = (similarities[:, 1:] >= similarities[:, :1]).sum(dim=1)
        return {"first_hit": (better == 0).float(), "reciprocal_rank": 1 / (1 + better)}

    # Optional: what the report shows of a sample: the query and the texts of the test set that are nearest to it.
    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        texts = [_samples("test")[index] for index in batch["index"].tolist()]
        return [
            {"query": Embedding(vectors[0], row[0], among="answer"), "answer": Embedding(vectors[1], row[1])}
            for vectors, row in zip(outputs, texts, strict=True)
        ]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        vectorizer = TfidfVectorizer().fit([text for row in _samples("train") for text in row])

        def embed(batch: dict[str, Tensor]) -> Tensor:
            rows = [_samples("test")[index] for index in batch["index"].tolist()]
            vectors = vectorizer.transform([text for row in rows for text in row]).toarray()
            return torch.from_numpy(vectors).float().reshape(len(rows), len(rows[0]), -1)

        return embed

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return [_samples("test")[index][0] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return prediction

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]  # of the first text of each sample

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return ["inexpensive inn near the beach", "a cheap hotel by the sea"]


def _similarities(vectors: Tensor) -> Tensor:
    """Return the cosine similarity of each query, which is the first text, to the other texts."""
    return (vectors[:, :1] * vectors[:, 1:]).sum(dim=2)


@cache
def _samples(split: str) -> list[list[str]]:
    """Return queries, each with the text that answers it and some that do not."""
    return [[row["query"], row["answer"], *row["wrong"]] for row in read_jsonl(f"data/{split}.jsonl")]
