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
        rows = [self._read(text, index) for index, text in enumerate(instances)]
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self._config["pad_token_id"], np.int64)
        mask, positions = np.zeros_like(ids), np.zeros_like(ids)
        for index, row in enumerate(rows):  # padding is on the left, so the last column has the last token of each row
            ids[index, width - len(row) :] = row
            mask[index, width - len(row) :] = 1
            positions[index, width - len(row) :] = np.arange(len(row))
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **self._empty_cache(len(rows))}

    def encode(self, outputs: Arrays) -> list[Any]:
        scores = outputs["logits"][:, -1].astype(np.float64)
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return [{"next": [self._describe_token(row, token) for token in np.argsort(-row)[:5]]} for row in probabilities]

    def _read(self, text: Any, index: int) -> list[int]:
        location = f"instances[{index}]"
        if not isinstance(text, str):
            raise InvalidPayload(f"{location}: must be a text, found {type(text).__name__}")
        if not text:
            raise InvalidPayload(f"{location}: the text is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPayload(f"{location}: no valid UTF-8: half a character at position {error.start}") from error
        ids = [self._config["bos_token_id"], *self._tokenizer.encode(text, add_special_tokens=False).ids]
        longest = self._config["max_position_embeddings"]
        if len(ids) > longest:
            raise InvalidPayload(f"{location}: {len(ids)} tokens, but the model takes at most {longest}")
        return ids

    def _empty_cache(self, rows: int) -> Arrays:
        """Return empty caches; DeepSeek caches the latent vectors from which keys and values are computed."""
        widths = {"latent": self._config["kv_lora_rank"], "rope": self._config["qk_rope_head_dim"]}
        return {
            f"past.{layer}.{name}": np.zeros((rows, 1, 0, width), np.float32)
            for layer in range(self._config["num_hidden_layers"])
            for name, width in widths.items()
        }

    def _describe_token(self, probabilities: np.ndarray[Any, Any], token: Any) -> dict[str, Any]:
        text = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        return {"text": text, "token": int(token), "probability": float(probabilities[token])}
