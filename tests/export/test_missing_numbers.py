"""A model that handles missing numbers itself: data, parity, golden requests, and answers of the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.__main__ import export
from export.bundle import columns_with_nan
from export.checks.cases import random_batch, sample_cases
from export.checks.parity import compare_everywhere, compare_outputs
from export.checks.verify import find_nondeterminism
from export.compare import Attempts, require_equal
from export.golden import choose_samples
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.data import Samples, open_split
from pipeline.contract.run import Run, RunFile
from pipeline.contract.settings.stages import Export
from pipeline.data_checks.profile import SchemaBuilder
from pipeline.system.errors import DataError
from pipeline.system.files import digest_file, write_json
from serve.protocol import v1, v2
from serve.runtime.loading import load_predictor
from tests.weights import save_weights

from .conftest import COUNT, Exporter, Small, pairs

TASK = """
import numpy as np
import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x, code):
        missing = torch.isnan(x)
        return super().forward(torch.cat([torch.nan_to_num(x), missing.float()], dim=1)), x[:, :1] / 2


class Gaps:
    inputs = ("x", "code")
    outputs = ("y", "half")

    def model(self):
        return Net(4, 1)

    def data(self, split):
        x = np.arange(18, dtype=np.float32).reshape(9, 2) / 18
        x[6, 0] = np.nan
        return {"x": x, "code": np.arange(9), "full": x[:, 1]}

    def loss(self, outputs, batch):
        return outputs["y"].mean()

    def metrics(self, outputs, batch):
        return {"size": -outputs["y"][:, 0].abs()}

    def example(self):
        return [(1, float("nan")), (None, 2)]
"""
CODEC = """
import numpy as np


class Codec:
    def decode(self, instances):
        assert all(type(row) is list for row in instances), "as in JSON"
        return {"x": np.array(instances, np.float32), "code": np.zeros(len(instances), np.int64)}

    def encode(self, outputs, inputs):
        rows = zip(outputs["half"].tolist(), np.isnan(inputs["x"]).tolist())
        return [{"half": half[0], "missing": missing} for half, missing in rows]
