"""The model that blocks add nodes to."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import TensorProto, helper

_OPSET = 17
_IR_VERSION = 8


class Accessor:
    """A model that blocks add to."""

    def __init__(self, model: onnx.ModelProto, path: str | None = None) -> None:
        self.model = model
        self.path = path

    def node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        """Adds a node with one output, whose name it returns."""
        output = self.name(operator)
        node = helper.make_node(operator, inputs, [output], name=output, **attributes)
        self.model.graph.node.append(node)
        return output

    def name(self, kind: str) -> str:
        """Returns a name that nothing in the model has."""
        graph = self.model.graph
        taken = {output for node in graph.node for output in node.output}
        taken.update(value.name for value in (*graph.input, *graph.initializer))
        number = sum(node.op_type == kind for node in graph.node)
        while f"onnx::{kind}::{number}" in taken:
            number += 1
        return f"onnx::{kind}::{number}"

    def constant(self, value: Any, name: str = "constant") -> str:
        """Adds an initializer of type float, whose name it returns."""
        import numpy as np

        made = self.name(name)
        while any(tensor.name == made for tensor in self.model.graph.initializer):
            made += "_"
        array = np.asarray(value, np.float32)
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(array, made))
        return made

    def value(self, name: str) -> onnx.ValueInfoProto:
        """Returns the type of an input, an output or a value."""
        graph = self.model.graph
        for value in (*graph.output, *graph.input, *graph.value_info):
            if value.name == name:
                return value
        for tensor in graph.initializer:
            if tensor.name == name:
                return helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        inferred = onnx.shape_inference.infer_shapes(self.model).graph
        for value in (*inferred.value_info, *inferred.output):
            if value.name == name:
                return value
        raise LookupError(f"{name} is not a value of the model with a known type")

    def input_like(self, like: str, name: str, data_type: int | None = None, rank: int = -1) -> str:
        """Adds an input of the shape of a value, without dimension 1 if `rank` is one less."""
        if all(value.name != name for value in self.model.graph.input):
            made = onnx.ValueInfoProto()
            made.CopyFrom(self.value(like))
            made.name = name
            tensor = made.type.tensor_type
            if data_type is not None:
                tensor.elem_type = data_type
            if rank >= 0 and len(tensor.shape.dim) > rank:
                del tensor.shape.dim[1]
            self.model.graph.input.append(made)
        return name


_current: contextvars.ContextVar[Accessor | None] = contextvars.ContextVar("model", default=None)


def accessor() -> Accessor:
    """Returns the model that blocks add to now."""
    current = _current.get()
    if current is None:
        raise RuntimeError("call blocks inside of `with onnxblock.base(model):`")
    return current


@contextlib.contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[Accessor]:
    """Lets the blocks that are called inside of it add to this model."""
    if _current.get() is not None:
        raise RuntimeError("blocks add to another model already")
    token = _current.set(Accessor(model, model_path))
    try:
        yield accessor()
    finally:
        _current.reset(token)


def empty_base(opset_version: int | None = None) -> contextlib.AbstractContextManager[Accessor]:
    """Lets the blocks that are called inside of it make a new model."""
    graph = helper.make_graph([], "model", [], [])
    opset = helper.make_opsetid("", opset_version or _OPSET)
    return base(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION))


def with_first_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Makes a value the first output of a model, which it returns."""
    others = [output for output in model.graph.output if output.name != name]
    first = helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
    known = [output for output in model.graph.output if output.name == name]
    del model.graph.output[:]
    model.graph.output.extend([*(known or [first]), *others])
    return model
