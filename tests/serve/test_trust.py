"""Only what a trusted key signed is loaded: at the start, by a hot swap, as a canary and as a shadow."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.signing import SIGNATURE, new_key, private_key, sign
from pipeline.system.errors import BundleError
from serve.__main__ import _open, _shadow
from serve.models import ModelManager, ModelRepository
from serve.options import Options, parse_options
from serve.runtime.loading import load_predictor
from tests.serve.bundles import seal

Spoil = Callable[[Path], None]


@dataclass(frozen=True)
class Given:
    key: Path
    bundle: Path  # signed, and reporting when its codec is loaded
    loaded: Path
    options: Options


@pytest.fixture
def given(own_bundle: Path, tmp_path: Path) -> Given:
    key, loaded = tmp_path / "key", tmp_path / "loaded"
    new_key(key)
    codec = own_bundle / "codec.py"
    codec.write_text(f"{codec.read_text()}\nfrom pathlib import Path\nPath({str(loaded)!r}).touch()\n")
    seal(own_bundle)
    sign(own_bundle, private_key(key))
    options = parse_options([str(own_bundle), "--shadow", str(own_bundle), "--require-signature", f"{key}.pub"])
    return Given(key, own_bundle, loaded, options)


@pytest.fixture
def manager(given: Given, bundle: Bundle, pool: Executor) -> Iterator[ModelManager]:
    repository = ModelRepository()
    manager = ModelManager(repository, given.options, pool, [("tiny", load_predictor(bundle, "cpu", 1))])
    yield manager
    manager.close()


def unsigned(bundle: Path) -> None:
    (bundle / SIGNATURE).unlink()


def by_another(bundle: Path) -> None:
    new_key(bundle.parent / "other")
    sign(bundle, private_key(bundle.parent / "other"))


def forged(bundle: Path) -> None:
    path = bundle / SIGNATURE
    path.write_text(path.read_text().replace('"sig": "', '"sig": "AAAA'))


def sealed_again(bundle: Path) -> None:
    (bundle / "card.md").write_text("# better\n")
    seal(bundle)


REFUSED = pytest.mark.parametrize(
    ("spoil", "output"),
    [
        (unsigned, "is not signed"),
        (by_another, "is signed by SHA256:"),
        (forged, "was not made by the key"),
        (sealed_again, "was changed after it was signed"),
    ],
)


def enter_at_start(given: Given, manager: ModelManager) -> None:
    _open(given.options.bundles[0], given.options)


def enter_as_shadow_at_start(given: Given, manager: ModelManager) -> None:
    _shadow(given.options.shadows[0], given.options, {"tiny": SimpleNamespace(signature=None)})  # type: ignore[dict-item]


def enter_by_swap(given: Given, manager: ModelManager) -> None:
    asyncio.run(manager.load("tiny", given.bundle))


def enter_as_shadow(given: Given, manager: ModelManager) -> None:
    asyncio.run(manager.start_shadow("tiny", given.bundle, 1.0))


WAYS = (enter_at_start, enter_as_shadow_at_start, enter_by_swap, enter_as_shadow)


@REFUSED
def test_what_no_trusted_key_signed_is_refused_with_nothing_loaded(
    given: Given, manager: ModelManager, spoil: Spoil, output: str
) -> None:
    before = manager.status()
    spoil(given.bundle)
    for enter in WAYS:
        with pytest.raises(BundleError, match=output):
            enter(given, manager)
    assert not given.loaded.exists()
    assert manager.status() == before


def test_what_a_trusted_key_signed_comes_in_by_every_way(given: Given, manager: ModelManager) -> None:
    for enter in (enter_at_start, enter_by_swap, enter_as_shadow, enter_as_shadow):
        enter(given, manager)
    assert given.loaded.exists()
    assert manager.status()["models"]["tiny"]["shadow"]["path"] == str(given.bundle)


def test_a_key_that_is_taken_out_of_the_file_opens_no_security_from_then_on(
    given: Given, manager: ModelManager
) -> None:
    new_key(given.key.parent / "other")
    shutil.copyfile(f"{given.key.parent}/other.pub", f"{given.key}.pub")
    with pytest.raises(BundleError, match="is signed by SHA256:"):
        enter_by_swap(given, manager)
