"""A tiny language model, loaded as the service loads it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.contract.bundle import open_bundle
from serve.llm.model import LanguageModel
from serve.runtime.loading import load_predictor
from tests.serve.llm import tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("words") / "bundle")


@pytest.fixture(scope="session")
def language_model(tiny_path: Path) -> LanguageModel:
    found = load_predictor(open_bundle(tiny_path), None, None).language_model
    assert isinstance(found, LanguageModel)
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as made:
        yield made
