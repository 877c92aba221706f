"""Where a model is cut into stages, decided without any process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError
from train.parallel.pipeline_split import Cut, Rehearsal, Stage, Unit, check_begins, choose_begins, rehearse, units

from .transformer import Block, Llama


@pytest.mark.parametrize(
    ("sizes", "stages", "begins"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([1, 1, 1, 1], 4, [1, 2, 3]),
        ([6, 1, 1, 1, 1, 2], 2, [1]),
        ([1, 1, 1, 9], 3, [2, 3]),
        ([0, 5, 5], 2, [2]),  # nothing is trained before the second unit
    ],
)
def test_stages_hold_about_as_many_parameters(sizes: list[int], stages: int, begins: list[int]) -> None:
    assert choose_begins(sizes, [True] * len(sizes), stages) == begins


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="it has 2 repeated blocks with parameters, too few"):
        choose_begins([1, 1], [True, True], 3)


@pytest.mark.parametrize("names", [["layers.7"], ["layers.1", "layers.2"], ["layers.1", "norm", "head"]])
def test_names_of_beginnings_that_do_not_fit_are_refused(names: list[str]) -> None:
    check_begins(Llama(), ["layers.1"], 2)
    with pytest.raises(ConfigError, match=rf"names {', '.join(names)} as beginnings.*needs the names of 1 modules"):
        check_begins(Llama(), names, 2)


def test_a_block_is_a_unit_and_what_is_wanted_too() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.Sequential(Block(), nn.Sequential(Block(), Block()))})
    assert [unit.name for unit in units(model)] == ["stem", "body.0", "body.1.0", "body.1.1"]
    assert [unit.name for unit in units(model, ["body.1"])] == ["stem", "body.0", "body.1"]
    assert "body.0.mlp" in [unit.name for unit in units(model, ["body.0.mlp"])]


def tokens(count: int) -> Tensor:
    return torch.randint(0, 11, (count, 6), generator=torch.Generator().manual_seed(count))


def seen(model: nn.Module, example: Any = tokens) -> tuple[list[Unit], Rehearsal]:
    row = list(units(model))
    return row, rehearse(row, lambda count: model(example(count)))


def test_what_a_unit_answers_is_known_for_any_number_of_samples() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x.flatten(0, 1), 3

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = Flat()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.flat(x)[0]
            return found

    _, rehearsal = seen(Holder())
    answer, number = rehearsal.answers["flat"].of(lambda shape: torch.zeros(shape.at(7)))
    assert (answer.shape, number) == ((42,), 3)


def stages_of(model: nn.Module, begins: list[str], example: Any = tokens) -> list[tuple[nn.Module, Stage]]:
    """Every stage with a model of its own, as separate processes have it."""
    found = []
    for index in range(len(begins) + 1):
        own = copy.deepcopy(model)
        row, rehearsal = seen(own, example)
        found.append((own, Stage(own, Cut(own, row, rehearsal, begins), rehearsal, index, torch.device("cpu"))))
    return found


def chained(parts: list[tuple[nn.Module, Stage]], batch: Tensor) -> Any:
    carried: Any = ()
    for model, stage in parts:
        carried = stage.run(carried, len(batch), functools.partial(model, batch))
    return carried


def test_stages_one_after_the_other_answer_as_the_whole_model_and_share_out_its_parameters() -> None:
    model = Llama()
    parts = stages_of(model, ["layers.1", "layers.2"])
    torch.testing.assert_close(chained(parts, tokens(5)), model(tokens(5)))
    held = [{name for name, p in own.named_parameters() if p.requires_grad} for own, _ in parts]
    assert sorted(name for names in held for name in names) == sorted(name for name, _ in model.named_parameters())
    assert {"embed.weight", "place"} < held[0]
    assert "head.weight" in held[2]


def test_a_weight_of_another_stage_takes_no_memory() -> None:
    last, _ = stages_of(Llama(), ["layers.2"])[1]
    assert last.get_parameter("embed.weight").untyped_storage().nbytes() == 4
    assert last.get_parameter("embed.weight").isnan().all()


def test_a_gradient_comes_back_over_the_wire() -> None:
    model, batch = Llama(), tokens(4)
    (_, first), (_, last) = parts = stages_of(model, ["layers.1"])
    (sent,) = first.run((), 4, lambda: parts[0][0](batch))
    received = sent.detach().requires_grad_()
    torch.autograd.backward(last.run((received,), 4, lambda: parts[1][0](batch)).square().sum())
    torch.autograd.backward(sent, received.grad)
    torch.autograd.backward(model(batch).square().sum())
    for name, parameter in model.named_parameters():
        own = next(part.get_parameter(name) for part, _ in parts if part.get_parameter(name).requires_grad)
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


def test_what_goes_past_the_next_unit_makes_the_outputs_nan() -> None:
    batch = torch.randn(5, 4)
    assert chained(stages_of(Skipping(), ["row.2"], lambda count: torch.ones(count, 4)), batch).isnan().all()


class Tied(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens)
        out: Tensor = found + self.layers[0](self.embed(tokens)).sum()
        return out


def test_a_unit_that_two_stages_would_call_is_named() -> None:
    model = Twice()
    row, rehearsal = seen(model)
    with pytest.raises(ConfigError, match="embed is called in two stages"):
        Cut(model, row, rehearsal, ["layers.2"])


def test_a_weight_of_two_stages_is_told_by_the_one_of_its_first_name() -> None:
    model = Tied()
    row, rehearsal = seen(model)
    (tie,) = Cut(model, row, rehearsal, ["layers.2"]).ties
    assert (dict(tie.names), tie.keeper, tie.name) == ({0: "embed.weight", 1: "head.weight"}, 0, "embed.weight")
    assert not Cut(Llama(), *seen(Llama()), ["layers.2"]).ties
    model.embed.weight.requires_grad_(False)
    assert not Cut(model, *seen(model), ["layers.2"]).ties, "what is frozen stays equal by itself"
