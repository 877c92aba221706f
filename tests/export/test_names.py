"""Names of tensors and axes in the file are the task's, whatever torch calls them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export.checks.verify import write_and_compare
from export.conversion.names import MeasuredShapes, name_output_axes
from export.conversion.to_onnx import tensor_specs
from export.subject import ModelExporter
from export.variants.quantize import CONVERTERS, VariantInputs
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import ConfigError

from .conftest import COUNT, Small, open_model
from .recurrent import KINDS, LONGEST, Tagger, Tags

QUICK = {"batch_sizes": (1, 7)}


def verified(task: Any, folder: Path, **settings: Any) -> ModelExporter:
    config = Export(**{**QUICK, **settings})
    kind = open_model(task, folder / "model.onnx", config)
    write_and_compare(kind).require(config)
    return kind


def shapes(path: Path) -> dict[str, tuple[int | str, ...]]:
    inputs, outputs = tensor_specs(path)
    return {spec.name: spec.shape for spec in (*inputs, *outputs)}


def test_output_length_of_a_recurrent_model_follows_its_input(tmp_path: Path) -> None:
    task = Tags(axes={"letters": ("batch", "time"), "real": ("batch", "time"), "tags": ("batch", "time", KINDS)})
    verified(task, tmp_path)
    assert shapes(tmp_path / "model.onnx") == {
        "letters": ("batch", "time"),
        "real": ("batch", "time"),
        "tags": ("batch", "time", KINDS),
    }
    graph = onnx.load(tmp_path / "model.onnx").graph
    weights = {tensor.name for tensor in graph.initializer}
    inner = [value.type.tensor_type.shape.dim for value in graph.value_info if value.name not in weights]
    assert not any(dim.dim_value == 9 for dims in inner for dim in dims), "no tensor has the length of the test data"


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(nn.RNN(6, 5, num_layers=2, batch_first=True, bidirectional=True), marks=pytest.mark.long),
        pytest.param(nn.RNN(6, 10, nonlinearity="relu", batch_first=True, bias=False), marks=pytest.mark.long),
        nn.GRU(6, 5, num_layers=2, dropout=0.5, batch_first=True, bidirectional=True),
    ],
)
def test_recurrent_layers_of_every_kind_keep_the_length_free(tmp_path: Path, layer: nn.Module) -> None:
    task = Tags()
    net: Any = task.net
    net.gru = layer
    verified(task, tmp_path)
    assert shapes(tmp_path / "model.onnx")["tags"] == ("batch", "time", KINDS)


class Attentive(Tagger):
    """Attention over what a recurrent layer returned reads its length from there."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embed(letters) * real[:, :, None])
        rows, length = hidden.shape[:2]
        heads = hidden.reshape(rows, length, 2, 5).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        found: Tensor = self.head(attended.transpose(1, 2).reshape(rows, length, 10))
        return found


def test_attention_behind_a_recurrent_layer_keeps_the_length_free(tmp_path: Path) -> None:
    verified(Tags(Attentive()), tmp_path)
    assert shapes(tmp_path / "model.onnx")["tags"] == ("batch", "time", KINDS)


@dataclass
class Answer:
    tags: Tensor
    heads: dict[str, Tensor]


class Structured(Tagger):
    """Returns a dataclass with a mapping inside."""

    def forward(self, letters: Tensor, real: Tensor) -> Any:
        tags = super().forward(letters, real)
        return Answer(tags, {"any": tags.amax(1), "unused": tags})


def test_outputs_inside_a_dataclass_and_a_mapping_are_exported(tmp_path: Path) -> None:
    verified(Tags(Structured(), outputs=("heads.any", "tags")), tmp_path)
    assert [spec.name for spec in tensor_specs(tmp_path / "model.onnx")[1]] == ["heads.any", "tags"]


