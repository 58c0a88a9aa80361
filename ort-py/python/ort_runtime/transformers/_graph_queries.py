"""Questions about the graphs of a model: who makes and reads values, paths, constants.

`OnnxModel` has these methods. A path is a chain of nodes, each a parent (or child) of the one
before.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

#: Nodes by the value that they make, and by those that they read.
Producers = dict[str, Any]
Readers = dict[str, list[Any]]


def subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields the bodies of all control-flow nodes, those inside of them too."""
    for node in graph.node:
        for body in bodies(node):
            yield body
            yield from subgraphs(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


class GraphQueries:
    """Reads a model."""

    model: onnx.ModelProto

    def graph(self) -> Any:
        """Returns the main graph."""
        return self.model.graph

    def graphs(self) -> list[Any]:
        """Returns the main graph and all subgraphs."""
        return [self.graph(), *subgraphs(self.graph())]

    def functions(self) -> Any:
        """Returns the functions of the model."""
        return self.model.functions

    def nodes(self) -> list[Any]:
        """Returns the nodes of all graphs."""
        return [node for graph in self.graphs() for node in graph.node]

    def get_nodes_by_op_type(self, op_type: str) -> list[Any]:
        """Returns the nodes of an operator."""
        return [node for node in self.nodes() if node.op_type == op_type]

    def get_graph_by_node(self, node: Any) -> Any:
        """Returns the graph that has a node, None if no graph has it."""
        return next((graph for graph in self.graphs() if node in graph.node), None)

    def get_graph_by_name(self, graph_name: str) -> Any:
        """Returns the graph of a name, None if there is none."""
        return next((graph for graph in self.graphs() if graph.name == graph_name), None)

    def get_opset_version(self) -> int:
        """Returns the version of ONNX's own operators. Raises RuntimeError if it is missing."""
        for opset in self.model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                return opset.version
        raise RuntimeError("ONNX model has no opset for default domain")

    def get_operator_statistics(self, include_domain: bool = False) -> dict[str, int]:
        """Returns how many nodes each operator has."""
        counts: dict[str, int] = {}
        for node in self.nodes():
            prefix = f"{node.domain}:" if include_domain and node.domain else ""
            counts[prefix + node.op_type] = counts.get(prefix + node.op_type, 0) + 1
        return counts

    def input_name_to_nodes(self, exclude_subgraphs: bool = False) -> Readers:
        """Returns the nodes that read each value."""
        readers: Readers = {}
        for node in self.graph().node if exclude_subgraphs else self.nodes():
            for name in dict.fromkeys(node.input):
                if name:
                    readers.setdefault(name, []).append(node)
        return readers

    def output_name_to_node(self, exclude_subgraphs: bool = False) -> Producers:
        """Returns the node that makes each value."""
        nodes = self.graph().node if exclude_subgraphs else self.nodes()
        return {name: node for node in nodes for name in node.output if name}

    # Inputs, outputs and constants.

    def get_graphs_input_names(self) -> list[str]:
        """Returns the names of the inputs of all graphs."""
        return [value.name for graph in self.graphs() for value in graph.input]

    def get_graphs_output_names(self) -> list[str]:
        """Returns the names of the outputs of all graphs."""
        return [value.name for graph in self.graphs() for value in graph.output]

    def get_graph_inputs_excluding_initializers(self) -> list[Any]:
        """Returns the inputs of the main graph that are no weights."""
        weights = {tensor.name for tensor in self.graph().initializer}
        return [value for value in self.graph().input if value.name not in weights]

    def find_graph_input(self, input_name: str) -> Any:
        """Returns an input of the main graph, None if there is none of that name."""
        return next((value for value in self.graph().input if value.name == input_name), None)

    def find_graph_output(self, output_name: str) -> Any:
        """Returns an output of the main graph, None if there is none of that name."""
        return next((value for value in self.graph().output if value.name == output_name), None)

    def get_initializer(self, name: str) -> Any:
        """Returns a weight of any graph, None if there is none of that name."""
        for graph in self.graphs():
            for tensor in graph.initializer:
                if tensor.name == name:
                    return tensor
        return None

    def get_constant_value(self, output_name: str) -> Any:
        """Returns the array of a weight or of a Constant's tensor, None for other values."""
        for node in self.get_nodes_by_op_type("Constant"):
            if node.output[0] == output_name:
                for attribute in node.attribute:
                    if attribute.name == "value":
                        return numpy_helper.to_array(attribute.t)
        tensor = self.get_initializer(output_name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def get_constant_input(self, node: Any) -> tuple[int | None, Any]:
        """Returns the place and the array of a node's first constant input, Nones without one."""
        for place, name in enumerate(node.input):
            value = self.get_constant_value(name)
            if value is not None:
                return place, value
        return None, None

    def find_constant_input(self, node: Any, expected_value: float, delta: float = 1e-6) -> int:
        """Returns the place of a node's constant input if it is one number near this one, or -1."""
        place, value = self.get_constant_input(node)
        if place is not None and value.size == 1 and abs(value.item() - expected_value) < delta:
            return place
        return -1

    def has_constant_input(self, node: Any, expected_value: float, delta: float = 1e-6) -> bool:
        """Whether `find_constant_input` finds one."""
        return self.find_constant_input(node, expected_value, delta) >= 0

    def is_constant_with_specified_dimension(
        self, output_name: str, dimensions: int, description: str
    ) -> bool:
        """Whether a value is a constant of this rank."""
        value = self.get_constant_value(output_name)
        return value is not None and len(value.shape) == dimensions

    def tensor_shape_to_list(self, tensor_type: Any) -> list[Any]:
        """Returns the sizes of a type: numbers, names, and "?" for unknown ones."""
        sizes = []
        for dim in tensor_type.shape.dim:
            known = dim.dim_value if dim.HasField("dim_value") else dim.dim_param
            sizes.append("?" if known == "" else known)
        return sizes

    def _value_info(self, name: str) -> Any:
        graph = self.graph()
        values = (*graph.value_info, *graph.input, *graph.output)
        return next((value for value in values if value.name == name), None)

    def get_dtype(self, name: str, symbolic_shape_helper: Any = None) -> int | None:
        """Returns ONNX's number of the type of a value's elements, None if it is not known."""
        tensor = self.get_initializer(name)
        if tensor is not None:
            return tensor.data_type
        value = self._inferred(name, symbolic_shape_helper)
        is_tensor = value is not None and value.type.HasField("tensor_type")
        return value.type.tensor_type.elem_type if is_tensor else None

    def get_shape(self, name: str, symbolic_shape_helper: Any = None) -> Any:
        """Returns the sizes of a value, None if they are not known."""
        tensor = self.get_initializer(name)
        if tensor is not None:
            return tensor.dims
        value = self._inferred(name, symbolic_shape_helper)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return self.tensor_shape_to_list(value.type.tensor_type)

    def _inferred(self, name: str, helper: Any) -> Any:
        found = self._value_info(name)
        known = getattr(helper, "known_vi_", {})
        return known.get(name) if found is None else found

    @staticmethod
    def get_node_attribute(node: Any, attribute_name: str) -> Any:
        """Returns the value of an attribute, None if the node does not have it."""
        for attribute in node.attribute:
            if attribute.name == attribute_name:
                return onnx.helper.get_attribute_value(attribute)
        return None

    @staticmethod
    def input_index(node_output: str, child_node: Any) -> int:
        """Returns the place of a value among the inputs of a node, -1 if it is none."""
        inputs = list(child_node.input)
        return inputs.index(node_output) if node_output in inputs else -1

    @staticmethod
    def has_same_value(
        tensor1: onnx.TensorProto,
        tensor2: onnx.TensorProto,
        signature_cache1: dict[str, Any] | None = None,
        signature_cache2: dict[str, Any] | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-8,
    ) -> bool:
        """Whether two tensors have one type and shape and near values. The caches are unused."""
        if tensor1.data_type != tensor2.data_type or list(tensor1.dims) != list(tensor2.dims):
            return False
        arrays = numpy_helper.to_array(tensor1), numpy_helper.to_array(tensor2)
        if tensor1.data_type == onnx.TensorProto.STRING:
            return bool(np.array_equal(*arrays))
        return bool(np.allclose(*arrays, rtol=rtol, atol=atol))

    # Neighbours and paths.

    def get_parent(
        self, node: Any, i: int, output_name_to_node: Producers | None = None
    ) -> Any:
        """Returns the node that makes input `i` of a node, None if no node does."""
        if i >= len(node.input):
            return None
        return self._producers(output_name_to_node).get(node.input[i])

    def get_parents(self, node: Any, output_name_to_node: Producers | None = None) -> list[Any]:
        """Returns the nodes that make the inputs of a node."""
        producers = self._producers(output_name_to_node)
        return [producers[name] for name in node.input if name in producers]

    def get_children(
        self, node: Any, input_name_to_nodes: Readers | None = None, output_index: int | None = None
    ) -> list[Any]:
        """Returns the nodes that read the outputs of a node, or one of them."""
        readers = self._readers(input_name_to_nodes)
        names = node.output if output_index is None else node.output[output_index : output_index + 1]
        return [reader for name in names for reader in readers.get(name, [])]

    def match_first_parent(
        self, node: Any, parent_op_type: str, output_name_to_node: Producers, exclude: Any = ()
    ) -> tuple[Any, int | None]:
        """Returns the first parent of an operator and which input it makes, or Nones."""
        for place, name in enumerate(node.input):
            parent = output_name_to_node.get(name)
            if parent is not None and parent.op_type == parent_op_type and parent not in exclude:
                return parent, place
        return None, None

    def match_parent(
        self,
        node: Any,
        parent_op_type: str,
        input_index: int | None = None,
        output_name_to_node: Producers | None = None,
        exclude: Any = (),
        return_indice: list[int] | None = None,
    ) -> Any:
        """Returns the parent of an operator at an input, or at any; None if there is none."""
        producers = self._producers(output_name_to_node)
        if input_index is None:
            parent, place = self.match_first_parent(node, parent_op_type, producers, exclude)
            if return_indice is not None and place is not None:
                return_indice.append(place)
            return parent
        parent = self.get_parent(node, input_index, producers)
        fits = parent is not None and parent.op_type == parent_op_type and parent not in exclude
        return parent if fits else None

    def match_parent_path(
        self,
        node: Any,
        parent_op_types: Sequence[str],
        parent_input_index: Sequence[int | None] | None = None,
        output_name_to_node: Producers | None = None,
        return_indice: list[int] | None = None,
    ) -> list[Any] | None:
        """Returns the parents of these operators, each through an input or any; None if one lacks.

        `return_indice` gets the inputs that were found for None.
        """
        places = parent_input_index or [None] * len(parent_op_types)
        producers, path = self._producers(output_name_to_node), []
        for op_type, place in zip(parent_op_types, places, strict=True):
            node = self.match_parent(node, op_type, place, producers, (), return_indice)
            if node is None:
                return None
            path.append(node)
        return path

    def match_parent_paths(
        self, node: Any, paths: Sequence[tuple[Sequence[str], Any]], output_name_to_node: Producers
    ) -> tuple[int, list[Any] | None, list[int] | None]:
        """Returns the first path that fits: which one, its nodes, inputs found. Else -1 and Nones."""
        for index, (op_types, places) in enumerate(paths):
            found: list[int] = []
            path = self.match_parent_path(node, op_types, places, output_name_to_node, found)
            if path:
                return index, path, found
        return -1, None, None

    def match_parent_paths_all(
        self, node: Any, paths: Sequence[tuple[Sequence[str], Any]], output_name_to_node: Producers
    ) -> tuple[list[int], list[list[Any]]]:
        """Returns which paths fit, and the nodes of each."""
        tried = [self.match_parent_path(node, *path, output_name_to_node) for path in paths]
        fitting = [index for index, path in enumerate(tried) if path]
        return fitting, [path for path in tried if path]

    def match_child_path(
        self,
        node: Any,
        child_op_types: Sequence[str],
        edges: Sequence[tuple[int, int]] | None = None,
        input_name_to_nodes: Readers | None = None,
        exclude: Any = (),
    ) -> list[Any] | None:
        """Returns the children of these operators, each of the one before; None if one lacks.

        `edges` are pairs of an output of the parent and the input of the child that reads it.
        """
        readers, path = self._readers(input_name_to_nodes), []
        for index, op_type in enumerate(child_op_types):
            output, place = edges[index] if edges else (None, None)
            children = self.get_children(node, readers, output)
            fitting = [child for child in children if child.op_type == op_type and child not in exclude]
            if output is not None:
                name = node.output[output]
                fitting = [child for child in fitting if self.input_index(name, child) == place]
            if not fitting:
                return None
            node = fitting[0]
            path.append(node)
        return path

    def find_first_child_by_type(
        self,
        node: Any,
        child_type: str,
        input_name_to_nodes: Readers | None = None,
        recursive: bool = True,
    ) -> Any:
        """Returns the nearest child of an operator, or a child's child; None if there is none."""
        readers = self._readers(input_name_to_nodes)
        return self._first(node, child_type, lambda one: self.get_children(one, readers), recursive)

    def find_first_parent_by_type(
        self,
        node: Any,
        parent_type: str,
        output_name_to_node: Producers | None = None,
        recursive: bool = True,
    ) -> Any:
        """Returns the nearest parent of an operator, or a parent's parent; None without one."""
        made = self._producers(output_name_to_node)
        return self._first(node, parent_type, lambda one: self.get_parents(one, made), recursive)

    @staticmethod
    def _first(node: Any, op_type: str, neighbours: Any, recursive: bool) -> Any:
        waiting, seen = deque(neighbours(node)), set()
        while waiting:
            one = waiting.popleft()
            if one.op_type == op_type:
                return one
            if recursive and id(one) not in seen:
                seen.add(id(one))
                waiting.extend(neighbours(one))
        return None

    def get_children_subgraph_nodes(
        self, root_node: Any, stop_nodes: Collection[Any], input_name_to_nodes: Readers | None = None
    ) -> list[Any]:
        """Returns the nodes after a node, up to `stop_nodes`, which are left out."""
        readers = self._readers(input_name_to_nodes)
        return self._between(root_node, stop_nodes, lambda one: self.get_children(one, readers))

    def get_parent_subgraph_nodes(
        self, node: Any, stop_nodes: Collection[Any], output_name_to_node: Producers | None = None
    ) -> list[Any]:
        """Returns the nodes before a node, up to `stop_nodes`, which are left out."""
        made = self._producers(output_name_to_node)
        return self._between(node, stop_nodes, lambda one: self.get_parents(one, made))

    @staticmethod
    def _between(node: Any, stop_nodes: Collection[Any], neighbours: Any) -> list[Any]:
        waiting, found = deque(neighbours(node)), []
        while waiting:
            one = waiting.popleft()
            if one not in stop_nodes and one not in found:
                found.append(one)
                waiting.extend(neighbours(one))
        return found

    def get_graph_inputs(self, current_node: Any, recursive: bool = False) -> list[str]:
        """Returns the inputs of the main graph that a node reads, or its parents too."""
        nodes = [current_node]
        if recursive:
            nodes += self.get_parent_subgraph_nodes(current_node, [])
        read = dict.fromkeys(name for node in nodes for name in node.input)
        return [name for name in read if self.find_graph_input(name) is not None]

    def is_safe_to_fuse_nodes(
        self,
        nodes_to_remove: Collection[Any],
        keep_outputs: Collection[str],
        input_name_to_nodes: Readers,
        output_name_to_node: Producers,
    ) -> bool:
        """Whether no other node reads what these nodes make, apart from `keep_outputs`."""
        made = {name for node in nodes_to_remove for name in node.output} - set(keep_outputs)
        readers = [node for name in made for node in input_name_to_nodes.get(name, [])]
        outputs = {value.name for value in self.graph().output}
        return not made & outputs and all(node in nodes_to_remove for node in readers)

    def _producers(self, known: Producers | None) -> Producers:
        return self.output_name_to_node() if known is None else known

    def _readers(self, known: Readers | None) -> Readers:
        return self.input_name_to_nodes() if known is None else known


def reads(node: Any) -> set[str]:
    """Returns the values that a node reads, those of its subgraphs too."""
    read = {name for name in node.input if name}
    holder = onnx.GraphProto(node=[node])
    for graph in subgraphs(holder):
        read |= {name for inner in graph.node for name in inner.input if name}
        read |= {value.name for value in graph.output}
    return read


def topological_order(nodes: Any) -> list[Any]:
    """Kahn's algorithm: of the nodes that are ready, the first one goes first."""
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    readers: list[list[int]] = [[] for _ in nodes]
    unmet: list[int] = []
    for index, node in enumerate(nodes):
        # A subgraph may have a value of the node's own name.
        needed = {producers[name] for name in reads(node) if name in producers} - {index}
        unmet.append(len(needed))
        for producer in needed:
            readers[producer].append(index)
    ready = [index for index, count in enumerate(unmet) if not count]
    order: list[Any] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers[index]:
            unmet[reader] -= 1
            if not unmet[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise RuntimeError("the graph has a cycle")
    return order
