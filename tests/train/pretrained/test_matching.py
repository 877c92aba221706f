"""Weights that do not match the model are all listed, and refused unless they are allowed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.pretrained import open_pretrained
from pipeline.system.errors import ConfigError, DataError
from train.optim import seed_step
from train.pretrained.load import load_from_files, load_placeholder

from .folders import Tower, tower_state, write_folder

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


def load(folder: Path, make: Make = Tower, *allow: str) -> nn.Module:
    pretrained = load_from_files(make, open_pretrained(folder), allow, partial(seed_step, 0, -1, 0))
    pretrained.materializer.materialize(pretrained.model, CPU)
    return pretrained.model


def test_all_differences_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tower_state()
    del state["head.bias"]
    state |= {"extra.weight": torch.ones(2), "first.weight": torch.ones(8, 4), "shift": torch.arange(8)}
    with pytest.raises(DataError) as caught:
        load(write_folder(tmp_path / "other", state))
    message = str(caught.value)
    assert "missing: head.bias [1], in no file" in message
    assert "unexpected: extra.weight [2] in model.safetensors" in message
    assert "first.weight is [8, 4] in model.safetensors, and [8, 3] in the model" in message
    assert "shift is of type I64 in model.safetensors, and float32 in the model" in message
    assert message.endswith("model.allow_mismatch=['head.bias', 'extra.*', 'shift', 'first.weight']")
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_error_lists_some_differences_and_the_log_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"and 20 more, all in the log"):
        load(write_folder(tmp_path / "other", {"head.bias": torch.ones(1)}), Tower, "head.*")
    assert capsys.readouterr().err.count("missing: ") == 4 * 6 + 4


def test_the_suggested_globs_allow_all_differences(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tower_state().items() if not name.startswith(("head.", "layers.2."))}
    folder = write_folder(
        tmp_path / "other", state | {"old.head.weight": torch.ones(2), "old.head.bias": torch.ones(2)}
    )
    with pytest.raises(DataError) as caught:
        load(folder)
    globs = json.loads(str(caught.value).partition("model.allow_mismatch=")[2].replace("'", '"'))
    assert {"head.*", "old.*", "layers.*.gate_proj.weight"} < set(globs)
    assert load(folder, Tower, *globs)


def test_allowed_mismatch_is_initialized_by_the_seed(tmp_path: Path) -> None:
    state = tower_state()
    del state["head.weight"]
    state |= {"extra.weight": torch.ones(2), "head.bias": torch.ones(3)}
    folder = write_folder(tmp_path / "other", state)
    torch.manual_seed(1)
    one = load(folder, Tower, "head.*", "extra.*").state_dict()
    torch.manual_seed(2)
    two = load(folder, Tower, "head.*", "extra.*").state_dict()
    for name in one:
        assert torch.equal(one[name], two[name])
        assert name.startswith("head.") or torch.equal(one[name], state[name])
    assert 0 < float(one["head.weight"].abs().max()) < 0.4, "initialized like nn.Linear"


class Computing(nn.Module):
    """Computes with its weights, and on their device, while it is built."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.width = self.head(torch.zeros(1, 3)).shape[1]
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.table.copy_(torch.arange(3, device=self.head.weight.device))


