"""`ONNXModel`: a model with methods that read and change its main graph.

Needs the package `onnx`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..transformers._graph_queries import reads, subgraphs, topological_order
from ..transformers.onnx_model import OnnxModel


class ONNXModel:
    """A model; changes go to `model`, the protobuf message.

    Example::

        model = ONNXModel(onnx.load("model.onnx"))
        model.replace_gemm_with_matmul()
        model.save_model_to_file("products.onnx")
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    def graph(self) -> Any:
        """Returns the main graph."""
        return self.model.graph

    def nodes(self) -> Any:
        """Returns the nodes of the main graph."""
        return self.model.graph.node

    def initializer(self) -> Any:
        """Returns the weights of the main graph."""
        return self.model.graph.initializer

    def ir_version(self) -> int:
        """Returns the version of the file format."""
        return self.model.ir_version

    def opset_import(self) -> Any:
        """Returns the operator sets."""
        return self.model.opset_import

    def set_opset_import(self, domain: str, version: int) -> None:
        """Sets the version of a domain, which is added if it is missing."""
        for opset in self.model.opset_import:
            if opset.domain == domain:
                opset.version = version
                return
        self.model.opset_import.append(helper.make_opsetid(domain, version))

    # Weights.

    def initializer_extend(self, inits: Iterable[Any]) -> None:
        """Adds weights.

        Raises:
            ValueError: there are none.
        """
        added = list(inits)
        if not added:
            raise ValueError("there are no initializers to add")
        for tensor in added:
            self.add_initializer(tensor)

    def add_initializer(self, tensor: Any) -> None:
        """Adds a weight, unless there is one of that name."""
        if self.get_initializer(tensor.name) is None:
            self.model.graph.initializer.append(tensor)

    def get_initializer(self, name: str) -> Any:
        """Returns the weight of that name, None if there is no such."""
        return next((w for w in self.model.graph.initializer if w.name == name), None)

    def get_initializer_name_set(self) -> set[str]:
        """Returns the names of weights."""
        return {weight.name for weight in self.model.graph.initializer}

    def get_constant_value(self, output_name: str) -> np.ndarray | None:
        """Returns a weight, or what a Constant node makes, None for other values."""
        weight = self.get_initializer(output_name)
        if weight is not None:
            return numpy_helper.to_array(weight)
        for node in self.model.graph.node:
            if node.op_type == "Constant" and output_name in node.output:
                held = (a.t for a in node.attribute if a.name == "value")
                return next((numpy_helper.to_array(tensor) for tensor in held), None)
        return None

    def remove_initializer(self, tensor: Any) -> None:
        """Takes out a weight, and the input of its name."""
        graph = self.model.graph
        if tensor in graph.initializer:
            graph.initializer.remove(tensor)
            _remove(graph.input, {tensor.name})

    def remove_initializers(self, init_to_remove: Iterable[Any]) -> None:
        """Takes out weights."""
        for tensor in init_to_remove:
            self.remove_initializer(tensor)

    def find_nodes_by_initializer(self, graph: Any, initializer: Any) -> list[Any]:
        """Returns the nodes of a graph that read a weight."""
        return [node for node in graph.node if initializer.name in node.input]

    def get_largest_initializer_name_suffix(self, initializer_name_prefix: str) -> int:
        """Returns the largest number after the prefix in names of weights, -1 if there is none."""
        return _largest_number(self.model.graph.initializer, initializer_name_prefix)

    # Values.

    def find_graph_input(self, input_name: str) -> Any:
        """Returns the input of that name, None if there is no such."""
        return next((v for v in self.model.graph.input if v.name == input_name), None)

    def find_graph_output(self, output_name: str) -> Any:
        """Returns the output of that name, None if there is no such."""
        return next((v for v in self.model.graph.output if v.name == output_name), None)

    def is_graph_input(self, tensor_name: str) -> bool:
        """Returns whether it is an input."""
        return self.find_graph_input(tensor_name) is not None

    def is_graph_output(self, output_name: str) -> bool:
        """Returns whether it is an output."""
        return self.find_graph_output(output_name) is not None

    def get_tensor_type(self, tensor_name: str) -> Any:
        """Returns the type and shape of a value, None if the model does not say."""
        graph = self.model.graph
        for values in (graph.value_info, graph.input, graph.output):
            for value in values:
                if value.name == tensor_name and value.type.HasField("tensor_type"):
                    return value.type.tensor_type
        return None

    def get_non_initializer_inputs(self) -> set[str]:
        """Returns the names of inputs that have no weight as default."""
        return {v.name for v in self.model.graph.input} - self.get_initializer_name_set()

    def input_name_to_nodes(self) -> dict[str, list[Any]]:
        """Returns the nodes that read each value."""
        readers: dict[str, list[Any]] = {}
        for node in self.model.graph.node:
            for name in filter(None, dict.fromkeys(node.input)):
                readers.setdefault(name, []).append(node)
        return readers

    def output_name_to_node(self) -> dict[str, Any]:
        """Returns the node that makes each value."""
        return {name: node for node in self.model.graph.node for name in node.output if name}

    # Nodes.

    def get_children(self, node: Any, input_name_to_nodes: Any = None) -> list[Any]:
        """Returns the nodes that read outputs of a node."""
        readers = input_name_to_nodes or self.input_name_to_nodes()
        return [reader for name in node.output for reader in readers.get(name, ())]

    def get_parents(self, node: Any, output_name_to_node: Any = None) -> list[Any]:
        """Returns the nodes that make inputs of a node."""
        producers = output_name_to_node or self.output_name_to_node()
        return [producers[name] for name in node.input if name in producers]

    def get_parent(self, node: Any, idx: int, output_name_to_node: Any = None) -> Any:
        """Returns the node that makes an input of a node, None if no node does."""
        if idx >= len(node.input):
            return None
        producers = output_name_to_node or self.output_name_to_node()
        return producers.get(node.input[idx])

    def find_node_by_name(self, node_name: str, new_nodes_list: list[Any], graph: Any) -> Any:
        """Returns the node of that name in a graph or a list, None if there is no such."""
        nodes = (*graph.node, *new_nodes_list)
        return next((node for node in nodes if node.name == node_name), None)

    def get_largest_node_name_suffix(self, node_name_prefix: str) -> int:
        """Returns the largest number after the prefix in names of nodes, -1 if there is none."""
        return _largest_number(self.model.graph.node, node_name_prefix)

    def add_node(self, node: Any) -> None:
        """Adds a node at the end."""
        self.model.graph.node.append(node)

    def add_nodes(self, nodes_to_add: Iterable[Any]) -> None:
        """Adds nodes at the end."""
        self.model.graph.node.extend(nodes_to_add)

    def remove_node(self, node: Any) -> None:
        """Takes out a node."""
        if node in self.model.graph.node:
            self.model.graph.node.remove(node)

    def remove_nodes(self, nodes_to_remove: Iterable[Any]) -> None:
        """Takes out nodes."""
        for node in nodes_to_remove:
            self.remove_node(node)

    @staticmethod
    def replace_node_input(node: Any, old_input_name: str, new_input_name: str) -> None:
        """Lets a node read another value."""
        _replace(node.input, old_input_name, new_input_name)

    def replace_input_of_all_nodes(self, old_input_name: str, new_input_name: str) -> None:
        """Lets all nodes read another value."""
        for node in self.model.graph.node:
            _replace(node.input, old_input_name, new_input_name)

    def replace_input_of_nodes(
        self, old_input_name: str, new_input_name: str, node_names_set: Iterable[str]
    ) -> None:
        """Lets the nodes of these names read another value."""
        for node in self._named(node_names_set):
            _replace(node.input, old_input_name, new_input_name)

    @staticmethod
    def replace_node_output(node: Any, old_output_name: str, new_output_name: str) -> None:
        """Renames an output of a node."""
        _replace(node.output, old_output_name, new_output_name)

    def replace_output_of_all_nodes(self, old_output_name: str, new_output_name: str) -> None:
        """Renames an output of whichever node makes it."""
        for node in self.model.graph.node:
            _replace(node.output, old_output_name, new_output_name)

    def replace_output_of_nodes(
        self, old_output_name: str, new_output_name: str, node_names_set: Iterable[str]
    ) -> None:
        """Renames an output of the nodes of these names."""
        for node in self._named(node_names_set):
            _replace(node.output, old_output_name, new_output_name)

    def _named(self, names: Iterable[str]) -> list[Any]:
        """Returns the nodes of these names."""
        wanted = set(names)
        return [node for node in self.model.graph.node if node.name in wanted]

    # The whole graph.

    def replace_gemm_with_matmul(self) -> None:
        """Writes Gemm nodes of all graphs as MatMul and Add, where these compute the same.

        That is, with `alpha` and `beta` 1, and `transA` 0. A weight that `transB` turns is turned
        itself if no one else reads it, else a copy is.
        """
        graphs = [self.model.graph, *subgraphs(self.model.graph)]
        uses = Counter(name for graph in graphs for node in graph.node for name in node.input)
        uses.update(value.name for graph in graphs for value in graph.output)
        for graph in graphs:
            nodes: list[Any] = []
            for node in graph.node:
                nodes += self._product(graph, node, uses) if _is_plain_gemm(node) else [node]
            _keep(graph.node, nodes)

    def _product(self, graph: Any, node: Any, uses: Counter[str]) -> list[Any]:
        """Returns the nodes of a Gemm in a graph."""
        nodes, right = [], node.input[1]
        if _attributes(node).get("transB", 0):
            right = self._turned(graph, right, uses[right])
            if right is None:
                right = node.input[1] + "_Transposed"
                turn = helper.make_node(
                    "Transpose", [node.input[1]], [right], node.name + "_Transpose"
                )
                nodes.append(turn)
        biased = len(node.input) > 2 and bool(node.input[2])
        product = node.output[0] + "_MatMul" if biased else node.output[0]
        inputs = [node.input[0], right]
        nodes.append(helper.make_node("MatMul", inputs, [product], node.name + "_MatMul"))
        if biased:
            inputs = [product, node.input[2]]
            nodes.append(helper.make_node("Add", inputs, node.output, node.name + "_Add"))
        return nodes

    def _turned(self, graph: Any, name: str, uses: int) -> str | None:
        """Returns the name of a weight transposed, None if it is no weight."""
        for holder in (graph, self.model.graph):
            weight = next((w for w in holder.initializer if w.name == name), None)
            if weight is None:
                continue
            turned = np.ascontiguousarray(numpy_helper.to_array(weight).T)
            if uses == 1:
                weight.CopyFrom(numpy_helper.from_array(turned, name))
                _remove(holder.input, {name})
                return name
            if all(w.name != name + "_Transposed" for w in holder.initializer):
                copy = numpy_helper.from_array(turned, name + "_Transposed")
                holder.initializer.append(copy)
            return name + "_Transposed"
        return None

    def topological_sort(self) -> None:
        """Sorts the nodes, so that each comes after those that it reads."""
        _keep(self.model.graph.node, topological_order(self.model.graph.node))

    def remove_unused_constant(self) -> None:
        """Takes out Constant nodes that no one reads."""
        graph = self.model.graph
        read = {name for node in graph.node for name in reads(node)}
        read |= {value.name for value in graph.output}
        kept = [n for n in graph.node if n.op_type != "Constant" or read.intersection(n.output)]
        _keep(graph.node, kept)

    def clean_initializers(self) -> tuple[Any, set[str]]:
        """Takes out weights that no one reads. Returns the graph, and names that no one defines."""
        return _clean_initializers_helper(self.model.graph, self.model)

    def save_model_to_file(
        self, output_path: str | os.PathLike[str], use_external_data_format: bool = False
    ) -> None:
        """Sorts the nodes and writes the model, with its weights in a file beside it if asked."""
        self.topological_sort()
        OnnxModel.save(self.model, output_path, use_external_data_format)


