from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from google.protobuf.descriptor import Descriptor

from pipeline.spec.errors import BundleError
from pipeline.spec.external import MESSAGES, external_locations


def leads_to_a_tensor(kind: Descriptor, seen: frozenset[str] = frozenset()) -> bool:
    if kind.name in ("TensorProto", "SparseTensorProto"):
        return True
    inner = (field.message_type for field in kind.fields if field.message_type and field.message_type.name not in seen)
    return any(leads_to_a_tensor(other, seen | {kind.name}) for other in inner)


def test_every_way_to_a_tensor_that_onnx_knows_is_followed() -> None:
    """Held against ONNX's own schema, in which a later version may open another one."""
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


def test_tensors_are_found_wherever_they_hide(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("raw", [b"\x3a\x7flocation", b"\x3b location", b"\x3a" + b"\xff" * 12 + b"location", b"\x09location"[:-3] + b"location"])  # fmt: skip  # noqa: E501
def test_what_is_no_protobuf_is_refused_and_not_passed_over(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(raw)
    with pytest.raises(BundleError, match="is not an ONNX file that can be read"):
        external_locations(tmp_path / "model.onnx")


@pytest.mark.parametrize("raw", [b"", b"no tensors of its own"])
def test_without_the_word_there_is_nothing_to_look_for(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(raw)
    assert external_locations(tmp_path / "model.onnx") == set()
