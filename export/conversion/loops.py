"""Make an ONNX `Loop` of each step that `pipeline.repeat` marked in the trace."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from export.conversion.names import input_names, nested_nodes
from pipeline.contract.loops import BEGIN, END
from pipeline.system.errors import StageError


def fold_loops(model: ModelProto) -> bool:
    """Move the nodes between each pair of marks into the body of a `Loop`; return whether there is one."""
    graph, found = model.graph, False
    while (end := next((node for node in graph.node if _is_mark(node, END)), None)) is not None:  # inner ones end first
        begins = (node for node in graph.node if _is_mark(node, BEGIN))
        begin = next(node for node in begins if _attribute(node, "loop") == _attribute(end, "loop"))
        _fold(graph, begin, end)
        found = True
    if found:
        read = {name for node in nested_nodes(graph) for name in node.input} | {value.name for value in graph.output}
        for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
            graph.initializer.remove(tensor)  # the first number of a step, which a `Loop` counts itself
        opsets = [opset for opset in model.opset_import if opset.domain != BEGIN.partition(":")[0]]
        del model.opset_import[:]
        model.opset_import.extend(opsets)
    return found


def _is_mark(node: NodeProto, mark: str) -> bool:
    return f"{node.domain}::{node.op_type}" == mark


def _attribute(node: NodeProto, name: str) -> int:
    return int(helper.get_node_attr_value(node, name))


def _fold(graph: GraphProto, begin: NodeProto, end: NodeProto) -> None:
    """Put the nodes that change from step to step into a loop; the others stay before it, to be computed once."""
    changing, needed = set(begin.output), set(end.input)
    for node in graph.node:
        if node != end and changing.intersection(input_names(node)):
            changing.update(node.output)
    for node in reversed(graph.node):
        if node != begin and needed.intersection(node.output):
            needed.update(input_names(node))
    inside = [node for node in graph.node if node not in (begin, end) and changing & needed & {*node.output}]
    outside = [node for node in graph.node if node not in (begin, end) and node not in inside]
    read_outside = {name for node in outside for name in input_names(node)} | {value.name for value in graph.output}
    if escaped := changing & read_outside:
        raise StageError(
            f"`{min(escaped)}` is computed in a step of repeat() and used behind it; return it as a part of the state"
        )
    readers = (index for index, node in enumerate(outside) if {*end.output} & {*input_names(node)})
    outside.insert(next(readers, len(outside)), _loop(graph, begin, inside, end))
    del graph.node[:]
    graph.node.extend(outside)


def _loop(graph: GraphProto, begin: NodeProto, inside: list[NodeProto], end: NodeProto) -> NodeProto:
    infos = {value.name: value for value in graph.value_info}
    number, *values = (infos[name] for name in begin.output)
    goes_on = helper.make_tensor_value_info(end.output[0], TensorProto.BOOL, [])
    outputs = [ValueInfoProto.FromString(value.SerializeToString()) for value in (goes_on, *values)]
    for output, name in zip(outputs, end.input, strict=True):
        output.name = f"{output.name}_next"
        inside.append(helper.make_node("Identity", [name], [output.name]))
    body = helper.make_graph(inside, f"{end.name}_step", [number, goes_on, *values], outputs)
    body.value_info.extend(infos[name] for node in inside for name in node.output if name in infos)
    times = helper.make_tensor(f"{end.name}_times", TensorProto.INT64, [], [_attribute(end, "times")])
    graph.initializer.append(times)
    return helper.make_node("Loop", [times.name, "", *begin.input[1:]], end.output[1:], name=end.name, body=body)
