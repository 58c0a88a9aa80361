"""`OnnxModel`: a model with methods that read and change its graphs.

Needs the package `onnx`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from ._graph_queries import GraphQueries, reads, topological_order

logger = logging.getLogger(__name__)


class OnnxModel(GraphQueries):
    """A model. Changes go to `model`, the protobuf message.

    Example::

        model = OnnxModel(onnx.load("model.onnx"))
        model.get_operator_statistics()
        model.convert_float_to_float16()
        model.save_model_to_file("half.onnx")
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.initialize(model)

    def initialize(self, model: onnx.ModelProto) -> None:
        """Takes another model."""
        self.model = model
        self.shape_infer_helper: Any = None
        self.enable_shape_infer = True
        self.all_graphs: Any = None
        self._next_numbers: dict[str, int] = {}

    def disable_shape_inference(self) -> None:
        """Lets `infer_runtime_shape` do nothing."""
        self.enable_shape_infer = False

    def infer_runtime_shape(
        self, dynamic_axis_mapping: dict[str, int] | None = None, update: bool = False
    ) -> Any:
        """Returns a helper that knows the shapes with these sizes, None if that fails."""
        from .shape_infer_helper import SymbolicShapeInferenceHelper

        if self.enable_shape_infer and (self.shape_infer_helper is None or update):
            self.shape_infer_helper = SymbolicShapeInferenceHelper(self.model)
            if not self.shape_infer_helper.infer(dynamic_axis_mapping or {}):
                self.disable_shape_inference()
        return self.shape_infer_helper if self.enable_shape_infer else None

    def clean_shape_infer(self) -> None:
        """Forgets the inferred shapes."""
        self.shape_infer_helper = None

    # Adding, removing, renaming.

    def _graph_of(self, graph_name: str | None) -> Any:
        graph = self.graph() if graph_name is None else self.get_graph_by_name(graph_name)
        if graph is None:
            raise ValueError(f"the model has no graph named {graph_name!r}")
        return graph

    def add_node(self, node: Any, graph_name: str | None = None) -> None:
        """Appends a node to a graph, the main one if None."""
        self._graph_of(graph_name).node.append(node)

    def add_nodes(
        self, nodes_to_add: Iterable[Any], node_name_to_graph_name: dict[str, str] | None = None
    ) -> None:
        """Appends nodes, each to the graph that its name stands for."""
        for node in nodes_to_add:
            names = node_name_to_graph_name
            self.add_node(node, None if names is None else names[node.name])

    def add_initializer(self, tensor: Any, graph_name: str | None = None) -> None:
        """Appends a weight to a graph."""
        self._graph_of(graph_name).initializer.append(tensor)

    def add_input(self, input: Any, graph_name: str | None = None) -> None:
        """Appends an input to a graph."""
        self._graph_of(graph_name).input.append(input)

    def remove_node(self, node: Any) -> None:
        """Removes a node from the graph that has it."""
        for graph in self.graphs():
            if node in graph.node:
                graph.node.remove(node)
                return
        logger.warning("Failed to remove node %s", node.name)

    def remove_nodes(self, nodes_to_remove: Iterable[Any]) -> None:
        """Removes nodes."""
        for node in list(nodes_to_remove):
            self.remove_node(node)

    def remove_initializer(self, tensor: Any) -> None:
        """Removes a weight from the graph that has it."""
        for graph in self.graphs():
            if tensor in graph.initializer:
                graph.initializer.remove(tensor)
                return
        logger.warning("Failed to remove initializer %s", tensor.name)

    @staticmethod
    def replace_node_input(node: Any, old_input_name: str, new_input_name: str) -> None:
        """Lets a node read another value."""
        node.input[:] = [new_input_name if n == old_input_name else n for n in node.input]

    @staticmethod
    def replace_node_output(node: Any, old_output_name: str, new_output_name: str) -> None:
        """Lets a node make a value under another name."""
        node.output[:] = [new_output_name if n == old_output_name else n for n in node.output]

    def replace_input_of_all_nodes(self, old_input_name: str, new_input_name: str) -> None:
        """Lets all nodes read another value."""
        for node in self.nodes():
            self.replace_node_input(node, old_input_name, new_input_name)

    def replace_output_of_all_nodes(self, old_output_name: str, new_output_name: str) -> None:
        """Lets the node that makes a value make it under another name."""
        for node in self.nodes():
            self.replace_node_output(node, old_output_name, new_output_name)

    def rename_graph_output(self, old_name: str, new_name: str) -> None:
        """Gives an output of the main graph another name. Nothing happens if it has none."""
        output = self.find_graph_output(old_name)
        if output is None:
            return
        output.name = new_name
        self.replace_output_of_all_nodes(old_name, new_name)
        self.replace_input_of_all_nodes(old_name, new_name)

    def add_prefix_to_names(self, prefix: str) -> None:
        """Puts a prefix before the names of values, apart from inputs and outputs of the model."""
        graph = self.graph()
        kept = {"", *(value.name for value in (*graph.input, *graph.output))}

        def renamed(name: str) -> str:
            return name if name in kept else prefix + name

        for one in self.graphs():
            for node in one.node:
                node.input[:] = [renamed(name) for name in node.input]
                node.output[:] = [renamed(name) for name in node.output]
            inner = [] if one is graph else [*one.input, *one.output]
            for named in (*one.initializer, *one.value_info, *inner):
                named.name = renamed(named.name)

    def create_node_name(self, op_type: str, name_prefix: str | None = None) -> str:
        """Returns a name that no node has: a prefix, the operator without one, and a number."""
        prefix = (name_prefix or op_type) + ("" if (name_prefix or "").endswith("_") else "_")
        taken = {node.name for node in self.nodes()}
        number = self._next_numbers.get(prefix, 0)
        while f"{prefix}{number}" in taken:
            number += 1
        self._next_numbers[prefix] = number + 1
        return f"{prefix}{number}"

    def change_graph_input_type(self, graph_input: Any, new_type: int) -> tuple[Any, list[Any]]:
        """Gives an input another type, with a Cast where nodes read it; Casts to it are removed.

        Returns the new Cast and the nodes that were removed, (None, []) if nothing changes.
        """
        old_type = graph_input.type.tensor_type.elem_type
        if old_type == new_type:
            return None, []
        name, readers = graph_input.name, self.input_name_to_nodes().get(graph_input.name, [])
        removed = [n for n in readers if n.op_type == "Cast" and self._casts_to(n) == new_type]
        for node in removed:
            self.replace_input_of_all_nodes(node.output[0], name)
        self.remove_nodes(removed)
        others = [node for node in readers if node not in removed]
        added = None
        if others:
            node_name = self.create_node_name("Cast")
            made = f"{node_name}_{name}"
            for node in others:
                self.replace_node_input(node, name, made)
            added = helper.make_node("Cast", [name], [made], name=node_name, to=old_type)
            self.add_node(added)
        graph_input.type.tensor_type.elem_type = new_type
        return added, removed

    def change_graph_output_type(self, graph_output: Any, new_type: int) -> Any:
        """Gives an output another type by a Cast, which is returned; None if nothing changes."""
        if graph_output.type.tensor_type.elem_type == new_type:
            return None
        name, node_name = graph_output.name, self.create_node_name("Cast")
        made = f"{node_name}_{name}"
        self.replace_output_of_all_nodes(name, made)
        self.replace_input_of_all_nodes(name, made)
        added = helper.make_node("Cast", [made], [name], name=node_name, to=new_type)
        self.add_node(added)
        graph_output.type.tensor_type.elem_type = new_type
        return added

    @staticmethod
    def _casts_to(node: Any) -> int:
        return GraphQueries.get_node_attribute(node, "to")

    # Cleaning up.

    def remove_cascaded_cast_nodes(self) -> None:
        """Lets a Cast of a Cast read what the first one reads; the first goes if no one else does."""
        made = self.output_name_to_node()
        for node in self.get_nodes_by_op_type("Cast"):
            first = made.get(node.input[0])
            while first is not None and first.op_type == "Cast":
                node.input[0] = first.input[0]
                first = made.get(first.input[0])
        outputs = set(self.get_graphs_output_names())
        readers = self.input_name_to_nodes()
        casts = self.get_nodes_by_op_type("Cast")
        self.remove_nodes(
            [c for c in casts if c.output[0] not in outputs and c.output[0] not in readers]
        )

    def remove_useless_cast_nodes(self) -> None:
        """Removes Casts to the type that a value already has."""
        shapes = self.infer_runtime_shape(update=True)
        outputs = set(self.get_graphs_output_names())
        for node in self.get_nodes_by_op_type("Cast"):
            source, target = node.input[0], node.output[0]
            if self.get_dtype(source, shapes) == self._casts_to(node) and target not in outputs:
                self.replace_input_of_all_nodes(target, source)
                self.remove_node(node)

    def remove_unused_constant(self) -> None:
        """Removes Constant nodes that no one reads."""
        read = {*self.input_name_to_nodes(), *self.get_graphs_output_names()}
        constants = self.get_nodes_by_op_type("Constant")
        self.remove_nodes([node for node in constants if node.output[0] not in read])

    def remove_duplicated_initializer(self, cache: dict[str, Any] | None = None) -> None:
        """Keeps one of the weights of the main graph that have the same bits. The cache is unused."""
        first: dict[tuple[Any, ...], str] = {}
        for tensor in list(self.graph().initializer):
            array = numpy_helper.to_array(tensor)
            is_text = array.dtype.hasobject
            content = tuple(array.ravel().tolist()) if is_text else array.tobytes()
            key = tensor.data_type, tuple(tensor.dims), content
            if key in first:
                self.replace_input_of_all_nodes(tensor.name, first[key])
                self.remove_initializer(tensor)
            else:
                first[key] = tensor.name

    def prune_graph(
        self, outputs: list[str] | None = None, allow_remove_graph_inputs: bool = True
    ) -> None:
        """Removes the nodes, weights and inputs that no output needs, or none of these outputs."""
        graph = self.graph()
        if outputs is not None:
            kept = [value for value in graph.output if value.name in outputs]
            del graph.output[:]
            graph.output.extend(kept)
        needed = {value.name for value in graph.output}
        for node in reversed(topological_order(graph.node)):
            if needed & set(node.output):
                needed |= reads(node)
        self.remove_nodes([node for node in graph.node if not needed & set(node.output)])
        self.update_graph(allow_remove_graph_inputs=allow_remove_graph_inputs)

    def update_graph(self, verbose: bool = False, allow_remove_graph_inputs: bool = False) -> None:
        """Removes weights and Constants that no one reads, and, if asked, inputs too."""
        self.remove_unused_constant()
        graph = self.graph()
        read = {value.name for value in graph.output}
        for node in graph.node:
            read |= reads(node)
        for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
            graph.initializer.remove(tensor)
        if allow_remove_graph_inputs:
            for value in [value for value in graph.input if value.name not in read]:
                graph.input.remove(value)

    @staticmethod
    def graph_topological_sort(graph: Any, is_deterministic: bool = False) -> None:
        """Sorts the nodes of a graph, so that each comes after those that it reads."""
        nodes = topological_order(graph.node)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)

    def topological_sort(
        self, is_deterministic: bool = False, dump_model_on_failure: bool = False
    ) -> None:
        """Sorts the nodes of all graphs. Raises RuntimeError if a graph has a cycle."""
        for graph in self.graphs()[::-1]:
            self.graph_topological_sort(graph, is_deterministic)

    # Precision and files.

    def use_float16(self) -> bool:
        """Whether a weight, an input or a value of the main graph is of float16."""
        graph = self.graph()
        values = (*graph.input, *graph.value_info)
        kinds = {value.type.tensor_type.elem_type for value in values}
        return TensorProto.FLOAT16 in kinds | {tensor.data_type for tensor in graph.initializer}

    def convert_float_to_float16(
        self, use_symbolic_shape_infer: bool = True, **kwargs: Any
    ) -> None:
        """Converts the model to float16; see `float16.convert_float_to_float16`.

        Inputs and outputs stay float32 unless `keep_io_types` says otherwise.
        """
        from .float16 import convert_float_to_float16

        if use_symbolic_shape_infer and not kwargs.get("disable_shape_infer"):
            shapes = self.infer_runtime_shape(update=True)
            if shapes is not None:
                self.model = shapes.model_with_shapes()
        self.model = convert_float_to_float16(self.model, **{"keep_io_types": True, **kwargs})

    def convert_model_float32_to_float16(self, cast_input_output: bool = True) -> None:
        """Converts the model to float16."""
        logger.warning("convert_model_float32_to_float16 is replaced by convert_float_to_float16")
        self.convert_float_to_float16(keep_io_types=cast_input_output)

    @staticmethod
    def save(
        model: onnx.ModelProto,
        output_path: str | os.PathLike[str],
        save_as_external_data: bool = False,
        all_tensors_to_one_file: bool = True,
        size_threshold: int = 1024,
        convert_attribute: bool = False,
    ) -> None:
        """Writes a model, with weights of at least `size_threshold` bytes beside it if asked."""
        path = Path(output_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not save_as_external_data:
            onnx.save_model(model, str(path))
            return
        location = path.name + ".data"
        if all_tensors_to_one_file:
            # onnx appends to a file that is there.
            path.with_name(location).unlink(missing_ok=True)
        onnx.save_model(
            model,
            str(path),
            save_as_external_data=True,
            all_tensors_to_one_file=all_tensors_to_one_file,
            location=location if all_tensors_to_one_file else None,
            size_threshold=size_threshold,
            convert_attribute=convert_attribute,
        )

    def save_model_to_file(
        self,
        output_path: str | os.PathLike[str],
        use_external_data_format: bool = False,
        all_tensors_to_one_file: bool = True,
        size_threshold: int = 1024,
        convert_attribute: bool = False,
    ) -> None:
        """Sorts the nodes and writes the model; see `save`."""
        self.topological_sort()
        self.save(
            self.model,
            output_path,
            use_external_data_format,
            all_tensors_to_one_file,
            size_threshold,
            convert_attribute,
        )
