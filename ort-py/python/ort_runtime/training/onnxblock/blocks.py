"""Blocks that add operators to a model."""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np
import onnx

from ._model import accessor


class Block(abc.ABC):
    """A part of a graph. A call adds it to the model of `onnxblock.base`.

    Derive from it, and make a graph of other blocks in `build`::

        class Scaled(onnxblock.Block):
            def __init__(self):
                super().__init__()
                self.loss = onnxblock.loss.MSELoss()
                self.mul = onnxblock.blocks.Mul()

            def build(self, output):
                return self.mul(self.loss(output), onnxblock.blocks.Constant(0.5)())
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        self.temp_onnx_file_path = temp_file_name

    @property
    def base(self) -> onnx.ModelProto:
        """The model that the block adds to."""
        return accessor().model

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to the model. Returns the name or names of its outputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to the model, and checks the model."""
        output = self.build(*args, **kwargs)
        onnx.checker.check_model(accessor().model)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Returns a copy of the model with the shapes that its operators imply."""
        return onnx.shape_inference.infer_shapes(accessor().model)


class _Unary(Block):
    """An operator of one input."""

    operator = ""

    def build(self, input_name: str) -> str:
        return accessor().node(self.operator, [input_name])


class _Binary(Block):
    """An operator of two inputs."""

    operator = ""

    def build(self, input_name1: str, input_name2: str) -> str:
        return accessor().node(self.operator, [input_name1, input_name2])


class Add(_Binary):
    """Adds two values."""

    operator = "Add"


class Sub(_Binary):
    """Subtracts the second value from the first."""

    operator = "Sub"


class Mul(_Binary):
    """Multiplies two values."""

    operator = "Mul"


class Div(_Binary):
    """Divides the first value by the second."""

    operator = "Div"


class Abs(_Unary):
    """Takes absolute values."""

    operator = "Abs"


class Log(_Unary):
    """Takes natural logarithms."""

    operator = "Log"


class Neg(_Unary):
    """Changes signs."""

    operator = "Neg"


class Sigmoid(_Unary):
    """Takes the logistic function."""

    operator = "Sigmoid"


class Pow(Block):
    """Raises a value to a power."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        model = accessor()
        return model.node("Pow", [pow_input_name, model.constant(self._exponent, "exponent")])


class _Reduction(Block):
    """A reduction over all dimensions."""

    operator = ""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, input_name: str) -> str:
        return accessor().node(self.operator, [input_name], keepdims=int(self._keepdims))


class ReduceMean(_Reduction):
    """Takes the mean of all elements."""

    operator = "ReduceMean"


class ReduceSum(_Reduction):
    """Takes the sum of all elements."""

    operator = "ReduceSum"


class ReduceAllL2(Block):
    """Takes the Euclidean norm of all elements of several values."""

    def build(self, *reduce_node_input_names: str) -> str:
        model = accessor()
        names = reduce_node_input_names
        squares = [model.node("ReduceSumSquare", [name], keepdims=0) for name in names]
        total = squares[0] if len(squares) == 1 else model.node("Sum", squares)
        return model.node("Sqrt", [total])


class Constant(Block):
    """A number."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return accessor().constant(self._value)


class SequenceConstruct(Block):
    """Makes a sequence of values."""

    def build(self, *sequence_input_names: str) -> str:
        return accessor().node("SequenceConstruct", list(sequence_input_names))


class InputLike(Block):
    """An input of the type and shape of a value."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        return accessor().input_like(self._like, input_name or f"{self._like}_like")


class PassThrough(Block):
    """Hands on what it is given."""

    def build(self, *input_names: str) -> Any:
        return input_names[0] if len(input_names) == 1 else input_names


class Cast(Block):
    """Casts a value to a type of `onnx.TensorProto`."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        return accessor().node("Cast", [cast_input_name], to=int(self._to))


class Clip(Block):
    """Limits a value to a range; None is no limit."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = clip_min, clip_max

    def build(self, clip_input_name: str) -> str:
        model = accessor()
        bounds = ["" if bound is None else model.constant(bound, "bound") for bound in self._bounds]
        return model.node("Clip", [clip_input_name, *bounds])


class Linear(Block):
    """A fully connected layer with weights of its own, drawn uniformly as torch does."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        self._shape = out_features, in_features
        self._has_bias = bias
        self._factors = {"alpha": float(alpha), "beta": float(beta)}

    def build(self, linear_input_name: str) -> str:
        model = accessor()
        bound = 1.0 / math.sqrt(self._shape[1])
        draw = np.random.default_rng().uniform
        inputs = [linear_input_name, model.constant(draw(-bound, bound, self._shape), "weight")]
        if self._has_bias:
            inputs.append(model.constant(draw(-bound, bound, self._shape[:1]), "bias"))
        return model.node("Gemm", inputs, transB=1, **self._factors)
