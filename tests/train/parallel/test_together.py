"""Models of known families, split in every case by the same processes: the logits and weights of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.process_group import ProcessGroup

from ..distributed import run_distributed
from .dispatch import Values, dispatched
from .mixture import resumed_in, single, store, trained_in
from .pretrained import PretrainedRun, train_pretrained

SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}  # of five tokens, which two processes cannot share evenly
TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "whole-copies": {"strategy": "fsdp", "weight_copies": 2},
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
    "sparse-fsdp": {"strategy": "fsdp", "sparse": True},
    "sparse-tensor": {"tensor_parallel": 2, "sparse": True},
    "sparse-expert-fsdp": {"expert_parallel": 2, "strategy": "fsdp", "sparse": True},
    "sequence": {**SEQUENCE, "accumulate": 2},
    "sequence-adapted": {**SEQUENCE, "kind": "AdaptedLlama"},
    "sparse-sequence": {**SEQUENCE, "sparse": True, "recompute": "blocks"},
    "sparse-pipeline-tied": {"pipeline_parallel": 2, "accumulate": 2, "kind": "TiedQwen2", "sparse": True},
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
    "sequence-fsdp": {**SEQUENCE, "strategy": "fsdp", "accumulate": 2, "kind": "Llama"},
    "sequence-expert-fsdp": {**SEQUENCE, "expert_parallel": 2, "strategy": "fsdp"},
    "sequence-of-four": {**SEQUENCE, "tensor_parallel": 4, "kind": "DeepseekV2"},
    "fsdp-copies": {"weight_copies": 2, "strategy": "fsdp", "accumulate": 2},
    "sparse-fsdp-copies": {"weight_copies": 2, "strategy": "fsdp", "sparse": True},
    "pipeline-copies": {"pipeline_parallel": 2, "accumulate": 2},
    "tensor-latent-v3": {"tensor_parallel": 2, "strategy": "fsdp", "kind": "LatentDeepseekV3"},
    "pipeline-adapted": {"pipeline_parallel": 2, "accumulate": 2, "kind": "AdaptedLlama"},
    "expert-adapted": {"expert_parallel": 2, "strategy": "fsdp", "kind": "AdaptedDeepseekV3"},
    "tensor-adapted-fsdp": {"tensor_parallel": 2, "strategy": "fsdp", "kind": "AdaptedDeepseekV3"},
    "pipeline-tied-copies": {"pipeline_parallel": 2, "accumulate": 2, "kind": "TiedQwen2"},
}
# Copies of three and four samples: some pass one by one, and others in twos or not at all.
STAGES: dict[str, dict[str, Any]] = {
    "stages-fsdp": {"strategy": "fsdp", "pipeline_parallel": 2, "accumulate": 4, "kind": "Llama"},
    "stages-tied-fsdp": {"strategy": "fsdp", "pipeline_parallel": 2, "accumulate": 2, "kind": "TiedQwen2"},
    "stages-sparse-fsdp": {
        "strategy": "fsdp",
        "pipeline_parallel": 2,
        "accumulate": 2,
        "kind": "AdaptedLlama",
        "sparse": True,
    },
    "stages-tensor": {"tensor_parallel": 2, "pipeline_parallel": 2, "accumulate": 3, "kind": "TiedQwen2"},
    "stages-experts": {"tensor_parallel": 2, "pipeline_parallel": 2, "accumulate": 2, "sparse": True},
}
ALL_THREE = {"strategy": "fsdp", "tensor_parallel": 2, "pipeline_parallel": 2, "accumulate": 4, "kind": "TiedQwen2"}
IMPLEMENTATIONS = [(axis, name) for axis in ("expert", "tensor") for name in ("eager", "batched_mm", "grouped_mm")]
Outputs = dict[str, list[Tensor | None]]


def train_in_all(group: ProcessGroup, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Tensor | None]:
    """Train all in the same processes: loading transformers costs more than the training."""
    torch.use_deterministic_algorithms(True)
    outputs: dict[str, Tensor | None] = {}
    kinds = sorted({settings.get("kind", "DeepseekV3") for settings in cases.values()})
    for kind in kinds[group.rank.rank :: group.size]:  # in a single process, to compare with
        outputs[kind] = trained_in(single(), folder / kind, kind=kind)
    for name, settings in cases.items():
        outputs[name] = trained_in(group, folder / name, **settings)
    return outputs


def train_in_two(
    group: ProcessGroup, folder: Path
) -> tuple[dict[str, Tensor | None], dict[str, Any], list[PretrainedRun]]:
    outputs = train_in_all(group, folder, {**TWO, **BF16, "local": LOCAL})
    if group.rank.first:  # resumes from checkpoints of two processes
        _copy_first_step(folder, "expert", "resumed-single")
        outputs["resumed-single"] = resumed_in(single(), folder / "resumed-single")
        _copy_first_step(folder, "pipeline-tied", "tied-resumed-single")
        outputs["tied-resumed-single"] = resumed_in(single(), folder / "tied-resumed-single", kind="TiedQwen2")
        _copy_first_step(folder, "sequence", "sequence-resumed-single")
        outputs["sequence-resumed-single"] = resumed_in(single(), folder / "sequence-resumed-single")
        _copy_first_step(folder, "DeepseekV3", "resumed")
        _copy_first_step(folder, "DeepseekV3", "resumed-sequence")
        _copy_first_step(folder, "TiedQwen2", "tied-resumed")
    torch.distributed.barrier()
    outputs["resumed"] = resumed_in(group, folder / "resumed", expert_parallel=2, strategy="fsdp")
    outputs["resumed-sequence"] = resumed_in(group, folder / "resumed-sequence", **SEQUENCE)
    outputs["tied-resumed"] = resumed_in(group, folder / "tied-resumed", **TWO["sparse-pipeline-tied"])
    dispatches = {f"{axis} {name}": dispatched(axis, name) for axis, name in IMPLEMENTATIONS}
    return outputs, dispatches, train_pretrained(group, folder)


def _copy_first_step(folder: Path, source: str, name: str) -> None:
    shutil.copytree(folder / source / "checkpoints", folder / name / "checkpoints")
    shutil.rmtree(folder / name / "checkpoints" / "step-00000002")


def read_log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "experts" in line]


def assert_same(folder: Path, name: str, outputs_by_name: Outputs, kind: str = "DeepseekV3") -> None:
    """Compare logits, and the weights after one step and after two."""
    for step in (1, 2):
        whole, split = (store(folder / case, single()).load(step).tensors("") for case in (kind, name))
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    (expected,) = outputs_by_name[kind]
    outputs = [output for output in outputs_by_name[name] if output is not None]
    assert outputs and expected is not None
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def by_name(results: list[dict[str, Tensor | None]]) -> Outputs:
    return {name: [outputs[name] for outputs in results if name in outputs] for name in set().union(*results)}


def kind_of(name: str) -> str:
    settings = {**TWO, **FOUR, **STAGES, "tied-resumed": TWO["pipeline-tied"]}.get(name, {})
    return str(settings.get("kind", "DeepseekV3"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_distributed(train_in_two, 2, folder, seconds=240)


@pytest.fixture(scope="module")
def two(results: tuple[Path, list[Any]]) -> tuple[Path, Outputs]:
    folder, outputs = results
    return folder, by_name([outputs_by_name for outputs_by_name, *_ in outputs])


@pytest.mark.parametrize("name", [*TWO, "resumed", "resumed-sequence", "tied-resumed"])
def test_two_processes_train_and_predict_like_one(two: tuple[Path, Outputs], name: str) -> None:
    assert_same(two[0], name, two[1], kind_of(name))


def test_one_process_resumes_from_checkpoints_of_two(two: tuple[Path, Outputs]) -> None:
    folder, outputs_by_name = two
    assert_same(folder, "resumed-single", outputs_by_name)
    assert_same(folder, "sequence-resumed-single", outputs_by_name)
    assert_same(folder, "tied-resumed-single", outputs_by_name, "TiedQwen2")


def test_clipping_counts_weights_that_all_processes_have_once(two: tuple[Path, Outputs]) -> None:
    expected = [line["grad_norm"] for line in read_log(two[0] / "DeepseekV3")]
    assert min(expected) > 1, "all gradients are clipped"
    for name in ("tensor", "sequence", "sparse-sequence"):
        assert [line["grad_norm"] for line in read_log(two[0] / name)] == pytest.approx(expected, rel=1e-5), name


def test_expert_loads_are_those_of_all_processes(two: tuple[Path, Outputs]) -> None:
    """Seven samples of five tokens, each with two experts, however many processes share them."""
    expected = read_log(two[0] / "DeepseekV3")
    assert len(expected) == 2
    for name in (name for name in TWO if kind_of(name) == "DeepseekV3"):
        for own, line in zip(read_log(two[0] / name), expected, strict=True):
            assert own["expert_loads"] == line["expert_loads"]
            assert sum(line["expert_loads"][0]) == 7 * 5 * 2
            assert own["experts"] == pytest.approx(line["experts"], rel=1e-4)
            assert own["experts"]["dropped_tokens"] == 0
            assert own["expert_load_max_over_mean"].keys() == {"layer_0"}


def test_bf16_follows_fp32_and_local_sgd_reports_all_loads(two: tuple[Path, Outputs]) -> None:
    expected = read_log(two[0] / "DeepseekV3")
    for name in BF16:
        half = read_log(two[0] / name)
        assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in expected], rel=0.02), name
    local = read_log(two[0] / "local")
    assert local[0]["expert_loads"] == expected[0]["expert_loads"]
    assert sum(local[1]["expert_loads"][0]) == 7 * 5 * 2


def test_bias_moves_towards_idle_experts_and_is_saved(two: tuple[Path, Outputs]) -> None:
    (load,) = read_log(two[0] / "DeepseekV3")[0]["expert_loads"]
    moved = torch.tensor([0.001 * ((mean := sum(load) / 4) > count) - 0.001 * (mean < count) for count in load])
    kept = store(two[0] / "pipeline", single()).load(1).tensors("weights.")
    torch.testing.assert_close(kept["inner.model.layers.1.mlp.gate.e_score_correction_bias"], moved)
    assert moved.abs().sum() > 0


@pytest.mark.parametrize(("axis", "implementation"), IMPLEMENTATIONS)
def test_every_implementation_of_experts_can_be_split(
    results: tuple[Path, list[Any]], axis: str, implementation: str
) -> None:
    """Gradients of tokens, of their shares and of the experts too, also where a process has nothing to work on."""
    for _, dispatches, _ in results[1]:
        for name, (outputs, expected) in dispatches[f"{axis} {implementation}"].items():
            values: tuple[Values, Values] = outputs, expected
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5, msg=name)


def test_official_experts_are_read_by_their_owners_only(results: tuple[Path, list[Any]]) -> None:
    for *_, (single_run, split, sharded) in results[1]:
        for run in (split, sharded):
            torch.testing.assert_close(run.initial, single_run.initial, rtol=0, atol=0)
            torch.testing.assert_close(run.trained, single_run.trained, rtol=1e-4, atol=1e-5)
        experts = sum(t.numel() * 4 for name, t in single_run.initial.items() if ".experts." in name)
        assert single_run.parameter_bytes - split.parameter_bytes == experts / 2
        assert sharded.parameter_bytes <= single_run.parameter_bytes * 0.51


def train_in_four(group: ProcessGroup, folder: Path) -> dict[str, Tensor | None]:
    return train_in_all(group, folder, FOUR)


@pytest.mark.long
def test_four_processes_train_and_predict_like_one(tmp_path: Path) -> None:
    outputs = run_distributed(train_in_four, 4, tmp_path, seconds=400)
    outputs_by_name = by_name(outputs)
    for name in FOUR:
        assert_same(tmp_path, name, outputs_by_name, kind_of(name))
        own, expected = (
            [line["expert_loads"] for line in read_log(tmp_path / folder)] for folder in (name, kind_of(name))
        )
        assert own == expected


def train_stages(group: ProcessGroup, folder: Path) -> dict[str, Tensor | None]:
    half = {**STAGES["stages-fsdp"], "kind": "DeepseekV3", "precision": "bf16"}
    return train_in_all(group, folder, {**STAGES, "stages-bf16": half})


@pytest.mark.long
def test_stages_with_sharded_or_split_layers_train_and_predict_like_one(tmp_path: Path) -> None:
    outputs_by_name = by_name(run_distributed(train_stages, 4, tmp_path, seconds=400))
    for name in STAGES:
        assert_same(tmp_path, name, outputs_by_name, kind_of(name))
        assert_same_norms(tmp_path, name, kind_of(name))
    own, half, expected = (read_log(tmp_path / name) for name in ("stages-experts", "stages-bf16", "DeepseekV3"))
    assert [line["expert_loads"] for line in own] == [line["expert_loads"] for line in expected]
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in expected], rel=0.02)


def assert_same_norms(folder: Path, name: str, kind: str) -> None:
    """Compare the norms by which gradients are clipped."""
    texts = ((folder / case / "metrics.jsonl").read_text() for case in (name, kind))
    own, expected = (
        [line["grad_norm"] for line in map(json.loads, t.splitlines()) if "grad_norm" in line] for t in texts
    )
    assert len(own) == 2 and max(own) > 1.0
    assert own == pytest.approx(expected, rel=1e-4)


def train_in_eight(group: ProcessGroup, folder: Path) -> dict[str, Tensor | None]:
    """Train by all three axes, and resume from there in one process and back."""
    outputs = train_in_all(group, folder, {"all": ALL_THREE})
    if group.rank.first:
        _copy_first_step(folder, "all", "alone")
        _copy_first_step(folder, "TiedQwen2", "resumed")
        outputs["alone"] = resumed_in(single(), folder / "alone", kind="TiedQwen2")
    torch.distributed.barrier()
    outputs["resumed"] = resumed_in(group, folder / "resumed", **ALL_THREE)
    return outputs


@pytest.mark.long
def test_eight_processes_share_data_stages_and_layers(tmp_path: Path) -> None:
    outputs_by_name = by_name(run_distributed(train_in_eight, 8, tmp_path, seconds=400))
    for name in ("all", "alone", "resumed"):
        assert_same(tmp_path, name, outputs_by_name, "TiedQwen2")
    assert_same_norms(tmp_path, "all", "TiedQwen2")
