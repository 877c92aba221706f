"""Finetune a transformer with LoRA to classify texts. Replace data/, and name pretrained weights in pipe.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import CLASSES, LONGEST, Codec
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, Qwen2Config

from pipeline import read_jsonl


class Net(nn.Module):
    """A transformer of Hugging Face, to which model.adapter adds LoRA, and a head over the mean of its states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = AutoModel.from_config(config, dtype=torch.float32)
        self.score = nn.Linear(config.hidden_size, len(CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        logits: Tensor = self.score((hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        return logits


class Task:
    inputs = ("input_ids", "attention_mask")  # columns of data() that the model takes, in order
    outputs = ("logits",)  # names for what it returns
    axes = {"input_ids": ("batch", "tokens"), "attention_mask": ("batch", "tokens")}
    longest = {"tokens": LONGEST}
    classes = CLASSES

    def make_files(self, folder: Path) -> None:
        """Write a tokenizer and a small transformer's configuration, unless those of model.pretrained are there."""
        if (folder / "config.json").exists():
            return
        tokenizer = Tokenizer(models.WordLevel(unk_token="?"))  # noqa: S106 - no password
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["<pad>", "?"], show_progress=False)
        tokenizer.train_from_iterator(_reviews("train")[0], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = Qwen2Config(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.2,
        )  # fmt: skip
        config.save_pretrained(folder)

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def adapt(self, folder: Path) -> nn.Module:
        """Build the model; with model.pretrained, its weights are loaded by name afterwards."""
        return Net(AutoConfig.from_pretrained(folder))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        texts, labels = _reviews(split)
        return {**self.codec.decode(texts), "label": np.array(labels), "index": np.arange(len(texts))}

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
        return [_reviews("test")[0][index] for index in batch["index"].tolist()]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        fitted = make_pipeline(CountVectorizer(), LogisticRegression()).fit(*_reviews("train"))
        return lambda batch: torch.from_numpy(fitted.predict_log_proba(self.text(batch))).float()

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return self.text(batch)

    def answer(self, prediction: Any) -> Any:
        return prediction["class"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return ["the soup was never cold and the waiter was so charming", "the room was not clean"]


@cache
def _reviews(split: str) -> tuple[list[str], list[int]]:
    """Return texts and labels."""
    rows = list(read_jsonl(f"data/{split}.jsonl"))
    return [row["text"] for row in rows], [CLASSES.index(row["class"]) for row in rows]
