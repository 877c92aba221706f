from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export.convert import check_external_data, tensor_specs
from export.parity import require_equal, verify
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import DataError, StageError

from .conftest import COUNT, Exported, Exporter, Small, linear, pairs


class Fixed(nn.Module):
    """Answers right for three samples only, the number the exporter happens to be shown."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, 4) * 2


class Mixed(nn.Module):
    """Two inputs of different types, two outputs, returned as a mapping in another order than declared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        found = self.embedding(tokens).sum(dim=1) + x
        return {"best": found.argmax(dim=1), "scores": found, "unused": found * 2}


class Branching(nn.Module):
    """Control flow that depends on data becomes a graph inside the graph."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return found


def mixed() -> Small:
    columns: dict[str, Any] = {
        "tokens": np.arange(COUNT * 2).reshape(COUNT, 2) % 10,
        "x": np.ones((COUNT, 4), np.float32),
    }
    return Small(Mixed(), columns, inputs=("tokens", "x"), outputs=("scores", "best"))


def equal(made: Exported) -> list[dict[str, Any]]:
    found = verify(made.task, made.model, made.test, made.path, made.config)
    require_equal(found, made.config)
    return found


def strings(message: Any) -> Iterator[str]:
    """Every text anywhere in a protobuf message."""
    for kind, value in message.ListFields():
        for item in value if kind.is_repeated else [value]:
            if kind.message_type is not None:
                yield from strings(item)
            elif isinstance(item, str):
                yield item


def test_the_batch_axis_is_dynamic_and_bears_its_name(exported: Exporter) -> None:
    made = exported(Small(linear(), pairs()))
    inputs, outputs = tensor_specs(made.path)
    assert [(spec.name, spec.datatype, spec.shape) for spec in inputs] == [("x", "FP32", ("batch", 4))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in outputs] == [("y", "FP32", ("batch", 3))]
    assert equal(made)


def test_several_inputs_of_their_types_and_outputs_named_by_a_mapping(exported: Exporter) -> None:
    made = exported(mixed())
    inputs, outputs = tensor_specs(made.path)
    assert [(spec.name, spec.datatype) for spec in inputs] == [("tokens", "INT64"), ("x", "FP32")]
    assert [(spec.name, spec.datatype) for spec in outputs] == [("scores", "FP32"), ("best", "INT64")]
    assert equal(made)


def test_a_model_for_one_batch_size_alone_is_refused_with_the_cause(exported: Exporter) -> None:
    with pytest.raises(StageError, match="batch") as caught:
        tensor_specs(exported(Small(Fixed(), pairs())).path)
    assert "\n" not in str(caught.value)


def test_an_output_that_has_no_batch_axis_is_refused(tmp_path: Path) -> None:
    made = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "fixed",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 2])],
    )
    onnx.save(onnx.helper.make_model(made), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=r"the batch axis of `y` became fixed in the export \(shape \[3, 2\]\)"):
        tensor_specs(tmp_path / "model.onnx")


def test_a_model_left_in_training_mode_is_exported_as_it_is_served(exported: Exporter) -> None:
    task = Small(linear(), pairs())
    made = exported(task)
    first = made.path.read_bytes()
    assert b"Dropout" not in first
    assert equal(made)


def test_a_model_that_does_not_return_what_was_declared_is_the_users_to_mend(exported: Exporter) -> None:
    with pytest.raises((DataError, StageError), match="outputs"):
        exported(Small(linear(), pairs(), outputs=("y", "z")))


@pytest.mark.parametrize("external_data", ["auto", "always"])
def test_the_same_model_is_the_same_bytes(exported: Exporter, external_data: str) -> None:
    left, right = (exported(Small(linear(), pairs()), name, external_data=external_data) for name in ("a", "b"))
    assert digest_file(left.path) == digest_file(right.path)
    assert sorted(p.name for p in left.path.parent.iterdir()) == sorted(p.name for p in right.path.parent.iterdir())


@pytest.mark.parametrize("net", [linear(), Branching()], ids=["linear", "branching"])
def test_nothing_tells_which_machine_made_it(exported: Exporter, net: nn.Module) -> None:
    made = exported(Small(net, pairs()), batch_sizes=(COUNT,))
    assert equal(made)
    raw = made.path.read_bytes()
    for trace in (str(made.path.parent), str(Path(__file__).parent), sys.prefix, "site-packages", ".py"):
        assert trace.encode() not in raw, trace
    assert not [text for text in strings(onnx.load(made.path)) if text.startswith("/") or "line " in text]


def test_weights_may_live_beside_the_model_and_are_found_there(exported: Exporter) -> None:
    made = exported(Small(linear(), pairs()), external_data="always")
    assert len(list(made.path.parent.iterdir())) == 2
    check_external_data(made.path)
    assert equal(made)


@pytest.mark.parametrize("location", ["../weights", "/etc/hostname", "folder/weights", "gone", "", "link", "."])
def test_weights_that_live_anywhere_else_are_refused(tmp_path: Path, location: str) -> None:
    path = tmp_path / "bundle" / "model.onnx"
    for name in ("bundle/folder/weights", "weights"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0" * 16)
    (path.parent / "link").symlink_to(tmp_path / "weights")
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4], raw_data=b"0" * 16)
    onnx.external_data_helper.set_external_data(tensor, location)
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString())
    with pytest.raises(StageError, match=r"keeps weights in .*, which is no plain file beside it"):
        check_external_data(path)
