"""Classify texts of any length: reviews. Replace data/ and model()."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from codec import CLASSES, LONGEST, VOCABULARY, Codec
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from torch.nn import functional

from pipeline import read_jsonl


class Net(nn.Module):
    """Embedding, two convolutions over neighboring words, and the maximum over the text. Replace: your network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64, padding_idx=0)
        self.first, self.second = nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, len(CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[:, None].float()  # padding must not change the answer
        hidden = self.first(self.embedding(input_ids).transpose(1, 2) * mask).relu() * mask
        hidden = self.second(hidden).relu() * mask
        logits: Tensor = self.head(hidden.amax(dim=2))
        return logits


class Task:
    inputs = ("input_ids", "attention_mask")  # columns of data() that the model takes, in order
    outputs = ("logits",)  # names for what it returns
    axes = {"input_ids": ("batch", "words"), "attention_mask": ("batch", "words")}
    longest = {"words": LONGEST}
    classes = CLASSES

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        texts, labels = self._reviews(split)
        return {**Codec().decode(texts), "label": np.array(labels), "index": np.arange(len(texts))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float()}

    # With these and `classes`, the report has metrics per class, a confusion matrix and the calibration.
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    # Optional: the texts of test samples, for the report.
    def text(self, batch: dict[str, Tensor]) -> list[str]:
        texts, _ = self._reviews("test")
        return [texts[index] for index in batch["index"].tolist()]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        fitted = make_pipeline(CountVectorizer(), LogisticRegression()).fit(*self._reviews("train"))
        return lambda batch: torch.from_numpy(fitted.predict_log_proba(self.text(batch))).float()

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return self.text(batch)

    def answer(self, prediction: Any) -> Any:
        return prediction["class"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return ["The soup was never cold, and the waiter was charming.", "The room was not clean."]

    def _reviews(self, split: str) -> tuple[list[str], list[int]]:
        """Return texts and labels."""
        rows = list(read_jsonl(f"data/{split}.jsonl"))
        return [row["text"] for row in rows], [CLASSES.index(row["class"]) for row in rows]
