from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.descriptor import Descriptor

from pipeline.contract.bundle import MESSAGES, PROVENANCE, REQUIRED, external_locations, open_bundle, statement
from pipeline.system.errors import BundleError
from pipeline.system.files import digest_file, write_json

from .conftest import SIGNATURE, seal

NAMES = [*REQUIRED, "codec.py", "weights/part.bin"]


def edit(bundle: Path, change: dict[str, Any]) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def entries(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())["files"]
    return found


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    return str(caught.value)


def test_sealed_bundle_opens_with_its_manifest_digest(bundle: Path) -> None:
    found = open_bundle(bundle)
    assert found.digest == digest_file(bundle / "manifest.json") == seal(bundle)
    assert (found.name, found.model, found.signature) == ("pairs", bundle / "model.onnx", SIGNATURE)
    assert set(entries(bundle)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_in_any_file_is_refused_by_name(bundle: Path, name: str) -> None:
    raw = bytearray((bundle / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (bundle / name).write_bytes(raw)
    assert f"{name}: content changed since export" in refusal(bundle)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert f"missing {name}" in refusal(bundle)


@pytest.mark.parametrize("name", [*REQUIRED, "codec.py"])
def test_manifest_without_a_required_file_is_refused(bundle: Path, name: str) -> None:
    edit(bundle, {"files": {path: entry for path, entry in entries(bundle).items() if path != name}})
    assert f"not in the manifest: {name}" in refusal(bundle)


def test_codec_file_is_required_unless_the_signature_has_none(bundle: Path) -> None:
    (bundle / "codec.py").unlink()
    seal(bundle)
    assert "missing codec.py" in refusal(bundle)
    (bundle / "signature.json").write_text(SIGNATURE.model_copy(update={"codec": ""}).model_dump_json())
    seal(bundle)
    assert open_bundle(bundle).signature.codec == ""


@pytest.mark.parametrize("name", ["extra.py", "weights/extra.bin", ".hidden", "weights/manifest.json"])
def test_a_file_that_the_manifest_does_not_name_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).write_text("{}")
    assert f"not in the manifest: {name}" in refusal(bundle)


@pytest.mark.parametrize("name", ["codec.py", "weights"])
def test_symbolic_link_is_refused_even_with_the_right_content(bundle: Path, name: str) -> None:
    (bundle / name).rename(bundle.parent / name)
    (bundle / name).symlink_to(bundle.parent / name)
    assert "symbolic link" in refusal(bundle)


def test_empty_folders_and_special_files_are_refused(bundle: Path) -> None:
    (bundle / "weights" / "more").mkdir(parents=True)
    assert "not in the manifest: weights/more, an empty folder" in refusal(bundle)
    os.mkfifo(bundle / "pipe")
    assert "not a regular file" in refusal(bundle)


@pytest.mark.parametrize("name", ["../outside", "weights/../../outside", "{outside}", "./codec.py", "weights"])
def test_manifest_path_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    """Even if the file exists and has the right digest."""
    outside = bundle.parent / "outside"
    outside.write_text("secret")
    name = name.format(outside=outside)
    found = bundle / name
    digest = digest_file(found) if found.is_file() else "0" * 64
    edit(bundle, {"files": {**entries(bundle), name: {"sha256": digest, "bytes": 6}}})
    assert f"missing {name}" in refusal(bundle)


def test_lineage_is_part_of_the_digest_and_must_name_the_model(bundle: Path) -> None:
    before = open_bundle(bundle).digest
    ancestors = json.loads((bundle / "manifest.json").read_text())["ancestors"]
    edit(bundle, {"ancestors": {**ancestors, "data": "another"}})
    assert open_bundle(bundle).digest != before
    edit(bundle, {"ancestors": {**ancestors, "onnx": "0" * 64}})
    assert "lineage names another model.onnx" in refusal(bundle)


def test_an_older_bundle_is_to_be_exported_again_and_a_newer_one_needs_a_newer_pipe(bundle: Path) -> None:
    edit(bundle, {"schema_version": 0})
    assert "schema 0, this version reads 1; export again" in refusal(bundle)
    edit(bundle, {"schema_version": 2})
    assert "newer version of pipe (schema 2, this one reads 1); to fix it: pip install --upgrade" in refusal(bundle)
    edit(bundle, {"schema_version": 1, "surprise": 1})
    assert "newer version of pipe (surprise is unknown here); to fix it" in refusal(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 1}', "\ufeff{}"])
def test_invalid_manifest_or_signature_is_refused(bundle: Path, text: str) -> None:
    (bundle / "signature.json").write_text(text)
    seal(bundle)
    assert "signature.json: damaged: " in refusal(bundle)
    (bundle / "manifest.json").write_text(text)
    assert "manifest.json: damaged: " in refusal(bundle)
    (bundle / "manifest.json").unlink()
    assert "not a bundle" in refusal(bundle)


def test_manifest_json_in_a_subfolder_is_sealed_too(bundle: Path) -> None:
    (bundle / "weights" / "manifest.json").write_text("{}")
    seal(bundle)
    assert "weights/manifest.json" in open_bundle(bundle).manifest.files


def test_file_with_hard_links_elsewhere_is_refused(bundle: Path) -> None:
    os.link(bundle / "codec.py", bundle.parent / "codec.py")
    os.link(bundle / "codec.py", bundle.parent / "again.py")
    message = refusal(bundle)
    assert "codec.py: has 2 hard links elsewhere" in message
    assert "`cp -r`" in message


def test_hard_links_from_other_runs_are_accepted(bundle: Path) -> None:
    """`pipe` links reused outputs; a killed export leaves `export.partial`."""
    runs = bundle.parent / "runs"
    own = runs / "first" / "export" / "bundle"
    shutil.copytree(bundle, own)
    (runs / "first" / "run.json").write_text("{}")
    for name, step in (("second", "export"), ("third", "export.partial")):
        shutil.copytree(own, runs / name / step / "bundle", copy_function=os.link)
        (runs / name / "run.json").write_text("{}")
        assert open_bundle(runs / name / step / "bundle").digest == open_bundle(own).digest
    os.link(own / "card.md", bundle.parent / "card.md")
    assert "card.md: has 1 hard link elsewhere" in refusal(own)


def model(bundle: Path, location: str) -> None:
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4], raw_data=b"0" * 16)
    onnx.external_data_helper.set_external_data(tensor, location)
    node = onnx.helper.make_node("Constant", [], ["w"], value=tensor)  # not an initializer: it is read all the same
    graph = onnx.helper.make_graph([node], "g", [], [])
    (bundle / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    seal(bundle)


@pytest.mark.parametrize("location", ["../outside", "/etc/hostname", "weights/part.bin", "gone", "", "."])
def test_external_weights_outside_the_bundle_are_refused(bundle: Path, location: str) -> None:
    (bundle.parent / "outside").write_bytes(b"0" * 16)
    model(bundle, location)
    assert f"keeps weights in {location!r}, which is not a regular file next to it" in refusal(bundle)


def test_external_weights_beside_the_model_are_accepted(bundle: Path) -> None:
    (bundle / "model.data").write_bytes(b"0" * 16)
    model(bundle, "model.data")
    assert "model.data" in open_bundle(bundle).manifest.files


def test_model_with_an_unparsable_weight_location_is_refused(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"\x0f location")
    seal(bundle)
    assert "is not a readable ONNX file" in refusal(bundle)


def test_provenance_of_another_bundle_is_refused(bundle: Path) -> None:
    raw = (bundle / "manifest.json").read_bytes()
    body = statement(open_bundle(bundle).manifest, raw, {"name": "pairs"}, {"torch": "2"}, {"python": "3"})
    write_json(bundle / PROVENANCE, body)
    digest = open_bundle(bundle).digest
    assert seal(bundle) == digest, "a statement is not part of its own subject"
    for change, message in (
        ({"subject": []}, "is about another bundle"),
        ({"_type": "x"}, "is not an in-toto statement"),
    ):
        write_json(bundle / PROVENANCE, {**body, **change})
        assert message in refusal(bundle)
    (bundle / PROVENANCE).write_text("{")
    assert "not valid JSON" in refusal(bundle)


def leads_to_a_tensor(kind: Descriptor, seen: frozenset[str] = frozenset()) -> bool:
    if kind.name in ("TensorProto", "SparseTensorProto"):
        return True
    inner = (field.message_type for field in kind.fields if field.message_type and field.message_type.name not in seen)
    return any(leads_to_a_tensor(other, seen | {kind.name}) for other in inner)


def test_every_onnx_message_with_tensors_is_searched() -> None:
    """Compare with the schema of ONNX, to which a later version may add messages."""
    waiting: list[Descriptor] = [onnx.ModelProto.DESCRIPTOR]
    found: dict[str, dict[int, str]] = {}
    while waiting:
        kind = waiting.pop()
        if kind.name in found or kind.name == "TensorProto":
            continue
        inner = {field.number: field.message_type for field in kind.fields if field.message_type}
        kept = {number: other for number, other in inner.items() if leads_to_a_tensor(other)}
        found[kind.name] = {number: other.name for number, other in kept.items()}
        waiting += kept.values()
    assert found == {name: fields for name, fields in MESSAGES.items() if name != "TensorProto"}
    field = onnx.TensorProto.DESCRIPTOR.fields_by_name["external_data"]
    assert MESSAGES["TensorProto"] == {field.number: field.message_type.name}


def outside(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1], raw_data=b"0000")
    onnx.external_data_helper.set_external_data(tensor, location, offset=0, length=4)
    return tensor


