"""The graphs of a model in half precision: which values are halved, and where casts go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto, helper

from ._graph_queries import bodies, subgraphs

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT

#: Attributes that name the type of an output, with what operators assume without them.
_TYPE_ATTRIBUTES = {
    "BlackmanWindow": ("output_datatype", True),
    "Cast": ("to", False),
    "EyeLike": ("dtype", False),
    "HammingWindow": ("output_datatype", True),
    "HannWindow": ("output_datatype", True),
    "MelWeightMatrix": ("output_datatype", True),
    "RandomNormal": ("dtype", True),
    "RandomNormalLike": ("dtype", False),
    "RandomUniform": ("dtype", True),
    "RandomUniformLike": ("dtype", False),
    "Bernoulli": ("dtype", False),
}


@dataclass(frozen=True)
class Precision:
    """What is converted."""

    blocked_ops: frozenset[str]
    blocked_nodes: frozenset[str]
    always_float: dict[str, set[int]]
    #: Inputs by operator that need no form in float16: they stay, or the caller forces them.
    unchecked: dict[str, list[int]]
    converts_all_weights: bool
    #: The type that blocked nodes compute in.
    wide: int
    opsets: dict[str, int]
    halve: Callable[[onnx.TensorProto], onnx.TensorProto]

    def blocks(self, node: onnx.NodeProto) -> bool:
        """Whether a node stays in the wider type: it is listed, or has no form in float16."""
        if node.op_type in self.blocked_ops or node.name in self.blocked_nodes:
            return True
        return not self._allows_half(node)

    def _allows_half(self, node: onnx.NodeProto) -> bool:
        version = self.opsets.get(node.domain)
        try:
            schema = onnx.defs.get_schema(node.op_type, version or 1, node.domain)
        except onnx.defs.SchemaError:
            return True
        types = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        free = self.unchecked.get(node.op_type, ())
        inputs = [formal for place, formal in _used(node.input, schema.inputs) if place not in free]
        outputs = [formal for _, formal in _used(node.output, schema.outputs)]
        allowed = (types.get(formal.type_str, [formal.type_str]) for formal in inputs + outputs)
        return not any("tensor(float)" in one and "tensor(float16)" not in one for one in allowed)


@dataclass
class GraphConverter:
    """Converts a graph and its subgraphs."""

    graph: onnx.GraphProto
    precision: Precision
    outer: GraphConverter | None = None
    #: Types of the elements before the conversion.
    types: dict[str, int] = field(default_factory=dict)
    #: Values that others read under another name.
    renamed: dict[str, str] = field(default_factory=dict)
    #: Weights that stay as they are.
    wide_weights: set[str] = field(default_factory=set)
    _cast: set[str] = field(default_factory=set)

    def convert_main(self, kept: bool | Collection[str]) -> None:
        """Converts the main graph; `kept` are the inputs and outputs that stay float32."""
        self._read_types()
        weights = {tensor.name for tensor in self.graph.initializer}
        before, after = [], []
        inputs = {value.name for value in self.graph.input}
        for index, value in enumerate(self.graph.input):
            if value.name not in weights and self._is_kept(value, kept):
                name = f"graph_input_cast_{index}"
                self.renamed[value.name], self.types[name] = name, FLOAT
                self._describe(value, name, HALF)
                before.append(_cast(f"graph_input_cast{index}", value.name, name, HALF))
        for index, value in enumerate(self.graph.output):
            # An input that is an output as well stays one.
            if value.name not in inputs and self._is_kept(value, kept):
                name = f"graph_output_cast_{index}"
                self._rename_producer(value.name, name)
                self._describe(value, name, HALF)
                after.append(_cast(f"graph_output_cast{index}", name, value.name, FLOAT))
        io = [*self.graph.input, *self.graph.output]
        is_kept = [value.name not in weights and self._is_kept(value, kept) for value in io]
        self._convert()
        for value, keeps in zip(io, is_kept, strict=True):
            if not keeps and value.name not in self.wide_weights:
                _halve_type(value.type)
        self._set_nodes([*before, *self.graph.node, *after])

    def convert_inner(self) -> None:
        """Converts a subgraph."""
        self._read_types()
        self._convert()
        for value in [*self.graph.input, *self.graph.output]:
            _halve_type(value.type)

    def _is_kept(self, value: onnx.ValueInfoProto, kept: bool | Collection[str]) -> bool:
        is_listed = kept if isinstance(kept, bool) else value.name in kept
        return is_listed and value.type.tensor_type.elem_type == FLOAT

    def _read_types(self) -> None:
        for value in [*self.graph.input, *self.graph.output, *self.graph.value_info]:
            self.types[value.name] = value.type.tensor_type.elem_type
        for tensor in self.graph.initializer:
            self.types[tensor.name] = tensor.data_type

    def _rename_producer(self, name: str, new: str) -> None:
        """Renames a value of the graph where it is made; its readers follow."""
        self.renamed[name] = new
        self.types[new] = self.types.get(name, FLOAT)
        for node in self.graph.node:
            node.output[:] = [new if output == name else output for output in node.output]
        for tensor in self.graph.initializer:
            if tensor.name == name:
                tensor.name = new

    def _convert(self) -> None:
        self._convert_weights()
        nodes: list[onnx.NodeProto] = []
        known = [*self.graph.value_info]
        for node in self.graph.node:
            self._rename_inputs(node)
            blocked = self.precision.blocks(node)
            always = self.precision.always_float.get(node.op_type, set())
            for place in range(len(node.input)):
                if blocked or place in always:
                    nodes.extend(self._widen(node, place))
            nodes.append(node)
            if blocked:
                nodes.extend(self._narrow(node))
            else:
                self._convert_attributes(node)
            for body in bodies(node):
                GraphConverter(body, self.precision, self).convert_inner()
        for value in known:
            _halve_type(value.type)
        if self.outer is not None:
            for value in self.graph.output:
                value.name = self._current(value.name)
        self._set_nodes(nodes)

    def _convert_weights(self) -> None:
        halved = set(self._read_in_half())
        for tensor in self.graph.initializer:
            if tensor.data_type != FLOAT:
                continue
            if self.precision.converts_all_weights or tensor.name in halved:
                self.precision.halve(tensor)
            else:
                self.wide_weights.add(tensor.name)

    def _read_in_half(self) -> Iterator[str]:
        """Yields the values that a converted node or an output reads, or no one at all."""
        read: set[str] = set()
        for graph in (self.graph, *subgraphs(self.graph)):
            for node in graph.node:
                always = self.precision.always_float.get(node.op_type, set())
                for place, name in enumerate(node.input):
                    name = self.renamed.get(name, name)
                    read.add(name)
                    if place not in always and not self.precision.blocks(node):
                        yield name
            yield from (self.renamed.get(value.name, value.name) for value in graph.output)
        yield from (tensor.name for tensor in self.graph.initializer if tensor.name not in read)

    def _rename_inputs(self, node: onnx.NodeProto) -> None:
        node.input[:] = [self._current(name) for name in node.input]

    def _current(self, name: str) -> str:
        scope: GraphConverter | None = self
        while scope is not None:
            if name in scope.renamed:
                return scope.renamed[name]
            if name in scope.types and scope.outer is not None:
                return name
            scope = scope.outer
        return name

    def _scope_of(self, name: str) -> GraphConverter | None:
        """Returns the innermost graph that has a value of this name."""
        scope: GraphConverter | None = self
        while scope is not None and name not in scope.types:
            scope = scope.outer
        return scope

    def _type(self, name: str) -> int:
        scope = self._scope_of(name)
        return TensorProto.UNDEFINED if scope is None else scope.types[name]

    def _stays_wide(self, name: str) -> bool:
        scope = self._scope_of(name)
        return scope is not None and name in scope.wide_weights

    def _widen(self, node: onnx.NodeProto, place: int) -> Iterator[onnx.NodeProto]:
        """Casts an input of a node to the wider type; yields the Cast, if it is a new one."""
        name = node.input[place]
        if not name or self._type(name) != FLOAT or self._stays_wide(name):
            return
        wide = f"{name}_cast_to_fp32"
        node.input[place] = wide
        if wide not in self._cast:
            self._cast.add(wide)
            self._add_value(wide, self.precision.wide)
            yield _cast(f"{wide}_node", name, wide, self.precision.wide)

    def _narrow(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Casts the outputs of a blocked node to float16."""
        for place, name in enumerate(node.output):
            if name and self._type(name) == FLOAT:
                wide = f"{name}_cast_to_fp16"
                node.output[place] = wide
                self._add_value(wide, self.precision.wide)
                yield _cast(f"{wide}_node", wide, name, HALF)

    def _convert_attributes(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                self.precision.halve(attribute.t)
            for tensor in attribute.tensors:
                self.precision.halve(tensor)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                values = [attribute.f] if attribute.name == "value_float" else list(attribute.floats)
                dims = [] if attribute.name == "value_float" else [len(values)]
                made = self.precision.halve(helper.make_tensor("value", FLOAT, dims, values))
                attribute.CopyFrom(helper.make_attribute("value", made))
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = helper.make_tensor("value", HALF, [1], [0.0])
            node.attribute.append(helper.make_attribute("value", zero))
        name, is_float = _TYPE_ATTRIBUTES.get(node.op_type, ("", False))
        found = [attribute for attribute in node.attribute if attribute.name == name]
        for attribute in found:
            attribute.i = HALF if attribute.i == FLOAT else attribute.i
        if is_float and not found:
            node.attribute.append(helper.make_attribute(name, HALF))

    def _describe(self, value: onnx.ValueInfoProto, name: str, kind: int) -> None:
        made = self.graph.value_info.add()
        made.CopyFrom(value)
        made.name, made.type.tensor_type.elem_type = name, kind

    def _add_value(self, name: str, kind: int) -> None:
        self.graph.value_info.append(helper.make_tensor_value_info(name, kind, None))

    def _set_nodes(self, nodes: list[onnx.NodeProto]) -> None:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del self.graph.node[:]
        self.graph.node.extend(copies)


def _used(names: Any, formals: Any) -> list[tuple[int, Any]]:
    """Returns the places of the values that a node has, each with what the schema says of it."""
    last = len(formals) - 1
    places = (place for place, name in enumerate(names) if name and last >= 0)
    return [(place, formals[min(place, last)]) for place in places]


def _cast(name: str, source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=name, to=kind)


def _halve_type(kind: Any) -> None:
    """Makes a float32 type float16, inside of sequences and optionals too."""
    if kind.HasField("sequence_type"):
        _halve_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _halve_type(kind.optional_type.elem_type)
    elif kind.HasField("tensor_type") and kind.tensor_type.elem_type == FLOAT:
        kind.tensor_type.elem_type = HALF
