"""Loops of a model in the file: one node, whatever the number of steps, with the results of Python's loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from export.conversion.to_onnx import write_onnx
from export.conversion.trace import ExportInput
from export.variants.quantize import CONVERTERS, VariantInputs
from pipeline import generate, repeat
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import DataError, StageError


class Cell(nn.Module):
    """Layers that are applied again and again to what they returned."""

    def __init__(self, run: Callable[[Cell, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.context, self._run = nn.Linear(4, 4), nn.Linear(4, 4), run

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        return self._run(self, values)


def diffuse(cell: Cell, values: Tensor) -> tuple[Tensor, ...]:
    """Take a fixed number of steps, each with its own weight, that read a value from outside."""
    context = cell.context(values)  # the same in every step
    return repeat(lambda i, noisy: noisy - torch.tanh(cell.layer(noisy) + context) / (i + 2), (values,), 50)


def stop_early(cell: Cell, values: Tensor) -> tuple[Tensor, ...]:
    """Go on until every row is small enough, and count the steps of each."""

    def step(_: Tensor, current: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        is_large = current.abs().sum(dim=1, keepdim=True) > 1
        return torch.where(is_large, torch.tanh(cell.layer(current)) / 2, current), steps + is_large

    steps = torch.zeros_like(values[:, :1], dtype=torch.int64)
    return repeat(step, (values, steps), 20, until=lambda current, _: (current.abs().sum(dim=1) <= 1).all())


def nest(cell: Cell, values: Tensor) -> tuple[Tensor, ...]:
    def outer(i: Tensor, current: Tensor) -> tuple[Tensor, ...]:
        return repeat(lambda j, inner: torch.tanh(cell.layer(inner)) * (1 + i + j), (current,), 3)

    first = repeat(outer, (values,), 4)
    return repeat(lambda _, x, y: (y, x + cell.context(y)), (*first, values), 2)


def export(module: nn.Module, folder: Path, outputs: tuple[str, ...]) -> Path:
    path = folder / "model.onnx"
    example, axes = (torch.randn(3, 4),), ({0: torch.export.Dim("batch")},)
    assert write_onnx(ExportInput(module.eval(), example, ("values",), outputs, axes), Export(), path).program is None
    onnx.checker.check_model(path, full_check=True)
    return path


def assert_same(module: nn.Module, path: Path, tolerance: float = 1e-5) -> None:
    session = onnxruntime.InferenceSession(path)
    for rows in (1, 2, 7):
        values = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            expected = module(values)
        for found, right in zip(session.run(None, {"values": values.numpy()}), expected, strict=True):
            np.testing.assert_allclose(found, right.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("run", "outputs"), [(diffuse, 1), (stop_early, 2), (nest, 2)])
def test_loop_is_one_node_with_the_results_of_python(run: Callable[..., object], outputs: int, tmp_path: Path) -> None:
    module = Cell(run)  # type: ignore[arg-type]
    path = export(module, tmp_path, ("first", "second")[:outputs])
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert operators.count("Loop") == (2 if run is nest else 1)
    assert len(operators) < 20
    assert_same(module, path)


def test_values_that_all_steps_share_are_computed_once(tmp_path: Path) -> None:
    graph = onnx.load(export(Cell(diffuse), tmp_path, ("values_out",))).graph
    (loop,) = (node for node in graph.node if node.op_type == "Loop")
    assert [node.op_type for node in graph.node].count("Gemm") == 1
    assert [node.op_type for node in loop.attribute[0].g.node].count("Gemm") == 1


def test_step_that_changes_a_shape_is_refused() -> None:
    with pytest.raises(DataError, match=r"keep the shape and type of each value; \[\(\[2, 4\], .*\)\] became"):
        repeat(lambda _, values: torch.cat([values, values]), (torch.zeros(2, 4),), 3)


def test_value_of_a_step_that_is_used_behind_the_loop_is_refused(tmp_path: Path) -> None:
    def run(cell: Cell, values: Tensor) -> tuple[Tensor, ...]:
        kept: list[Tensor] = []

        def step(_: Tensor, current: Tensor) -> Tensor:
            kept.append(torch.tanh(cell.layer(current)))
            return kept[-1] * 2

        return repeat(step, (values,), 3)[0] + kept[-1], values * 2

    with pytest.raises(StageError, match="is computed in a step of repeat\\(\\) and used behind it"):
        export(Cell(run), tmp_path, ("first", "second"))


WORDS, LONGEST, END, BEGIN = 4, 4, 3, 4
TABLE = torch.randn(3, LONGEST + 1, WORDS + 1, WORDS, generator=torch.Generator().manual_seed(0)) * 2


def decode(tokens: Tensor, row: Tensor) -> Tensor:
    """Return random scores that depend on the sample, the place and the token."""
    return TABLE[row[:, None], torch.arange(tokens.shape[1]), tokens]


def texts(row: int) -> dict[tuple[int, ...], float]:
    """Return all texts that can be written, with the sums of their log-probabilities."""
    sums: dict[tuple[int, ...], float] = {(): 0.0}
    for place in range(LONGEST):
        for text in [text for text in sums if len(text) == place and END not in text]:
            gains = TABLE[row, place, text[-1] if text else BEGIN].log_softmax(0).tolist()
            sums |= {(*text, token): sums[text] + gain for token, gain in enumerate(gains)}
            del sums[text]
    return sums


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_with_every_beam_finds_the_best_text(penalty: float) -> None:
    tokens, scores = generate(decode, [torch.arange(3)], BEGIN, END, LONGEST, WORDS**LONGEST, penalty)
    for row in range(3):
        values = {text: total / len(text) ** penalty for text, total in texts(row).items()}
        best = max(values, key=lambda text: values[text])
        assert tokens[row].tolist() == [*best, *[END] * (LONGEST - len(best))]
        assert float(scores[row]) == pytest.approx(values[best], rel=1e-5)


def test_one_beam_takes_the_likeliest_token_each_time() -> None:
    tokens, _ = generate(decode, [torch.arange(3)], BEGIN, END, LONGEST)
    for row in range(3):
        text = [BEGIN]
        while len(text) <= LONGEST and text[-1] != END:
            text.append(int(TABLE[row, len(text) - 1, text[-1]].argmax()))
        assert tokens[row].tolist() == [*text[1:], *[END] * (LONGEST + 1 - len(text))]


class Writer(nn.Module):
    def __init__(self, beams: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.beams = nn.Embedding(WORDS + 1, 8), nn.Linear(8, WORDS), beams

    def decode(self, tokens: Tensor, memory: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.words(tokens).cumsum(dim=1) + memory.unsqueeze(1)))
        return found

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        memory = torch.cat([values, -values], dim=1)
        return generate(self.decode, [memory], BEGIN, END, LONGEST, beams=self.beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_in_the_file_is_that_of_torch(beams: int, tmp_path: Path) -> None:
    module = Writer(beams)
    assert_same(module, export(module, tmp_path, ("tokens", "score")))


def test_half_precision_reaches_the_steps_of_a_loop(tmp_path: Path) -> None:
    """The converter puts casts for operators without fp16, such as TopK, outside the step that needs them."""
    module = Writer(beams=3)
    path = export(module, tmp_path, ("tokens", "score"))
    inputs = VariantInputs(reference=path, external=False, weight_bits=7, calibration=list)
    CONVERTERS["fp16"](inputs, tmp_path / "half.onnx")
    onnx.checker.check_model(tmp_path / "half.onnx", full_check=True)
    values = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))
    _, score = onnxruntime.InferenceSession(tmp_path / "half.onnx").run(None, {"values": values.numpy()})
    with torch.no_grad():
        assert float(score[0]) == pytest.approx(float(module(values)[1]), abs=0.01)
