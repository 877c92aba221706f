"""The templates of `pipe init`: complete projects, which plan and whose parts fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cli.project import TEMPLATES
from pipeline.contract.codec import encode_method, load_codec
from pipeline.contract.config import load_config
from pipeline.contract.data import forward, open_split
from pipeline.contract.pretrained import copy_small_files, find_pretrained
from pipeline.contract.task import Boxes, Embedding, TaggedText, load_task, make_shared_files
from pipeline.system.sources import SOURCE_ROOT

from ..plans import fixed_memory_estimate


def test_every_template_has_a_folder() -> None:
    folders = [path.name for path in (SOURCE_ROOT / "examples" / "templates").iterdir() if path.is_dir()]
    assert sorted(folders) == sorted(TEMPLATES)


# Those of language models differ in little, and take 15 to 35 s.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in ("dpo", "lora", "sft") else name for name in TEMPLATES],
)
def test_template_can_be_planned_and_its_parts_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My project"
    done = CliRunner().invoke(app, ["init", str(folder), "--template", name, "-o", "json"], catch_exceptions=False)
    assert json.loads(done.stdout) == {"folder": str(folder), "name": "my-project"}
    names = {path.name for path in folder.iterdir()}
    assert names in ({"task.py", "codec.py", "pipe.yaml"}, {"task.py", "codec.py", "pipe.yaml", "make_data.py", "data"})
    with fixed_memory_estimate():
        planned = CliRunner().invoke(app, ["-C", str(folder), "plan", "-o", "json"], catch_exceptions=False)
    assert [row["action"] for row in json.loads(planned.stdout)] == ["run"] * 6

    monkeypatch.chdir(folder)  # as the steps do, for the files in data/
    config = load_config(folder / "pipe.yaml")
    task: Any = load_task(config.task, folder)
    if pretrained := find_pretrained(config, folder):
        copy_small_files(pretrained, tmp_path / "files")
    make_shared_files(task, files := tmp_path / "files")
    codec = load_codec(config.codec, folder, files=files)
    batch = open_split(task, "test").batch(range(8))
    model = task.model().eval()
    with torch.no_grad():
        outputs = forward(model, task, batch)
        assert task.loss(outputs, batch).isfinite()
        assert all(values.shape == (8,) for values in task.metrics(outputs, batch).values())
        assert task.metrics(task.baseline()(batch), batch).keys() == task.metrics(outputs, batch).keys()
        instances = task.example()
        arrays = codec.decode(instances)
        answers: Any = forward(model, task, {name: torch.from_numpy(array) for name, array in arrays.items()})
    predictions = encode_method(codec, config.codec)({task.outputs[0]: answers.numpy()}, arrays)
    assert len(json.loads(json.dumps(predictions))) == len(instances)
    if hasattr(task, "show"):
        shown = [value for row in task.show(batch, outputs) for value in row.values()]
        assert shown
        assert all(isinstance(value, str | torch.Tensor | TaggedText | Boxes | Embedding) for value in shown)
