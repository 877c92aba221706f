"""The export step on an evaluated run: its outputs and its errors."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.__main__ import export
from pipeline.contract.bundle import Override, open_bundle, write_override
from pipeline.contract.codec import load_bundled_codec
from pipeline.contract.golden import difference
from pipeline.contract.run import Run, RunFile
from pipeline.system.errors import BundleError, ConfigError, DataError, GateError, PipelineError, StageError
from pipeline.system.files import digest_file, digest_tree, write_json
from pipeline.verify import verify_bundle
from tests.weights import save_weights

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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sums_task.py").write_text(TASK)
    (tmp_path / "sums_codec.py").write_text(CODEC)
    return tmp_path


def evaluated_run(root: Path, verdict: str = "pass", checkpoint: str | None = None, **sections: Any) -> Run:
    """A run up to its verdict."""
    run = Run(root / "runs" / f"run-{len(list(root.glob('runs/*')))}")
    for step in ("prepare", "train", "evaluate"):
        run.output(step).mkdir(parents=True)
    run.partial("export").mkdir()
    config: dict[str, Any] = {"name": "sums", "task": "sums_task.py:Sums", "codec": "sums_codec.py:Codec"}
    config |= {"evaluate": {"metric": "size"}, **sections}
    file = RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=config, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    write_json(run.output("prepare") / "data.json", {})
    write_json(run.output("prepare") / "profile.json", {"columns": {}})
    torch.manual_seed(0)
    save_weights(nn.Linear(3, 1).state_dict(), run.output("train") / "model.safetensors")
    found = checkpoint or digest_file(run.output("train") / "model.safetensors")
    body = {"verdict": verdict, "checkpoint": found, "summary": "size is 1", "rules": []}
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


def test_bundle_opens_and_names_every_ancestor(root: Path) -> None:
    run = evaluated_run(root)
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


def test_same_model_gives_an_identical_bundle(root: Path) -> None:
    digests = set()
    for _ in range(2):
        run = evaluated_run(root)
        export(run, root)
        bundle = run.partial("export") / "bundle"
        digests.add((open_bundle(bundle).digest, digest_file(bundle / "provenance.json")))
    assert len(digests) == 1
    check_provenance(run, bundle)


def check_provenance(run: Run, directory: Path) -> None:
    """Check that provenance.json names the sources of the bundle."""
    output = json.loads((directory / "provenance.json").read_text())
    assert (output["_type"], output["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    subjects = {one["name"]: one["digest"]["sha256"] for one in output["subject"]}
    assert subjects == {path.name: digest_file(path) for path in directory.iterdir() if path.name != "provenance.json"}
    made = output["predicate"]["buildDefinition"]
    found = {one["name"]: one for one in made["resolvedDependencies"]}
    ancestors = open_bundle(directory).manifest.ancestors
    for name in ("code", "data", "checkpoint", "verdict"):
        assert found[name]["digest"] == {"sha256": getattr(ancestors, name)}
    assert found["torch"]["uri"] == f"pkg:pypi/torch@{metadata.version('torch')}"
    assert made["externalParameters"]["config"]["export"] == run.config.export.model_dump(mode="json")
    assert len(output["predicate"]["runDetails"]["builder"]["version"]["source"]) == 64


def test_tensor_names_may_have_any_characters(root: Path) -> None:
    edit(root / "sums_task.py", 'inputs = ("x",)', 'inputs = ("weights/linear.x",)')
    edit(root / "sums_task.py", '{"x": np', '{"weights/linear.x": np')
    edit(root / "sums_task.py", 'outputs = ("y",)', 'outputs = ("Größe in m²",)')
    edit(root / "sums_codec.py", '{"x": np', '{"weights/linear.x": np')
    edit(root / "sums_codec.py", 'outputs["y"]', 'outputs["Größe in m²"]')
    run = evaluated_run(root)
    export(run, root)
    path = run.partial("export") / "bundle"
    assert list(open_bundle(path).golden().outputs) == ["Größe in m²"]
    assert [*verify_bundle(path)][-1] == "golden requests are answered as at export"


def test_bundle_does_not_contain_paths_of_the_machine(root: Path) -> None:
    run = evaluated_run(root)
    export(run, root)
    for path in (run.partial("export") / "bundle").iterdir():
        assert str(root).encode() not in path.read_bytes(), path.name
        assert sys.prefix.encode() not in path.read_bytes(), path.name


def test_rejected_candidate_is_not_exported(root: Path) -> None:
    assert "`fail`: size is 1" in refusal(evaluated_run(root, verdict="fail"), root, GateError)


def test_override_is_in_card_manifest_and_lineage(root: Path) -> None:
    run = evaluated_run(root, verdict="fail")
    verdict = digest_file(run.output("evaluate") / "verdict.json")
    write_override(run.path, Override(at="2026-01-02", by="ann@here", reason="shown on Monday", verdict="0" * 64))
    assert "`pipe gate override" in refusal(run, root, GateError), "an override of another verdict"
    given = Override(at="2026-01-02", by="ann@here", reason="shown on Monday", verdict=verdict)
    write_override(run.path, given)
    export(run, root)
    bundle = open_bundle(run.partial("export") / "bundle")
    assert (bundle.manifest.verdict, bundle.override) == ("overridden", given)
    assert bundle.manifest.ancestors.override == digest_file(run.path / "override.json")
    assert "overridden by ann@here, 2026-01-02: shown on Monday" in (bundle.path / "card.md").read_text()


def test_verdict_on_another_checkpoint_is_refused(root: Path) -> None:
    assert "another checkpoint" in refusal(evaluated_run(root, checkpoint="0" * 64), root, StageError)


def test_codec_travels_with_the_files_it_imports(root: Path) -> None:
    (root / "scales").mkdir()
    (root / "scales" / "__init__.py").write_text("")
    (root / "scales" / "sums_scale.py").write_text("from utils import ONE\nSCALE = ONE\n")
    (root / "utils.py").write_text("ONE = 1\n")
    (root / "unused.py").write_text("")
    edit(root / "sums_codec.py", "import numpy as np\n", "import numpy as np\nfrom scales.sums_scale import SCALE\n")
    run = evaluated_run(root)
    export(run, root)
    bundle = open_bundle(run.partial("export") / "bundle")
    files = {name for name in bundle.manifest.files if name.endswith(".py")}
    imported = ("sums_codec.py", "scales/__init__.py", "scales/sums_scale.py", "utils.py")
    assert files == {f"codec/{name}" for name in imported}
    assert bundle.signature.codec == "sums_codec.py:Codec"
    (root / "utils.py").write_text("ONE = 2\n")
    codec = load_bundled_codec(bundle.path, bundle.signature, "_codec_of_this_test")
    assert sys.modules["_codec_of_this_test.utils"].ONE == 1
    assert codec.decode([[1, 2, 3]])["x"].tolist() == [[1, 2, 3]]
    (bundle.path / "codec" / "utils.py").write_text("ONE = 3\n")
    with pytest.raises(BundleError, match=r"codec/utils\.py: content changed"):
        open_bundle(bundle.path)


def test_file_of_the_codec_that_imports_torch_is_named(root: Path) -> None:
    (root / "sums_scale.py").write_text("import torch\nSCALE = 1\n")
    edit(root / "sums_codec.py", "import numpy as np\n", "import numpy as np\nfrom sums_scale import SCALE\n")
    assert "sums_scale.py imports torch, which the service does not" in refusal(evaluated_run(root), root, ConfigError)


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
def test_codec_that_does_not_fit_is_refused(root: Path, old: str, new: str, message: str) -> None:
    edit(root / "sums_codec.py", old, new)
    assert message in refusal(evaluated_run(root), root, ConfigError)


def test_random_model_is_refused_and_parity_json_is_kept(root: Path) -> None:
    edit(root / "sums_task.py", "class Sums:", NOISY + "class Sums:")
    edit(root / "sums_task.py", "return nn.Linear(3, 1)", "return Noisy(3, 1)")
    run = evaluated_run(root)
    assert "no ONNX file can be the model: torch returns different values of `" in refusal(run, root, StageError)
    parity = json.loads((run.partial("export") / "parity.json").read_text())
    assert all(one["beyond_tolerance"] for one in parity["runs"])


def test_fixed_batch_size_is_refused_with_a_hint(root: Path) -> None:
    edit(root / "sums_task.py", "class Sums:", FIXED + "class Sums:")
    edit(root / "sums_task.py", "return nn.Linear(3, 1)", "return Fixed(3, 1)")
    text = refusal(evaluated_run(root, export={"batch_sizes": [3]}), root, StageError)
    assert "the batch axis of" in text
    assert "look in the model for a reshape that names the batch size" in text
    assert "the batch axis of" in refusal(evaluated_run(root), root, StageError)


FED_TASK = """

    def make_files(self, folder): ...

    def use_files(self, folder):
        self.scale = float((folder / "scale.txt").read_text())
