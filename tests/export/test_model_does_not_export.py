"""The examples of `docs/model-does-not-export.md`: the first gives the message of its heading, the other exports."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export.checks.verify import write_and_compare
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError
from pipeline.system.sources import SOURCE_ROOT

from .conftest import COUNT, Small, open_model

PAGE = SOURCE_ROOT / "docs" / "model-does-not-export.md"


def examples() -> Iterator[Any]:
    """Yield the message of a section, or nothing, and lines of `forward`."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        message = section.partition("\n")[0].strip('"')
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL)):
            for form, body in enumerate(block.strip().split("\n\n")):
                yield pytest.param("" if form else message, body, id=f"{message}, {number}, {form}")


class Net(nn.Module):
    """The layers that the examples use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.gru = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 1)


@dataclass
class Times(Small):
    axes: dict[str, Any] = field(default_factory=lambda: {"x": ("batch", "time")})
    longest: dict[str, int] = field(default_factory=lambda: {"time": 12})


@pytest.mark.parametrize(("message", "body"), list(examples()))
def test_example_of_the_page_is_refused_or_exported(
    message: str, body: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, code = tmp_path / "task.py", f"def forward(self, x):\n{textwrap.indent(body, '    ')}\n"
    linecache.cache[str(file)] = (len(code), None, code.splitlines(True), str(file))  # where torch looks for the lines
    scope: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(code, str(file), "exec"), scope)
    net = type("Example", (Net,), {"forward": scope["forward"]})()
    x = np.random.default_rng(0).normal(size=(COUNT, 5, 4)).astype(np.float32)
    task: Any = Times(net, {"x": x})
    printed = ""
    try:
        report = write_and_compare(open_model(task, tmp_path / "model.onnx"))
        report.require(Export())
        printed = report.attempts.text
    except StageError as error:
        printed = str(error)
    assert message in printed if message else printed == "", printed
    capfd.readouterr()  # torch prints the graph up to a branch
