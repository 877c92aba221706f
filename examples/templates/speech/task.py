"""Write down spoken words: an encoder of sound and a decoder of words. Replace data/ and model()."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import BANDS, END, LONGEST, WORDS, Codec
from torch import Tensor, nn
from torch.nn import functional

from pipeline import generate, read_jsonl

MOST = 6  # words of a text, and its end
BEGIN = END + 1


class Net(nn.Module):
    """Two convolutions, and a transformer. Replace: your network, such as one like Whisper."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.frames = nn.Parameter(torch.randn(LONGEST // 2, width) * 0.02)
        self.places = nn.Parameter(torch.randn(MOST + 1, width) * 0.02)
        self.words = nn.Embedding(len(WORDS) + 2, width)
        encoder = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True, norm_first=True)
        decoder = nn.TransformerDecoderLayer(width, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(width, len(WORDS) + 1)

    def encode(self, sound: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(sound.transpose(1, 2)).relu() * mask[:, None]  # padding must not change the answer
        hidden = self.second(hidden).relu().transpose(1, 2)
        is_padding = mask[:, ::2] == 0
        return self.encoder(hidden + self.frames[: hidden.shape[1]], src_key_padding_mask=is_padding), is_padding

    def decode(self, tokens: Tensor, memory: Tensor, is_padding: Tensor) -> Tensor:
        """Return scores of the word behind each of the tokens."""
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places[:length]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        hidden = self.decoder(hidden, memory, later, memory_key_padding_mask=is_padding, tgt_is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores

    def forward(self, sound: Tensor, mask: Tensor, words: Tensor) -> Tensor:
        """In training, each word is predicted from the true ones before it."""
        tokens = torch.cat([torch.full_like(words[:, :1], BEGIN), words[:, :-1]], dim=1)
        return self.decode(tokens, *self.encode(sound, mask))


class Served(nn.Module):
    """The net as it answers: each word is predicted from those that it wrote before."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, sound: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return generate(self.net.decode, self.net.encode(sound, mask), BEGIN, END, MOST, beams=4)


class Task:
    inputs = ("sound", "mask", "words")  # columns of data() that the model takes in training, in order
    outputs = ("scores",)
    serving_inputs = ("sound", "mask")  # what codec.py makes of a request
    serving_outputs = ("tokens", "score")
    axes = {"sound": ("batch", "frames", BANDS), "mask": ("batch", "frames")}
    longest = {"frames": LONGEST}
    directions = {"word_errors": "lower"}

    def model(self) -> nn.Module:
        return Net()

    def export_model(self, model: Any) -> nn.Module:
        return Served(model)

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        rows = _recordings(split)
        words = np.full((len(rows), MOST), END)
        for row, (_, text) in zip(words, rows, strict=True):
            row[: len(text)] = [WORDS.index(word) for word in text]
        return {**Codec().decode([instance for instance, _ in rows]), "words": words, "index": np.arange(len(rows))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        is_text = (batch["words"] == END).cumsum(dim=1) <= 1  # with its first end
        labels = torch.where(is_text, batch["words"], -100)  # no loss where it is -100
        return functional.cross_entropy(outputs.transpose(1, 2), labels)

    # All other methods get what is served.
    def metrics(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        errors = [
            _edits(_to_end(spoken), _to_end(written)) / len(_to_end(spoken))
            for spoken, written in zip(batch["words"].tolist(), outputs["tokens"].tolist(), strict=True)
        ]
        return {"word_errors": torch.tensor(errors)}

    def predicted(self, outputs: dict[str, Tensor]) -> Tensor:
        return outputs["tokens"]

    # Optional: what the report shows of a sample.
    def show(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        rows = zip(batch["sound"], batch["words"].tolist(), outputs["tokens"].tolist(), strict=True)
        return [{"sound": sound.T, "spoken": _text(right), "written": _text(found)} for sound, right, found in rows]

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        rows = _recordings("test")
        return [rows[index][0] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return [WORDS.index(word) for word in prediction["text"].split()]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [instance for instance, _ in _recordings("test")[:2]]


def _to_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens


def _text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in _to_end(tokens))


def _edits(spoken: list[int], written: list[int]) -> int:
    """Return the smallest number of words to insert, leave out or replace."""
    costs = list(range(len(written) + 1))
    for i, word in enumerate(spoken):
        before, costs[0] = costs[0], i + 1
        for j, other in enumerate(written):
            before, costs[j + 1] = costs[j + 1], min(before + (word != other), costs[j] + 1, costs[j + 1] + 1)
    return costs[-1]


@cache
def _recordings(split: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return recordings as a client would send them, and what is spoken."""
    rows = read_jsonl(f"data/{split}.jsonl")
    return [
        ({"b64": base64.b64encode((Path("data") / row["audio"]).read_bytes()).decode()}, row["words"]) for row in rows
    ]
