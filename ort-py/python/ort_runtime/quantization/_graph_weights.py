"""Constants of graphs and of the bodies in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import GraphProto, NodeProto, TensorProto

#: The types of weights that are quantized.
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class Found:
    """A constant, and the graph that has it."""

    tensor: TensorProto
    graph: GraphProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yields a graph and the bodies in it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs(body)


def _reads(graph: GraphProto) -> Iterator[str]:
    """Yields the values that nodes of a graph and of its bodies read, and its outputs."""
    for node in graph.node:
        yield from node.input
        for body in bodies(node):
            yield from _reads(body)
    yield from (output.name for output in graph.output)


def remove_unread(graph: GraphProto) -> None:
    """Takes out the weights of a body that nothing reads any more."""
    read = set(_reads(graph))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def constant(name: str, stack: list[GraphProto]) -> Found | None:
    """Returns the weight of that name in the innermost graph that has the name."""
    for graph in reversed(stack):
        for tensor in graph.initializer:
            if tensor.name == name:
                return Found(tensor, graph)
        inner = {value for node in graph.node for value in node.output}
        if name in inner or any(value.name == name for value in graph.input):
            return None
    return None