"""


class Halves(nn.Module):
    """Returns NaN where a number is missing; with `gap` also for a number that is not missing."""

    def __init__(self, gap: bool = False) -> None:
        super().__init__()
        self.gap = gap

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 1, torch.nan, x / 2) if self.gap else x / 2


def with_gaps() -> dict[str, Any]:
    columns = pairs()
    columns["x"][3, 1] = columns["x"][20, :] = np.nan
    return columns


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("gaps")
    (root / "gaps_task.py").write_text(TASK)
    (root / "gaps_codec.py").write_text(CODEC)
    run = Run(root / "runs" / "run-0")
    for step in ("prepare", "train", "evaluate"):
        run.output(step).mkdir(parents=True)
    run.partial("export").mkdir()
    config = {"name": "gaps", "task": "gaps_task.py:Gaps", "codec": "gaps_codec.py:Codec"}
    settings: dict[str, Any] = {**config, "evaluate": {"metric": "size"}, "export": {"batch_sizes": [1, 4]}}
    file = RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=settings, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    write_json(run.output("prepare") / "data.json", {})
    schema = SchemaBuilder()
    data = {"x": torch.tensor([[1.0, np.nan]]), "code": torch.tensor([0]), "full": torch.tensor([np.inf])}
    schema.add(data)
    columns = {name: summary.model_dump() for name, summary in schema.columns.items()}
    write_json(run.output("prepare") / "profile.json", {"columns": {"train": columns}})
    torch.manual_seed(0)
    save_weights(nn.Linear(4, 1).state_dict(), run.output("train") / "model.safetensors")
    checkpoint = digest_file(run.output("train") / "model.safetensors")
    body = {"verdict": "pass", "checkpoint": checkpoint, "summary": "size is 1", "rules": []}
    write_json(run.output("evaluate") / "verdict.json", body)
    export(run, root)
    return open_bundle(run.partial("export") / "bundle")


def test_signature_names_the_inputs_whose_data_have_nan(bundle: Bundle) -> None:
    assert bundle.signature.missing_inputs == ("x",)
    assert "| `x` | in | FP32 or null |" in (bundle.path / "card.md").read_text()


def test_golden_requests_have_a_missing_number_and_null_in_json(bundle: Bundle) -> None:
    golden = bundle.golden()
    assert np.isnan(golden.inputs["x"]).tolist() == [[False, False]] * 3 + [[True, False]]
    assert golden.instances == [[1, None], [None, 2]]
    assert golden.predictions == [{"half": 0.5, "missing": [False, True]}, {"half": None, "missing": [True, False]}]


def test_service_answers_them_as_at_export(bundle: Bundle) -> None:
    predictor = load_predictor(bundle, None, None)
    requests = bundle.golden_requests()
    payloads: list[Any] = [
        v1.Payload(json.dumps(requests[0].body, allow_nan=False).encode()),
        v2.Payload("gaps", json.dumps(requests[1].body, allow_nan=False).encode(), None, None),
    ]
    for request, payload in zip(requests, payloads, strict=True):
        (part,), names = payload.decode(predictor)
        answer = payload.encode(predictor, [predictor.run(part.arrays, names)], "1")
        text = answer if isinstance(answer, bytes) else answer.body
        assert b"NaN" not in text
        assert request.problem(json.loads(text)) is None


def test_columns_with_nan_in_any_split_are_found(tmp_path: Path) -> None:
    columns = {"x": {"missing": 0, "nan": 0}, "y": {"missing": 2, "nan": 1}, "z": {"missing": 2, "nan": 0}}
    write_json(tmp_path / "profile.json", {"columns": {"train": {"x": {"missing": 0, "nan": 0}}, "test": columns}})
    assert columns_with_nan(tmp_path / "profile.json") == {"y"}


def test_golden_samples_are_the_first_without_infinities() -> None:
    x = np.zeros((600, 2), np.float32)
    x[[0, 2], 1] = np.inf
    x[[5, 500]] = np.nan
    x[5, 0] = np.inf
    samples = Samples("test", {"x": x, "code": np.arange(600)})
    assert choose_samples(samples, ("x", "code"), ()) == [1, 3, 4, 6]
    assert choose_samples(samples, ("x", "code"), ("x",)) == [1, 3, 4, 500]
    assert choose_samples(samples.first(2), ("x",), ("x",)) == [1]
    with pytest.raises(DataError, match="every sample has an infinite number"):
        choose_samples(samples.first(1), ("x",), ())


def test_nan_equals_nan_where_a_number_was_missing(exported: Exporter) -> None:
    made = exported(Small(Halves(), with_gaps()))
    found = made.test_set_rows()
    require_equal(found, made.config)
    assert all(row["max_abs_error"] == row["max_rel_error"] == 0 for row in found)
    cases = list(sample_cases(made.task, made.model, made.test, made.config, Attempts()))
    rows = compare_everywhere(cases, made.path, made.config).coverage
    require_equal(rows, made.config)
    assert {row["inputs"] for row in rows} == {"real samples", "random inputs"}


def test_nan_without_a_missing_input_is_refused(exported: Exporter) -> None:
    made = exported(Small(Halves(gap=True), with_gaps()))
    first = int(np.flatnonzero(with_gaps()["x"][:, 0] > 1)[0])
    (row, *_) = made.test_set_rows()
    assert row["beyond_tolerance"] > 0
    reason = find_nondeterminism(made.task, made.model, made.test, Export())
    assert f"returns NaN in `y` for test sample {first}" in reason


def test_number_instead_of_nan_is_a_difference() -> None:
    task: Any = Small(Halves(), with_gaps())
    reference = {"y": with_gaps()["x"] / 2}
    for actual in (np.nan_to_num(reference["y"]), np.full_like(reference["y"], np.nan)):
        assert (
            compare_outputs(task, open_split(task, "test"), reference, {"y": actual}, Export(), 1, 0.0).beyond_tolerance
            > 0
        )


def test_random_inputs_are_also_between_the_known_numbers() -> None:
    task: Any = Small(nn.Identity(), with_gaps())
    drawn = random_batch(task, open_split(task, "test"), 64, 1)["x"]
    known = drawn[~drawn.isnan()]
    assert 0 < len(known) < drawn.numel()
    assert not np.isin(known.numpy(), with_gaps()["x"]).all(), "some are no values of the data"
    assert len(with_gaps()["x"]) == COUNT
