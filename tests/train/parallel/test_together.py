"""Models of known families, split in every way by the same processes: the logits and weights of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.process_group import ProcessGroup

from ..together import together
from .dispatch import Values, dispatched
from .mixture import resumed_in, single, store, trained_in
from .pretrained import PretrainedRun, train_pretrained

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel": 2},
    "expert": {"expert_parallel": 2},
    "expert-fsdp": {"expert_parallel": 2, "strategy": "fsdp", "accumulate": 3},
    "pipeline": {"pipeline_parallel": 2, "accumulate": 2},
    "pipeline-tied": {"pipeline_parallel": 2, "accumulate": 2, "kind": "TiedQwen2"},
    "exact": {"elastic_shards": 4},
    "tensor-adapted": {"tensor_parallel": 2, "kind": "AdaptedLlama"},
    "tensor-adapted-v3": {"tensor_parallel": 2, "kind": "AdaptedDeepseekV3"},
    "served-adapted": {"strategy": "parameter_server", "kind": "AdaptedLlama"},
    "tensor-v2": {"tensor_parallel": 2, "kind": "DeepseekV2"},
    "tensor-llama": {"tensor_parallel": 2, "kind": "Llama"},
}
BF16: dict[str, dict[str, Any]] = {
    "expert-bf16": {"expert_parallel": 2, "strategy": "fsdp", "precision": "bf16"},
    "tensor-bf16": {"tensor_parallel": 2, "precision": "bf16"},
    "pipeline-bf16": {"pipeline_parallel": 2, "accumulate": 2, "precision": "bf16"},
}
LOCAL = {"strategy": "local_sgd", "sync_every": 1}
FOUR: dict[str, dict[str, Any]] = {
    "tensor-expert": {"tensor_parallel": 2, "expert_parallel": 2},
    "tensor-expert-fsdp": {"tensor_parallel": 2, "expert_parallel": 2, "strategy": "fsdp"},
    "fsdp-expert": {"expert_parallel": 2, "strategy": "fsdp", "accumulate": 2},
    "copies-expert": {"expert_parallel": 2},
    "expert-alone": {"expert_parallel": 4},
    "tensor-qwen": {"tensor_parallel": 2, "kind": "Qwen2"},
    "tensor-expert-v2": {"tensor_parallel": 2, "expert_parallel": 2, "kind": "DeepseekV2"},
    "tensor-fsdp": {"tensor_parallel": 2, "strategy": "fsdp"},
    "pipeline-copies": {"pipeline_parallel": 2, "accumulate": 2},
    "tensor-latent-v3": {"tensor_parallel": 2, "strategy": "fsdp", "kind": "LatentDeepseekV3"},
    "pipeline-adapted": {"pipeline_parallel": 2, "accumulate": 2, "kind": "AdaptedLlama"},
    "expert-adapted": {"expert_parallel": 2, "strategy": "fsdp", "kind": "AdaptedDeepseekV3"},
    "tensor-adapted-fsdp": {"tensor_parallel": 2, "strategy": "fsdp", "kind": "AdaptedDeepseekV3"},
    "pipeline-tied-copies": {"pipeline_parallel": 2, "accumulate": 2, "kind": "TiedQwen2"},
}
IMPLEMENTATIONS = [(axis, name) for axis in ("expert", "tensor") for name in ("eager", "batched_mm", "grouped_mm")]
Answers = dict[str, list[Tensor | None]]


def train_in_all(group: ProcessGroup, folder: Path, ways: dict[str, dict[str, Any]]) -> dict[str, Tensor | None]:
    """Train all in the same processes: loading transformers costs more than the training."""
    torch.use_deterministic_algorithms(True)
    found: dict[str, Tensor | None] = {}
    kinds = sorted({settings.get("kind", "DeepseekV3") for settings in ways.values()})
    for kind in kinds[group.rank.rank :: group.size]:  # in a single process, to compare with
        found[kind] = trained_in(single(), folder / kind, kind=kind)
    for name, settings in ways.items():
        found[name] = trained_in(group, folder / name, **settings)
    return found


def train_in_two(
    group: ProcessGroup, folder: Path
) -> tuple[dict[str, Tensor | None], dict[str, Any], list[PretrainedRun]]:
    found = train_in_all(group, folder, {**WAYS, **BF16, "local": LOCAL})
    if group.rank.first:  # resumes from checkpoints of two processes
        _first_step(folder, "expert", "back")
        found["back"] = resumed_in(single(), folder / "back")
        _first_step(folder, "pipeline-tied", "tied-back")
        found["tied-back"] = resumed_in(single(), folder / "tied-back", kind="TiedQwen2")
        _first_step(folder, "DeepseekV3", "forth")
        _first_step(folder, "TiedQwen2", "tied-forth")
    torch.distributed.barrier()
    found["forth"] = resumed_in(group, folder / "forth", expert_parallel=2, strategy="fsdp")
    found["tied-forth"] = resumed_in(group, folder / "tied-forth", **WAYS["pipeline-tied"])
    dispatches = {f"{axis} {name}": dispatched(axis, name) for axis, name in IMPLEMENTATIONS}
    return found, dispatches, train_pretrained(group, folder)


def _first_step(folder: Path, made: str, name: str) -> None:
    shutil.copytree(folder / made / "checkpoints", folder / name / "checkpoints")
    shutil.rmtree(folder / name / "checkpoints" / "step-00000002")


def read_log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "experts" in line]


def assert_same(folder: Path, name: str, answers: Answers, kind: str = "DeepseekV3") -> None:
    """Logits, and the weights after one step and after two."""
    for step in (1, 2):
        whole, cut = (store(folder / way, single()).load(step).read_all("") for way in (kind, name))
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


def test_one_process_resumes_from_checkpoints_of_two(two: tuple[Path, Answers]) -> None:
    folder, answers = two
    assert_same(folder, "back", answers)
    assert_same(folder, "tied-back", answers, "TiedQwen2")


def test_expert_loads_are_those_of_all_processes(two: tuple[Path, Answers]) -> None:
    """Seven samples of five tokens, each with two experts, however many processes share them."""
    expected = read_log(two[0] / "DeepseekV3")
    assert len(expected) == 2
    for name in (name for name in WAYS if kind_of(name) == "DeepseekV3"):
        for mine, line in zip(read_log(two[0] / name), expected, strict=True):
            assert mine["expert_loads"] == line["expert_loads"]
            assert sum(line["expert_loads"][0]) == 7 * 5 * 2
            assert mine["experts"] == pytest.approx(line["experts"], rel=1e-4)
            assert mine["experts"]["dropped_tokens"] == 0
            assert mine["expert_load_max_over_mean"].keys() == {"layer_0"}


def test_bf16_follows_fp32_and_local_sgd_reports_all_loads(two: tuple[Path, Answers]) -> None:
    expected = read_log(two[0] / "DeepseekV3")
    for name in BF16:
        half = read_log(two[0] / name)
        assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in expected], rel=0.02), name
    local = read_log(two[0] / "local")
    assert local[0]["expert_loads"] == expected[0]["expert_loads"]
    assert sum(local[1]["expert_loads"][0]) == 7 * 5 * 2


def test_bias_moves_towards_idle_experts_and_is_saved(two: tuple[Path, Answers]) -> None:
    (load,) = read_log(two[0] / "DeepseekV3")[0]["expert_loads"]
    moved = torch.tensor([0.001 * ((mean := sum(load) / 4) > count) - 0.001 * (mean < count) for count in load])
    kept = store(two[0] / "pipeline", single()).load(1).read_all("weights.")
    torch.testing.assert_close(kept["inner.model.layers.1.mlp.gate.e_score_correction_bias"], moved)
    assert moved.abs().sum() > 0


@pytest.mark.parametrize(("axis", "implementation"), IMPLEMENTATIONS)
def test_every_implementation_of_experts_can_be_split(
    both: tuple[Path, list[Any]], axis: str, implementation: str
) -> None:
    """Gradients of tokens, of their shares and of the experts too, also where a process has nothing to work on."""
    for _, dispatches, _ in both[1]:
        for name, (found, expected) in dispatches[f"{axis} {implementation}"].items():
            values: tuple[Values, Values] = found, expected
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5, msg=name)


def test_official_experts_are_read_by_their_owners_only(both: tuple[Path, list[Any]]) -> None:
    for *_, (alone, shared, cut) in both[1]:
        for one in (shared, cut):
            torch.testing.assert_close(one.initial, alone.initial, rtol=0, atol=0)
            torch.testing.assert_close(one.trained, alone.trained, rtol=1e-4, atol=1e-5)
        experts = sum(t.numel() * 4 for name, t in alone.initial.items() if ".experts." in name)
        assert alone.parameter_bytes - shared.parameter_bytes == experts / 2
        assert cut.parameter_bytes <= alone.parameter_bytes * 0.51


def train_in_four(group: ProcessGroup, folder: Path) -> dict[str, Tensor | None]:
    return train_in_all(group, folder, FOUR)


@pytest.mark.long
def test_four_processes_answer_and_train_as_one(tmp_path: Path) -> None:
    found = together(train_in_four, 4, tmp_path, seconds=400)
    answers = by_name(found)
    for name in FOUR:
        assert_same(tmp_path, name, answers, kind_of(name))
        mine, expected = (
            [line["expert_loads"] for line in read_log(tmp_path / folder)] for folder in (name, kind_of(name))
        )
        assert mine == expected
