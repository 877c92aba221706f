from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.codec import codec_class, encode_method, load_codec, media_types, required_packages, shared_files
from pipeline.system.errors import ConfigError

METHODS = {
    "decode": "    def decode(self, instances): return {'x': instances}",
    "encode": "    def encode(self, o): ...",
}


def write(root: Path, *names: str) -> None:
    (root / "some_codec.py").write_text("class Codec:\n    pass\n" + "\n".join(METHODS[n] for n in names) + "\n")


def write_with(root: Path, *lines: str) -> None:
    body = [*lines, *METHODS.values(), "    def __init__(self, folder=None): self.folder = folder"]
    (root / "some_codec.py").write_text("class Codec:\n" + "\n".join(body) + "\n")


@pytest.mark.parametrize(("have", "missing"), [("decode", r"encode\(outputs\)"), ("encode", r"decode\(instances\)")])
def test_a_missing_method_is_named(root: Path, have: str, missing: str) -> None:
    write(root, have)
    with pytest.raises(ConfigError, match=f"has no method {missing}"):
        load_codec("some_codec.py:Codec", root)


def test_only_a_codec_with_files_gets_their_folder(root: Path) -> None:
    (root / "files").mkdir()
    (root / "files" / "words.txt").write_text("one two")
    for line, folder in (("    files = ('words.txt',)", root / "files"), ("", None)):
        name = "with_files" if line else "without"
        body = ["class Codec:", line, *METHODS.values(), "    def __init__(self, folder=None): self.folder = folder"]
        (root / f"{name}.py").write_text("\n".join(body) + "\n")
        assert vars(load_codec(f"{name}.py:Codec", root, files=root / "files")) == {"folder": folder}


def test_missing_file_is_named(root: Path) -> None:
    write_with(root, "    files = ('words.txt',)")
    with pytest.raises(ConfigError, match=r"needs words.txt, which is not in "):
        load_codec("some_codec.py:Codec", root, files=root / "files")
    with pytest.raises(ConfigError, match=r"needs words.txt; build it with the folder"):
        load_codec("some_codec.py:Codec", root)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/hostname", "a/../../b", "./words.txt", r"a\b", "a//b", "."])
def test_a_file_outside_the_folder_is_refused(root: Path, name: str) -> None:
    write_with(root, f"    files = (r'{name}',)")
    with pytest.raises(ConfigError, match="name files below the folder"):
        load_codec("some_codec.py:Codec", root, files=root)


@pytest.mark.parametrize("line", ["files = 'words.txt'", "files = (1,)", "requires = 'tokenizers'", "requires = ('',)"])
def test_files_and_requires_must_be_tuples_of_names(root: Path, line: str) -> None:
    write_with(root, f"    {line}")
    kind = codec_class("some_codec.py:Codec", root)
    read = shared_files if line.startswith("files") else required_packages
    with pytest.raises(ConfigError, match=f"write `{line.split()[0]} = "):
        read(kind, "some_codec.py:Codec")


@pytest.mark.parametrize(
    ("parameters", "gets_inputs"),
    [
        ("self, outputs", False),
        ("self, outputs, inputs", True),
        ("self, outputs, decoded", True),
        ("self, outputs, inputs=None", True),
        ("self, outputs, top=3", False),
        ("self, outputs, *, top=3", False),
        ("self, *outputs", False),
    ],
)
def test_encode_gets_the_decoded_inputs_if_it_has_a_parameter_for_them(
    root: Path, parameters: str, gets_inputs: bool
) -> None:
    lines = ["class Codec:", METHODS["decode"], f"    def encode({parameters}): return locals()"]
    (root / "some_codec.py").write_text("\n".join(lines) + "\n")
    encode = encode_method(load_codec("some_codec.py:Codec", root), "some_codec.py:Codec")
    given = {"x": np.zeros(1)}
    assert (given in dict(encode({}, given)).values()) == gets_inputs


@pytest.mark.parametrize("parameters", ["self, outputs, inputs, more", "self, outputs, *, inputs", "self, a, b, *, c"])
def test_encode_with_another_argument_is_refused(root: Path, parameters: str) -> None:
    lines = ["class Codec:", METHODS["decode"], f"    def encode({parameters}): ..."]
    (root / "some_codec.py").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"encode\(\) must take \(outputs\) or \(outputs, inputs\)"):
        encode_method(load_codec("some_codec.py:Codec", root), "some_codec.py:Codec")


def test_media_types_of_files_are_read(root: Path) -> None:
    write_with(root, "    media_types = ('image/png', 'image/svg+xml')")
    assert media_types(codec_class("some_codec.py:Codec", root), "") == ("image/png", "image/svg+xml")


@pytest.mark.parametrize("name", ["png", "image/*", "Image/PNG", "image/png; q=1", "application/json"])
def test_invalid_media_type_is_refused(root: Path, name: str) -> None:
    write_with(root, f"    media_types = ('{name}',)")
    with pytest.raises(ConfigError, match=r"name types of files, as in image/png"):
        codec_class("some_codec.py:Codec", root)
