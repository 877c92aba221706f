"""Files that are wrong although they equal the model in most comparisons, and a sound file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.checks.parity import MetricReference, compare_outputs
from export.checks.service_sizes import ServedSizes
from export.checks.verify import verify_file
from export.checks.weights_check import compare_weights
from export.compare import is_different
from export.conversion.optimize import check_random
from export.conversion.to_onnx import ExportResult, convert
from export.kinds import open_exporter
from export.ordinary import UnseenInputs
from export.report import Report
from export.subject import Subject
from export.tolerance import allowed_error, is_within, measure_scale
from export.variants.judge import compare_scores
from pipeline.contract.data import Samples, open_split
from pipeline.contract.settings.stages import Export
from pipeline.statistics.scores import actual_columns, score_batch
from pipeline.system.errors import StageError

from .conftest import COUNT, Small, pairs

VOCABULARY = 40
SERVED = ServedSizes(merged=8, request=70)


class Net(nn.Module):
    """An embedding of words and a head whose numbers are tiny."""

    def __init__(self, scale: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.head.weight.mul_(scale)
            self.head.bias.mul_(scale)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(ids).mean(1)).squeeze(1)
        return found


@dataclass
class Numbers(Small):
    inputs: tuple[str, ...] = ("ids",)

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        rows = {"train": 1, "validation": 2, "test": 0}[split]
        return {name: np.roll(column, rows, axis=0) for name, column in self.columns.items()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ones": torch.ones(len(batch["label"]))}


@dataclass(frozen=True)
class Whole:
    subject: Subject
    written: ExportResult

    @property
    def path(self) -> Path:
        return self.subject.path

    def report(self, path: Path | None = None) -> Report:
        subject = replace(self.subject, path=path or self.subject.path)
        return verify_file(open_exporter(subject), self.written)


def make_whole(net: nn.Module, folder: Path, kind: type[Numbers] = Numbers, words: int = 6) -> Whole:
    generator = np.random.default_rng(0)
    ids = generator.integers(1, VOCABULARY // 2, (COUNT, words))  # the other half is in no sample
    if kind is not Numbers:
        ids[np.arange(words) >= words - np.arange(COUNT)[:, None] % 6] = 0
    label = net.eval()(torch.from_numpy(ids)).detach().numpy()
    task: Any = kind(net, {"ids": ids, "label": label})
    test, config, path = open_split(task, "test"), Export(batch_sizes=(1, 7)), folder / "model.onnx"
    written = convert(net, task, test.batch(range(3)), config, path)
    limits = {"r2": 0.8}
    return Whole(Subject(task, net, test, config, path, SERVED, limits), written)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return make_whole(Net(), tmp_path_factory.mktemp("whole"))


def refusal(whole: Whole, folder: Path, change: Callable[[onnx.ModelProto], None]) -> str:
    model = onnx.load(whole.path)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError) as caught:
        whole.report(folder / "model.onnx").require(whole.subject.config)
    return str(caught.value)


def weights(name: str, change: Callable[[Any], Any]) -> Callable[[onnx.ModelProto], None]:
    def damage(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))

    return damage


def at_rows(count: int, add: str, axis: int = 0) -> Callable[[onnx.ModelProto], None]:
    """Add 1 to the output of batches of `count` rows (Equal) or of more (Greater), or of texts of that length."""

    def damage(model: onnx.ModelProto) -> None:
        graph = model.graph
        producer = next(node for node in graph.node if "y" in node.output)
        producer.output[:] = ["y_before" if name == "y" else name for name in producer.output]
        graph.initializer.append(numpy_helper.from_array(np.array([count], np.int64), "size"))
        for kind, given, made, attributes in (
            ("Shape", ["ids"], "rows", {"start": axis, "end": axis + 1}),
            (add, ["rows", "size"], "hit", {}),
            ("Cast", ["hit"], "one", {"to": TensorProto.FLOAT}),
            ("Add", ["y_before", "one"], "y", {}),
        ):
            graph.node.append(helper.make_node(kind, given, [made], name=f"wrong_{made}", **attributes))

    return damage


def test_sound_file_passes_and_all_comparisons_are_recorded(whole: Whole) -> None:
    report = whole.report()
    report.require(whole.subject.config)
    assert report.weights.not_compared == ()
    assert report.weights.text.startswith("3 of 3 tensors of the checkpoint are in the file")
    kinds = [row["inputs"] for row in report.coverage]
    assert kinds[-5:] == [
        "sizes of a service", "train samples", "validation samples", "random inputs of whole ranges",
        "every id of `ids`",
    ]  # fmt: skip


def test_missing_tensors_are_recorded_and_constants_counted(whole: Whole) -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5))
    comparison = compare_weights(whole.path, module)
    assert comparison.constant == ("0.weight", "0.bias")
    assert comparison.not_compared == ("1.weight", "1.bias")
    assert comparison.text == (
        "0 of 4 tensors of the checkpoint are in the file with the same values; 2 with one value throughout, such as "
        "zeros, are folded or shared; compared by outputs only: `1.weight`, `1.bias`"
    )


def test_tiny_head_that_is_zero_or_negated_is_stopped(whole: Whole, tmp_path: Path) -> None:
    for change in (np.zeros_like, np.negative):
        message = refusal(whole, tmp_path, weights("model.head.weight", change))
        assert "elements differ beyond" in message
        assert "r2 is" in message


def test_embedding_rows_without_samples_are_compared_by_value(whole: Whole, tmp_path: Path) -> None:
    def zero_unseen(values: Any) -> Any:
        values[VOCABULARY // 2 :] = 0
        return values

    assert "160 of 320 values of the weight `words.weight` are others" in refusal(
        whole, tmp_path, weights("model.words.weight", zero_unseen)
    )


def test_ids_without_samples_are_compared_if_the_weight_is_renamed(whole: Whole, tmp_path: Path) -> None:
    model = onnx.load(whole.path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "model.words.weight")
    values = numpy_helper.to_array(tensor).copy()
    values[VOCABULARY - 1] = 0
    tensor.CopyFrom(numpy_helper.from_array(values, "folded"))
    for node in model.graph.node:
        node.input[:] = ["folded" if name == "model.words.weight" else name for name in node.input]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    report = whole.report(tmp_path / "model.onnx")
    assert report.weights.not_compared == ("words.weight",)
    wrong = {row["inputs"] for row in report.coverage if row["beyond_tolerance"]}
    assert "every id of `ids`" in wrong


@pytest.mark.parametrize(
    ("count", "add"), [(5, "Equal"), (8, "Equal"), (50, "Equal"), (67, "Equal"), (70, "Equal"), (64, "Greater")]
)
def test_file_that_is_wrong_at_one_served_size_is_stopped(whole: Whole, tmp_path: Path, count: int, add: str) -> None:
    message = refusal(whole, tmp_path, at_rows(count, add))
    assert f"`y` at batch {count + (add == 'Greater')} of test samples" in message or "batch 70 of" in message


def test_served_sizes_include_all_batch_sizes_and_the_limits() -> None:
    served = ServedSizes(merged=32, request=1000)
    sizes = {*served.largest, *served.others}
    assert set(range(1, 34)) <= sizes
    assert {63, 64, 65, 255, 256, 257, 511, 512, 513, 999, 1000} <= sizes
    assert sizes == {*range(1, 1001)}
    assert {31, 32, 33, 999, 1000} == set(served.largest)
    assert list(served.others)[-2:] == [995, 997]
    places = {size: place for place, size in enumerate(served.others)}
    assert places[768] < places[384] < places[640] < places[77], "each halves the gaps between those before it"


@dataclass
class Texts(Numbers):
    axes: ClassVar = {"ids": ("batch", "words")}
    longest: ClassVar = {"words": 100}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Texts of 70 to 75 words, padded to 75 with the word 0."""
    return make_whole(Net(), tmp_path_factory.mktemp("texts"), Texts, 75)