class Resampled(nn.Module):
    """Returns outputs of other lengths than the input, the input itself, and one tensor twice, with awkward names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(12, 4), nn.Linear(4, 4)
        self.stride = nn.Conv1d(4, 2, 3, stride=2, padding=1)

    def forward(self, letters: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.relu(self.linear(self.embedding(letters))) * real[:, :, None]
        return (
            hidden.sum((1, 2))[:, None],
            self.stride(hidden.transpose(1, 2)),
            torch.cat([hidden, hidden], 1),
            hidden,
            hidden,
            letters,
            hidden @ hidden.transpose(1, 2),
        )


NAMES = ("embedding", "half/frames", "twice each", "relu", "größe", "letters.1", "model.linear.weight")


def test_outputs_may_have_names_of_inner_tensors(tmp_path: Path) -> None:
    rename = {"letters": "linear", "real": "model.embedding.weight"}
    columns = {rename[name]: column for name, column in Tags().columns.items()}
    axes: dict[str, Any] = dict.fromkeys(rename.values(), ("batch", "time")) | {"half/frames": ("batch", 2, "frames")}
    task = Tags(Resampled(), columns, tuple(columns), NAMES, axes=axes)
    verified(task, tmp_path)
    assert shapes(tmp_path / "model.onnx") == {
        "linear": ("batch", "time"),
        "model.embedding.weight": ("batch", "time"),
        "embedding": ("batch", 1),
        "half/frames": ("batch", 2, "frames"),
        "twice each": ("batch", "2 * time", 4),
        "relu": ("batch", "time", 4),
        "größe": ("batch", "time", 4),
        "letters.1": ("batch", "time"),
        "model.linear.weight": ("batch", "time", "time"),
    }


@pytest.mark.parametrize("variant", ["fp16", "int8-dynamic", "int8-static"])
def test_variants_keep_the_names_and_the_axes(tmp_path: Path, variant: str) -> None:
    """Outputs may also have the names that converters give to tensors of their own."""
    names = ("x_scale", "x_quantized", "graph_input_cast_0", "x_QuantizeLinear_Output")
    task = Small(Doubled(), {"x": np.random.default_rng(0).normal(size=(COUNT, 8)).astype(np.float32)}, outputs=names)
    verified(task, tmp_path)
    feeds = [{"x": task.columns["x"]}]
    path = tmp_path / "variant.onnx"
    CONVERTERS[variant](VariantInputs(tmp_path / "model.onnx", False, 7, lambda: feeds), path)
    onnx.checker.check_model(path, full_check=True)
    assert shapes(path) == shapes(tmp_path / "model.onnx")


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.relu(self.first(x))
        found = self.second(hidden)
        return found, hidden, found * 2, found.sum(1, keepdim=True)


def output_file(path: Path, *axes: int | str) -> Path:
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "copy",
        [value("x", onnx.TensorProto.FLOAT, ["batch", "time"])],
        [value("y", onnx.TensorProto.FLOAT, list(axes))],
    )
    onnx.save(onnx.helper.make_model(graph), path)
    return path


MEASURED = [
    MeasuredShapes({"batch": 3, "time": 9}, {"y": (3, 5, 4)}),
    MeasuredShapes({"batch": 1, "time": 2}, {"y": (1, 1, 4)}),
    MeasuredShapes({"batch": 5, "time": 20}, {"y": (5, 10, 4)}),
]


@pytest.mark.parametrize(
    ("written", "axis"),
    [
        ("(((time - 1)//2)) + 1", "(time - 1) // 2 + 1"),
        (5, "y_1"),  # the length of the data
        ("u0", "y_1"),  # a symbol of torch's own
        ("time//2", "y_1"),  # 4 for the 9 of the data
    ],
)
def test_output_axes_have_expressions_or_names(tmp_path: Path, written: int | str, axis: str) -> None:
    path = output_file(tmp_path / "model.onnx", "batch", written, 4)
    assert name_output_axes(path, {}, MEASURED) == {"y": ("batch", axis, 4)}
    assert shapes(path)["y"] == ("batch", axis, 4)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (("batch", "time"), "axis 1 is called 'time', but in the model it follows the inputs as `(time - 1) // 2 + 1`"),
        (("batch", "frames", "kinds"), "axis 2 is called 'kinds', but in the model it is 4 for every input; write 4"),
        (("batch", "frames", 3), "axis 2 is called 3, but in the model it is 4 for every input; write 4"),
        (("batch", 5), "axis 1 is called 5, but in the model it follows the inputs"),
        (("batch", "frames", 4, 1), "names 4 axes, but the output has 3"),
    ],
)
def test_declared_axes_that_the_model_does_not_have_are_refused(
    tmp_path: Path, declared: tuple[Any, ...], message: str
) -> None:
    path = output_file(tmp_path / "model.onnx", "batch", "(((time - 1)//2)) + 1", 4)
    with pytest.raises(ConfigError) as caught:
        name_output_axes(path, {"y": declared}, MEASURED)
    assert f"`axes` of y: {message}" in str(caught.value)


def test_one_name_for_axes_of_two_sizes_is_refused(tmp_path: Path) -> None:
    measured = [MeasuredShapes(shapes.sizes, {"y": (shapes.outputs["y"][0], 5, 4)}) for shapes in MEASURED]
    twice = [MeasuredShapes({**one.sizes}, {"y": (one.sizes["batch"], one.sizes["time"] * 2, 7)}) for one in MEASURED]
    path = output_file(tmp_path / "model.onnx", "batch", "2*time", 7)
    assert name_output_axes(path, {"y": ("batch", "2*time")}, twice)["y"] == ("batch", "2*time", 7)
    assert name_output_axes(output_file(path, "batch", 5, 4), {}, measured)["y"] == ("batch", 5, 4)
    unequal = [MeasuredShapes(one.sizes, {"y": (one.sizes["batch"], one.sizes["time"] * 2, one.sizes["time"] + 1)}) for one in MEASURED]  # fmt: skip  # noqa: E501
    with pytest.raises(ConfigError, match=r"`axes` of y: `n` is 10 long where it is 18 in y; give axes of different"):
        name_output_axes(output_file(path, "batch", "2*time", "time + 1"), {"y": ("batch", "n", "n")}, unequal)


def test_longest_of_an_input_stays_the_limit_of_the_service(tmp_path: Path) -> None:
    made = verified(Tags(), tmp_path)
    assert made.properties.axes == {"time": LONGEST}
