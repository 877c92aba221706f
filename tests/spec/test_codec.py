from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.codec import load_codec
from pipeline.spec.errors import ConfigError

METHODS = {
    "decode": "    def decode(self, instances): return {'x': instances}",
    "encode": "    def encode(self, o): ...",
}


def write(root: Path, *names: str) -> None:
    (root / "some_codec.py").write_text("class Codec:\n    pass\n" + "\n".join(METHODS[n] for n in names) + "\n")


def test_a_codec_with_both_methods_is_built(root: Path) -> None:
    write(root, "decode", "encode")
    assert load_codec("some_codec.py:Codec", root).decode([1]) == {"x": [1]}


@pytest.mark.parametrize(("have", "missing"), [("decode", r"encode\(outputs\)"), ("encode", r"decode\(instances\)")])
def test_a_missing_method_is_named(root: Path, have: str, missing: str) -> None:
    write(root, have)
    with pytest.raises(ConfigError, match=f"has no method {missing}"):
        load_codec("some_codec.py:Codec", root)
