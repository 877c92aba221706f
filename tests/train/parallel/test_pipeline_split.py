"""How a model is split into stages, tested without processes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError
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


def test_chained_stages_return_what_the_model_does_and_divide_its_parameters() -> None:
    model = Llama()
    stages = split(model, ["layers.1", "layers.2"])
    torch.testing.assert_close(chained(stages, tokens(5)), model(tokens(5)))
    held = [{name for name, p in own.named_parameters() if p.requires_grad} for own, _ in stages]
    assert sorted(name for names in held for name in names) == sorted(name for name, _ in model.named_parameters())
    assert {"embed.weight", "place"} < held[0]
    assert "head.weight" in held[2]


def test_weight_of_another_stage_takes_no_memory() -> None:
    last, _ = split(Llama(), ["layers.2"])[1]
    assert last.get_parameter("embed.weight").untyped_storage().nbytes() == 4
    assert last.get_parameter("embed.weight").isnan().all()


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


class Skipping(nn.Module):
    """The first layer's answer is needed again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.row[0](x)
        for layer in self.row[1:]:
            x = layer(x)
        out: Tensor = x + first
        return out


def test_activation_that_skips_a_unit_makes_outputs_nan() -> None:
    batch = torch.randn(5, 4)
    assert chained(split(Skipping(), ["row.2"], lambda count: torch.ones(count, 4)), batch).isnan().all()


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
