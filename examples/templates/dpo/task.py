"""Align a chat model with preferences (DPO). Replace data/, and name your model in pipe.yaml and as BASE."""

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
    Samples,
    answer_log_probs,
    completion_labels,
    dpo_loss,
    fill_rows,
    log_probs_in_training,
    mask_between_texts,
    read_jsonl,
)

BASE = "data/base"  # replace: what model.pretrained names in pipe.yaml; it is the frozen reference, too
LENGTH = 128  # tokens of a pair: the prompt with the chosen, and with the rejected answer
BETA = 0.1  # the higher, the nearer the model stays to the reference


class Task:
    inputs = ("input_ids", "attention_mask", "position_ids")  # columns of data() that the model takes, in order
    outputs = ("logits",)  # names for what it returns

    def make_files(self, folder: Path) -> None:
        """Compute the log-probabilities of all answers under the reference; model.pretrained's files are there."""
        self.use_files(folder)
        reference = self.baseline()
        for split in ("train", "validation", "test"):
            samples = Samples(split, self._pairs(split))
            batches = samples.batches(range(len(samples)), 16)
            log_probs = [self._log_probs(reference(batch), batch) for batch in batches]
            np.save(folder / f"reference_{split}.npy", torch.cat(log_probs).numpy())

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
        return {**self._pairs(split), "reference": np.load(self.folder / f"reference_{split}.npy")}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses, _ = dpo_loss(self._log_probs(outputs, batch), batch["reference"], BETA)
        return losses.mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whether the chosen answer is the likelier one, and by how much more than under the reference."""
        log_probs = self._log_probs(outputs, batch)
        _, margins = dpo_loss(log_probs, batch["reference"], BETA)
        return {
            "chosen_likelier": (log_probs[:, 0] > log_probs[:, 1]).float(),
            "reward_accuracy": (margins > 0).float(),
            "reward_margin": margins,
        }

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
        """Return the reference: the model before the training."""
        reference = mask_between_texts(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)).eval()
        return torch.no_grad()(lambda batch: reference(*(batch[name] for name in self.inputs)).logits)

    # Optional: prompts with the chosen answers as a client would send them, and the answer in a prediction. With these
    # two, the gate compares the codec with the test data.
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
        chats = [[{"role": "user", "content": text}] for text in ("Where do I find apples?", "Which aisle has eggs?")]
        return [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def _pairs(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Put both answers of a pair, each after the prompt, into one row; neither sees the other."""
        pairs = [
            [completion_labels(self.tokenizer, row["prompt"], row[kind]) for kind in ("chosen", "rejected")]
            for row in read_jsonl(f"data/{split}.jsonl")
        ]
        rows = fill_rows([[ids for ids, _ in pair] for pair in pairs], LENGTH, self.tokenizer.pad_token_id)
        labels = fill_rows([[labels for _, labels in pair] for pair in pairs], LENGTH, IGNORED).ids
        return {
            "input_ids": rows.ids, "attention_mask": rows.segments, "position_ids": rows.positions, "labels": labels,
        }  # fmt: skip

    def _log_probs(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the chosen and of the rejected answers, [pairs, 2]."""
        return answer_log_probs(logits, batch["labels"], batch["attention_mask"], texts=2)
