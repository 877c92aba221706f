"""Conversion to ONNX: axes beside the batch, dynamic sizes, names, types and external weights.

The operator for experts is compared with the product of each row and its expert's weights.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxscript import TracedOnnxFunction
from onnxscript._framework_apis.torch_2_11 import get_torchlib_ops
from torch import Tensor, nn

from export.checks.verify import write_and_compare
from export.compare import require_equal
from export.conversion.optimize import check_file
from export.conversion.shapes import check_dynamic_axes, untraced_batches
from export.conversion.to_onnx import GROUPED, grouped_experts, grouped_mm, tensor_specs, unparsed_functions
from export.kinds import check_positions
from pipeline.contract.data import axis_sizes, example_batch, open_split
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import TensorSpec
from pipeline.contract.task import input_axes
from pipeline.system.errors import DataError, PipelineError, StageError
from pipeline.system.files import digest_file
from tests.quick import quick

from .conftest import COUNT, Exported, Exporter, Small, linear, open_model, pairs

LENGTH = 6
NAMES = ("input_ids", "attention_mask")


def texts(net: nn.Module, length: int = 6) -> Any:
    return Texts(net, columns(length))


class Bag(nn.Module):
    """The mean over tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.float().unsqueeze(-1)
        mean = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1)
        found: Tensor = self.head(mean)
        return found


class Folded(Bag):
    """Works for a single length only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids.reshape(-1, LENGTH), attention_mask)


class Stepped(Bag):
    """Branches at a length beyond the test data; the exporter follows one branch only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scale = 1.0 if input_ids.shape[1] < 2 * LENGTH else 3.0
        return super().forward(input_ids, attention_mask) * scale


@dataclass
class Texts(Small):
    inputs: tuple[str, ...] = NAMES
    axes: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(NAMES, ("batch", "sequence")))
    longest: dict[str, int] = field(default_factory=lambda: {"sequence": 40})


def columns(length: int = LENGTH) -> dict[str, np.ndarray[Any, Any]]:
    ids = np.arange(COUNT * length).reshape(COUNT, length) % 10
    return {
        "input_ids": ids,
        "attention_mask": (np.arange(length) < 2 + np.arange(COUNT)[:, None] % 5).astype(np.int64),
    }


def test_untraced_lengths_with_and_without_padding_equal_torch(exported: Exporter) -> None:
    made = exported(texts(Bag()))
    inputs, outputs = tensor_specs(made.path)
    assert [spec.shape for spec in inputs] == [("batch", "sequence")] * 2
    assert outputs[0].shape == ("batch", 3)
    check_dynamic_axes(inputs, made.task)
    found = made.shape_rows()
    require_equal(found, made.config)
    places = {one["worst"].partition(" at ")[2] for one in found}
    lengths = {int(place.partition("sequence ")[2].partition(",")[0]) for place in places}
    assert lengths == {40, 1, 2, 3, 5, 7}
    assert {place.rpartition(" ")[2] for place in places} == {"none", "left", "right"}
    assert {one["batch_size"] for one in found} == {1, 2, 5}


def test_branch_on_a_length_beyond_the_data_is_refused(exported: Exporter) -> None:
    made = exported(Texts(Stepped(), columns()))
    require_equal(made.test_set_rows(), made.config)  # the data say nothing
    found = made.shape_rows()
    with pytest.raises(StageError, match=r"elements differ beyond .*at sequence 40, padding: \w+"):
        require_equal(found, made.config)


def test_model_for_a_single_length_is_refused(exported: Exporter) -> None:
    with pytest.raises(StageError, match=r"does not export to ONNX|axis `sequence` of `input_ids` became"):
        check_dynamic_axes(tensor_specs(exported(texts(Folded())).path)[0], texts(Folded()))


