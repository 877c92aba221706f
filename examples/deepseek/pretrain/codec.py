"""Text in, the likeliest next tokens out; the service's /openai/v1 generates whole texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload

Arrays = dict[str, np.ndarray[Any, Any]]


class TextCodec:
    """An instance is a text; a prediction is the five likeliest next tokens with their probabilities."""

    files = ("tokenizer.json", "config.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = json.loads((folder / "config.json").read_text())

    def decode(self, instances: Any) -> Arrays:
        rows = [self._read(text, place) for place, text in enumerate(instances)]
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self._config["pad_token_id"], np.int64)
        mask, positions = np.zeros_like(ids), np.zeros_like(ids)
        for index, row in enumerate(rows):  # padding is on the left, so the last column has the last token of each row
            ids[index, width - len(row) :] = row
            mask[index, width - len(row) :] = 1
            positions[index, width - len(row) :] = np.arange(len(row))
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **self._empty_cache(len(rows))}

    def encode(self, outputs: Arrays) -> list[Any]:
        last = outputs["logits"][:, -1].astype(np.float64)
        odds = np.exp(last - last.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        return [{"next": [self._describe_token(row, token) for token in np.argsort(-row)[:5]]} for row in odds]

    def _read(self, text: Any, place: int) -> list[int]:
        where = f"instances[{place}]"
        if not isinstance(text, str):
            raise InvalidPayload(f"{where}: must be a text, found {type(text).__name__}")
        if not text:
            raise InvalidPayload(f"{where}: the text is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPayload(f"{where}: no valid UTF-8: half a character at place {error.start}") from error
        ids = [self._config["bos_token_id"], *self._tokenizer.encode(text, add_special_tokens=False).ids]
        most = self._config["max_position_embeddings"]
        if len(ids) > most:
            raise InvalidPayload(f"{where}: {len(ids)} tokens, but the model takes at most {most}")
        return ids

    def _empty_cache(self, rows: int) -> Arrays:
        """Return empty caches; DeepSeek caches the latent vectors from which keys and values are computed."""
        widths = {"latent": self._config["kv_lora_rank"], "rope": self._config["qk_rope_head_dim"]}
        return {
            f"past.{layer}.{name}": np.zeros((rows, 1, 0, width), np.float32)
            for layer in range(self._config["num_hidden_layers"])
            for name, width in widths.items()
        }

    def _describe_token(self, odds: np.ndarray[Any, Any], token: Any) -> dict[str, Any]:
        text = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        return {"text": text, "token": int(token), "probability": float(odds[token])}
