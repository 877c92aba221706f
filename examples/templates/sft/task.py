"""Finetune a chat model on conversations. Replace data/, and name your model in pipe.yaml and as BASE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline import (
    IGNORED,
    Prompting,
    chat_labels,
    cut_texts,
    log_probs_in_training,
    mask_between_texts,
    one_text_per_row,
    pack_texts,
    read_jsonl,
    token_log_probs,
)

BASE = "data/base"  # replace: what model.pretrained names in pipe.yaml
LENGTH = 128  # tokens of a row


class Task:
    inputs = ("input_ids", "attention_mask", "position_ids")  # columns of data() that the model takes, in order
    outputs = ("logits",)  # names for what it returns
    directions = {"answer_loss": "lower"}

    def make_files(self, folder: Path) -> None:
        """Write nothing: the tokenizer and the configuration of model.pretrained are there."""

    def use_files(self, folder: Path) -> None:
        # It reads tokenizer.json as the service does; AutoTokenizer may split texts otherwise, by the model's class.
        self.folder, self.tokenizer = folder, PreTrainedTokenizerFast.from_pretrained(folder)

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def adapt(self, folder: Path) -> nn.Module:
        """Build the model; the weights of model.pretrained are loaded by name afterwards.

        For losses of whole logits, or a model that changes what its head returns, leave log_probs_in_training out.
        """
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        return mask_between_texts(log_probs_in_training(model))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Pack conversations for training; for evaluation, put one into each row, as in requests."""
        chats = [chat_labels(self.tokenizer, row["messages"]) for row in read_jsonl(f"data/{split}.jsonl")]
        lay_out = pack_texts if split == "train" else one_text_per_row
        rows = lay_out(cut_texts([ids for ids, _ in chats], LENGTH), LENGTH, self.tokenizer.pad_token_id)
        labels = lay_out(cut_texts([labels for _, labels in chats], LENGTH), LENGTH, IGNORED).ids
        labels[rows.positions == 0] = IGNORED  # nothing in its row comes before the first token of a text
        return {
            "input_ids": rows.ids, "attention_mask": rows.segments, "position_ids": rows.positions, "labels": labels,
        }  # fmt: skip

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the tokens of all answers, so that long answers count more than short ones."""
        losses, counted = self._losses(outputs, batch)
        return losses.sum() / counted.sum().clamp(min=1)

    # Optional: what a part of a batch counts for, so that the loss is the mean over the tokens of the whole batch.
    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        losses, counted = self._losses(outputs, batch)
        tokens = counted.sum(dim=1).clamp(min=1)
        right = (outputs[:, :-1].argmax(dim=2) == batch["labels"][:, 1:]) & counted
        return {"answer_loss": losses.sum(dim=1) / tokens, "token_accuracy": right.sum(dim=1) / tokens}

    def language_model(self, model: nn.Module) -> nn.Module:
        return model

    def prompting(self) -> Prompting:
        """Name prompts whose answers the export compares; the rest is read from the files of model.pretrained."""
        prompts = self.tokenizer(self.example(), add_special_tokens=False)["input_ids"]
        return Prompting(prompts=tuple(map(tuple, prompts)))

    # Optional: the texts of test samples, for the report.
    def text(self, batch: dict[str, Tensor]) -> list[str]:
        return list(self.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True))

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        """Return the model before the finetuning."""
        base = mask_between_texts(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)).eval()
        return torch.no_grad()(lambda batch: base(*(batch[name] for name in self.inputs)).logits)

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two,
    # the gate compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        rows = [ids[mask == 1].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        texts = [self.tokenizer.decode(row) for row in rows]
        # None where a text was cut so that it has other tokens by itself: no client can send that.
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [text if ids == row else None for text, ids, row in zip(texts, encoded, rows, strict=True)]

    def answer(self, prediction: Any) -> Any:
        return prediction["token"]

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, -1].argmax(dim=1)

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        chats = [[{"role": "user", "content": text}] for text in ("Where do I find apples?", "How much are the eggs?")]
        return [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def _losses(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of each token of the answers, 0 elsewhere, and which tokens these are."""
        return -token_log_probs(outputs, batch["labels"]), batch["labels"][:, 1:] != IGNORED