def test_axis_that_became_fixed_is_named() -> None:
    spec = TensorSpec(name="input_ids", datatype="INT64", shape=("batch", 6))
    with pytest.raises(StageError, match="axis `sequence` of `input_ids` became 6 in the export"):
        check_dynamic_axes((spec,), texts(Bag()))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_traced_batch_size_differs_from_other_axes(length: int) -> None:
    task = texts(Bag(), length)
    sizes = axis_sizes(task, example_batch(task, open_split(task, "test")))
    assert sizes["sequence"] == length != sizes["batch"] >= 2


def test_trace_is_not_of_the_longest_size() -> None:
    task = texts(Bag())
    task.columns = [{name: column[0, :size] for name, column in columns(40).items()} for size in (40, 40, 9)]
    task.collate = lambda samples: {
        name: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(sample[name]) for sample in samples], batch_first=True)
        for name in NAMES
    }
    assert example_batch(task, open_split(task, "test"))["input_ids"].shape == (3, 9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": {"ids": ("batch",)}}, "`axes` names ids, which is no input of the task"),
        (
            {"axes": {"input_ids": ("sequence", "batch")}},
            "`axes` of input_ids: write the names of its axes, `batch` first",
        ),
        ({"axes": {"input_ids": ("batch", "x", "x")}}, "`axes` of input_ids"),
        ({"longest": {}}, "`longest` must give the maximum of each of sequence"),
        ({"longest": {"sequence": 4}}, "test data: axis `sequence` is 6 long; `shortest` and `longest` allow 1 to 4"),
        (
            {"shortest": {"sequence": 7}, "longest": {"sequence": 9}},
            "test data: axis `sequence` is 6 long; `shortest` and `longest` allow 7 to 9",
        ),
        ({"columns": columns(1)}, "axis `sequence` of `input_ids` is 1 long in the test data"),
        (
            {"columns": {**columns(), "attention_mask": np.ones((COUNT, 5))}},
            "axis `sequence` is 5 long in `attention_mask`, and 6 in another input",
        ),
        (
            {"axes": {"input_ids": ("batch", "a"), "attention_mask": ("batch", "b")}, "longest": {"a": 9, "b": 9}},
            "axes of different names have one size in the test data",
        ),
    ],
)
def test_invalid_axes_are_reported(changed: dict[str, Any], message: str) -> None:
    task = texts(Bag())
    for name, value in changed.items():
        setattr(task, name, value)
    with pytest.raises(PipelineError) as caught:
        list(untraced_batches(task, open_split(task, "test")))
    assert message in str(caught.value)


def test_task_without_axes_has_only_the_batch_axis() -> None:
    task: Any = Small(nn.Identity(), {"x": np.ones((COUNT, 2))})
    assert input_axes(task) == {}
    assert len(example_batch(task, open_split(task, "test"))["x"]) == 3


def test_longest_beyond_the_models_positions_is_refused() -> None:
    net: Any = Bag()
    net.config = type("Config", (), {"max_position_embeddings": 39})()
    with pytest.raises(StageError, match=r"`longest` allows 40 for axis `sequence`, but .* ends at 39"):
        check_positions(texts(net), net)
    sounds: Any = Small(net, {"input_values": np.ones((COUNT, 2), np.float32)}, inputs=("input_values",))
    sounds.axes, sounds.longest = {"input_values": ("batch", "samples")}, {"samples": 40}
    check_positions(sounds, net)