@pytest.mark.parametrize("length", [3, 5, 9, 64, 71])
def test_file_that_is_wrong_at_one_length_is_stopped(texts: Whole, tmp_path: Path, length: int) -> None:
    assert f"words {length}" in refusal(texts, tmp_path, at_rows(length, "Equal", axis=1))


def test_file_of_texts_that_is_right_passes_at_every_length(texts: Whole) -> None:
    report = texts.report()
    report.require(texts.subject.config)
    (row,) = (row for row in report.coverage if row["inputs"] == "lengths")
    assert row["batches"] == 64 + 6


@pytest.mark.parametrize("kind", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_random_draws_are_refused_by_name(whole: Whole, tmp_path: Path, kind: str) -> None:
    def draw(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node(kind, ["y"], ["noise"], name="draw"))

    assert f"`draw` ({kind}) draws random numbers" in refusal(whole, tmp_path, draw)
    check_random(whole.path)


def within(expected: Any, actual: Any) -> bool:
    scale = measure_scale(expected)
    return bool(is_within(actual, expected, allowed_error(expected, Export(), scale)).all())


@pytest.mark.parametrize("size", [1e-8, 1e-5, 1.0, 1e6])
def test_rounding_passes_and_damage_does_not_at_any_scale(size: float) -> None:
    generator = np.random.default_rng(0)
    expected = (generator.normal(size=(64, 3)) * size).astype(np.float32)
    rounded = (expected * (1 + generator.normal(size=(64, 3)) * 1e-6)).astype(np.float32)
    assert within(expected, rounded)
    assert not within(expected, np.zeros_like(expected))
    assert not within(expected, -expected)
    assert not within(expected, expected + np.float32(size * 0.01))


def test_columns_are_compared_relative_to_their_own_spread() -> None:
    generator = np.random.default_rng(0)
    expected = (generator.normal(size=(64, 3)) * [1.0, 1e-3, 1e3]).astype(np.float32)
    assert within(expected, (expected * (1 + 2e-6)).astype(np.float32))
    damaged = expected.copy()
    damaged[:, 1] = 0
    assert not within(expected, damaged)


def test_offset_does_not_hide_the_values_around_it() -> None:
    expected = (1000 + np.random.default_rng(0).normal(size=64)).astype(np.float32).reshape(-1, 1)
    assert within(expected, np.nextafter(expected, 2000))
    assert not within(expected, np.full_like(expected, 1000))


@pytest.mark.parametrize("mask", [-np.inf, -1e9, -1e4, float(np.finfo(np.float32).min)])
def test_masked_scores_do_not_hide_damage(mask: float) -> None:
    expected = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    expected[np.random.default_rng(1).random((64, 8)) < 0.6] = mask
    expected[:, 7] = mask  # a column that is always masked
    is_free = expected > -100
    rounded = expected.copy()
    rounded[is_free] *= np.float32(1 + 1e-6)
    assert within(expected, rounded)
    assert not within(expected, np.where(is_free, 0, expected).astype(np.float32))


def test_integers_booleans_and_constants_are_compared() -> None:
    ids = np.arange(5000, 5064)
    assert within(ids, ids.copy())
    assert not within(ids, ids + 2)
    flags = ids % 2 == 0
    assert within(flags, flags.copy())
    assert not within(flags, ~flags)
    constant = np.full((64, 2), 0.25, np.float32)
    assert within(constant, np.nextafter(constant, np.float32(1)))
    assert not within(constant, constant + np.float32(0.01))
    assert within(np.zeros((64, 2), np.float32), np.zeros((64, 2), np.float32))


def test_metric_that_the_file_does_not_reach_is_named() -> None:
    generator = np.random.default_rng(0)
    truth = generator.normal(size=COUNT).astype(np.float32)
    task: Any = Numbers(nn.Identity(), {"ids": truth, "label": truth})
    samples = Samples("test", {"ids": truth, "label": truth})
    reference = {"y": (truth + generator.normal(size=COUNT) * 0.1).astype(np.float32)}
    metrics = MetricReference(task, samples, reference, {"r2": 0.8})
    assert metrics.changes({"y": reference["y"] * np.float32(1 + 1e-6)}, 0) == ()
    (*_, sentence) = metrics.changes({"y": np.zeros(COUNT, np.float32)}, 0)
    assert sentence.split(" is ")[0] in ("mae", "rmse", "r2", "spearman")
    assert not is_different(asdict(compare_outputs(task, samples, reference, reference, Export(), 1, 0.0)))


@dataclass
class Days(Numbers):
    """A forecast with quantiles."""

    quantiles = (0.2, 0.5, 0.8)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, :, 1]

    def predicted_quantiles(self, outputs: Tensor) -> Tensor:
        return outputs


