"""Partial data propagation: small integer tensors as expressions of symbolic dimensions.

Exporters compute shapes at run time: `Shape`, `Gather`, arithmetic, `Concat`, `Reshape`. The rules
here evaluate such nodes with `sympy`, so that `Reshape` and the like have symbolic output shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._contrib_shapes import Dim, Values, _attribute

if TYPE_CHECKING:
    import onnx

#: Longer tensors are not shapes, and longer expressions help no reader.
_MAX_ELEMENTS, _MAX_CHARACTERS = 64, 200

#: A slice end from here on means the end of the dimension.
_INT32_MAX = 2**31 - 1

#: ONNX's numbers of the element types that are no integers.
_FLOATS = frozenset({1, 10, 11, 16})


class Vector(NamedTuple):
    """A tensor of rank 0 or 1 by its elements; an unknown element is None."""

    elements: list[Any]
    is_scalar: bool = False
    is_float: bool = False


class SymbolicValues:
    """What is known of the values of one graph."""

    def __init__(self, graph: onnx.GraphProto, types: Values) -> None:
        import sympy

        self._sympy = sympy
        self._types = types
        self._expressions: dict[str, Any] = {}
        self._vectors: dict[str, Vector] = {}
        for tensor in graph.initializer:
            self._add_constant(tensor.name, tensor)

    def expression(self, dim: Dim) -> Any:
        """Returns a dimension as an expression, None if it is unknown."""
        if dim is None or isinstance(dim, int):
            return None if dim is None else self._sympy.Integer(dim)
        symbol = self._sympy.Symbol(dim, integer=True, positive=True)
        return self._expressions.setdefault(dim, symbol)

    def dim(self, expression: Any) -> Dim:
        """Returns an expression as a dimension: a number, or text that `expression` knows again."""
        if expression is None:
            return None
        expression = self._sympy.expand(expression)
        if expression.is_Integer:
            return int(expression) if expression >= 0 else None
        # What may be a fraction, or is below zero, is no size.
        if not expression.is_integer or expression.is_negative:
            return None
        text = str(expression)
        if len(text) > _MAX_CHARACTERS:
            return None
        self._expressions.setdefault(text, expression)
        return text

    def visit(self, node: onnx.NodeProto) -> list[Dim] | None:
        """Takes the next node; returns the dimensions of its output, None if nothing is known."""
        if node.domain not in ("", "ai.onnx") or not node.output:
            return None
        compute = _VALUE_RULES.get(node.op_type)
        found = compute(self, node) if compute else None
        if found is not None and len(found.elements) <= _MAX_ELEMENTS:
            self._vectors[node.output[0]] = found
        shape = _SHAPE_RULES.get(node.op_type)
        dims = shape(self, node) if shape else None
        return dims and [self.dim(dim) for dim in dims]

    def _add_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        """Remembers the elements of a constant."""
        import onnx

        size = tensor.dims[0] if tensor.dims else 1
        has_data = tensor.ByteSize() > 4 * size and tensor.data_location != tensor.EXTERNAL
        if len(tensor.dims) > 1 or not 0 < size <= _MAX_ELEMENTS or not has_data:
            return
        if tensor.data_type not in _FLOATS | {6, 7}:
            return
        array = onnx.numpy_helper.to_array(tensor)
        numbers = [self._sympy.Rational(number) for number in array.reshape(-1).tolist()]
        is_float = tensor.data_type in _FLOATS
        self._vectors[name] = Vector(numbers, not tensor.dims, is_float)

    def vector(self, node: onnx.NodeProto, position: int) -> Vector | None:
        """Returns what is known of an input."""
        names = node.input
        return self._vectors.get(names[position]) if position < len(names) else None

    def dims(self, node: onnx.NodeProto, position: int = 0) -> list[Any] | None:
        """Returns the dimensions of an input as expressions."""
        known = self._types.known(node.input[position]) if position < len(node.input) else None
        return known and [self.expression(dim) for dim in known[1]]

    def numbers(self, node: onnx.NodeProto, position: int) -> list[int] | None:
        """Returns an input whose elements are all integers."""
        vector = self.vector(node, position)
        if vector is None or not all(x is not None and x.is_Integer for x in vector.elements):
            return None
        return [int(x) for x in vector.elements]

    def minimum(self, left: Any, right: Any) -> Any:
        """Returns the smaller one of an index and the size it is for.

        Two symbolic sizes cannot be compared; then the index is assumed to be in range.
        """
        for bound in (left, right):
            if (left - bound).is_nonnegative and (right - bound).is_nonnegative:
                return bound
        has_number = left.is_Integer or right.is_Integer
        return self._sympy.Min(left, right) if has_number else left

    def sliced(self, size: Any, start: Any, end: Any, step: Any) -> Any:
        """Returns how many indices a slice takes of an axis."""
        if None in (size, start, end, step) or step.is_zero:
            return None
        backwards = bool(step.is_nonpositive)
        if not backwards and not step.is_nonnegative:
            return None
        last = size - 1 if backwards else size

        def index(place: Any, before: Any) -> Any:
            if place.is_Integer and abs(place) >= _INT32_MAX:
                return last if place > 0 else before
            if place.is_zero:
                return place
            return size + place if place.is_nonpositive else self.minimum(place, last)

        first = index(start, self._sympy.Integer(0))
        beyond = index(end, self._sympy.Integer(-1 if backwards else 0))
        width = first - beyond if backwards else beyond - first
        stride = -step if backwards else step
        return self._sympy.floor((width + stride - 1) / stride)


def _elementwise_values(function: Callable[..., Any]) -> Callable[..., Vector | None]:
    """Returns the rule of an operator on vectors of one length, or of length one."""

    def rule(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
        inputs = [values.vector(node, i) for i in range(len(node.input))]
        if not inputs or None in inputs:
            return None
        size = max(len(vector.elements) for vector in inputs)
        if any(len(vector.elements) not in (1, size) for vector in inputs):
            return None
        is_float = any(vector.is_float for vector in inputs)
        elements = []
        for i in range(size):
            places = [v.elements[i if len(v.elements) > 1 else 0] for v in inputs]
            elements.append(None if None in places else function(values._sympy, is_float, *places))
        return Vector(elements, all(vector.is_scalar for vector in inputs), is_float)

    return rule


def _divide(sympy: Any, is_float: bool, left: Any, right: Any) -> Any:
    if right.is_zero:
        return None
    return left / right if is_float else sympy.floor(left / right)


def _cast_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    vector = values.vector(node, 0)
    if vector is None:
        return None
    is_float = _attribute(node, "to") in _FLOATS
    whole = values._sympy.floor
    elements = [x if x is None or is_float or x.is_integer else whole(x) for x in vector.elements]
    return Vector(elements, vector.is_scalar, is_float)


def _shape_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    dims = values.dims(node)
    if dims is None:
        return None
    return Vector(dims[_attribute(node, "start", 0) : _attribute(node, "end")])


def _constant_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    tensor = _attribute(node, "value")
    if tensor is not None:
        values._add_constant(node.output[0], tensor)
        return None
    number, numbers = _attribute(node, "value_int"), _attribute(node, "value_ints")
    if number is None and numbers is None:
        return None
    elements = [values._sympy.Integer(x) for x in ([number] if numbers is None else numbers)]
    return Vector(elements, numbers is None)


def _same_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    """Squeeze, Unsqueeze and Reshape between ranks 0 and 1."""
    vector = values.vector(node, 0)
    known = values._types.known(node.output[0])
    if vector is None or known is None or len(known[1]) > 1:
        return None
    return Vector(vector.elements, not known[1], vector.is_float)


def _gather_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    vector, places = values.vector(node, 0), values.numbers(node, 1)
    if vector is None or places is None or vector.is_scalar:
        return None
    size = len(vector.elements)
    if not all(-size <= place < size for place in places):
        return None
    is_scalar = values.vector(node, 1).is_scalar
    return Vector([vector.elements[place] for place in places], is_scalar, vector.is_float)


def _slice_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    vector = values.vector(node, 0)
    starts, ends = values.numbers(node, 1), values.numbers(node, 2)
    if vector is None or not starts or not ends or len(starts) != 1:
        return None
    step = values.numbers(node, 4) if len(node.input) > 4 and node.input[4] else [1]
    if not step or step[0] == 0:
        return None
    end = None if step[0] < 0 and ends[0] <= -_INT32_MAX else ends[0]
    return Vector(vector.elements[starts[0] : end : step[0]], False, vector.is_float)


def _concat_values(values: SymbolicValues, node: onnx.NodeProto) -> Vector | None:
    vectors = [values.vector(node, i) for i in range(len(node.input))]
    if None in vectors or any(vector.is_scalar for vector in vectors):
        return None
    elements = [element for vector in vectors for element in vector.elements]
    return Vector(elements, False, any(vector.is_float for vector in vectors))


_VALUE_RULES: dict[str, Callable[[SymbolicValues, Any], Vector | None]] = {
    "Abs": _elementwise_values(lambda sympy, _, x: abs(x)),
    "Add": _elementwise_values(lambda sympy, _, x, y: x + y),
    "Cast": _cast_values,
    "Ceil": _elementwise_values(lambda sympy, _, x: sympy.ceiling(x)),
    "Concat": _concat_values,
    "Constant": _constant_values,
    "Div": _elementwise_values(_divide),
    "Floor": _elementwise_values(lambda sympy, _, x: sympy.floor(x)),
    "Gather": _gather_values,
    "Identity": _elementwise_values(lambda sympy, _, x: x),
    "Max": _elementwise_values(lambda sympy, _, *given: sympy.Max(*given)),
    "Min": _elementwise_values(lambda sympy, _, *given: sympy.Min(*given)),
    "Mul": _elementwise_values(lambda sympy, _, x, y: x * y),
    "Neg": _elementwise_values(lambda sympy, _, x: -x),
    "Reshape": _same_values,
    "Shape": _shape_values,
    "Slice": _slice_values,
    "Squeeze": _same_values,
    "Sub": _elementwise_values(lambda sympy, _, x, y: x - y),
    "Unsqueeze": _same_values,
}


def _elements(values: SymbolicValues, node: onnx.NodeProto, position: int) -> list[Any] | None:
    """Returns an input that has the dimensions of the output."""
    vector = values.vector(node, position)
    return vector and vector.elements


def _slice_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    dims, starts, ends = values.dims(node), _elements(values, node, 1), _elements(values, node, 2)
    if dims is None or starts is None or ends is None or len(starts) != len(ends):
        return None
    axes: Sequence[int] | None = range(len(starts))
    if len(node.input) > 3 and node.input[3]:
        axes = values.numbers(node, 3)
    steps: list[Any] | None = [values.expression(1)] * len(starts)
    if len(node.input) > 4 and node.input[4]:
        steps = _elements(values, node, 4)
    if axes is None or steps is None or not len(axes) == len(steps) == len(starts):
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if not -len(dims) <= axis < len(dims):
            return None
        dims[axis] = values.sliced(dims[axis], start, end, step)
    return dims


def _concat_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    parts = [values.dims(node, i) for i in range(len(node.input))]
    axis = _attribute(node, "axis", 0)
    if None in parts or len({len(part) for part in parts}) != 1 or not parts[0]:
        return None
    sizes = [part[axis] for part in parts] if -len(parts[0]) <= axis < len(parts[0]) else [None]
    dims: list[Any] = [None] * len(parts[0])
    dims[axis] = None if None in sizes else sum(sizes)
    return dims


def _reshape_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    source, target = values.dims(node), _elements(values, node, 1)
    if source is None or target is None or None in target:
        return None
    dims = list(target)
    for i, dim in enumerate(target):
        if dim.is_zero and not _attribute(node, "allowzero", 0):
            dims[i] = source[i] if i < len(source) else None
    rest = [i for i, dim in enumerate(dims) if dim is not None and dim == -1]
    if len(rest) == 1:
        others = [dim for i, dim in enumerate(dims) if i not in rest]
        known = None not in others and None not in source
        product = values._sympy.prod
        dims[rest[0]] = values._sympy.cancel(product(source) / product(others)) if known else None
    return dims


def _expand_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    source, target = values.dims(node), _elements(values, node, 1)
    if source is None or target is None:
        return None
    rank = max(len(source), len(target))
    one = values.expression(1)
    pairs = zip(
        [one] * (rank - len(source)) + source, [one] * (rank - len(target)) + target, strict=True
    )
    return [b if a == 1 else a if b == 1 or a == b else None for a, b in pairs]


def _tile_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    dims, repeats = values.dims(node), _elements(values, node, 1)
    if dims is None or repeats is None or len(dims) != len(repeats):
        return None
    return [None if None in pair else pair[0] * pair[1] for pair in zip(dims, repeats, strict=True)]


def _resize_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    if _attribute(node, "axes") is not None or _attribute(node, "keep_aspect_ratio_policy"):
        return None
    if len(node.input) > 3:
        return _elements(values, node, 3)
    dims, scales = values.dims(node), _elements(values, node, 2)
    if dims is None or scales is None or len(dims) != len(scales) or None in [*dims, *scales]:
        return None
    whole = values._sympy.floor
    return [whole(dim * scale) for dim, scale in zip(dims, scales, strict=True)]


def _range_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    inputs = [values.vector(node, i) for i in range(3)]
    if None in inputs or any(vector.is_float for vector in inputs):
        return None
    start, limit, delta = (vector.elements[0] for vector in inputs)
    if None in (start, limit, delta) or not delta.is_positive:
        return None
    return [values._sympy.floor((limit - start + delta - 1) / delta)]


def _window_shape(values: SymbolicValues, node: onnx.NodeProto) -> list[Any] | None:
    """Convolutions and pools: a size for each step of the window."""
    dims = values.dims(node)
    kernel = _attribute(node, "kernel_shape")
    if kernel is None and node.op_type == "Conv":
        weight = values.dims(node, 1)
        kernel = weight and weight[2:]
    if dims is None or kernel is None or len(kernel) != len(dims) - 2 or None in kernel:
        return None
    ones = [1] * len(kernel)
    strides, dilations = _attribute(node, "strides", ones), _attribute(node, "dilations", ones)
    pads, auto_pad = _attribute(node, "pads", [0] * 2 * len(kernel)), _attribute(node, "auto_pad")
    if auto_pad not in (None, b"NOTSET", b"VALID") or _attribute(node, "ceil_mode"):
        return None
    whole, count = values._sympy.floor, len(kernel)
    sizes: list[Any] = []
    for i, dim in enumerate(dims[2:]):
        padding = 0 if auto_pad == b"VALID" else pads[i] + pads[i + count]
        width = None if dim is None else dim + padding - dilations[i] * (kernel[i] - 1) - 1
        sizes.append(None if width is None else whole(width / strides[i]) + 1)
    return [None, None, *sizes]


_SHAPE_RULES: dict[str, Callable[[SymbolicValues, Any], list[Any] | None]] = {
    "AveragePool": _window_shape,
    "Concat": _concat_shape,
    "ConstantOfShape": lambda values, node: _elements(values, node, 0),
    "Conv": _window_shape,
    "Expand": _expand_shape,
    "MaxPool": _window_shape,
    "Range": _range_shape,
    "Reshape": _reshape_shape,
    "Resize": _resize_shape,
    "Slice": _slice_shape,
    "Tile": _tile_shape,
}
