"""The file is compared under every runtime setup on real samples, random inputs and untraced shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from export import sessions
from export.checks.cases import random_batch, sample_cases
from export.checks.parity import compare_everywhere
from export.compare import Attempts, Case
from export.report import Report
from export.sessions import CPU, CUDA, RuntimeSetup, runtime_setups
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import COUNT, Small, pairs

CONFIG = Export(batch_sizes=(1, 2, 7, 40))


class Halved(nn.Module):
    """Raises an error for one batch size, and returns NaN for negative numbers of another."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 7:
            raise ValueError("no sevens")
        return x.sqrt() if len(x) == 40 else x / 2


def halving(path: Path, above: float = 100.0) -> Path:
    """Write y = x / 2, but 0 for numbers beyond `above`, which no real sample has."""
    value, numbers = helper.make_tensor_value_info, {"half": 0.5, "above": above}
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["scaled"]),
        helper.make_node("Less", ["x", "above"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["factor"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["scaled", "factor"], ["y"]),
    ]
    given, answered = ([value(name, onnx.TensorProto.FLOAT, ["batch", 4])] for name in ("x", "y"))
    weights = [numpy_helper.from_array(np.array(number, np.float32), name) for name, number in numbers.items()]
    graph = helper.make_graph(nodes, "halving", given, answered, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def task() -> Any:
    return Small(Halved(), pairs())


def report(path: Path) -> Report:
    own, attempts = task(), Attempts()
    cases = list(sample_cases(own, own.net, open_split(own, "test"), CONFIG, attempts))
    return compare_everywhere(cases, path, CONFIG) + Report(attempts=attempts)


def test_every_size_is_compared_with_one_thread_and_with_all(tmp_path: Path) -> None:
    covered = report(halving(tmp_path / "model.onnx"))
    on_cpu = [row for row in covered.coverage if row["place"].startswith("CPU")]
    assert [(row["place"], row["inputs"], row["batches"]) for row in on_cpu] == [
        ("CPU, all threads", "real samples", 3),
        ("CPU, all threads", "random inputs", 2),
        ("CPU, 1 thread", "real samples", 3),
        ("CPU, 1 thread", "random inputs", 2),
    ]
    assert all(row["max_abs_error"] < 1e-6 and not row["beyond_tolerance"] for row in covered.coverage)
    sentence = next(text for text in covered.record()["left_out"] if "model itself fails" in text)
    assert sentence == (
        "3 of 8 cases were not compared, because the model itself fails on them, "
        "first on batch 7 of test samples (no sevens)"
    )


def test_random_inputs_reveal_faults_that_no_sample_shows(tmp_path: Path) -> None:
    values = pairs()["x"]
    seen = np.sort(np.unique(values[:7]))  # the largest of the samples that the real batches hold
    covered = report(halving(tmp_path / "model.onnx", above=float(seen[-1]) + 1e-4))
    beyond = {row["inputs"]: row["beyond_tolerance"] for row in covered.coverage if row["place"] == "CPU, 1 thread"}
    assert beyond["random inputs"] > 0
    worst = next(row["worst"] for row in covered.coverage if row["inputs"] == "random inputs")
    assert worst.startswith("`y` at batch ")
    assert worst.endswith("of random inputs (CPU, all threads)")


def test_random_values_are_in_the_range_of_the_data_and_masks_kept() -> None:
    columns: dict[str, Any] = {
        "input_ids": np.arange(COUNT * 6).reshape(COUNT, 6) % 11,
        "attention_mask": np.tril(np.ones((COUNT, 6), np.int64)),
        "weight": np.linspace(-1, 1, COUNT).astype(np.float32),
    }
    one: Any = Small(nn.Identity(), columns, inputs=tuple(columns))
    drawn = random_batch(one, open_split(one, "test"), 40, 3)
    assert drawn["input_ids"].max() <= 10
    assert torch.equal(drawn["attention_mask"][:COUNT], torch.from_numpy(columns["attention_mask"]))
    assert drawn["weight"].abs().max() <= 1
    assert len(set(drawn["weight"].tolist())) > COUNT / 2
    assert torch.equal(drawn["weight"], random_batch(one, open_split(one, "test"), 40, 3)["weight"]), "seeded"


def test_unusable_provider_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["TensorrtExecutionProvider", CPU])
    here, without = runtime_setups()
    assert [place.text for place in here] == ["CPU, all threads", "CPU, 1 thread"]
    assert without == [
        f"{CUDA}: the installed onnxruntime has no CUDA provider (onnxruntime-gpu has)",
        "TensorrtExecutionProvider: no service of ours uses it",
    ]
    monkeypatch.setattr(sessions, "cuda_problem", lambda _: "")
    assert [place.text for place in runtime_setups()[0]][2:] == ["CUDA", "CUDA in TF32"]


def test_tolerance_of_tf32_follows_its_precision() -> None:
    expected = {"y": np.array([[-4.0, 4.0]], np.float32)}
    assert RuntimeSetup(CUDA, 0).tolerance(CONFIG, expected) is CONFIG
    loose = RuntimeSetup(CUDA, 0, exact=False).tolerance(CONFIG, expected)
    assert (loose.rtol, loose.atol) == (2**-7, 2 * 2**-7)  # the range is two standard deviations


def test_setup_with_other_outputs_is_named(tmp_path: Path) -> None:
    feed = {"x": np.ones((2, 4), np.float32)}
    case = Case("shapes", "batch 2", feed, {"y": feed["x"]})
    row = compare_everywhere([case], halving(tmp_path / "model.onnx"), CONFIG).coverage[1]
    assert (row["beyond_tolerance"], row["worst"]) == (8, "`y` at batch 2 (CPU, 1 thread)")


def test_file_that_does_not_run_on_a_batch_is_reported_with_shapes(tmp_path: Path) -> None:
    case = Case("shapes", "batch 2", {"x": np.ones((2, 5), np.float32)}, {"y": np.ones((2, 5), np.float32)})
    with pytest.raises(StageError, match=r"cannot run the file on x \[2, 5\]"):
        compare_everywhere([case], halving(tmp_path / "model.onnx"), CONFIG)
