"""Let torchvision be imported beside a torch without CUDA: the one on PyPI is built for CUDA and cannot load then.

Its pictures and networks need none of its compiled operators, but its import fails where these are not declared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # their operators exist as long as they do


def declare_torchvision_operators() -> None:
    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    if _libraries or spec is None or spec.origin is None:
        return
    import torch

    if torch.version.cuda is None and "+cu" in Path(spec.origin).with_name("version.py").read_text():
        _libraries.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            _libraries[0].define(operator)
