"""`python -m benchmarks.export.weights`: size, speed and perplexity of a language model with rounded weights.

A small model is trained on Python's own library first, since rounding random weights shows nothing. Its variants are
made, judged and timed as an export does it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.train.deepseek import pieces
from export.checks.verify import write_and_compare
from export.kinds import open_exporter
from export.llm.variants import Perplexity
from export.subject import Subject
from export.variants.choose import VariantEvaluation, VariantResult
from pipeline import one_text_per_row, pack_texts
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.contract.signature import Prompting

LENGTH, WORDS = 256, 8000
SIZES = {"29M": (512, 8), "91M": (768, 12), "466M": (1344, 21)}  # width and layers
VARIANTS = ("fp16", "int8", "int4", "int4-128", "int4-gptq")


class Library:
    """A task: the next token of source files."""

    inputs = ("input_ids", "attention_mask")
    outputs = ("logits",)

    def __init__(self, size: str) -> None:
        texts = [text for text in pieces(WORDS, LENGTH) if len(text) > 16]
        self._texts = {"test": texts[:64], "train": texts[64:]}
        self._width, self._layers = SIZES[size]

    def model(self) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        heads = self._width // 64
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=WORDS, hidden_size=self._width, intermediate_size=self._width * 8 // 3 // 32 * 32,
                num_hidden_layers=self._layers, num_attention_heads=heads, num_key_value_heads=heads,
                max_position_embeddings=1024, tie_word_embeddings=True,
            )
        )  # fmt: skip

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        lay_out = pack_texts if split == "train" else one_text_per_row
        rows = lay_out(self._texts["train" if split == "train" else "test"], LENGTH, 0)
        return {"input_ids": rows.ids, "attention_mask": np.minimum(rows.segments, 1)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        losses = nn.functional.cross_entropy(outputs[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        counted = mask[:, 1:] * mask[:, :-1]
        return (losses * counted).sum() / counted.sum()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        right = (outputs[:, :-1].argmax(2) == batch["input_ids"][:, 1:]).float()
        counted = batch["attention_mask"][:, :-1]
        return {"token_accuracy": (right * counted).sum(1) / counted.sum(1)}

    def language_model(self, model: nn.Module) -> nn.Module:
        return model

    def prompting(self) -> Prompting:
        return Prompting(positions_limit=512)


def train(task: Library, steps: int, rows: int) -> tuple[nn.Module, float]:
    """Train by AdamW with a linear schedule; return the model and its last losses' mean."""
    columns = {name: torch.from_numpy(column) for name, column in task.data("train").items()}
    model = task.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order, losses = np.random.default_rng(0).permutation(len(columns["input_ids"])), []
    for step in range(steps):
        chosen = order[np.arange(step * rows, (step + 1) * rows) % len(order)]
        batch = {name: column[chosen] for name, column in columns.items()}
        loss = task.loss(model(**batch, use_cache=False).logits, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), float(np.mean(losses[-20:]))


def compare(size: str, steps: int, rows: int, variants: Sequence[str]) -> str:
    task: Any = Library(size)
    started = time.process_time()
    model, loss = train(task, steps, rows)
    count = sum(parameter.numel() for parameter in model.parameters())
    head = (
        f"{count / 1e6:.1f} M parameters, {steps} steps of {rows} rows of {LENGTH} tokens "
        f"({time.process_time() - started:.0f} CPU s), training loss {loss:.2f}"
    )
    export = {"variants": ["fp32", *variants], "batch_sizes": [8]}
    sections = {"export": export, "evaluate": {"metric": "token_accuracy"}}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", **sections}, source="benchmark")
    with tempfile.TemporaryDirectory() as folder:
        path, test = Path(folder) / "model.onnx", open_split(task, "test")
        kind = open_exporter(Subject(task, model, test, config.export, path))
        write_and_compare(kind)
        entries = VariantEvaluation(kind, config, Path(folder) / "variants", kind.converters).entries()
        return "\n".join([head, "", *table(entries)])


def table(entries: list[VariantResult]) -> list[str]:
    lines = [
        "| variant | MB | ÷ fp32 | ms a token, 1 text | tokens/s × fp32, 1 text | 32 texts | perplexity | faults |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = entries[0].timing
    for entry in entries:
        if entry.timing is None or not isinstance(entry.own_measure, Perplexity) or first is None:
            lines.append(f"| {entry.name} | – | | | | | | {'; '.join(entry.faults)} |")
            continue
        milliseconds = {rows: interval.estimate for rows, interval in entry.timing.p50_ms.items()}
        speeds = [first.p50_ms[rows].estimate / milliseconds[rows] for rows in (1, 32)]
        increase = entry.own_measure.increase
        change = "" if increase is None else f" ({increase.estimate:+.2%}, {increase.low:+.2%} to {increase.high:+.2%})"
        lines.append(
            f"| {entry.name} | {entry.bytes / 1e6:.1f} | {entry.bytes / entries[0].bytes:.3f} "
            f"| {milliseconds[1]:.2f} | {speeds[0]:.2f} | {speeds[1]:.2f} | {entry.own_measure.value:.2f}{change} | "
            f"{'; '.join(entry.faults)} |"
        )
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export.weights")
    parser.add_argument("--size", choices=SIZES, default="29M")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    options = parser.parse_args(argv)
    print(compare(options.size, options.steps, options.rows, options.variants))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