class LikeItsWeights(nn.Module):
    """Has a table on the device of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("table", torch.zeros_like(self.head.bias) + 3, persistent=False)


def test_buffer_made_from_weights_has_its_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "other", {"head.weight": torch.ones(2, 3), "head.bias": torch.ones(2)})
    assert load(folder, LikeItsWeights).get_buffer("table").tolist() == [3, 3]


def test_model_that_computes_while_it_is_built_gets_its_weights(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    folder = write_folder(tmp_path / "other", {"head.weight": weight})
    torch.manual_seed(1)
    one = load(folder, Computing, "head.bias")
    torch.manual_seed(2)
    two = load(folder, Computing, "head.bias")
    assert torch.equal(one.state_dict()["head.weight"], weight)
    assert torch.equal(one.state_dict()["head.bias"], two.state_dict()["head.bias"])
    assert one.get_buffer("table").tolist() == [0, 1, 2]


def test_weights_keep_the_type_of_the_model(tmp_path: Path) -> None:
    half = write_folder(tmp_path / "half", {name: tensor.bfloat16() for name, tensor in tower_state().items()})
    model = load(half)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("first.weight"), tower_state()["first.weight"].bfloat16().float())
    narrow = load(half, lambda: Tower().bfloat16())
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}


def test_numbers_too_large_for_the_model_are_refused(tmp_path: Path) -> None:
    state = {**tower_state(), "head.bias": torch.tensor([1e6])}
    with pytest.raises(DataError, match=r"head.bias has numbers that are too large for float16"):
        load(write_folder(tmp_path / "large", state), lambda: Tower().half())


class Tied(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 8)
        self.last.weight = self.first.weight


def test_tied_weights_stay_tied_whichever_name_the_files_have(tmp_path: Path) -> None:
    state = {**tower_state(), "last.bias": torch.ones(8)}
    for name in ("first.weight", "last.weight"):
        kept = {n: t for n, t in state.items() if n != "first.weight"} | {name: state["first.weight"]}
        model = load(write_folder(tmp_path / name, kept), Tied)
        assert model.get_parameter("last.weight") is model.get_parameter("first.weight")
        assert torch.equal(model.get_parameter("last.weight"), state["first.weight"])


def test_two_weights_for_a_tied_one_must_be_equal(tmp_path: Path) -> None:
    state = {**tower_state(), "last.bias": torch.ones(8)}
    same = write_folder(tmp_path / "same", {**state, "last.weight": state["first.weight"].clone()})
    assert torch.equal(load(same, Tied).get_parameter("last.weight"), state["first.weight"])
    with pytest.raises(DataError, match=r"last.weight differs from first.weight"):
        load(write_folder(tmp_path / "other", {**state, "last.weight": torch.ones(8, 3)}), Tied)
    with pytest.raises(DataError, match=r"is \[9, 3\] in model.safetensors \(last.weight\), and \[8, 3\] in the model"):
        load(write_folder(tmp_path / "longer", {**state, "last.weight": torch.ones(9, 3)}), Tied)


def test_frozen_parameters_stay_frozen_and_all_are_materialized(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = Tower()
        model.layers.requires_grad_(False)
        return model

    model = load(write_folder(tmp_path / "tower", tower_state()), frozen)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        *("offset", "first.weight", "first.bias", "head.weight", "head.bias")
    }
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.get_buffer("scale"), torch.full((8,), 0.5)), "which no file holds"


class Adapter(nn.Module):
    """A layer wrapped around another one, with peft's names."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inner.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, inner.out_features, bias=False)})
        nn.init.zeros_(self.lora_B.get_parameter("default.weight"))
        self.lora_A.to(inner.weight.device, dtype=torch.float32)  # so does peft
        self.lora_B.to(inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return found


def adapted() -> nn.Module:
    model = Tower()
    for layer in model.layers:
        layer.up_proj = Adapter(layer.get_submodule("up_proj"))  # type: ignore[arg-type]
    return model


@torch.no_grad()
def test_new_adapters_do_not_change_outputs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tower", tower_state())
    model, x = load(folder, adapted, "*lora_*"), torch.ones(2, 3)
    assert torch.equal(model(x), load(folder)(x))
    assert float(model.get_parameter("layers.0.up_proj.lora_A.default.weight").abs().max()) > 0
    assert float(model.get_parameter("layers.0.up_proj.lora_B.default.weight").abs().max()) == 0


def test_copy_of_a_new_layer_is_initialized_like_it(tmp_path: Path) -> None:
    """peft copies a head that is trained besides adapters."""

    def copied() -> nn.Module:
        model = Tower()
        model.other = nn.Linear(8, 2)
        model.spare = copy.deepcopy(model.other)
        return model

    model = load(write_folder(tmp_path / "tower", tower_state()), copied, "spare.*", "other.*")
    assert torch.equal(model.get_parameter("spare.weight"), model.get_parameter("other.weight"))
    assert model.get_parameter("spare.weight") is not model.get_parameter("other.weight")


def test_parameter_of_two_modules_stays_one(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model, shared = Tower(), nn.Parameter(torch.ones(8, 3))
        model.first.weight = shared
        model.again = nn.Linear(3, 8, bias=False)
        model.again.weight = shared
        return model

    model = load(write_folder(tmp_path / "tower", tower_state()), tied)
    assert model.get_parameter("again.weight") is model.get_parameter("first.weight")
    assert torch.equal(model.get_parameter("again.weight"), tower_state()["first.weight"])


def test_model_matches_files_with_another_prefix(tmp_path: Path) -> None:
    whole = {f"net.{name}": tensor for name, tensor in tower_state().items()}
    folder = write_folder(tmp_path / "wrapped", whole)
    assert torch.equal(load(folder).get_parameter("first.weight"), whole["net.first.weight"])


def test_model_that_is_built_differently_each_time_is_refused(tmp_path: Path) -> None:
    built: list[nn.Module] = []

    def other() -> nn.Module:
        built.append(Tower())
        built[-1].head = nn.Linear(8, len(built))
        return built[-1]

    with pytest.raises(ConfigError, match=r"adapt\(\): builds \w+.* differently each time"):
        load(write_folder(tmp_path / "tower", {"first.bias": torch.ones(8)}), other, "*")


def test_placeholder_for_a_checkpoint_reads_no_file() -> None:
    pretrained = load_placeholder(Tower)
    pretrained.materializer.materialize(pretrained.model, CPU)
    assert pretrained.materializer.read.bytes == 0
    assert all(bool(p.isfinite().all() and p.abs().max() > 0) for p in pretrained.model.parameters())
