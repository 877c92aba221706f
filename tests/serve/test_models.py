"""What a change of who answers means to those who are asking, inside the process."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from serve.errors import Conflict, NotFound
from serve.models import Model, ModelManager, ModelRepository
from serve.options import parse_options
from serve.runtime.loading import load_predictor
from tests.serve.bundles import build, digits
from tests.serve.doubling_model import Client


@pytest.fixture
def repository() -> ModelRepository:
    return ModelRepository()


@pytest.fixture
def manager(repository: ModelRepository, bundle: Bundle, pool: Executor) -> Any:
    manager = ModelManager(repository, parse_options(["unused"]), pool, [("tiny", load_predictor(bundle, "cpu", 1))])
    yield manager
    manager.close()


def test_all_models_are_ready_or_none_is(
    repository: ModelRepository, bundle: Bundle, other_path: Path, pool: Executor
) -> None:
    loaded = [("one", load_predictor(bundle, "cpu", 1)), ("two", load_predictor(open_bundle(other_path), "cpu", 1))]
    assert repository.ready() is False, "without a model there is nothing to be ready"
    manager = ModelManager(repository, parse_options(["unused"]), pool, loaded)
    assert repository.ready() is True
    repository.add(Model("empty"))
    assert repository.ready() is False
    assert repository.model_ready("one") is True
    assert repository.model_ready("empty") is False
    repository.find_model("empty").switch(repository.find_version("two"))
    assert repository.ready() is True
    assert [one["name"] for one in repository.index(ready=True)] == ["one", "two"]
    repository.draining = True
    assert repository.ready() is False
    assert repository.index(ready=True) == []
    assert {one["state"] for one in repository.index()} == {"UNAVAILABLE"}
    manager.close()


def test_who_was_met_answers_though_it_is_let_go(
    repository: ModelRepository,
    manager: ModelManager,
    bundle: Bundle,
    other_path: Path,
    picture: list[Any],
    tmp_path: Path,
) -> None:
    """Two switches on, the first version is known no more; the client that has met it is answered by it."""
    source = (bundle.path / "codec.py").read_text()
    third = build(tmp_path / "third", "DigitsCodec", source, [picture], digits, seed=9)
    met = repository.find_version("tiny")

    async def switched() -> Any:
        for path in (other_path, third):
            manager.switch("tiny", (await manager.load("tiny", path)).version)
        return await met.batcher.outputs({"image": bundle.golden().inputs["image"]}, ("logits",), Client())

    outputs = asyncio.run(switched())
    assert sorted(repository.find_model("tiny").versions) == ["2", "3"]
    with pytest.raises(NotFound, match="no version '1'"):
        repository.find_version("tiny", "1")
    assert abs(outputs["logits"] - bundle.golden().outputs["logits"]).max() < 1e-3


@pytest.mark.parametrize(("keep", "kept"), [("1", ["4"]), ("2", ["3", "4"]), ("3", ["2", "3", "4"])])
def test_as_many_versions_stay_as_was_stated_and_the_others_are_freed(
    repository: ModelRepository,
    bundle: Bundle,
    pool: Executor,
    picture: list[Any],
    tmp_path: Path,
    keep: str,
    kept: list[str],
) -> None:
    source = (bundle.path / "codec.py").read_text()
    paths = [build(tmp_path / str(seed), "DigitsCodec", source, [picture], digits, seed=seed) for seed in (11, 12, 13)]
    manager = ModelManager(
        repository,
        parse_options(["unused", "--keep-versions", keep]),
        pool,
        [("tiny", load_predictor(bundle, "cpu", 1))],
    )
    model = repository.find_model("tiny")
    sessions = {"1": weakref.ref(model.find_version("1").predictor.session)}

    async def switched() -> None:
        for path in paths:
            version = (await manager.load("tiny", path)).version
            sessions[version] = weakref.ref(model.find_version(version).predictor.session)
            manager.switch("tiny", version)

    asyncio.run(switched())
    gc.collect()
    assert sorted(model.versions) == kept
    assert [version for version, session in sessions.items() if session() is not None] == kept
    if len(kept) == 3:
        manager.switch("tiny", "2")
        assert (model.previous and model.previous.version, sorted(model.versions)) == ("4", kept), "back, two at once"
    manager.close()


def test_two_who_load_one_bundle_get_one_version(
    manager: ModelManager, repository: ModelRepository, other_path: Path
) -> None:
    async def both() -> set[str]:
        found = await asyncio.gather(manager.load("tiny", other_path), manager.load("tiny", other_path))
        return {one.version for one in found}

    assert asyncio.run(both()) == {"2"}
    manager.unload_unused("tiny")
    assert list(repository.find_model("tiny").versions) == ["1"]


def test_a_bundle_that_takes_more_than_grpc_was_reported_needs_a_restart(
    manager: ModelManager, other_path: Path
) -> None:
    manager.max_body_bytes = 10
    with pytest.raises(Conflict, match="its max_body_bytes is 100000, this process was started for 10; restart"):
        asyncio.run(manager.load("tiny", other_path))


def test_the_shadow_goes_on_with_the_next_version(
    manager: ModelManager, repository: ModelRepository, other_path: Path
) -> None:
    async def shadowed_and_switched() -> tuple[Any, Any]:
        await manager.start_shadow("tiny", other_path, 1.0)
        before = repository.find_model("tiny").shadow
        manager.switch("tiny", (await manager.load("tiny", other_path)).version)
        return before, repository.find_model("tiny").shadow

    before, after = asyncio.run(shadowed_and_switched())
    assert before is after is not None
    assert repository.find_version("tiny", "1").shadow is None


def test_a_shadow_that_the_next_versions_requests_mean_nothing_to_ends(
    manager: ModelManager, repository: ModelRepository, other_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def shadowed_and_switched() -> None:
        await manager.start_shadow("tiny", other_path, 1.0)
        served = await manager.load("tiny", other_path)
        served.predictor.signature = served.predictor.signature.model_copy(update={"inputs": ()})
        manager.switch("tiny", served.version)

    asyncio.run(shadowed_and_switched())
    assert repository.find_model("tiny").shadow is None
    assert "the shadow ends: its inputs are" in caplog.text
