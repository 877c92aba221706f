"""What does not go together is listed, all of it, and refused unless it is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.pretrained import open_pretrained
from train.optim import seed_step
from train.pretrained.load import from_files, from_nothing

from .folders import Tower, tower_state, write_folder

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


def filled(folder: Path, make: Make = Tower, *allow: str) -> nn.Module:
    begun = from_files(make, open_pretrained(folder), allow, partial(seed_step, 0, -1, 0))
    begun.filling.fill(begun.model, CPU)
    return begun.model


def test_everything_that_differs_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tower_state()
    del state["head.bias"]
    state |= {"extra.weight": torch.ones(2), "first.weight": torch.ones(8, 4), "shift": torch.arange(8)}
    with pytest.raises(DataError) as caught:
        filled(write_folder(tmp_path / "odd", state))
    told = str(caught.value)
    assert "missing: head.bias [1], in no file" in told
    assert "unexpected: extra.weight [2] in model.safetensors" in told
    assert "first.weight is [8, 4] in model.safetensors, and [8, 3] in the model" in told
    assert "shift is of type I64 in model.safetensors, and float32 in the model" in told
    assert "model.allow, as ['head.bias']" in told
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_the_error_names_some_and_the_log_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"and 20 more, all in the log"):
        filled(write_folder(tmp_path / "odd", {"head.bias": torch.ones(1)}), Tower, "head.*")
    assert capsys.readouterr().err.count("missing: ") == 4 * 6 + 4


def test_what_is_allowed_begins_by_the_seed_and_the_rest_by_the_files(tmp_path: Path) -> None:
    state = tower_state()
    del state["head.weight"]
    state |= {"extra.weight": torch.ones(2), "head.bias": torch.ones(3)}
    folder = write_folder(tmp_path / "odd", state)
    torch.manual_seed(1)
    one = filled(folder, Tower, "head.*", "extra.*").state_dict()
    torch.manual_seed(2)
    two = filled(folder, Tower, "head.*", "extra.*").state_dict()
    for name in one:
        assert torch.equal(one[name], two[name])
        assert name.startswith("head.") or torch.equal(one[name], state[name])
    assert 0 < float(one["head.weight"].abs().max()) < 0.4, "as nn.Linear begins it"


def test_weights_keep_the_type_of_the_model(tmp_path: Path) -> None:
    half = write_folder(tmp_path / "half", {name: tensor.bfloat16() for name, tensor in tower_state().items()})
    model = filled(half)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("first.weight"), tower_state()["first.weight"].bfloat16().float())
    narrow = filled(half, lambda: Tower().bfloat16())
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}


def test_numbers_that_the_model_cannot_hold_are_told(tmp_path: Path) -> None:
    state = {**tower_state(), "head.bias": torch.tensor([1e6])}
    with pytest.raises(DataError, match=r"head.bias has numbers that float16 cannot hold"):
        filled(write_folder(tmp_path / "large", state), lambda: Tower().half())


class Tied(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 8)
        self.last.weight = self.first.weight


def test_tied_weights_are_one_whichever_of_their_names_the_files_have(tmp_path: Path) -> None:
    state = {**tower_state(), "last.bias": torch.ones(8)}
    for name in ("first.weight", "last.weight"):
        kept = {n: t for n, t in state.items() if n != "first.weight"} | {name: state["first.weight"]}
        model = filled(write_folder(tmp_path / name, kept), Tied)
        assert model.get_parameter("last.weight") is model.get_parameter("first.weight")
        assert torch.equal(model.get_parameter("last.weight"), state["first.weight"])


def test_two_weights_for_one_of_the_model_must_be_equal(tmp_path: Path) -> None:
    state = {**tower_state(), "last.bias": torch.ones(8)}
    same = write_folder(tmp_path / "same", {**state, "last.weight": state["first.weight"].clone()})
    assert torch.equal(filled(same, Tied).get_parameter("last.weight"), state["first.weight"])
    with pytest.raises(DataError, match=r"last.weight differs from first.weight"):
        filled(write_folder(tmp_path / "other", {**state, "last.weight": torch.ones(8, 3)}), Tied)
    with pytest.raises(DataError, match=r"is \[9, 3\] in model.safetensors \(last.weight\), and \[8, 3\] in the model"):
        filled(write_folder(tmp_path / "longer", {**state, "last.weight": torch.ones(9, 3)}), Tied)


def test_frozen_parts_stay_frozen_and_nothing_is_left_without_memory(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = Tower()
        model.layers.requires_grad_(False)
        return model

    model = filled(write_folder(tmp_path / "tower", tower_state()), frozen)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        *("offset", "first.weight", "first.bias", "head.weight", "head.bias")
    }
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.get_buffer("scale"), torch.full((8,), 0.5)), "which no file holds"


class Around(nn.Module):
    """A layer put around another one, with the names peft gives them."""

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
        layer.up_proj = Around(layer.get_submodule("up_proj"))  # type: ignore[arg-type]
    return model


@torch.no_grad()
def test_adapters_begin_as_their_own_code_has_it_so_the_model_answers_as_before(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tower", tower_state())
    model, x = filled(folder, adapted, "*lora_*"), torch.ones(2, 3)
    assert torch.equal(model(x), filled(folder)(x))
    assert float(model.get_parameter("layers.0.up_proj.lora_A.default.weight").abs().max()) > 0
    assert float(model.get_parameter("layers.0.up_proj.lora_B.default.weight").abs().max()) == 0


def test_a_copy_of_a_new_layer_begins_as_the_layer_does(tmp_path: Path) -> None:
    """As peft copies a head that is to be trained beside adapters."""

    def copied() -> nn.Module:
        model = Tower()
        model.other = nn.Linear(8, 2)
        model.spare = copy.deepcopy(model.other)
        return model

    model = filled(write_folder(tmp_path / "tower", tower_state()), copied, "spare.*", "other.*")
    assert torch.equal(model.get_parameter("spare.weight"), model.get_parameter("other.weight"))
    assert model.get_parameter("spare.weight") is not model.get_parameter("other.weight")


def test_one_parameter_that_is_given_to_two_modules_stays_one(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model, shared = Tower(), nn.Parameter(torch.ones(8, 3))
        model.first.weight = shared
        model.again = nn.Linear(3, 8, bias=False)
        model.again.weight = shared
        return model

    model = filled(write_folder(tmp_path / "tower", tower_state()), tied)
    assert model.get_parameter("again.weight") is model.get_parameter("first.weight")
    assert torch.equal(model.get_parameter("again.weight"), tower_state()["first.weight"])


def test_a_model_within_a_module_of_the_task_takes_the_names_it_has_alone(tmp_path: Path) -> None:
    whole = {f"net.{name}": tensor for name, tensor in tower_state().items()}
    folder = write_folder(tmp_path / "wrapped", whole)
    assert torch.equal(filled(folder).get_parameter("first.weight"), whole["net.first.weight"])


def test_a_model_that_is_built_otherwise_each_time_is_refused(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    def other() -> nn.Module:
        made.append(Tower())
        made[-1].head = nn.Linear(8, len(made))
        return made[-1]

    with pytest.raises(ConfigError, match=r"adapt\(\): builds \w+.* in another way each time"):
        filled(write_folder(tmp_path / "tower", {"first.bias": torch.ones(8)}), other, "*")


def test_for_a_checkpoint_that_is_restored_no_file_is_asked() -> None:
    begun = from_nothing(Tower)
    begun.filling.fill(begun.model, CPU)
    assert begun.filling.bytes_read == 0
    assert all(bool(p.isfinite().all() and p.abs().max() > 0) for p in begun.model.parameters())
