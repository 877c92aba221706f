"""Read a folder in the layout of sentence-transformers, for `pipe init --from FOLDER`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.system.errors import ConfigError

_SUPPORTED = ["Transformer", "Pooling", "Normalize"]
_POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_DECODERS = ("t5", "mt5", "clip", "siglip")  # AutoModel of these needs more than the ids of a text
_SETTINGS = "sentence_bert_config.json"


@dataclass(frozen=True)
class SentenceTransformer:
    """A folder whose modules are all supported."""

    folder: Path
    transformer: Path  # config.json, tokenizer.json and the weights
    pooling: Path  # its config.json

    def copy_small_files(self, target: Path) -> None:
        """Copy what describes the modules, so that the project depends on the folder for weights and tokenizer only."""
        pooling = target / self.pooling.parent.relative_to(self.folder)
        pooling.mkdir(parents=True)
        shutil.copyfile(self.folder / "modules.json", target / "modules.json")
        shutil.copyfile(self.transformer / _SETTINGS, target / _SETTINGS)
        shutil.copyfile(self.pooling, pooling / "config.json")


def read_sentence_transformer(folder: Path) -> SentenceTransformer:
    """Check a folder; raise ConfigError for what the project could not compute."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{folder / 'modules.json'}: must hold a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unsupported := [kind for kind in kinds if kind not in _SUPPORTED]:
        raise ConfigError(
            f"{folder / 'modules.json'}: the module {unsupported[0]} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}; to fix it: write its layer in task.py, from `pipe init --template embedding`"
        )
    if kinds not in (_SUPPORTED[:2], _SUPPORTED):
        raise ConfigError(f"{folder / 'modules.json'}: needs the modules Transformer, Pooling and, if any, Normalize")
    transformer, pooling = (folder / _inside(folder, str(module.get("path", ""))) for module in modules[:2])
    _check_transformer(transformer)
    _check_pooling(pooling / "config.json")
    _check_prompt(folder)
    return SentenceTransformer(folder, transformer, pooling / "config.json")


def _inside(folder: Path, path: str) -> str:
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'}: the path {path!r} is outside the folder")
    return path


def _check_transformer(folder: Path) -> None:
    kind = _read(folder / "config.json").get("model_type")
    if kind in _DECODERS:
        raise ConfigError(f"{folder / 'config.json'}: the model type {kind} is not supported; use an encoder as BERT")
    length = _read(folder / _SETTINGS).get("max_seq_length")
    if not isinstance(length, int) or length < 3:
        raise ConfigError(f"{folder / _SETTINGS}: set max_seq_length to the most tokens of a text, found {length!r}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder}: has no tokenizer.json; to fix it: load it with transformers' AutoTokenizer and save it there"
        )


def _check_pooling(path: Path) -> None:
    config = _read(path)
    if "pooling_mode" in config:
        modes = [config["pooling_mode"]]
    else:
        names = (name for name, value in config.items() if name.startswith("pooling_mode_") and value)
        modes = [name.removeprefix("pooling_mode_") for name in names]
        short = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean"}
        modes = [short.get(mode, mode) for mode in modes]
    if not modes or any(mode not in _POOLING for mode in modes):
        raise ConfigError(f"{path}: pooling {', '.join(map(str, modes)) or 'of no kind'} is not supported; supported are {', '.join(_POOLING)}")  # fmt: skip  # noqa: E501


def _check_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    if path.is_file() and (prompt := _read(path).get("default_prompt_name")):
        raise ConfigError(
            f"{path}: the default prompt {prompt!r} is not supported; remove it, and send it in the texts"
        )


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, which a sentence-transformers folder has")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
