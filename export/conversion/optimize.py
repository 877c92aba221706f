"""Optimize the file once, before it is verified, and make sure that ONNX Runtime can load it.

The plain file is kept until the optimized one is verified, and replaces it if that fails. A file with a newer IR or
operator set than the installed runtime supports is lowered first. The serving image pins the runtime installed here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper, numpy_helper, version_converter
from torch import nn

from export.conversion.names import nested_graphs
from export.conversion.to_onnx import ExportResult, strip_file
from pipeline.contract.bundle import check_external_data_files
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import BundleError, StageError

_LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "transformers": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,  # then its own fusions
}
_INLINE_BYTES = "1024"  # tensors below stay inside the file in any case


@dataclass(frozen=True)
class Optimization:
    """The result, as it is written to parity.json."""

    requested: str
    used: str
    fused: dict[str, int]  # operators that are in the file now and were not before, or that no plain file has
    reason: str = ""  # why less was used than requested
    nodes: tuple[int, int] | None = None  # before and after, of a file that was rewritten


@dataclass(frozen=True)
class Written:
    """A file, how it was optimized, and how to put the plain one in its place."""

    result: ExportResult
    optimization: Optimization | None
    restore: Callable[[], ExportResult]

    @property
    def is_optimized(self) -> bool:
        return self.optimization is not None and self.optimization.used != "none"

    def restored(self, path: Path, reason: str) -> Written:
        """Put the plain file in its place; `reason`: why the optimized one is not used."""
        assert self.optimization is not None
        remove_model(path)
        optimization = Optimization(self.optimization.requested, "none", {}, reason)
        return replace(self, result=self.restore(), optimization=optimization)


def write_optimized(write: Callable[[], ExportResult], path: Path, model: nn.Module, config: Export) -> Written:
    result = write()
    return Written(result, optimize_file(path, model, config), partial(restore_plain, path, result))


def optimize_file(path: Path, model: nn.Module, config: Export) -> Optimization | None:
    """Write the optimized file to `path`. Return None if none is requested; the result has the reason for a failure."""
    if config.optimize == "none":
        return None
    counts_before, plain_folder = operators(path), _plain_folder(path)
    optimized_folder = path.parent.parent / f"{path.parent.name}.optimized"
    for folder in (plain_folder, optimized_folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        _optimize_by_runtime(path, optimized_folder / path.name, config.optimize)
        if config.optimize == "transformers":
            _fuse(optimized_folder / path.name, model_type(model))
        strip_file(optimized_folder / path.name)
        _replace_files(path, optimized_folder, plain_folder)
    except StageError as error:  # the file is as it was
        remove_plain(path)
        return Optimization(config.optimize, "none", {}, str(error))
    finally:
        shutil.rmtree(optimized_folder, ignore_errors=True)
    counts_after = operators(path)
    fused = {kind: count for kind, count in sorted(counts_after.items()) if kind not in counts_before}
    nodes = (counts_before.total(), counts_after.total())
    return Optimization(config.optimize, config.optimize, fused, nodes=nodes)


def restore_plain(path: Path, result: ExportResult) -> ExportResult:
    """Move the file back that the exporter wrote; return how it was written."""
    for file in _model_files(_plain_folder(path) / path.name):
        os.replace(file, path.parent / file.name)
    remove_plain(path)
    return result


def remove_model(path: Path) -> None:
    for file in _model_files(path):
        file.unlink()


def remove_plain(path: Path) -> None:
    shutil.rmtree(_plain_folder(path), ignore_errors=True)


def operators(path: Path) -> Counter[str]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes)


def model_type(model: nn.Module) -> str:
    """Return the model type for ONNX Runtime's fusions, from the model's configuration."""
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    for module in model.modules():
        name = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(name, str):
            return name if name in MODEL_TYPES else "bert"
    return "bert"


def _optimize_by_runtime(path: Path, target: Path, level: str) -> None:
    """Run ONNX Runtime's own passes for the CPU, including constant folding."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = _LEVELS[level]
    options.optimized_model_filepath = str(target)
    if len(_model_files(path)) > 1:
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", f"{target.name}.data")
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", _INLINE_BYTES)
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise StageError(f"export.optimize={level}: {' '.join(str(error).split())[:400]}") from error


