"""A small DeepSeek-V3 of transformers on real text: Python's own library, packed in rows, or with padding."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.workloads import Workload
from pipeline import PackedRows, cut_texts, mask_between_texts, one_text_per_row, pack_texts

if TYPE_CHECKING:
    from pipeline import Batch, Outputs


LENGTH, BATCH_SIZE, LAP = 512, 4, 4
VOCABULARY, PAD = 2048, 0
_ROWS = 4096  # so many that no epoch ends inside a race
_SIZE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,  # layers without experts
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_mtp_layers": 0,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "use_cache": False,
}


class DeepSeek:
    """Packed. The loss is of every token but the first of its text."""

    inputs: Sequence[str] = ("input_ids", "attention_mask", "position_ids")
    outputs: Sequence[str] = ("logits",)

    def model(self) -> nn.Module:
        return mask_between_texts(_model())

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        assert split, "a race looks at one alone"
        rows = self.rows()
        repeats = -(-_ROWS // len(rows.ids))
        columns = zip(self.inputs, (rows.ids, rows.segments, rows.positions), strict=True)
        return {name: np.tile(column, (repeats, 1))[:_ROWS] for name, column in columns}

    def rows(self) -> PackedRows:
        return pack_texts(pieces(), LENGTH, PAD)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        columns = slice(-outputs.shape[1], None)  # of those that were not cut off
        ids, segments = batch["input_ids"][:, columns], batch["attention_mask"][:, columns]
        counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        losses = functional.cross_entropy(outputs[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return ((losses * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)).mean()

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(outputs, Tensor)
        hits = outputs[:, :-1].argmax(dim=2) == batch["input_ids"][:, -outputs.shape[1] :][:, 1:]
        return {"next_token": hits.float().mean(dim=1)}


class Padded(DeepSeek):
    """A text a row, each batch as long as its longest: what a careful loop without packing computes."""

    def model(self) -> nn.Module:
        return _Trimmed(_model())

    def rows(self) -> PackedRows:
        return one_text_per_row(pieces(), LENGTH, PAD)


class _Trimmed(nn.Module):
    """Padding on the left that all rows share is not computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        longest = int((segments != 0).sum(dim=1).max())
        ids, segments, positions = (column[:, -longest:] for column in (ids, segments, positions))
        logits: Tensor = self.model(ids, (segments != 0).long(), positions).logits
        return logits


def useful_tokens(task: DeepSeek) -> float:
    """Return the mean number of tokens in a batch that are no padding."""
    return float((task.rows().segments != 0).sum(axis=1).mean()) * BATCH_SIZE


def padding() -> float:
    """Return the mean fraction of padding in the batches of `Padded`, over many random draws."""
    lengths = np.array([len(piece) for piece in pieces()])
    draws = np.random.default_rng(0).choice(lengths, (1000, BATCH_SIZE))
    return float(1 - draws.sum() / (draws.max(axis=1).sum() * BATCH_SIZE))


@cache
def pieces(vocabulary: int = VOCABULARY, length: int = LENGTH) -> list[Sequence[int]]:
    """Return definitions of the standard library as tokens of a tokenizer that was trained on some of them."""
    texts = [piece for path in _library() for piece in _definitions(path.read_text(encoding="utf-8", errors="replace"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[::4], trainer)
    rows = cut_texts([encoding.ids for encoding in tokenizer.encode_batch(texts)], length)
    return [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]


def _library() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))


def _definitions(text: str) -> list[str]:
    return [piece for piece in re.split(r"\n(?=def |class |async def |@)", text) if piece.strip()]


def _model() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # here: what is raced elsewhere needs it not

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZE))
    model.set_experts_implementation("eager")  # the fastest on CPU
    result: nn.Module = model
    return result


PACKED = Workload(DeepSeek, BATCH_SIZE, LAP)
PADDED = Workload(Padded, BATCH_SIZE, LAP)
