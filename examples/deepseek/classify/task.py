"""Fine-tune a pretrained model to classify which package a snippet comes from: all of it, or only the head."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import torch
from bag import Bag
from codec import LONGEST, PACKAGES, SnippetCodec
from tfidf import fit_best
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel
from vocabulary import read_tokenizer, require_loaded

from pipeline import ConfigError, mask_between_texts

LINES = 8  # of a snippet


class SnippetClassifier(nn.Module):
    """A pretrained transformer with a linear head over the mean of its hidden states, plus scores by tokens.

    The scores by tokens learn names that only one package uses, without the transformer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        body = AutoModel.from_config(config, dtype=torch.float32)
        if hasattr(config, "n_routed_experts"):
            body.set_experts_implementation("eager")  # the fastest on CPU; the export replaces it
        self.model = mask_between_texts(body)
        self.score = nn.Linear(config.hidden_size, len(PACKAGES))
        self.bag = Bag(config.vocab_size, len(PACKAGES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        weight = attention_mask[:, :, None].to(hidden.dtype)
        scores: Tensor = self.score((hidden * weight).sum(dim=1) / weight.sum(dim=1)) + self.bag(
            input_ids, attention_mask
        )
        return scores


class Classify:
    inputs = ("input_ids", "attention_mask", "position_ids")
    outputs = ("logits",)
    classes = PACKAGES

    def __init__(self) -> None:
        self._codec: SnippetCodec | None = None

    def make_files(self, folder: Path) -> None:
        """Check that the pretrained folder contains them."""
        for name in ("config.json", "tokenizer.json"):
            if not (folder / name).is_file():
                raise ConfigError(
                    f"no {name} came with model.pretrained; name ../pretrain, one of its runs, or a folder with "
                    "config.json, tokenizer.json and safetensors"
                )

    def use_files(self, folder: Path) -> None:
        read_tokenizer(folder)
        self._codec = SnippetCodec(folder)

    def model(self) -> nn.Module:
        raise ConfigError("this task needs pretrained weights: set model.pretrained to their folder")

    def adapt(self, folder: Path) -> nn.Module:
        return SnippetClassifier(AutoConfig.from_pretrained(folder))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        snippets = self._snippets[split]
        codec = require_loaded(self._codec)
        tokens = [codec.tokens(text)[:LONGEST] for text, _ in snippets]  # another tokenizer may need more tokens
        labels = np.asarray([label for _, label in snippets], np.int64)
        return {**codec.rows(tokens), "index": np.arange(len(snippets)), "label": labels}

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        log_likelihood = functional.log_softmax(outputs, dim=1).gather(1, batch["label"][:, None])[:, 0]
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float(), "log_likelihood": log_likelihood}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["label"]

    def baseline(self) -> Any:
        """Classify the whole text itself, not its tokens."""
        fitted = fit_best(self._snippets["train"], self._snippets["validation"])
        texts = [text for text, _ in self._snippets["test"]]

        def predict(batch: Mapping[str, Tensor]) -> Tensor:
            log_probabilities, labels = fitted([texts[i] for i in batch["index"].tolist()])
            scores = torch.full(
                (len(log_probabilities), len(PACKAGES)), _NEVER
            )  # for packages without a training snippet
            scores[:, labels] = torch.from_numpy(log_probabilities).float()
            return scores

        return predict

    def instances(self, batch: Mapping[str, Tensor]) -> list[Any]:
        """Return the texts that fit, as `example` does."""
        codec = require_loaded(self._codec)
        texts = [self._snippets["test"][index][0] for index in batch["index"].tolist()]
        return [text if len(codec.tokens(text)) <= LONGEST else None for text in texts]

    def answer(self, prediction: Any) -> Any:
        return prediction["package"]

    def example(self) -> list[Any]:
        """Return texts that fit: another tokenizer may need more tokens for a text."""
        codec = require_loaded(self._codec)
        return [text for text, _ in self._snippets["test"] if len(codec.tokens(text)) <= LONGEST][:3]

    @cached_property
    def _snippets(self) -> dict[str, list[tuple[str, int]]]:
        """Split by definition, 60 % train, 20 % validation, 20 % test; drop snippets that occur twice."""
        snippets: dict[str, list[tuple[str, int]]] = {split: [] for split in corpus.SPLITS}
        seen = set[str]()
        for name, text in corpus.files().items():
            package = name.partition("/")[0]
            for definition in corpus.definitions(text) if package in PACKAGES and "/" in name else ():
                draw = int(hashlib.sha256(definition.encode()).hexdigest()[:8], 16) % 10
                split = "test" if draw < 2 else "validation" if draw < 4 else "train"
                for snippet in _snippets_of(definition):
                    if snippet not in seen:
                        seen.add(snippet)
                        snippets[split].append((snippet, PACKAGES.index(package)))
        return snippets


class Frozen(Classify):
    """Train only the head."""

    def adapt(self, folder: Path) -> nn.Module:
        model = super().adapt(folder)
        model.get_submodule("model").requires_grad_(False)
        return model


_NEVER = -100.0


def _snippets_of(definition: str) -> Iterator[str]:
    """Yield snippets of a few non-empty lines; drop the rest if it is too short."""
    lines = [line[:100] for line in definition.splitlines() if line.strip()]
    for start in range(0, len(lines), LINES):
        if len(chosen := lines[start : start + LINES]) >= LINES // 2:
            yield "\n".join(chosen)
