"""Other formats of the model: verified like the bundle, or not kept; skipped with a warning if they cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from export import other_formats
from export.other_formats import require_formats, saved_model_problem, write_formats
from export.subject import ModelExporter
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError
from pipeline.system.files import digest_file

from .conftest import Classes, Exporter, Small, linear, open_model, pairs
from .recurrent import Tags

TENSORFLOW = os.environ.get(other_formats.TENSORFLOW_PYTHON, "")
NO_TENSORFLOW = saved_model_problem(TENSORFLOW)
PRINT_NAMES = """
import sys, tensorflow
serve = tensorflow.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(*sorted(serve.structured_input_signature[1]), *sorted(serve.structured_outputs))
"""


class Sneaky(nn.Module):
    """A module that behaves differently while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] if torch.compiler.is_compiling() else x[:, :3] * 1.5


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), 2 * x


def original(folder: Path, net: nn.Module, **settings: Any) -> ModelExporter:
    task: Any = Classes(net.eval(), pairs())
    config = Export(batch_sizes=(1, 7, 40), **settings)
    return open_model(task, folder / "model.onnx", config)


def test_pt2_has_the_models_outputs_without_its_code(tmp_path: Path) -> None:
    one = original(tmp_path, linear(), formats=("onnx", "pt2"))
    (row,) = write_formats(one, tmp_path / "formats")
    path = tmp_path / row["path"]
    assert (row["passed"], row["reason"], row["path"]) == (True, "equal to torch", "formats/pt2/model.pt2")
    assert row["max_abs_error"] < 1e-5
    assert row["sha256"] == {"model.pt2": digest_file(path)}
    require_formats([row])
    x = torch.from_numpy(pairs()["x"])
    (found,) = torch.export.load(path).module()(x)
    assert np.allclose(found.detach(), one.subject.model(x).detach(), atol=1e-5)
    with zipfile.ZipFile(path) as inside:
        for name in inside.namelist():
            assert str(Path(__file__).parent).encode() not in inside.read(name), "where it was made"
            assert pairs()["x"][:3].tobytes() not in inside.read(name), "samples of the data"


def test_pt2_has_dynamic_axes(tmp_path: Path) -> None:
    task: Any = Tags()
    config = Export(batch_sizes=(1, 7), formats=("onnx", "pt2"))
    (row,) = write_formats(open_model(task, tmp_path / "model.onnx", config), tmp_path / "formats")
    assert (row["passed"], row["reason"]) == (True, "equal to torch")
    letters = torch.arange(26).reshape(2, 13) % 12
    (found,) = torch.export.load(tmp_path / row["path"]).module()(letters, torch.ones_like(letters))
    assert torch.allclose(found, task.net(letters, torch.ones_like(letters)), atol=1e-5)


def test_format_that_differs_from_the_model_is_not_kept(tmp_path: Path) -> None:
    rows = write_formats(original(tmp_path, Sneaky(), formats=("onnx", "pt2")), tmp_path / "formats")
    assert (rows[0]["passed"], rows[0]["path"], rows[0]["sha256"]) == (False, "", {})
    assert list((tmp_path / "formats").iterdir()) == []
    with pytest.raises(StageError, match=r"export\.formats: pt2 is not kept: it is not the model: \d+ elements differ"):
        require_formats(rows)


def test_saved_model_is_skipped_without_its_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(other_formats.TENSORFLOW_PYTHON, raising=False)
    monkeypatch.setattr(other_formats, "find_spec", lambda _: None)
    rows = write_formats(original(tmp_path, linear(), formats=("onnx", "savedmodel")), tmp_path / "formats")
    assert (rows[0]["passed"], rows[0]["skipped"]) == (False, True)
    assert rows[0]["reason"].startswith("skipped: onnx2tf and tensorflow not installed here; pip install -c")
    assert "savedmodel is skipped: onnx2tf and tensorflow not installed here" in capsys.readouterr().out
    require_formats(rows)


@pytest.mark.skipif(bool(NO_TENSORFLOW), reason=NO_TENSORFLOW)
@pytest.mark.parametrize(("net", "outputs"), [(linear(), ("scores",)), (Doubled(), ("scores", "doubled"))])
def test_saved_model_has_the_names_of_the_task(
    exported: Exporter, tmp_path: Path, net: nn.Module, outputs: tuple[str, ...]
) -> None:
    task: Any = Small(net, {"Row": pairs()["x"]}, inputs=("Row",), outputs=outputs)
    (row,) = write_formats(exported(task, formats=("onnx", "savedmodel")).kind, tmp_path / "formats")
    assert row["reason"] == "equal to torch"
    argv = [TENSORFLOW or sys.executable, "-c", PRINT_NAMES, str(tmp_path / row["path"])]
    names = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    assert names == ["Row", *sorted(outputs)]


def test_missing_tensorflow_environment_is_named() -> None:
    assert saved_model_problem("/no/such/python").startswith("PIPE_TENSORFLOW_PYTHON=/no/such/python: no such program")


def test_error_of_the_converter_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"onnx2tf does not convert the file: .*Error"):
        other_formats.run_saved_model(sys.executable, tmp_path / "gone.onnx", tmp_path, ("y",), [pairs()])


@pytest.mark.parametrize("formats", [("pt2",), ("onnx", "pt2", "pt2")])
def test_formats_contain_onnx_and_no_duplicates(formats: Any) -> None:
    with pytest.raises(ValidationError, match="onnx is always one, and each is named once"):
        Export(formats=formats)


def test_saved_model_with_fused_operators_is_refused() -> None:
    with pytest.raises(ValidationError, match="optimize=extended brings others"):
        Export(formats=("onnx", "savedmodel"), optimize="extended")