def test_metric_of_a_forecast_that_the_file_does_not_reach_is_named() -> None:
    generator = np.random.default_rng(0)
    truth = generator.normal(size=(COUNT, 3)).astype(np.float32)
    columns = {"ids": truth, "label": truth}
    task: Any = Days(nn.Identity(), columns)
    samples = Samples("test", columns)
    reference = {"y": (truth[:, :, None] + generator.normal(size=(COUNT, 3, 3)) * 0.1).astype(np.float32)}
    metrics = MetricReference(task, samples, reference, {"mae_2": 0.2})
    assert metrics.changes({"y": reference["y"] * np.float32(1 + 1e-6)}, 0) == ()
    damaged = reference["y"].copy()
    damaged[:, 1] += 1
    assert {sentence.split()[0] for sentence in metrics.changes({"y": damaged}, 0)} >= {"mae", "pinball", "mae_2"}
    batch = samples.batch(range(COUNT))
    wrong = score_batch(task, lambda _: torch.from_numpy(damaged), batch)
    right = score_batch(task, lambda _: torch.from_numpy(reference["y"]), batch)
    compared = compare_scores(task, wrong, right | actual_columns(task, batch, COUNT), ["mae_2", "pinball_1"])
    assert [name for name, metric in compared.items() if not metric.differing] == ["ones", "pinball_1"]
    assert {"coverage_error", "mae_2"} <= compared.keys()


