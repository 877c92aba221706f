from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.spec.digest import digest_bytes, digest_file, digest_mapping, digest_parts, digest_tree


def test_parts_cut_elsewhere_have_another_digest() -> None:
    assert digest_parts(["ab", "c"]) != digest_parts(["a", "bc"])
    assert digest_parts(["ab", ""]) != digest_parts(["", "ab"]) != digest_parts(["ab"])


def test_text_and_its_bytes_are_the_same_part() -> None:
    assert digest_parts(["é"]) == digest_parts(["é".encode()])


def test_a_mapping_has_one_digest_whatever_its_order() -> None:
    assert digest_mapping({"a": "1", "b": "2"}) == digest_mapping({"b": "2", "a": "1"})


def test_a_mapping_keeps_names_and_values_apart() -> None:
    assert digest_mapping({"a": "b"}) != digest_mapping({"b": "a"})
    assert digest_mapping({"a": "1", "b": "2"}) != digest_mapping({"a": "2", "b": "1"})


def test_a_file_larger_than_one_chunk_is_digested_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    path = tmp_path / "big"
    path.write_bytes(data)
    assert digest_file(path) == digest_bytes(data) == hashlib.sha256(data).hexdigest()


def test_a_tree_lists_regular_files_only_by_their_relative_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b").write_text("b")
    (tmp_path / "a").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert digest_tree(tmp_path) == {"a": digest_bytes(b"a"), "inner/b": digest_bytes(b"b")}