class Windowed(Bag):
    """Accepts no text shorter than its window, in torch either."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scale = attention_mask.float().unfold(1, 3, 1).mean(dim=(1, 2))
        return super().forward(input_ids, attention_mask) * scale[:, None]


@pytest.mark.parametrize("shortest", [{}, {"sequence": 3}])
def test_lengths_that_torch_refuses_are_reported_once(
    tmp_path: Path, shortest: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    task: Any = Texts(Windowed(), columns())
    task.shortest = shortest
    exporter = open_model(task, tmp_path / "model.onnx")
    report = write_and_compare(exporter)
    report.require(Export())
    assert not [row for row in report.shapes if " 1, padding" in row["worst"] or " 2, padding" in row["worst"]]
    assert exporter.properties.shortest == shortest
    sentences = [text for text in report.record()["left_out"] if "model itself fails" in text]
    assert [sentence in capsys.readouterr().out for sentence in sentences] == [True] * (not shortest)
    for sentence in sentences:
        assert re.match(
            r"2 of \d+ cases were not compared, .*, first on batch 2, sequence 1, padding: none \(", sentence
        )
        assert sentence.endswith(
            '; if no shorter inputs are to be served, set `shortest = {"sequence": 3}` in the task'
        )


class Wide(Bag):
    """Accepts only texts at least as long as those of the test set."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scale = attention_mask.float().unfold(1, LENGTH, 1).mean(dim=(1, 2))
        return super().forward(input_ids, attention_mask) * scale[:, None]


def test_fewer_than_two_shapes_to_compare_are_refused(exported: Exporter) -> None:
    task = texts(Wide())
    task.longest = {"sequence": LENGTH}  # longer texts are not allowed, and shorter ones not accepted by torch
    with pytest.raises(StageError, match="fewer than two shapes other than the traced one could be compared"):
        exported(task).shape_rows()


class Stubborn(Bag):
    """Never leaves training mode."""

    def train(self, mode: bool = True) -> Stubborn:
        super().train(True)
        return self


def test_module_in_training_mode_is_named(tmp_path: Any) -> None:
    task: Any = Texts(nn.Sequential(Stubborn()), columns())
    with pytest.raises(StageError, match=r"0, 0\.embedding, 0\.head: still in training mode after eval"):
        open_model(task, tmp_path / "model.onnx")


