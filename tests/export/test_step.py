"""The export step on a judged run: what it writes, and what it will not let through."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.__main__ import export
from pipeline.spec.bundle import open_bundle
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import ConfigError, GateError, PipelineError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.golden import difference
from pipeline.spec.run import Run, RunFile
from pipeline.spec.weights import save_weights

TASK = """
import numpy as np
import torch
from torch import nn


class Sums:
    inputs = ("x",)
    outputs = ("y",)

    def model(self):
        return nn.Linear(3, 1)

    def data(self, split):
        return {"x": np.arange(27, dtype=np.float32).reshape(9, 3) / 27}

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {"size": -outputs[:, 0].abs()}

    def example(self):
        return [[1, 2, 3], [4, 5, 6]]
"""

CODEC = """
import numpy as np


class Codec:
    def decode(self, instances):
        return {"x": np.asarray(instances, np.float32)}

    def encode(self, outputs):
        return [{"sum": float(row[0])} for row in outputs["y"]]
"""


NOISY = """class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)[:, :1]


"""


FIXED = """class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(3, 3))


"""


@pytest.fixture(autouse=True)
def forget_the_project(tmp_path: Path) -> Iterator[None]:
    """What is imported from the project is gone afterwards."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sums_task.py").write_text(TASK)
    (tmp_path / "sums_codec.py").write_text(CODEC)
    return tmp_path


def judged(root: Path, verdict: str = "pass", checkpoint: str | None = None, **sections: Any) -> Run:
    """A run up to its verdict."""
    run = Run(root / "runs" / f"run-{len(list(root.glob('runs/*')))}")
    for step in ("prepare", "train", "evaluate"):
        run.output(step).mkdir(parents=True)
    run.partial("export").mkdir()
    config = {"name": "sums", "task": "sums_task.py:Sums", "codec": "sums_codec.py:Codec", **sections}
    file = RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=config, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    write_json(run.output("prepare") / "data.json", {})
    torch.manual_seed(0)
    save_weights(nn.Linear(3, 1).state_dict(), run.output("train") / "model.safetensors")
    found = checkpoint or digest_file(run.output("train") / "model.safetensors")
    body = {"verdict": verdict, "checkpoint": found, "summary": "size is 1", "rules": [], "forced_reason": "because"}
    write_json(run.output("evaluate") / "verdict.json", body)
    return run


def refusal(run: Run, root: Path, kind: type[PipelineError]) -> str:
    with pytest.raises(kind) as caught:
        export(run, root)
    assert not (run.partial("export") / "bundle" / "manifest.json").exists()
    return str(caught.value)


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_bundle_opens_and_names_every_ancestor(root: Path) -> None:
    run = judged(root)
    export(run, root)
    bundle = open_bundle(run.partial("export") / "bundle")
    assert bundle.manifest.ancestors.checkpoint == digest_file(run.output("train") / "model.safetensors")
    assert bundle.manifest.ancestors.verdict == digest_file(run.output("evaluate") / "verdict.json")
    assert bundle.manifest.ancestors.data == digest_file(run.output("prepare") / "data.json")
    golden = bundle.golden()
    assert (len(golden.inputs["x"]), golden.instances) == (4, [[1, 2, 3], [4, 5, 6]])
    torch.manual_seed(0)
    expected = [{"sum": value} for value in nn.Linear(3, 1)(torch.tensor(golden.instances).float())[:, 0].tolist()]
    assert difference(expected, golden.predictions, 1e-4, 1e-4) is None


def test_the_same_model_is_the_same_bundle_to_the_byte(root: Path) -> None:
    digests = set()
    for _ in range(2):
        run = judged(root)
        export(run, root)
        digests.add(open_bundle(run.partial("export") / "bundle").digest)
    assert len(digests) == 1


def test_no_file_of_the_bundle_tells_where_it_was_made(root: Path) -> None:
    run = judged(root)
    export(run, root)
    for path in (run.partial("export") / "bundle").iterdir():
        assert str(root).encode() not in path.read_bytes(), path.name
        assert sys.prefix.encode() not in path.read_bytes(), path.name


def test_a_rejected_candidate_is_not_exported(root: Path) -> None:
    assert "`fail`: size is 1" in refusal(judged(root, verdict="fail"), root, GateError)


def test_a_forced_one_says_so_on_its_card(root: Path) -> None:
    run = judged(root, verdict="forced")
    export(run, root)
    assert "Forced: because." in (run.partial("export") / "bundle" / "card.md").read_text()


def test_the_verdict_on_another_checkpoint_is_worth_nothing(root: Path) -> None:
    assert "another checkpoint" in refusal(judged(root, checkpoint="0" * 64), root, StageError)


def test_a_codec_that_imports_from_the_project_cannot_travel(root: Path) -> None:
    (root / "sums_scale.py").write_text("SCALE = 1\n")
    edit(root / "sums_codec.py", "import numpy as np\n", "import numpy as np\nfrom sums_scale import SCALE\n")
    assert "imports sums_scale.py; a codec travels alone" in refusal(judged(root), root, ConfigError)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("np.float32", "np.float64", "decode() gives `x` as float64, the model takes FP32"),
        ('{"x": np', '{"y": np', "decode() gives no array `x`"),
        ('outputs["y"]]', 'outputs["y"][:1]]', "encode() gives 1 predictions for 2 instances"),
        ("float(row[0])", "row[0]", "encode() must give plain JSON values"),
        ("float(row[0])", 'float("nan")', "encode() must give plain JSON values"),
    ],
)
def test_a_codec_that_does_not_fit_is_told_at_export(root: Path, old: str, new: str, message: str) -> None:
    edit(root / "sums_codec.py", old, new)
    assert message in refusal(judged(root), root, ConfigError)


def test_a_model_that_answers_by_chance_is_refused_and_the_evidence_is_kept(root: Path) -> None:
    edit(root / "sums_task.py", "class Sums:", NOISY + "class Sums:")
    edit(root / "sums_task.py", "return nn.Linear(3, 1)", "return Noisy(3, 1)")
    run = judged(root)
    assert "the ONNX file is not the model" in refusal(run, root, StageError)
    evidence = json.loads((run.partial("export") / "parity.json").read_text())
    assert all(one["beyond_tolerance"] for one in evidence["runs"])


def test_a_model_that_names_its_batch_size_is_told_where_to_look(root: Path) -> None:
    edit(root / "sums_task.py", "class Sums:", FIXED + "class Sums:")
    edit(root / "sums_task.py", "return nn.Linear(3, 1)", "return Fixed(3, 1)")
    text = refusal(judged(root, export={"batch_sizes": [3]}), root, StageError)
    assert "the batch axis of" in text
    assert "look in the model for a reshape that names the batch size" in text
    assert "the batch axis of" in refusal(judged(root), root, StageError)
