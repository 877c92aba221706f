"""Optimising the file once, offline: what is written here is what is verified and shipped.

The plain file is kept beside it until the optimised one has been verified, and takes its place again where it fails.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from torch import nn

from export.convert import _strip
from pipeline.spec.errors import StageError
from pipeline.spec.exporting import Export

_LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "transformers": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,  # then its own fusions
}
_INLINE_BYTES = "1024"  # tensors below stay inside the file in any case


@dataclass(frozen=True)
class Optimised:
    """What became of it, as parity.json has it."""

    asked: str
    used: str
    nodes: tuple[int, int]  # before and after
    fused: dict[str, int]  # operators that are in the file now and were not before
    reason: str = ""  # why less was used than asked for


def optimise(path: Path, model: nn.Module, config: Export) -> Optimised | None:
    """Write the optimised file to `path`; None where nothing is asked for, and where it fails the reason."""
    if config.optimize == "none":
        return None
    before, plain, made = operators(path), _plain(path), path.parent.parent / f"{path.parent.name}.optimised"
    for folder in (plain, made):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        _by_runtime(path, made / path.name, config.optimize)
        if config.optimize == "transformers":
            _fuse(made / path.name, kind_of(model))
        _strip(made / path.name)
        _exchange(path, made, plain)
    except StageError as error:  # the file is as it was
        forget_plain(path)
        return Optimised(config.optimize, "none", (before.total(), before.total()), {}, str(error))
    finally:
        shutil.rmtree(made, ignore_errors=True)
    after = operators(path)
    fused = {kind: count - before[kind] for kind, count in sorted(after.items()) if kind not in before}
    return Optimised(config.optimize, config.optimize, (before.total(), after.total()), fused)


def put_back(path: Path, found: Optimised, reason: str) -> Optimised:
    """The file as the exporter wrote it."""
    for file in _files(path):
        file.unlink()
    for file in _files(_plain(path) / path.name):
        os.replace(file, path.parent / file.name)
    forget_plain(path)
    return Optimised(found.asked, "none", (found.nodes[0], found.nodes[0]), {}, reason)


def forget_plain(path: Path) -> None:
    shutil.rmtree(_plain(path), ignore_errors=True)


def operators(path: Path) -> Counter[str]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes)


def kind_of(model: nn.Module) -> str:
    """In the words of ONNX Runtime's fusions, read off the model's configuration."""
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    for part in model.modules():
        kind = getattr(getattr(part, "config", None), "model_type", None)
        if isinstance(kind, str):
            return kind if kind in MODEL_TYPES else "bert"
    return "bert"


def _by_runtime(path: Path, made: Path, level: str) -> None:
    """ONNX Runtime's own passes for the CPU, constant folding among them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = _LEVELS[level]
    options.optimized_model_filepath = str(made)
    if len(_files(path)) > 1:
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{made.name}.data")
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", _INLINE_BYTES
        )
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise StageError(f"export.optimize={level}: {' '.join(str(error).split())[:400]}") from error


def _fuse(path: Path, kind: str) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    external = len(_files(path)) > 1
    try:
        fused: Any = optimize_model(str(path), model_type=kind, opt_level=0, num_heads=0, hidden_size=0)
    except Exception as error:  # its passes raise whatever a graph they do not know makes them stumble over
        raise StageError(f"export.optimize=transformers: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error  # fmt: skip  # noqa: E501
    for file in _files(path):
        file.unlink()
    fused.save_model_to_file(str(path), use_external_data_format=external)


def _exchange(path: Path, made: Path, plain: Path) -> None:
    for file in _files(path):
        os.replace(file, plain / file.name)
    for file in _files(made / path.name):
        os.replace(file, path.parent / file.name)


def _files(path: Path) -> list[Path]:
    """The file, and its weights where they lie beside it."""
    return sorted(path.parent.glob(f"{path.name}*"))


def _plain(path: Path) -> Path:
    return path.parent.parent / f"{path.parent.name}.plain"
