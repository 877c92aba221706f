"""What `pipe export` refuses before it writes a project."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.given.sources import Request, read_inputs, read_source
from pipeline.system.errors import PipelineError
from tests.e2e import given_models

NET = {"source": "net.py:Net", "weights": "net.pt", "inputs": [given_models.INPUT]}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"source": "net.pt"}, "is none of"),
        ({"source": "missing.onnx"}, "no such file"),
        ({"source": "net.pt2"}, "is no program of torch.export"),
        ({"source": "fixed.onnx"}, "the first axis of `X` is fixed at 4"),
        ({"source": "timm:none"}, "timm"),
        ({**NET, "inputs": []}, "--input image=float32[batch,8]"),
        ({**NET, "inputs": ["image=float32[batch,8]"]}, "forward(): fails for inputs of"),
        ({**NET, "inputs": ["picture=float32[batch,8]"]}, "forward() has no such argument; it takes image"),
        ({**NET, "weights": ""}, "--weights FILE"),
        ({**NET, "weights": "whole.pt"}, "save the weights alone"),
        ({**NET, "weights": "other.pt"}, "missing: out.bias; unexpected: more"),
        ({**NET, "weights": "small.pt"}, "of another shape: out.bias"),
        ({**NET, "source": "net.py:Other"}, "has no class Other"),
        ({**NET, "source": "task.py:Net"}, "the project has a file of this name"),
        ({"source": "remote"}, "auto_map"),
        ({"source": "pickled"}, "a pickle, which can run code"),
        ({"source": "unknown"}, "BertForNothing is not supported"),
    ],
)
def test_wrong_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = given_models.write_net(tmp_path).state_dict()
    shutil.copyfile("net.py", "task.py")
    torch.save(nn.Linear(1, 1), "whole.pt")
    torch.save({"more" if name == "out.bias" else name: value for name, value in state.items()}, "other.pt")
    torch.save({**state, "out.bias": torch.ones(2)}, "small.pt")
    Path("net.pt2").write_bytes(b"no program")
    given_models.write_classifier(Path("fixed.onnx"), batch=4)
    for name, architecture in (("remote", "BertModel"), ("pickled", "BertModel"), ("unknown", "BertForNothing")):
        Path(name).mkdir()
        extra = {"auto_map": {"AutoModel": "m.Net"}} if name == "remote" else {}
        Path(name, "config.json").write_text(
            json.dumps({"model_type": "bert", "architectures": [architecture], **extra})
        )
        Path(name, "pytorch_model.bin" if name == "pickled" else "model.safetensors").write_bytes(b"")
    Path("project").mkdir()
    with pytest.raises(PipelineError, match=re.escape(message)):
        read_source(Request(folder="project", name="project", **request_))  # type: ignore[arg-type]


def test_inputs_name_their_axes() -> None:
    inputs, longest = read_inputs(["ids=int64[batch, time<=512]", "mask=bool[batch,time,2]"])
    assert (inputs["ids"]["axes"], inputs["mask"]["axes"]) == (["batch", "time"], ["batch", "time", 2])
    assert longest == {"time": 512}


def test_inputs_are_those_of_an_example(tmp_path: Path) -> None:
    ids, flags = np.array([[4, 9, 5], [7, 4, 4]]), np.array([[True], [False]])
    np.savez(tmp_path / "example.npz", ids=ids, flags=flags)
    assert read_inputs([str(tmp_path / "example.npz")]) == (
        {
            "ids": {"dtype": "int64", "axes": ["batch", 3], "low": 4, "high": 10},
            "flags": {"dtype": "bool", "axes": ["batch", 1], "low": 0, "high": 1},
        },
        {},
    )


ANNOTATED = given_models.NET.replace("self, image", 'self, image: Annotated[Tensor, "float32[batch,3,16,16]"]')


def test_inputs_are_those_of_the_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given_models.write_net(tmp_path)
    Path("net.py").write_text(f"from typing import Annotated\nfrom torch import Tensor\n{ANNOTATED}")
    Path("project").mkdir()
    facts = read_source(Request("net.py:Net", "project", "net", "net.pt")).facts
    assert facts is not None
    assert facts["inputs"] == read_inputs([given_models.INPUT])[0]


@pytest.mark.parametrize("text", ["x=float32[3]", "x=float[batch]", "x=float32[batch,time]", "none.npz"])
def test_wrong_input_is_refused(text: str) -> None:
    with pytest.raises(PipelineError, match="--input"):
        read_inputs([text])
