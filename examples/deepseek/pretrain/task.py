"""Pretrain a small DeepSeek-V3 on Python code: latent attention, a mixture of experts, packed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import torch
from multi_token import MultiTokenModel, without_multi_token
from ngram import NGram
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from vocabulary import BEGIN, END, PAD, bytes_of, encode, read_tokenizer, require_loaded, train_tokenizer

from pipeline import (
    Prompting,
    Samples,
    cut_texts,
    log_probs_in_training,
    mask_between_texts,
    one_text_per_row,
    pack_texts,
    token_log_probs,
)


class Pretrain:
    inputs = ("input_ids", "attention_mask", "position_ids")
    outputs: Sequence[str] = ("logits",)

    length = 256  # tokens in a row
    documents: Mapping[str, int] = {"validation": 96, "test": 192}  # at most
    size: Mapping[str, int] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,  # layers without experts
        "num_attention_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }
    orders, discounts = (2, 3, 4, 5), (0.75, 0.9)  # of the baseline; validation selects the best
    multi_token_layers = 0
    model_class: type[DeepseekV3ForCausalLM] = DeepseekV3ForCausalLM

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoded: dict[str, list[Sequence[int]]] = {}

    def make_files(self, folder: Path) -> None:
        train_tokenizer(corpus.documents("train"), self.size["vocab_size"], folder)
        config = DeepseekV3Config(
            **self.size,
            num_key_value_heads=self.size["num_attention_heads"],
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            num_mtp_layers=self.multi_token_layers,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=PAD,
            use_cache=False,
            architectures=["DeepseekV3ForCausalLM"],
        )
        config.save_pretrained(folder)

    def use_files(self, folder: Path) -> None:
        self._folder, self._tokenizer = folder, read_tokenizer(folder)

    def model(self) -> nn.Module:
        config = DeepseekV3Config.from_pretrained(require_loaded(self._folder))
        model = self.model_class(config)
        model.set_experts_implementation("eager")  # the fastest on CPU; the export replaces it
        return mask_between_texts(model if self.multi_token_layers else log_probs_in_training(model))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Pack documents for training; for evaluation, put one into each row, as in requests."""
        lay_out = pack_texts if split == "train" else one_text_per_row
        packed = lay_out(self._pieces(split)[: self.documents.get(split)], self.length, PAD)
        lengths = np.asarray(bytes_of(require_loaded(self._tokenizer)))[packed.ids] * (packed.positions > 0)
        columns = zip(self.inputs, (packed.ids, packed.segments, packed.positions), strict=True)
        return {**dict(columns), "bytes": lengths.sum(axis=1)}

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return _per_row(*_token_losses(outputs, batch))

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return negative bits per byte, as higher is better; the end token counts, although it has no bytes."""
        losses, counted = _token_losses(outputs, batch)
        bits = losses.double().sum(dim=1) / np.log(2)
        hits = ((outputs[:, :-1].argmax(dim=2) == batch["input_ids"][:, 1:]) & counted).sum(dim=1)
        return {
            "minus_bits_per_byte": -bits / batch["bytes"].clamp(min=1),
            "next_token": hits / counted.sum(dim=1).clamp(min=1),
        }

    def language_model(self, model: nn.Module) -> nn.Module:
        return model

    def prompting(self) -> Prompting:
        prompts = encode(require_loaded(self._tokenizer), self.example())
        return Prompting(begin=(BEGIN,), end=(END,), prompts=tuple(tuple(ids[:-1]) for ids in prompts))

    def baseline(self) -> Any:
        """Return the n-gram model whose order and discount are best on the validation split."""
        counts = NGram(max(self.orders), self.size["vocab_size"]).fit(self._pieces("train"))
        models = [counts.with_order(order, discount) for order in self.orders for discount in self.discounts]
        bits, best = min(((self._bits(model), model) for model in models), key=lambda pair: pair[0])
        settings = f"order {best.order}, discount {best.discount}: best of {len(models)} on validation"
        print(f"baseline: {settings}, {bits:.4f} bits per byte", flush=True)
        return lambda batch: _ngram_log_probabilities(best, batch)

    def instances(self, batch: Mapping[str, Tensor]) -> list[Any]:
        """Return the texts of whole documents; a client cannot send a part of one that was cut."""
        rows = [row[mask > 0].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        decode = require_loaded(self._tokenizer).decode
        return [decode(row[1:-1]) if (row[0], row[-1]) == (BEGIN, END) else None for row in rows]

    def answer(self, prediction: Any) -> Any:
        return prediction["next"][0]["token"]

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, -1].argmax(dim=1)

    def example(self) -> list[Any]:
        return ["import ", "def __init__(self", "for key, value in "]

    def _bits(self, counts: NGram) -> float:
        """Return the bits per byte on the validation split."""
        samples = Samples("validation", self.data("validation"))
        losses = [
            Pretrain.metrics(self, _ngram_log_probabilities(counts, batch), batch)["minus_bits_per_byte"]
            for batch in samples.batches(range(len(samples)), 16)
        ]
        return -float(torch.cat(losses).mean())

    def _pieces(self, split: str) -> list[Sequence[int]]:
        if split not in self._encoded:
            self._encoded[split] = cut_texts(
                encode(require_loaded(self._tokenizer), corpus.documents(split)), self.length
            )
        return self._encoded[split]


class MultiToken(Pretrain):
    """With DeepSeek-V3's multi-token prediction; the exported model is the one without it."""

    multi_token_layers = 1
    multi_token_weight = 0.3  # of its loss: lambda in DeepSeek-V3's first 10T tokens
    model_class = MultiTokenModel

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        logits, second = _parts(outputs, batch)
        return super().loss(logits, batch) + self.multi_token_weight * _per_row(*_token_losses(second, batch, ahead=2))

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`minus_multi_token_loss` is in nats per token, like the loss."""
        logits, second = _parts(outputs, batch)
        losses, counted = _token_losses(second, batch, ahead=2)
        negative_loss = -losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        return {**super().metrics(logits, batch), "minus_multi_token_loss": negative_loss}

    def language_model(self, model: Any) -> nn.Module:
        plain: nn.Module = without_multi_token(model)
        return plain


def _parts(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Split into logits of the next and the second token; the baseline and a champion have a uniform second one."""
    length = batch["input_ids"].shape[1]
    logits, second = outputs[:, :length], outputs[:, length:]
    return logits, second if second.shape[1] else torch.zeros_like(logits[:, 1:])


def _ngram_log_probabilities(counts: NGram, batch: Mapping[str, Tensor]) -> Tensor:
    ids, positions = batch["input_ids"], batch["position_ids"]
    log_probabilities = torch.from_numpy(
        counts.log_probabilities(ids.reshape(-1).numpy(), positions.reshape(-1).numpy())
    )
    return (
        log_probabilities.reshape(*ids.shape, -1).roll(-1, dims=1).float()
    )  # a model's logits are for the next position


def _token_losses(outputs: Tensor, batch: Mapping[str, Tensor], ahead: int = 1) -> tuple[Tensor, Tensor]:
    """Return the loss in nats of every token with `ahead` tokens before it in its document, and their mask."""
    segments = batch["attention_mask"]
    counted = (segments[:, ahead:] == segments[:, :-ahead]) & (segments[:, ahead:] != 0)
    return -token_log_probs(outputs, batch["input_ids"][:, ahead - 1 :]) * counted, counted


def _per_row(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over rows, so that the mean over a batch is that over its parts."""
    return (losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).mean()