def _fuse(path: Path, kind: str) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    external = len(_model_files(path)) > 1
    try:
        fused: Any = optimize_model(str(path), model_type=kind, opt_level=0, num_heads=0, hidden_size=0)
    except Exception as error:  # its passes raise whatever a graph they do not know makes them stumble over
        raise StageError(f"export.optimize=transformers: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error  # fmt: skip  # noqa: E501
    remove_model(path)
    fused.save_model_to_file(str(path), use_external_data_format=external)


def _replace_files(path: Path, optimized_folder: Path, plain_folder: Path) -> None:
    for file in _model_files(path):
        os.replace(file, plain_folder / file.name)
    for file in _model_files(optimized_folder / path.name):
        os.replace(file, path.parent / file.name)


def _model_files(path: Path) -> list[Path]:
    """Return the file and the file of its weights, if there is one."""
    return sorted(path.parent.glob(f"{path.name}*"))


def _plain_folder(path: Path) -> Path:
    return path.parent.parent / f"{path.parent.name}.plain"


_LOWEST_OPSET = 18


def fit_runtime(path: Path) -> str:
    """Lower the versions of the file until it loads; describe the change, empty if none was needed."""
    refusal = load_error(path)
    if not _is_version_error(refusal):
        return ""  # other faults have checks of their own
    before = read_versions(path)
    if "IR version" in refusal:
        lower_ir(path)
    lower_opset(path)
    if _is_version_error(refusal := load_error(path)):
        raise StageError(
            f"{path.name}: the ONNX Runtime {onnxruntime.__version__} that will serve it cannot load it: {refusal}; "
            "set export.opset lower, or install a newer onnxruntime"
        )
    after = read_versions(path)
    changed = [f"{word} {number} to {after[word]}" for word, number in before.items() if number != after[word]]
    return f"lowered from {', '.join(changed)}, which is what ONNX Runtime {onnxruntime.__version__} loads"


def check_file(path: Path) -> None:
    """Check external data, ONNX's rules, inferred shapes, and that no node is in training mode."""
    try:
        check_external_data_files(path)
        onnx.checker.check_model(path, full_check=True)  # which infers shapes, strictly
    except BundleError as error:
        raise StageError(str(error)) from error
    except (DecodeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageError(f"{path.name}: not sound by ONNX's own rules: {_one_line(error)}") from error
    check_inference(path)


_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}


def check_inference(path: Path) -> None:
    """Refuse nodes in training mode: this ONNX Runtime accepts some of them, another may not."""
    true_constants: set[str] = set()
    for nodes, tensors in _scopes(onnx.load(path, load_external_data=False)):
        true_constants |= {tensor.name for tensor in tensors if _is_true(tensor)}
        for node in nodes:
            values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            if node.op_type == "Constant" and any(map(_is_true, values)):
                true_constants.add(node.output[0])
            is_dropping = node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in true_constants
            is_training = any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
            if is_dropping or is_training:
                raise StageError(
                    f"{path.name}: the node `{node.name or node.output[0]}` ({node.op_type}) is in training mode; call "
                    "eval() on the module it comes from, or give its function training=self.training"
                )


def check_random(path: Path) -> None:
    """Refuse nodes that draw random numbers; two runs with equal results prove nothing."""
    for nodes, _ in _scopes(onnx.load(path, load_external_data=False)):
        for node in nodes:
            if node.op_type in _RANDOM:
                raise StageError(
                    f"{path.name}: the node `{node.name or node.output[0]}` ({node.op_type}) draws random numbers, so "
                    "that equal requests get different answers; draw them in forward() only if self.training"
                )


def _scopes(model: onnx.ModelProto) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes and the stored tensors of the graph, of the graphs inside its nodes, and of functions."""
    for part in (model.graph, *model.functions):
        for inner in nested_graphs(part):
            yield inner.node, getattr(inner, "initializer", ())


def _is_true(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.BOOL or tensor.external_data:
        return False
    return bool(numpy_helper.to_array(tensor).any())


def _is_version_error(refusal: str) -> bool:
    return "IR version" in refusal or "opset version" in refusal


def read_versions(path: Path) -> dict[str, int]:
    model = onnx.load(path, load_external_data=False)
    return {"opset": _opset(model), "IR version": model.ir_version}


def load_error(path: Path) -> str:
    """Return ONNX Runtime's error for the file; empty if it loads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        return _one_line(error)
    return ""


def lower_ir(path: Path) -> None:
    """Set the lowest IR version that the operators need; torch's exporters use no feature of a higher one."""
    model = onnx.load(path, load_external_data=False)
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def lower_opset(path: Path) -> None:
    """Convert to the highest opset that loads, if the file's own does not; leave the file unchanged if none does."""
    if not load_error(path):
        return
    model = onnx.load(path, load_external_data=False)
    if any(tensor.external_data for tensor in model.graph.initializer):
        raise StageError(f"{path.name}: opset {_opset(model)} cannot be lowered where weights lie outside the file; set export.opset lower")  # fmt: skip  # noqa: E501
    original = path.read_bytes()
    for opset in range(_opset(model) - 1, _LOWEST_OPSET - 1, -1):
        try:
            lowered = version_converter.convert_version(model, opset)
        except (RuntimeError, version_converter.ConvertError) as error:
            path.write_bytes(original)
            raise StageError(f"{path.name}: cannot be written in opset {opset}: {_one_line(error)}") from error
        lowered.ir_version = helper.find_min_ir_version_for(list(lowered.opset_import), ignore_unknown=True)
        path.write_bytes(lowered.SerializeToString(deterministic=True))
        if not load_error(path):
            return
    path.write_bytes(original)


def _opset(model: ModelProto) -> int:
    return int(next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0))


def _one_line(error: BaseException) -> str:
    """Return the message on one line, without the C++ function that raised it."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    return re.sub(r"/onnxruntime_src/\S+ .*\)(?: const)? (?=[A-Z])", "", text)[:600]