def test_external_tensors_are_found_everywhere_in_a_model(tmp_path: Path) -> None:
    helper = onnx.helper
    branch = helper.make_graph([helper.make_node("Constant", [], ["b"], value=outside("branch"))], "b", [], [])
    function = helper.make_function("f", "F", [], ["y"], [helper.make_node("Constant", [], ["y"], value=outside("function"))], [helper.make_opsetid("", 20)])  # fmt: skip  # noqa: E501
    sparse = onnx.SparseTensorProto(values=outside("values"), indices=outside("indices"), dims=[4])
    graph = helper.make_graph(
        [
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
            helper.make_node("Many", [], ["z"], all=[outside("list")]),
        ],
        "g", [], [], [outside("weights")], sparse_initializer=[sparse],
    )  # fmt: skip
    model = helper.make_model(graph, functions=[function])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert external_locations(tmp_path / "model.onnx") == {
        "branch", "function", "values", "indices", "list", "weights",
    }  # fmt: skip


NO_PROTOBUF = [b"\x3a\x7flocation", b"\x3b location", b"\x3a" + b"\xff" * 12 + b"location", b"\x09locatlocation"]


@pytest.mark.parametrize("raw", NO_PROTOBUF)
def test_invalid_protobuf_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(raw)
    with pytest.raises(BundleError, match="is not a readable ONNX file"):
        external_locations(tmp_path / "model.onnx")
    for without_the_word in (b"", b"no tensors of its own"):
        (tmp_path / "model.onnx").write_bytes(without_the_word)
        assert external_locations(tmp_path / "model.onnx") == set()