"""

FED_CODEC = """
import numpy as np
import yaml


class Codec:
    files = ("scale.txt",)
    requires = ("pyyaml",)

    def __init__(self, folder):
        self.scale = yaml.safe_load((folder / "scale.txt").read_text())

    def decode(self, instances):
        return {"x": np.asarray(instances, np.float32) * np.float32(self.scale)}

    def encode(self, outputs):
        return [{"sum": float(row[0])} for row in outputs["y"]]
"""


def fed(root: Path) -> Run:
    """Make a run whose task and codec share a file, and whose prepare wrote another one."""
    (root / "sums_task.py").write_text(TASK + FED_TASK)
    (root / "sums_codec.py").write_text(FED_CODEC)
    run = evaluated_run(root)
    files = run.output("prepare") / "files"
    files.mkdir()
    (files / "scale.txt").write_text("2.5")
    (files / "other.txt").write_text("the task's own")
    write_json(run.output("prepare") / "data.json", {"files": digest_tree(files)})
    return run


def test_codec_reads_its_files_from_the_bundle(root: Path) -> None:
    run = fed(root)
    export(run, root)
    path = run.partial("export") / "bundle"
    bundle = open_bundle(path)
    assert [name for name in bundle.manifest.files if "/" in name] == ["files/scale.txt"]
    assert bundle.signature.requires == (f"pyyaml=={metadata.version('pyyaml')}",)
    assert [*verify_bundle(path)][-1] == "golden requests are answered as at export"
    (path / "files" / "scale.txt").write_text("2.6")
    with pytest.raises(BundleError, match=r"scale.txt: content changed since export"):
        open_bundle(path)


def test_file_that_prepare_did_not_make_is_named(root: Path) -> None:
    run = fed(root)
    edit(root / "sums_codec.py", 'files = ("scale.txt",)', 'files = ("scale.txt", "offset.txt")')
    assert "needs the file offset.txt, which the task's make_files() did not write" in refusal(run, root, ConfigError)


def test_file_altered_since_prepare_stops_the_export(root: Path) -> None:
    run = fed(root)
    (run.output("prepare") / "files" / "scale.txt").write_text("2.6")
    assert "scale.txt: changed since prepare" in refusal(run, root, DataError)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_golden_requests_detect_another_model_in_any_unit(root: Path, unit: float) -> None:
    edit(root / "sums_task.py", "nn.Linear(3, 1)", "Scaled(3, 1)")
    scaled = f"class Scaled(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * {unit}\n\n\n"
    edit(root / "sums_task.py", "class Sums", f"{scaled}class Sums")
    run = evaluated_run(root)
    export(run, root)
    golden = open_bundle(run.partial("export") / "bundle").golden()
    changed = [{"sum": 1.01 * prediction["sum"]} for prediction in golden.predictions]
    assert difference(golden.predictions, changed, golden.rtol, golden.atol) is not None
    assert golden.atol == pytest.approx(1e-4 * min(1.0, unit), rel=3)
