"""How a model is split into stages, tested without processes."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.system.errors import ConfigError
from train.parallel.pipeline_split import (
    DryRun,
    Stage,
    StagePlan,
    Unit,
    check_stage_starts,
    choose_stage_starts,
    dry_run,
    units,
)
from train.parallel.placeholder import Placeholder

from .transformer import Block, Llama


@pytest.mark.parametrize(
    ("sizes", "stages", "starts"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([1, 1, 1, 1], 4, [1, 2, 3]),
        ([6, 1, 1, 1, 1, 2], 2, [1]),
        ([1, 1, 1, 9], 3, [2, 3]),
        ([0, 5, 5], 2, [2]),  # nothing is trained before the second unit
    ],
)
def test_stages_have_about_as_many_parameters(sizes: list[int], stages: int, starts: list[int]) -> None:
    assert choose_stage_starts(sizes, [True] * len(sizes), stages) == starts


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="it has 2 repeated blocks with parameters, too few"):
        choose_stage_starts([1, 1], [True, True], 3)


@pytest.mark.parametrize("names", [["layers.7"], ["layers.1", "layers.2"], ["layers.1", "norm", "head"]])
def test_stage_starts_that_do_not_fit_are_refused(names: list[str]) -> None:
    check_stage_starts(Llama(), ["layers.1"], 2)
    with pytest.raises(
        ConfigError, match=rf"names {', '.join(names)} as the first modules of stages.*needs the names of 1 modules"
    ):
        check_stage_starts(Llama(), names, 2)


def test_blocks_and_requested_modules_are_units() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.Sequential(Block(), nn.Sequential(Block(), Block()))})
    assert [unit.name for unit in units(model)] == ["stem", "body.0", "body.1.0", "body.1.1"]
    assert [unit.name for unit in units(model, ["body.1"])] == ["stem", "body.0", "body.1"]
    assert "body.0.mlp" in [unit.name for unit in units(model, ["body.0.mlp"])]


def tokens(count: int) -> Tensor:
    return torch.randint(0, 11, (count, 6), generator=torch.Generator().manual_seed(count))


def record_calls(model: nn.Module, example: Any = tokens) -> tuple[list[Unit], DryRun]:
    row = list(units(model))
    return row, dry_run(row, lambda count: model(example(count)))


def test_output_template_fits_any_number_of_samples() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x.flatten(0, 1), 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = Flat()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.flat(x)[0]
            return found

    _, recorded = record_calls(Model())
    answer, number = recorded.templates["flat"].fill(lambda shape: torch.zeros(shape.at(7)))
    assert (answer.shape, number) == ((42,), 3)


def split(model: nn.Module, starts: list[str], example: Any = tokens) -> list[tuple[nn.Module, Stage]]:
    """Return every stage with its own copy of the model, as separate processes have it."""
    found = []
    for index in range(len(starts) + 1):
        own = copy.deepcopy(model)
        row, recorded = record_calls(own, example)
        found.append((own, Stage(own, StagePlan(own, row, recorded, starts), recorded, index, torch.device("cpu"))))
    return found


def chained(stages: list[tuple[nn.Module, Stage]], batch: Tensor) -> Any:
    activations: Any = ()
    for model, stage in stages:
        activations = stage.run(activations, len(batch), functools.partial(model, batch))
    return activations


def test_chained_stages_equal_the_model_and_divide_its_parameters() -> None:
    model = Llama()
    stages = split(model, ["layers.1", "layers.2"])
    torch.testing.assert_close(chained(stages, tokens(5)), model(tokens(5)))
    held = [{name for name, p in own.named_parameters() if p.requires_grad} for own, _ in stages]
    assert sorted(name for names in held for name in names) == sorted(name for name, _ in model.named_parameters())
    assert {"embed.weight", "place"} < held[0]
    assert "head.weight" in held[2]


def test_weights_of_other_stages_are_placeholders() -> None:
    (first, _), (last, _) = split(Llama(), ["layers.2"])
    for weight in (last.get_parameter("embed.weight"), first.get_parameter("head.weight")):
        assert isinstance(weight, Placeholder)
        assert (weight.shape, weight.dtype, weight.device.type) == ((11, 16), torch.float32, "cpu")


def test_gradient_passes_between_stages() -> None:
    model, batch = Llama(), tokens(4)
    (_, first), (_, last) = stages = split(model, ["layers.1"])
    (sent,) = first.run((), 4, lambda: stages[0][0](batch))
    received = sent.detach().requires_grad_()
    torch.autograd.backward(last.run((received,), 4, lambda: stages[1][0](batch)).square().sum())
    torch.autograd.backward(sent, received.grad)
    torch.autograd.backward(model(batch).square().sum())
    for name, parameter in model.named_parameters():
        own = next(
            stage_model.get_parameter(name)
            for stage_model, _ in stages
            if stage_model.get_parameter(name).requires_grad
        )
        torch.testing.assert_close(own.grad, parameter.grad)


class Row(nn.Module):
    """Four layers, and code around them that tests override."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.row:
            x = layer(x)
        return x


def inputs(count: int) -> Tensor:
    return torch.arange(count * 4.0).view(count, 4) / 10


def assert_stages_match(model: nn.Module, starts: list[str]) -> None:
    torch.testing.assert_close(chained(split(model, starts, inputs), inputs(5)), model(inputs(5)))


