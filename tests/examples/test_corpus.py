from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from .conftest import Module

SOURCE = '''"""What it is."""
import os

@decorated
@twice
def first():
    return 1

class Second:
    def inner(self): ...
'''


@pytest.fixture
def corpus(pretrain_module: Module) -> Any:
    module = pretrain_module("corpus")
    module.files.cache_clear()
    module.documents.cache_clear()
    yield module
    module.files.cache_clear()
    module.documents.cache_clear()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of forty files, and some files that do not belong to it."""
    for name in [f"module_{i}.py" for i in range(40)] + ["test/no.py", "site-packages/no.py", "config-3/no.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{SOURCE}\n\ndef own_{Path(name).stem}(): ...\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_source_is_split_at_definitions_without_loss(corpus: Any) -> None:
    pieces = list(corpus.definitions(SOURCE))
    assert "".join(pieces) == SOURCE
    assert [piece.splitlines()[0] for piece in pieces] == ['"""What it is."""', "@decorated", "class Second:"]


def test_every_document_is_in_one_split_once(corpus: Any, library: Path) -> None:
    splits = [corpus.documents(split) for split in corpus.SPLITS]
    assert all(splits)
    together = [text for split in splits for text in split]
    assert len(together) == len(set(together)) == 3 + 40, "what all files share is used once, in training"


def test_file_is_in_one_split_and_third_party_code_in_none(corpus: Any, library: Path) -> None:
    assert not [name for name in corpus.files() if "no" in name]
    own = {split: {text for text in corpus.documents(split) if "own_" in text} for split in corpus.SPLITS}
    for name in corpus.files():
        assert [split for split, texts in own.items() if f"def own_{name}(): ..." in texts] == [corpus.split_of(name)]


def test_unknown_split_is_refused(corpus: Any, library: Path) -> None:
    with pytest.raises(ValueError, match="no split 'dev'; there are train, validation, test"):
        corpus.documents("dev")
