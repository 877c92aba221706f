"""Modules of the DeepSeek example, with few documents and sizes that take milliseconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.task import load_class

DEEPSEEK = Path(__file__).resolve().parents[2] / "examples" / "deepseek"
TEXTS = {
    "train": tuple(
        f"def add_{i}(a, b):\n    return a + b + {i}\n\n\nfor i in range({i}):\n    print(i)" for i in range(40)
    ),
    "validation": tuple(f"def sub_{i}(a, b):\n    return a - b - {i}" for i in range(8)),
    "test": tuple(f"class Thing{i}:\n    def add(self, b):\n        return self.a + {i}" for i in range(8)),
}
Module = Callable[[str], Any]


@pytest.fixture
def pretrain_module() -> Module:
    """A module beside pretrain/task.py, by its name."""
    load_class("task.py:Pretrain", DEEPSEEK / "pretrain")
    return importlib.import_module


@pytest.fixture
def pretrain(pretrain_module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The task at its smallest, with its files made."""
    return smallest("Pretrain", pretrain_module, monkeypatch, tmp_path / "files")


def smallest(name: str, module: Module, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    monkeypatch.setattr(module("corpus"), "documents", lambda split: TEXTS[split])
    kind: Any = load_class(f"task.py:{name}", DEEPSEEK / "pretrain")
    size = {**kind.size, "vocab_size": 280, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 8, "n_routed_experts": 4}
    size |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    task = type("Tiny", (kind,), {"size": size, "length": 48})()
    folder.mkdir()
    task.make_files(folder)
    task.use_files(folder)
    return task
