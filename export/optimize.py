"""Optimize the file once, before it is verified, and make sure that ONNX Runtime can load it.

The plain file is kept until the optimized one is verified, and replaces it if that fails. A file with a newer IR or
operator set than the installed runtime supports is lowered first. The serving image pins the runtime installed here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper, numpy_helper, version_converter
from torch import nn

from export.to_onnx import _strip, check_external_data
from pipeline.contract.errors import StageError
from pipeline.contract.settings.stages import Export

_LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "transformers": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,  # then its own fusions
}
_INLINE_BYTES = "1024"  # tensors below stay inside the file in any case


@dataclass(frozen=True)
class Optimised:
    """What became of it, as parity.json has it."""

    requested: str
    used: str
    nodes: tuple[int, int]  # before and after
    fused: dict[str, int]  # operators that are in the file now and were not before
    reason: str = ""  # why less was used than requested


def optimise(path: Path, model: nn.Module, config: Export) -> Optimised | None:
    """Write the optimized file to `path`. Return None if none is requested; the result has the reason for a failure."""
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
    return Optimised(found.requested, "none", (found.nodes[0], found.nodes[0]), {}, reason)


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


_LOWEST_OPSET = 18


def fit_runtime(path: Path) -> str:
    """What was changed so that its versions load, in words; nothing where they do as they are."""
    refusal = why_not_loaded(path)
    if not _is_version(refusal):
        return ""  # other faults have checks of their own
    before = versions_of(path)
    if "IR version" in refusal:
        lower_ir(path)
    lower_opset(path)
    if _is_version(refusal := why_not_loaded(path)):
        raise StageError(
            f"{path.name}: the ONNX Runtime {onnxruntime.__version__} that will serve it cannot load it: {refusal}; "
            "set export.opset lower, or install a newer onnxruntime"
        )
    after = versions_of(path)
    changed = [f"{word} {before[word]} to {after[word]}" for word in before if before[word] != after[word]]
    return f"lowered from {', '.join(changed)}, which is what ONNX Runtime {onnxruntime.__version__} loads"


def check_file(path: Path) -> None:
    """Alone, sound by ONNX's own rules, every shape inferred and as it is declared, and done with training."""
    try:
        check_external_data(path)
        onnx.checker.check_model(path, full_check=True)  # which infers shapes, strictly
    except (DecodeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageError(f"{path.name}: not sound by ONNX's own rules: {_words(error)}") from error
    check_inference(path)


def check_inference(path: Path) -> None:
    """No node trains: this ONNX Runtime lets some of them pass for inference, and another would not."""
    graph = onnx.load(path, load_external_data=False).graph
    switched = {tensor.name for tensor in graph.initializer if _is_true(tensor)}
    for node in graph.node:
        drops = node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in switched
        learns = any(one.name == "training_mode" and one.i for one in node.attribute)
        if drops or learns:
            raise StageError(
                f"{path.name}: the node `{node.name or node.output[0]}` ({node.op_type}) is in training mode; call "
                "eval() on the module it comes from, or give its function training=self.training"
            )


def _is_true(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.BOOL or tensor.external_data:
        return False
    return bool(numpy_helper.to_array(tensor).any())


def _is_version(refusal: str) -> bool:
    return "IR version" in refusal or "opset version" in refusal


def versions_of(path: Path) -> dict[str, int]:
    model = onnx.load(path, load_external_data=False)
    return {"opset": _opset(model), "IR version": model.ir_version}


def why_not_loaded(path: Path) -> str:
    """In ONNX Runtime's words; nothing where it loads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        return _words(error)
    return ""


def lower_ir(path: Path) -> None:
    """To the least that the file's operators need; what the number adds beyond that, no exporter of torch writes."""
    model = onnx.load(path, load_external_data=False)
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def lower_opset(path: Path) -> None:
    """To the highest that loads, if the file's own does not. Nothing is written where none does."""
    if not why_not_loaded(path):
        return
    model = onnx.load(path, load_external_data=False)
    if any(tensor.external_data for tensor in model.graph.initializer):
        raise StageError(f"{path.name}: opset {_opset(model)} cannot be lowered where weights lie outside the file; set export.opset lower")  # fmt: skip  # noqa: E501
    whole = path.read_bytes()
    for opset in range(_opset(model) - 1, _LOWEST_OPSET - 1, -1):
        try:
            lowered = version_converter.convert_version(model, opset)
        except (RuntimeError, version_converter.ConvertError) as error:
            path.write_bytes(whole)
            raise StageError(f"{path.name}: cannot be written in opset {opset}: {_words(error)}") from error
        lowered.ir_version = helper.find_min_ir_version_for(list(lowered.opset_import), ignore_unknown=True)
        path.write_bytes(lowered.SerializeToString(deterministic=True))
        if not why_not_loaded(path):
            return
    path.write_bytes(whole)


def _opset(model: ModelProto) -> int:
    return int(next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0))


def _words(error: BaseException) -> str:
    """On one line, without the C++ signature of who complains."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    return re.sub(r"/onnxruntime_src/\S+ .*\)(?: const)? (?=[A-Z])", "", text)[:600]
