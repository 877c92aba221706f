"""A mixture of experts with latent attention, cut in every way: the logits and weights of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.process_group import Group

from ..together import together
from .dispatch import Values, dispatched
from .mixture import resumed_in, single, store, trained_in
from .pretrained import Begun, begun_in_parts

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel": "fsdp"},
    "tensor": {"tensor": 2},
    "expert": {"expert": 2},
    "expert-fsdp": {"expert": 2, "parallel": "fsdp", "accumulate": 3},
    "pipeline": {"pipeline": 2, "accumulate": 2},
    "pipeline-tied": {"pipeline": 2, "accumulate": 2, "kind": "TiedQwen2"},
    "exact": {"elastic": "exact"},
    "tensor-adapted": {"tensor": 2, "kind": "AdaptedLlama"},
    "tensor-adapted-v3": {"tensor": 2, "kind": "AdaptedDeepseekV3"},
    "served-adapted": {"sync": "parameter_server", "kind": "AdaptedLlama"},
    "tensor-v2": {"tensor": 2, "kind": "DeepseekV2"},
    "tensor-llama": {"tensor": 2, "kind": "Llama"},
}
LOOSE: dict[str, dict[str, Any]] = {
    "expert-bf16": {"expert": 2, "parallel": "fsdp", "precision": "bf16"},
    "local": {"sync": "local_sgd", "sync_every": 1},
}
FOUR: dict[str, dict[str, Any]] = {
    "tensor-expert": {"tensor": 2, "expert": 2},
    "tensor-expert-fsdp": {"tensor": 2, "expert": 2, "parallel": "fsdp"},
    "fsdp-expert": {"expert": 2, "parallel": "fsdp", "accumulate": 2},
    "copies-expert": {"expert": 2},
    "expert-alone": {"expert": 4},
    "tensor-qwen": {"tensor": 2, "kind": "Qwen2"},
    "tensor-expert-v2": {"tensor": 2, "expert": 2, "kind": "DeepseekV2"},
    "tensor-fsdp": {"tensor": 2, "parallel": "fsdp"},
    "pipeline-copies": {"pipeline": 2, "accumulate": 2},
    "tensor-latent-v3": {"tensor": 2, "parallel": "fsdp", "kind": "LatentDeepseekV3"},
    "pipeline-adapted": {"pipeline": 2, "accumulate": 2, "kind": "AdaptedLlama"},
    "expert-adapted": {"expert": 2, "parallel": "fsdp", "kind": "AdaptedDeepseekV3"},
    "tensor-adapted-fsdp": {"tensor": 2, "parallel": "fsdp", "kind": "AdaptedDeepseekV3"},
    "pipeline-tied-copies": {"pipeline": 2, "accumulate": 2, "kind": "TiedQwen2"},
}
IMPLEMENTATIONS = [(axis, name) for axis in ("expert", "tensor") for name in ("eager", "batched_mm", "grouped_mm")]
Answers = dict[str, list[Tensor | None]]


def train_in_all(group: Group, folder: Path, ways: dict[str, dict[str, Any]]) -> dict[str, Tensor | None]:
    """All in the same processes: loading transformers costs more than all of it."""
    torch.use_deterministic_algorithms(True)
    found: dict[str, Tensor | None] = {}
    kinds = sorted({words.get("kind", "DeepseekV3") for words in ways.values()})
    for kind in kinds[group.rank.rank :: group.size]:  # what one process makes of each
        found[kind] = trained_in(single(), folder / kind, kind=kind)
    for name, words in ways.items():
        found[name] = trained_in(group, folder / name, **words)
    return found


def train_in_two(group: Group, folder: Path) -> tuple[dict[str, Tensor | None], dict[str, Any], list[Begun]]:
    found = train_in_all(group, folder, WAYS | LOOSE)
    if group.rank.first:  # goes on alone from what experts in two places have left
        _first_step(folder, "expert", "back")
        found["back"] = resumed_in(single(), folder / "back")
        _first_step(folder, "pipeline-tied", "tied-back")
        found["tied-back"] = resumed_in(single(), folder / "tied-back", kind="TiedQwen2")
        _first_step(folder, "DeepseekV3", "forth")
        _first_step(folder, "TiedQwen2", "tied-forth")
    torch.distributed.barrier()
    found["forth"] = resumed_in(group, folder / "forth", expert=2, parallel="fsdp")
    found["tied-forth"] = resumed_in(group, folder / "tied-forth", **WAYS["pipeline-tied"])
    dispatches = {f"{axis} {name}": dispatched(axis, name) for axis, name in IMPLEMENTATIONS}
    return found, dispatches, begun_in_parts(group, folder)


def _first_step(folder: Path, made: str, name: str) -> None:
    shutil.copytree(folder / made / "checkpoints", folder / name / "checkpoints")
    shutil.rmtree(folder / name / "checkpoints" / "step-00000002")


def told(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "experts" in line]


def assert_same(folder: Path, name: str, answers: Answers, kind: str = "DeepseekV3") -> None:
    """Logits, and the weights after one step and after two."""
    for step in (1, 2):
        whole, cut = (store(folder / way, single()).load(step).whole("") for way in (kind, name))
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    (expected,) = answers[kind]
    found = [one for one in answers[name] if one is not None]
    assert found and expected is not None
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def by_name(found: list[dict[str, Tensor | None]]) -> Answers:
    return {name: [one[name] for one in found if name in one] for name in set().union(*found)}


def kind_of(name: str) -> str:
    found = {**WAYS, **FOUR, "tied-forth": WAYS["pipeline-tied"]}.get(name, {})
    return str(found.get("kind", "DeepseekV3"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, together(train_in_two, 2, folder, seconds=240)


@pytest.fixture(scope="module")
def two(both: tuple[Path, list[Any]]) -> tuple[Path, Answers]:
    folder, found = both
    return folder, by_name([answers for answers, *_ in found])


@pytest.mark.parametrize("name", [*WAYS, "forth", "tied-forth"])
def test_two_processes_answer_and_train_as_one(two: tuple[Path, Answers], name: str) -> None:
    assert_same(two[0], name, two[1], kind_of(name))


def test_one_process_goes_on_from_what_two_have_left(two: tuple[Path, Answers]) -> None:
    folder, answers = two
    assert_same(folder, "back", answers)
    assert_same(folder, "tied-back", answers, "TiedQwen2")


def test_the_load_of_experts_is_that_of_all_processes(two: tuple[Path, Answers]) -> None:
    """Seven samples of five tokens, each with two experts, however many processes share them."""
    expected = told(two[0] / "DeepseekV3")
    assert len(expected) == 2
    for name in (name for name in WAYS if kind_of(name) == "DeepseekV3"):
        for mine, line in zip(told(two[0] / name), expected, strict=True):
            assert mine["expert_loads"] == line["expert_loads"]
            assert sum(line["expert_loads"][0]) == 7 * 5 * 2
            assert mine["experts"] == pytest.approx(line["experts"], rel=1e-4)
            assert mine["experts"]["dropped_tokens"] == 0
            assert mine["expert_load_max_over_mean"].keys() == {"layer_0"}


def test_half_precision_follows_and_processes_that_step_by_themselves_tell_of_all(two: tuple[Path, Answers]) -> None:
    expected = told(two[0] / "DeepseekV3")
    half, local = (told(two[0] / name) for name in LOOSE)
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in expected], rel=0.02)
    assert local[0]["expert_loads"] == expected[0]["expert_loads"]
    assert sum(local[1]["expert_loads"][0]) == 7 * 5 * 2


def test_the_bias_moves_towards_idle_experts_and_is_kept(two: tuple[Path, Answers]) -> None:
    (load,) = told(two[0] / "DeepseekV3")[0]["expert_loads"]
    moved = torch.tensor([0.001 * ((mean := sum(load) / 4) > count) - 0.001 * (mean < count) for count in load])
    kept = store(two[0] / "pipeline", single()).load(1).whole("weights.")
    torch.testing.assert_close(kept["inner.model.layers.1.mlp.gate.e_score_correction_bias"], moved)
    assert moved.abs().sum() > 0


@pytest.mark.parametrize(("axis", "implementation"), IMPLEMENTATIONS)
def test_every_implementation_answers_in_parts_as_it_does_whole(
    both: tuple[Path, list[Any]], axis: str, implementation: str
) -> None:
    """Gradients of tokens, of their shares and of the experts too, also where a process has nothing to work on."""
    for _, dispatches, _ in both[1]:
        for name, (found, expected) in dispatches[f"{axis} {implementation}"].items():
            values: tuple[Values, Values] = found, expected
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5, msg=name)


def test_official_experts_are_read_by_those_who_keep_them(both: tuple[Path, list[Any]]) -> None:
    for *_, (alone, shared, cut) in both[1]:
        for one in (shared, cut):
            torch.testing.assert_close(one.began, alone.began, rtol=0, atol=0)
            torch.testing.assert_close(one.trained, alone.trained, rtol=1e-4, atol=1e-5)
        experts = sum(t.numel() * 4 for name, t in alone.began.items() if ".experts." in name)
        assert alone.kept - shared.kept == experts / 2
        assert cut.kept <= alone.kept * 0.51


def train_in_four(group: Group, folder: Path) -> dict[str, Tensor | None]:
    return train_in_all(group, folder, FOUR)


@pytest.mark.long
def test_four_processes_answer_and_train_as_one(tmp_path: Path) -> None:
    found = together(train_in_four, 4, tmp_path, seconds=400)
    answers = by_name(found)
    for name in FOUR:
        assert_same(tmp_path, name, answers, kind_of(name))
        mine, expected = (
            [line["expert_loads"] for line in told(tmp_path / folder)] for folder in (name, kind_of(name))
        )
        assert mine == expected
