"""Selection of a model's version, and readiness of all models."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from serve.errors import NotFound
from serve.models import ModelRepository, make_repository
from serve.options import parse_options
from serve.runtime.loading import load_predictor


def test_service_is_ready_if_it_has_models_and_does_not_drain(bundle: Bundle, other_path: Path, pool: Executor) -> None:
    loaded = [("one", load_predictor(bundle, "cpu", 1)), ("two", load_predictor(open_bundle(other_path), "cpu", 1))]
    assert ModelRepository().ready() is False, "without a model there is nothing to be ready"
    repository = make_repository(loaded, parse_options(["unused"]), pool)
    assert repository.ready() is True
    assert repository.model_ready("one") is True
    repository.drain()
    assert repository.ready() is False
    assert repository.model_ready("one") is False
    assert repository.index(ready=True) == []
    assert {one["state"] for one in repository.index()} == {"UNAVAILABLE"}


@pytest.mark.parametrize(
    ("share", "current", "canary"), [("0", "2", None), ("0.1", "1", {"version": "2", "share": 0.1})]
)
def test_last_bundle_of_a_name_gets_all_requests_or_a_share(
    bundle: Bundle, other_path: Path, pool: Executor, share: str, current: str, canary: Any
) -> None:
    loaded = [("tiny", load_predictor(one, "cpu", 1)) for one in (bundle, open_bundle(other_path))]
    repository = make_repository(loaded, parse_options(["unused", "--canary", share]), pool)
    status = repository.status()["models"]["tiny"]
    assert (status["current"], status["canary"], status["shadow"]) == (current, canary, None)
    assert status["versions"]["1"] == {"bundle": bundle.digest}
    assert repository.find_version("tiny", "1").digest == bundle.digest, "by its number it answers in any case"
    with pytest.raises(NotFound, match="no version '3'"):
        repository.find_version("tiny", "3")