def _attributes(node: Any) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _is_plain_gemm(node: Any) -> bool:
    """Returns whether a node is a Gemm that is a product, and a sum at most."""
    attributes = _attributes(node) if node.op_type == "Gemm" else {"alpha": None}
    factors = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    return factors == (1.0, 1.0) and not attributes.get("transA", 0)


def _keep(nodes: Any, kept: list[Any]) -> None:
    """Puts these nodes in the place of all that a graph has."""
    copies = []
    for node in kept:
        copies.append(onnx.NodeProto())
        copies[-1].CopyFrom(node)
    del nodes[:]
    nodes.extend(copies)


def _remove(field: Any, names: set[str]) -> None:
    """Takes the items of these names out of a repeated field, without a copy of the others."""
    for place in reversed(range(len(field))):
        if field[place].name in names:
            del field[place]


def _replace(names: Any, old: str, new: str) -> None:
    for place, name in enumerate(names):
        if name == old:
            names[place] = new


def _largest_number(items: Any, prefix: str) -> int:
    """Returns the largest number that follows a prefix in the names of items, -1 if none does."""
    ends = (item.name[len(prefix) :] for item in items if item.name.startswith(prefix))
    return max((int(end) for end in ends if end.isdecimal()), default=-1)


def _clean_initializers_helper(graph: Any, model: Any) -> tuple[Any, set[str]]:
    """Takes out weights of a graph that no one reads.

    Returns:
        The graph, and the names that its nodes read and no one in it defines.

    Raises:
        RuntimeError: that is so in the main graph, so the model is faulty.
    """
    read = {name for node in graph.node for name in reads(node)}
    read |= {value.name for value in graph.output}
    unused = {weight.name for weight in graph.initializer} - read
    _remove(graph.initializer, unused)
    _remove(graph.input, unused)
    defined = {item.name for item in (*graph.initializer, *graph.input)}
    defined |= {sparse.values.name for sparse in graph.sparse_initializer}
    holders = [graph, *subgraphs(graph)]
    defined |= {name for holder in holders for node in holder.node for name in node.output}
    for holder in holders[1:]:
        defined |= {item.name for item in (*holder.initializer, *holder.input)}
    missing = read - defined
    if missing and graph is model.graph:
        raise RuntimeError(f"Invalid model with unknown initializers/tensors.{missing}")
    return graph, missing
