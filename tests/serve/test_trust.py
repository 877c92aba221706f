"""Only bundles and shadows that a trusted key signed are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contract.signing import SIGNATURE, new_key, private_key, sign
from pipeline.system.errors import BundleError
from serve.__main__ import _open, _shadow
from serve.options import Options, parse_options
from tests.serve.bundles import seal

Spoil = Callable[[Path], None]


@dataclass(frozen=True)
class Given:
    key: Path
    bundle: Path  # signed; its codec writes `loaded` when it is loaded
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


def enter(given: Given) -> None:
    _open(given.options.bundles[0], given.options)


def enter_as_shadow(given: Given) -> None:
    _shadow(given.options.shadows[0], given.options, {"tiny": SimpleNamespace(signature=None)})  # type: ignore[dict-item]


@REFUSED
@pytest.mark.parametrize("way", [enter, enter_as_shadow])
def test_untrusted_bundle_is_refused_before_its_codec_is_loaded(
    given: Given, spoil: Spoil, output: str, way: Callable[[Given], None]
) -> None:
    spoil(given.bundle)
    with pytest.raises(BundleError, match=output):
        way(given)
    assert not given.loaded.exists()


def test_bundle_signed_by_a_trusted_key_is_opened(given: Given) -> None:
    enter(given)


def test_key_removed_from_the_file_is_no_longer_trusted(given: Given) -> None:
    new_key(given.key.parent / "other")
    shutil.copyfile(f"{given.key.parent}/other.pub", f"{given.key}.pub")
    with pytest.raises(BundleError, match="is signed by SHA256:"):
        enter(given)
