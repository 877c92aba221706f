"""A byte-pair tokenizer trained on the given texts, with the files that transformers expects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline import DataError

Given = TypeVar("Given")
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
BEGIN, END, PAD = range(len(SPECIAL))


def train_tokenizer(texts: Iterable[str], size: int, folder: Path) -> None:
    """Train over bytes, so that no text is unknown; equal texts give equal files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model's folder, after checking that the embedding has a row for every token."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing but plain Exceptions
        raise DataError(f"{folder / 'tokenizer.json'}: not a tokenizer of the package tokenizers: {error}") from error
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    highest, rows = max(tokenizer.get_vocab().values()), int(config["vocab_size"])
    if highest >= rows:
        raise DataError(
            f"{folder / 'tokenizer.json'}: its highest token is {highest}, but config.json has an embedding of {rows} "
            f"rows (vocab_size); the two must come from one model"
        )
    return tokenizer


def require_loaded(file: Given | None) -> Given:
    """Return a value that use_files() loads, or raise an error if it has not been called."""
    if file is None:
        raise DataError("the task has no tokenizer and no config.json yet: call use_files(folder) before anything else")
    return file


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Sequence[int]]:
    """Return the ids of each text, with the special tokens for its beginning and end."""
    return [[BEGIN, *encoding.ids, END] for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def bytes_of(tokenizer: Tokenizer) -> list[int]:
    """Return the number of bytes of each token; ByteLevel encodes a byte as one letter."""
    lengths = [0] * (max(tokenizer.get_vocab().values()) + 1)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token in SPECIAL else len(token)
    return lengths