@dataclass
class Sure(Numbers):
    """A task whose outputs are logits, so that their scale decides the probabilities."""

    classes = ("no", "yes")

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)


def test_calibration_limits_use_the_files_probabilities() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2000, 2)).astype(np.float32)
    shares = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    label = (generator.random(2000) < shares).astype(np.int64)
    samples = Samples("test", {"ids": logits, "label": label})
    reference = {"y": logits}
    task: Any = Sure(nn.Identity(), {"ids": logits, "label": label})
    metrics = MetricReference(task, samples, reference, {"ece": 0.2})
    assert metrics.changes({"y": logits * np.float32(1 + 1e-6)}, 0) == ()
    sentences = metrics.changes({"y": logits * 20}, 0)
    assert any(sentence.startswith("brier is ") for sentence in sentences)
    assert any("misses evaluate.require 0.2, which torch's" in sentence for sentence in sentences), sentences


class Joined(nn.Module):
    """A convolution and a batch norm, which exporters may fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.norm = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)
        self.norm.running_mean = torch.tensor([0.3, -1.0])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.pixels(x[:, None])).flatten(1)
        return found


def test_batch_norm_joined_with_a_layer_is_compared(tmp_path: Path) -> None:
    net = Joined().eval()
    task: Any = Small(net, pairs())
    path, test = tmp_path / "model.onnx", open_split(task, "test")
    written = convert(net, task, test.batch(range(3)), Export(), path)
    result = compare_weights(path, written.source.module)
    assert (result.different, result.not_compared, result.equal) == ((), (), 6)
    model = onnx.load(path)
    weights("model.pixels.weight", np.zeros_like)(model)
    path.write_bytes(model.SerializeToString())
    (sentence,) = compare_weights(path, written.source.module).different
    assert "6 of 6 values of the weight `pixels.weight`" in sentence


def test_categorical_columns_are_found_by_embedding_inputs() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(7, 2), nn.Embedding(9, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.first(x[:, 0].long()), self.second(x[:, 1].long())], 1)

    generator = np.random.default_rng(0)
    columns = {"x": np.stack([generator.integers(0, 5, COUNT), generator.integers(0, 3, COUNT)], 1).astype(np.float32)}
    task: Any = Small(Columns().eval(), columns)
    unseen = UnseenInputs(task, task.net, open_split(task, "test"))
    assert [(each.text, each.size) for each in unseen.vocabularies] == [("column 0 of `x`", 7), ("column 1 of `x`", 9)]


class Scales(nn.Module):
    """Outputs of all scales and types from one body."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6))
        self.register_buffer("sizes", torch.tensor([1e6, 1.0, 1e-3, 1e-6, 1e3, 1e-1]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.body(x)
        masked = x[:, :1] > torch.arange(6) / 3 - 1
        return (
            found * 1e6,
            found * 1e-8,
            found * self.sizes,
            found * 1e-3 + 1000,
            found.masked_fill(masked, -torch.inf),
            found.masked_fill(masked, -1e9),
            found * 8 + masked * -1e9,
            found.mul(30).softmax(1),
            torch.nn.functional.gelu(found * 10),
            found.argmax(1),
            found > found.flip(1) + 10,
            torch.zeros_like(found) + self.sizes,
        )


def test_outputs_of_all_scales_and_types_pass(tmp_path: Path) -> None:
    net, path = Scales().eval(), tmp_path / "model.onnx"
    names = (
        "big",
        "tiny",
        "mixed",
        "offset",
        "infinite",
        "low",
        "added",
        "shares",
        "bent",
        "best",
        "flags",
        "constant",
    )
    task: Any = Small(net, pairs(), outputs=names)
    test, config = open_split(task, "test"), Export(batch_sizes=(1, 7))
    written = convert(net, task, test.batch(range(3)), config, path)
    Whole(Subject(task, net, test, config, path, SERVED), written).report().require(config)
