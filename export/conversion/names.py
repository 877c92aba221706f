"""Names of tensors and axes in the ONNX file: those of the task, whatever the exporter called them.

The exporter names tensors after torch's operators (`linear`, `embedding`), so inner tensors give way to names of the
task. Axes of outputs follow the inputs: each has the name or the expression that agrees with torch's own outputs at
sizes that were not traced.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from pipeline.system.errors import ConfigError

Axis = int | str


def name_tensors(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Give the graph's inputs and outputs these names, in order; return the new name of every tensor that changed."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    old_inputs = [value.name for value in graph.input if value.name not in weights]
    names = dict(zip(old_inputs, inputs, strict=True))
    for value, name in zip(graph.output, outputs, strict=True):
        assert value.name not in names, "the exporter copies what it returns twice, and inputs that it returns"
        names[value.name] = name
    taken = {name for part in nested_graphs(graph) for name in _tensor_names(part)} | set(names.values())
    for name in sorted(set(names.values()) & taken - names.keys()):
        new_name = name
        while new_name in taken:
            new_name += "_"
        if any(name in _tensor_names(part) for part in nested_graphs(graph)):
            names[name] = new_name
            taken.add(new_name)
    names = {old: new for old, new in names.items() if old != new}
    for part in nested_graphs(graph):
        _rename(part, names)
    return names


def nested_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph or function, and the graphs in its nodes, which see its tensors: the body of a `Loop`."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from nested_graphs(inner)


def nested_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    return (node for inner in nested_graphs(graph) for node in inner.node)


def _tensor_names(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    return names.union(*(node.input for node in graph.node), *(node.output for node in graph.node))


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]


def input_names(node: onnx.NodeProto) -> Iterable[str]:
    """Yield the names that a node reads, also those that its branches read from outside."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        graphs = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
        for graph in graphs:
            local_names = {value.name for value in (*graph.input, *graph.initializer)}
            for child in graph.node:
                yield from (name for name in input_names(child) if name not in local_names)
                local_names.update(child.output)


@dataclass(frozen=True)
class MeasuredShapes:
    """The shapes of torch's outputs for inputs of some sizes."""

    sizes: Mapping[str, int]  # of each named axis of the inputs
    outputs: Mapping[str, Sequence[int]]


def name_output_axes(
    path: Path, declared: Mapping[str, Sequence[Axis]], measured: Sequence[MeasuredShapes]
) -> dict[str, tuple[Axis, ...]]:
    """Write the axes of all outputs into the file and return them; raise where those the task declares are wrong."""
    model = onnx.load(path, load_external_data=False)
    chosen: dict[str, tuple[Axis, ...]] = {}
    for value in model.graph.output:
        dims = value.type.tensor_type.shape.dim
        axes = tuple(
            _choose_axis(value.name, position, dim.dim_param or dim.dim_value, measured)
            for position, dim in enumerate(dims)
        )
        chosen[value.name] = _use_declared(value.name, axes, declared.get(value.name, ()), measured)
    _check_shared_names(chosen, measured)
    set_output_axes(model, chosen)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return chosen


def set_output_axes(model: onnx.ModelProto, axes: Mapping[str, Sequence[Axis]]) -> None:
    """Write the axes of outputs into a model."""
    for value in model.graph.output:
        for dim, axis in zip(value.type.tensor_type.shape.dim, axes[value.name], strict=True):
            if isinstance(axis, str):
                dim.dim_param = axis
            else:
                dim.dim_value = axis


def _choose_axis(output: str, position: int, written: Axis, measured: Sequence[MeasuredShapes]) -> Axis:
    """Return the first of the exporter's axis, the inputs' axes and a fixed size that agrees with torch."""
    if isinstance(written, str):
        written = _tidy(written)
    for candidate in (written, *measured[0].sizes, measured[0].outputs[output][position]):
        if _agrees(candidate, output, position, measured):
            return candidate
    return f"{output}_{position}"


def _agrees(axis: Axis, output: str, position: int, measured: Sequence[MeasuredShapes]) -> bool:
    return all(_size(axis, shapes.sizes) == shapes.outputs[output][position] for shapes in measured)


def _use_declared(
    output: str, axes: tuple[Axis, ...], declared: Sequence[Axis], measured: Sequence[MeasuredShapes]
) -> tuple[Axis, ...]:
    """Return the axes with the names that the task gives them: names of inputs' axes and numbers must be right."""
    if len(declared) > len(axes):
        raise ConfigError(f"`axes` of {output}: names {len(declared)} axes, but the output has {len(axes)}")
    for position, (name, axis) in enumerate(zip(declared, axes, strict=False)):
        is_new_name = _size(name, measured[0].sizes) is None
        if is_new_name and isinstance(axis, str) and axis not in measured[0].sizes:
            continue
        if is_new_name or not _agrees(name, output, position, measured):
            meaning = f"is {axis} for every input" if isinstance(axis, int) else f"follows the inputs as `{axis}`"
            raise ConfigError(
                f"`axes` of {output}: axis {position} is called {name!r}, but in the model it {meaning}; write {axis!r}"
            )
    return (*declared, *axes[len(declared) :])


def _check_shared_names(chosen: Mapping[str, Sequence[Axis]], measured: Sequence[MeasuredShapes]) -> None:
    """Check that axes of one name have one size in all outputs."""
    for shapes in measured:
        sizes: dict[str, tuple[int, str]] = {}
        for output, axes in chosen.items():
            for axis, size in zip(axes, shapes.outputs[output], strict=True):
                first = sizes.setdefault(str(axis), (size, output))
                if isinstance(axis, str) and first[0] != size:
                    raise ConfigError(
                        f"`axes` of {output}: `{axis}` is {size} long where it is {first[0]} in {first[1]}; give axes "
                        "of different sizes different names"
                    )


def _tidy(expression: str) -> str:
    """Return an expression of torch without needless brackets; what is no expression stays as it is."""
    try:
        return ast.unparse(ast.parse(expression, mode="eval"))
    except SyntaxError:
        return expression


def _size(axis: Axis, sizes: Mapping[str, int]) -> int | None:
    """Return the size of an axis for inputs of these sizes; None for a symbol of torch that no input has."""
    if isinstance(axis, int):
        return axis
    if axis in sizes:
        return sizes[axis]
    try:
        return _evaluate(ast.parse(axis, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Compute an expression of sizes as torch writes it; KeyError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_evaluate(node.left, sizes), _evaluate(node.right, sizes)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, sizes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return int(_FUNCTIONS[node.func.id](*(_evaluate(argument, sizes) for argument in node.args)))
    raise KeyError(ast.unparse(node))


_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
    ast.Mod: int.__mod__,
    ast.Pow: int.__pow__,
}
_FUNCTIONS: dict[str, Any] = {"Max": max, "Min": min, "Mod": int.__mod__}