class Skipping(Row):
    """The first layer's activation is needed again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.row[0](x)
        return self.merge(self.row[3](self.row[2](self.row[1](first))), first)

    def merge(self, x: Tensor, first: Tensor) -> Tensor:
        return x + first


class HidingNans(Skipping):
    def merge(self, x: Tensor, first: Tensor) -> Tensor:
        return torch.nan_to_num(x) + torch.nan_to_num(first)


@pytest.mark.parametrize("model", [Skipping(), HidingNans()])
def test_activation_that_skips_a_stage_is_refused_with_the_output(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"its output needs values of other stages besides those arguments of row\.2"):
        chained(split(model, ["row.2"], inputs), inputs(5))


class SkippingToLayer(Row):
    def forward(self, x: Tensor) -> Tensor:
        first = self.row[0](x)
        out: Tensor = self.row[3](self.row[2](self.row[1](first)) + first)
        return out


def test_activation_that_skips_a_stage_is_refused_with_the_module() -> None:
    assert_stages_match(SkippingToLayer(), ["row.3"])
    with pytest.raises(ConfigError, match=r"row\.3, at which a stage starts, needs .* those arguments of row\.1"):
        chained(split(SkippingToLayer(), ["row.1", "row.3"], inputs), inputs(5))


class Masking(Row):
    """Masks and positions are made from activations, of which only shape, type and device matter."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.row[0](x)
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        mask = x.new_ones(4, 4).tril() @ torch.ones_like(x[0]) > 2
        offset = torch.zeros_like(x)
        offset[:, 0] = 7
        assert bool(mask.any()), "a mask has values"
        for layer in self.row[1:]:
            x = (layer(x) + positions + offset).masked_fill(mask, 0.5)
        return x


class Catching(Row):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except BaseException:
            return torch.zeros_like(x)


class CheckingItsOutput(Row):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        assert torch.isfinite(torch.tensor([out.detach().max(), out.detach().min()])).all()
        return out * out.max().item()


@pytest.mark.parametrize("model", [Masking(), Catching(), CheckingItsOutput()])
def test_forward_may_use_python_and_shapes_of_other_stages(model: nn.Module) -> None:
    assert_stages_match(model, ["row.1", "row.3"])


class Branching(Row):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.row:
            x = layer(x)
            if x.max() > 1e9:
                x = x / 2
        return x


class Filling(Row):
    def forward(self, x: Tensor) -> Tensor:
        buffer = x.new_zeros(len(x), 4)
        buffer[:, :3] = self.row[0](x)[:, :3]
        return super().forward(buffer)


@pytest.mark.parametrize(("model", "line"), [(Branching(), "if x.max() > 1e9:"), (Filling(), "buffer[:, :3] = ")])
def test_code_that_needs_values_of_an_earlier_stage_is_refused_with_its_line(model: nn.Module, line: str) -> None:
    (_, _), (own, last) = split(model, ["row.2"], inputs)
    with pytest.raises(
        ConfigError, match=rf"needs values of other stages, {Path(__file__).name} line \d+: `{re.escape(line)}"
    ):
        last.run([inputs(5)], 5, lambda: own(inputs(5)))


class Listing(Row):
    """Makes a tensor of numbers, which torch reads without any operation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.row[0](x)
        scale = torch.tensor([x.detach().mean(), 1.0]).max()
        return self.row[3](self.row[2](self.row[1](x))) * scale  # type: ignore[no-any-return]


def check(model: nn.Module, starts: list[str], index: int) -> None:
    row, recorded = record_calls(model, inputs)
    stage = Stage(model, StagePlan(model, row, recorded, starts), recorded, index, torch.device("cpu"))
    stage.check(recorded, lambda: model(inputs(2)))


def test_check_compares_every_stage_with_the_whole_model() -> None:
    for index in range(3):
        check(Row(), ["row.1", "row.3"], index)
    with pytest.raises(ConfigError, match=r"forward\(\) fails without values of other stages, .* line \d+: `scale = "):
        check(Listing(), ["row.2"], 1)


class Counting(Row):
    """Adds what no stage can know: how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + 100.0 * self.calls


def test_stage_with_other_outputs_than_the_whole_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="its outputs change"):
        check(Counting(), ["row.2"], 1)


class Leaving(Row):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else super().forward(x)


def test_stage_that_is_not_reached_is_refused() -> None:
    (own, first), _ = split(Leaving().eval(), ["row.2"], inputs)
    own.train()
    with pytest.raises(ConfigError, match=r"row\.2, at which a stage starts, is not always called"):
        first.run((), 5, lambda: own(inputs(5)))


def test_running_statistics_of_other_stages_do_not_change() -> None:
    """Frozen layers have no weights to drop, but those between trained ones depend on them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), nn.Linear(4, 4))
    (_, _), (own, last) = split(model, ["2"], inputs)
    before = own.get_buffer("1.running_mean").clone()
    own.train()
    last.run([inputs(5)], 5, lambda: own(inputs(5)))
    assert torch.equal(own.get_buffer("1.running_mean"), before)


class Tied(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens)
        out: Tensor = found + self.layers[0](self.embed(tokens)).sum()
        return out


def test_unit_called_in_two_stages_is_refused() -> None:
    model = Twice()
    row, recorded = record_calls(model)
    with pytest.raises(ConfigError, match="embed is called in two stages"):
        StagePlan(model, row, recorded, ["layers.2"])


def test_tied_weight_is_owned_by_the_first_stage() -> None:
    model = Tied()
    row, recorded = record_calls(model)
    (tie,) = StagePlan(model, row, recorded, ["layers.2"]).ties
    assert (dict(tie.names), tie.owner, tie.name) == ({0: "embed.weight", 1: "head.weight"}, 0, "embed.weight")
    assert not StagePlan(Llama(), *record_calls(Llama()), ["layers.2"]).ties
    model.embed.weight.requires_grad_(False)
    assert not StagePlan(model, *record_calls(model), ["layers.2"]).ties, "what is frozen stays equal by itself"
