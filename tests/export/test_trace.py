"""Models with behaviour that a graph cannot have: each is rejected with its line and a fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own word for it)
from torch import Tensor, nn

from export.checks.verify import write_and_compare
from export.conversion.to_onnx import export_input
from export.conversion.trace import inspect, numeric_attributes, source_location
from export.llm import decoder
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import Exporter, Small, linear, open_model, pairs
from .recurrent import Tagger, Tags


class Plain(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.head(x))

    def answer(self, found: Tensor) -> Tensor:
        return found


class Functional(Plain):
    def answer(self, found: Tensor) -> Tensor:
        return F.dropout(found, 0.5)


class Attention(Plain):
    def answer(self, found: Tensor) -> Tensor:
        heads = found[:, None, None]
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)[:, 0, 0]


class OfTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


class BatchNormOn(Plain):
    def answer(self, found: Tensor) -> Tensor:
        return F.batch_norm(found, None, None, training=True)


class Counting(Plain):
    def answer(self, found: Tensor) -> Tensor:
        self.calls += 1
        return found * self.calls


class Refusing(Plain):
    def answer(self, found: Tensor) -> Tensor:
        raise ValueError("You have to specify y")


class Numbering(Plain):
    made = 0

    def answer(self, found: Tensor) -> Tensor:
        self.made += 1
        return found * self.made


class Replacing(Plain):
    def answer(self, found: Tensor) -> Tensor:
        self.calls = self.calls + found.mean()
        return found


class Learning(Plain):
    def answer(self, found: Tensor) -> Tensor:
        self.head.weight.mul_(0.5)
        return found


class MakingATable(Plain):
    """Makes a table for its input at the first call; as a saved buffer, it would come from the first input alone."""

    table: Tensor

    def __init__(self, is_saved: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=is_saved)

    def answer(self, found: Tensor) -> Tensor:
        if len(self.table) != found.shape[1]:
            self.table = torch.arange(found.shape[1], dtype=torch.float32)
        return found + self.table


class Writing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return self.answer(self.head(x))


class Branching(Plain):
    def answer(self, found: Tensor) -> Tensor:
        return found if found.sum() > 0 else -found


class Looping(Plain):
    def answer(self, found: Tensor) -> Tensor:
        for _ in range(int(found.abs().max())):
            found = found * 2
        return found


@torch.library.custom_op("hidden_state::untraceable", mutates_args=())
def untraceable(x: Tensor) -> Tensor:
    return x * 3


@torch.library.custom_op("hidden_state::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


@triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Untraceable(Plain):
    def answer(self, found: Tensor) -> Tensor:
        answer: Tensor = untraceable(found)
        return answer


class Custom(Plain):
    def answer(self, found: Tensor) -> Tensor:
        answer: Tensor = triple(found)
        return answer


def seen(net: nn.Module) -> str:
    """Return why the model is refused before its conversion; empty if it is not."""
    task: Any = Small(net.eval(), pairs())
    batch = {"x": torch.from_numpy(pairs()["x"][:3])}
    try:
        inspect(export_input(net, task, batch))
    except StageError as error:
        return str(error)
    return ""


def test_table_that_the_first_call_makes_is_a_constant() -> None:
    assert seen(MakingATable()) == ""
    assert "changes `table` with every call" in seen(MakingATable(is_saved=True))


@pytest.mark.parametrize(
    ("net", "parts"),
    [
        (Functional, ("the model's own forward, test_trace.py line ", "dropout stays on", "training=self.training")),
        (Attention, ("dropout stays on in eval mode",)),
        (OfTheBatch, ("`body.1` (BatchNorm1d)", "by the current batch", "track_running_stats=True")),
        (BatchNormOn, ("by the current batch",)),
        (Counting, ("changes `calls` with every call", "only if self.training")),
        (Numbering, ("counts its calls: `made` changes with each", "a graph has it as a constant")),
        (Replacing, ("changes `calls` with every call",)),
        (Learning, ("changes `head.weight` with every call",)),
        (Writing, ("changes its input `x` in place", "x = x.clone()")),
        (Branching, ("decides in python", "`return found if found.sum() > 0 else -found`", "torch.where")),
        (Looping, ("decides in python", "test_trace.py line ")),
        (Refusing, ("the model fails for inputs x float32[", "ValueError: You have to specify y")),
        (Untraceable, ("custom operator hidden_state::untraceable", "write it with torch's own operators")),
    ],
)
def test_behaviour_that_a_graph_cannot_have_is_named_with_its_fix(
    net: type[nn.Module], parts: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    output = seen(net())
    assert [part for part in parts if part not in output] == [], output
    assert "\n" not in output
    capfd.readouterr()  # torch prints the graph up to a branch


class CountingSteps(Plain):
    def forward(self, x: Tensor) -> Tensor:
        steps = [self.head(row) for row in x]
        return torch.stack(steps)


class Distances(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x)


def test_operator_of_torch_itself_is_named_with_the_line_that_calls_it(exported: Exporter) -> None:
    with pytest.raises(
        StageError, match=r"_cdist_forward in the model's own forward, test_trace\.py line \d+, which has"
    ):
        exported(Small(Distances().eval(), pairs()))


class Noisy(Plain):
    def answer(self, found: Tensor) -> Tensor:
        found = torch.cond(found.sum() > 0, torch.sin, torch.cos, (found,))
        return found + torch.rand_like(found)


class Scaled(Plain):
    def answer(self, found: Tensor) -> Tensor:
        return found * found.max().item()


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (CountingSteps, r"`x` became fixed .* the batch size \(test_trace\.py line \d+: `steps = \[.*`\)$"),
        (Noisy, r"same input \(test_trace\.py line \d+: `return found \+ torch\.rand_like\(found\)`\); look for"),
        (
            Scaled,
            r"in the batch \(test_trace\.py line \d+: `return found \* found\.max\(\)\.item\(\)`\), and a service",
        ),
    ],
)
def test_line_that_keeps_the_model_from_its_export_is_named(net: type[nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=message):
        write_and_compare(open_model(Small(net(), pairs()), tmp_path / "model.onnx")).require(Export())


class Harmless(Plain):
    """Harmless cases of the above: only in training, or without effect."""

    def answer(self, found: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        self.calls.mul_(1.0)
        self.last, self.requested = found, found.numel() + getattr(self, "requested", 0)
        found = F.dropout(F.dropout(found, 0.5, training=self.training), 0.0)
        heads = found[:, None, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0]


@pytest.mark.parametrize("net", [Plain(), linear(), Harmless(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))])
def test_sound_models_are_traced(net: nn.Module) -> None:
    assert seen(net) == ""


def test_unknown_operator_is_named_with_its_call(exported: Exporter) -> None:
    with pytest.raises(StageError, match=r"calls hidden_state::triple in the model's own forward, test_trace\.py line"):
        exported(Small(Custom(), pairs()))


def test_numeric_attributes_include_those_of_submodules() -> None:
    net = nn.Sequential(nn.Dropout(0.25))
    assert numeric_attributes(net)["0.p"] == 0.25


class SteadyDropout(Tagger):
    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        return F.dropout(super().forward(letters, real), 0.5)


def test_models_with_dynamic_lengths_are_inspected() -> None:
    task: Any = Tags(SteadyDropout())
    batch = {name: torch.as_tensor(column[:3]) for name, column in task.columns.items()}
    with pytest.raises(StageError, match="dropout stays on in eval mode"):
        inspect(export_input(task.net.eval(), task, batch))


def test_model_is_traced_once(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    export = Mock(wraps=torch.export.export)
    monkeypatch.setattr(torch.export, "export", export)
    exported(Small(linear(), pairs()))
    assert export.call_count == 1


class Packed(Tagger):
    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(letters), real.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        found: Tensor = self.head(hidden)
        return found


def test_lines_of_the_exporter_itself_are_not_named() -> None:
    trace = f'File "task.py", line 7, in forward\nFile "{decoder.__file__}", line 50, in forward'
    node: Any = SimpleNamespace(meta={"stack_trace": trace})
    assert source_location(node) == ", task.py line 7"


def test_packed_sequences_are_refused_with_the_line() -> None:
    task: Any = Tags(Packed())
    batch = {name: torch.as_tensor(column[:3]) for name, column in task.columns.items()}
    with pytest.raises(StageError, match=r"packs sequences by their lengths \(test_trace\.py line \d+: `.*`\), and"):
        inspect(export_input(task.net.eval(), task, batch))