def test_router_with_noise_is_named(tmp_path: Any) -> None:
    class Noisy(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            found = super().forward(input_ids, attention_mask)
            return found + torch.rand_like(found)

    task: Any = Texts(Noisy(), columns())
    report = write_and_compare(open_model(task, tmp_path / "model.onnx"))
    with pytest.raises(StageError, match=r"torch returns different values of `y` .*noise in a router"):
        report.require(Export())


class Fixed(nn.Module):
    """Works for batches of three samples only, the size that the exporter traces."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, 4) * 2


class Mixed(nn.Module):
    """Has two inputs of different types, and returns two outputs as a mapping in another order than declared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        found = self.embedding(tokens).sum(dim=1) + x
        return {"best": found.argmax(dim=1), "scores": found, "unused": found * 2}


class Branching(nn.Module):
    """Has control flow that depends on data, which becomes a subgraph."""

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
    found = made.test_set_rows()
    require_equal(found, made.config)
    return found


def strings(message: Any) -> Iterator[str]:
    """Yield all strings in a protobuf message."""
    for kind, value in message.ListFields():
        for item in value if kind.is_repeated else [value]:
            if kind.message_type is not None:
                yield from strings(item)
            elif isinstance(item, str):
                yield item


def test_batch_axis_is_dynamic_and_named(exported: Exporter) -> None:
    made = exported(Small(linear(), pairs()))
    inputs, outputs = tensor_specs(made.path)
    assert [(spec.name, spec.datatype, spec.shape) for spec in inputs] == [("x", "FP32", ("batch", 4))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in outputs] == [("y", "FP32", ("batch", 3))]
    assert equal(made)


def test_several_inputs_and_outputs_keep_names_and_types(exported: Exporter) -> None:
    made = exported(mixed())
    inputs, outputs = tensor_specs(made.path)
    assert [(spec.name, spec.datatype) for spec in inputs] == [("tokens", "INT64"), ("x", "FP32")]
    assert [(spec.name, spec.datatype) for spec in outputs] == [("scores", "FP32"), ("best", "INT64")]
    assert equal(made)


class Counted(Mixed):
    """Reads sizes with `len`, which is a plain number when forward runs."""

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(tokens, x)
        return {**found, "scores": found["scores"].reshape(len(x), len(tokens[0]), -1).flatten(1)}


def test_sizes_that_the_model_reads_with_len_stay_dynamic(exported: Exporter) -> None:
    task = mixed()
    task.net = Counted()
    made = exported(task)
    inputs, outputs = tensor_specs(made.path)
    assert [(spec.name, spec.shape) for spec in inputs] == [("tokens", ("batch", 2)), ("x", ("batch", 4))]
    assert [(spec.name, spec.shape) for spec in outputs] == [("scores", ("batch", 4)), ("best", ("batch",))]
    assert made.written.program is not None
    assert equal(made)


class Repeated(Bag):
    """Returns the answer once for every position, whose number it reads with `len`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask)[:, None].expand(-1, len(input_ids[0]), -1)


def test_length_that_the_model_reads_with_len_stays_dynamic(exported: Exporter) -> None:
    made = exported(texts(Repeated()))
    assert tensor_specs(made.path)[1][0].shape == ("batch", "sequence", 3)
    assert equal(made)
    require_equal(made.shape_rows(), made.config)


def test_model_for_a_single_batch_size_is_refused(exported: Exporter) -> None:
    with pytest.raises(StageError, match="batch") as caught:
        tensor_specs(exported(Small(Fixed(), pairs())).path)
    assert "\n" not in str(caught.value)


def test_output_that_has_no_batch_axis_is_refused(tmp_path: Path) -> None:
    made = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "fixed",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 2])],
    )
    onnx.save(onnx.helper.make_model(made), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=r"the batch axis of `y` became fixed in the export \(shape \[3, 2\]\)"):
        tensor_specs(tmp_path / "model.onnx")


def test_model_in_training_mode_is_exported_for_inference(exported: Exporter) -> None:
    task = Small(linear(), pairs())
    made = exported(task)
    first = made.path.read_bytes()
    assert b"Dropout" not in first
    assert equal(made)


def test_undeclared_outputs_are_refused(exported: Exporter) -> None:
    with pytest.raises((DataError, StageError), match="outputs"):
        exported(Small(linear(), pairs(), outputs=("y", "z")))


@pytest.mark.parametrize("inside_bytes", quick([0], [1 << 30, 0]))
def test_same_model_gives_the_same_bytes(
    exported: Exporter, inside_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.conversion.to_onnx._MAX_INLINE_BYTES", inside_bytes)
    left, right = (exported(Small(linear(), pairs()), name) for name in ("a", "b"))
    assert digest_file(left.path) == digest_file(right.path)
    assert sorted(p.name for p in left.path.parent.iterdir()) == sorted(p.name for p in right.path.parent.iterdir())


@pytest.mark.parametrize("net", [pytest.param(linear(), marks=pytest.mark.long), Branching()])
def test_file_has_no_trace_of_the_machine(exported: Exporter, net: nn.Module) -> None:
    made = exported(Small(net, pairs()), batch_sizes=(COUNT,))
    assert equal(made)
    raw = made.path.read_bytes()
    for trace in (str(made.path.parent), str(Path(__file__).parent), sys.prefix, "site-packages", ".py"):
        assert trace.encode() not in raw, trace
    assert not [text for text in strings(onnx.load(made.path)) if text.startswith("/") or "line " in text]


def test_external_weights_lie_beside_the_model(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.conversion.to_onnx._MAX_INLINE_BYTES", 0)
    made = exported(Small(linear(), pairs()))
    assert len(list(made.path.parent.iterdir())) == 2
    check_file(made.path)
    assert equal(made)


@pytest.mark.parametrize("location", ["../weights", "/etc/hostname", "folder/weights", "gone", "", "link", "."])
def test_external_weights_elsewhere_are_refused(tmp_path: Path, location: str) -> None:
    path = tmp_path / "bundle" / "model.onnx"
    for name in ("bundle/folder/weights", "weights"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0" * 16)
    (path.parent / "link").symlink_to(tmp_path / "weights")
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4], raw_data=b"0" * 16)
    onnx.external_data_helper.set_external_data(tensor, location)
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString())
    with pytest.raises(StageError, match=r"keeps weights in .*, which is not a regular file next to it"):
        check_file(path)


WIDE, NARROW = 128, 96


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """A session of the operator, with other sizes than in the model, since it has no fixed ones."""
    model, tensor = grouped_mm.to_model_proto(), onnx.helper.make_tensor_value_info
    kinds: dict[str, Any] = {
        "rows": (onnx.TensorProto.FLOAT, ["pairs", WIDE]),
        "ends": (onnx.TensorProto.INT32, ["experts"]),
    }
    kinds["weight"] = (onnx.TensorProto.FLOAT, ["experts", WIDE, NARROW])
    for value in model.graph.input:
        value.CopyFrom(tensor(value.name, *kinds[value.name]))
    for value in model.graph.output:
        value.CopyFrom(tensor(value.name, onnx.TensorProto.FLOAT, ["pairs", NARROW]))
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feed(counts: list[int], seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {
        "rows": chance.normal(size=(sum(counts), WIDE)).astype(np.float32),
        "weight": chance.normal(size=(len(counts), WIDE, NARROW)).astype(np.float32),
        "ends": np.cumsum(counts).astype(np.int32),
    }


@pytest.mark.parametrize("counts", [[3, 1, 2], [0, 4, 0, 0, 1], [5], [0, 0, 7], [1, 0, 0]])
def test_each_row_is_multiplied_by_its_expert(session: Any, counts: list[int]) -> None:
    given = feed(counts)
    own = np.repeat(np.arange(len(counts)), counts)
    expected = np.einsum("sk,skn->sn", given["rows"], given["weight"][own])
    np.testing.assert_allclose(session.run(None, given)[0], expected, rtol=1e-4, atol=1e-4)


def test_empty_batch_keeps_the_width(session: Any) -> None:
    assert session.run(None, feed([0, 0, 0]))[0].shape == (0, NARROW)


def fastest(session: Any, given: dict[str, Any]) -> float:
    """Return the shortest of many CPU times, since other processes share the machine."""
    times = []
    for _ in range(30):
        started = time.thread_time()
        session.run(None, given)
        times.append(time.thread_time() - started)
    return min(times)


def test_time_follows_the_number_of_used_experts(session: Any) -> None:
    """Compare the rows of two experts among 4 and among 256: a dense implementation would take 64 times as long."""
    few, many = [2, 0, 2, 0], [2, *[0] * 253, 2, 0]
    fastest(session, feed(few))
    assert fastest(session, feed(many)) < 6 * fastest(session, feed(few))


def test_experts_setting_is_restored_after_tracing() -> None:
    class Config:
        def __init__(self, kind: str | None) -> None:
            self._experts_implementation = kind

    class Part(nn.Module):
        def __init__(self, kind: str | None) -> None:
            super().__init__()
            self.config = Config(kind)

    model: Any = nn.Sequential(Part("eager"), Part(None), nn.Linear(2, 2), Part("batched_mm"))
    shared = model[0].config
    model[2].config = shared

    def kinds() -> list[str | None]:
        return [part.config._experts_implementation for part in model]

    with contextlib.suppress(KeyError), grouped_experts(model):
        assert kinds() == [GROUPED, None, GROUPED, GROUPED]
        raise KeyError  # as when a model cannot be exported
    assert kinds() == ["eager", None, "eager", "batched_mm"]


def test_domain_of_a_translation_is_known_without_its_source() -> None:
    functions = [meta.function for meta in get_torchlib_ops()]
    traced = [function for function in functions if isinstance(function, TracedOnnxFunction)]
    parsed = [function.function_ir.domain for function in traced]
    with unparsed_functions(), patch("inspect.getsource", side_effect=AssertionError):
        assert [function.function_ir.domain for function in traced] == parsed
    assert len(traced) > 400
    assert traced[0].function_ir.name, "afterwards it is parsed again"
