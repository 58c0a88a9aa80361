"""The table: each ATen overload with the operators that compute it.

A row is a function that emits an FX node; most come from a factory, so that a family of operators
is a few lines of data. Layers and their gradients stay whole where the runtime has an operator for
them: softmax, layer normalization, convolution, batch normalization, attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import _table_activations, _table_layers, _table_movement
from ._emitter import Emitter, Unsupported
from ._rows import Arguments, Cost, Row, Table, arguments, cheap

__all__ = ["TABLE", "emit", "is_cheap", "is_free"]


def _result(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _common(e: Emitter, first: Any, second: Any) -> torch.dtype:
    """The type in which torch compares or combines two operands."""

    def example(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value if isinstance(value, int | float | bool) else 1
        found = value.meta["val"]
        if not isinstance(found, torch.Tensor):
            return 1
        return torch.empty((1,) * found.dim(), dtype=found.dtype)

    return torch.result_type(example(first), example(second))


# Factories of rows.


def unary(operator: str, **attributes: Any) -> Row:
    """An operator of one operand, in the type of the result."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        return e.op(operator, e.read(a.first, _result(node)), **attributes)

    return row


def same_type(operator: str) -> Row:
    """An operator of one operand whose result may be of another type, such as IsNaN."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        return e.op(operator, e.of(a.first))

    return row


def binary(operator: str) -> Row:
    """An elementwise operator of two operands, in the type of the result."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        first, second = a.values[0], a.values[1]
        return e.op(operator, e.read(first, _result(node)), e.read(second, _result(node)))

    return row


def scaled(operator: str, reverse: bool = False) -> Row:
    """Addition or subtraction, whose second operand is scaled by `alpha`."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        if dtype == torch.bool:
            return e.op("Or", e.read(a.values[0], dtype), e.read(a.values[1], dtype))
        first, second = e.read(a.values[0], dtype), e.read(a.values[1], dtype)
        if a.get("alpha", 1) != 1:
            which = first if reverse else second
            by_alpha = e.op("Mul", which, e.number(a["alpha"], dtype))
            first, second = (by_alpha, second) if reverse else (first, by_alpha)
        return e.op(operator, second, first) if reverse else e.op(operator, first, second)

    return row


def product(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Multiplication; of two booleans it is their conjunction."""
    dtype = _result(node)
    operator = "And" if dtype == torch.bool else "Mul"
    return e.op(operator, e.read(a.values[0], dtype), e.read(a.values[1], dtype))


def quotient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Division, rounded if `rounding_mode` asks for it."""
    dtype, mode = _result(node), a.get("rounding_mode")
    first, second = e.read(a.values[0], dtype), e.read(a.values[1], dtype)
    divided = e.op("Div", first, second)
    if mode is None or (mode == "trunc" and not dtype.is_floating_point):
        return divided
    if mode == "floor" and dtype.is_floating_point:
        return e.op("Floor", divided)
    if mode == "floor":
        # Without the remainder, which has the divisor's sign, the division is exact.
        return e.op("Div", e.op("Sub", first, e.op("Mod", first, second)), second)
    raise Unsupported(f"division of {dtype} with rounding_mode {mode!r}")


def compare(operator: str, negate: bool = False) -> Row:
    """A comparison, in the type that torch promotes both operands to."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        first, second = a.values[0], a.values[1]
        dtype = _common(e, first, second)
        if dtype == torch.bool and operator != "Equal":
            dtype = torch.int32
        found = e.op(operator, e.read(first, dtype), e.read(second, dtype))
        return e.op("Not", found) if negate else found

    return row


def logical(operator: str) -> Row:
    """A boolean operator, of operands that count as true unless they are 0."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        operands = [e.read(value, torch.bool) for value in a.tensors()]
        return e.op(operator, *operands)

    return row


def bitwise(operator: str, of_bits: str) -> Row:
    """A boolean operator, which is one of bits if the operands are integers."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        chosen = operator if dtype == torch.bool else of_bits
        count = 1 if operator == "Not" else 2
        return e.op(chosen, *(e.read(value, dtype) for value in a.values[:count]))

    return row


def reduction(operator: str) -> Row:
    """A reduction over axes, all of them if none are named."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        value = e.read(a.first, dtype)
        axes = a.get("dim")
        if isinstance(axes, int):
            axes = [axes]
        keep = int(bool(a.get("keepdim", False)))
        if e.rank(a.first) == 0:
            return e.op("Identity", value)
        named = e.ints(*(e.axis(a.first, axis) for axis in axes)) if axes else ""
        if dtype == torch.bool:
            value = e.cast(value, torch.bool, torch.int32)
        found = e.op(operator, value, named, keepdims=keep)
        return e.cast(found, torch.int32, dtype) if dtype == torch.bool else found

    return row


def variance(with_mean: bool) -> Row:
    """Variance with a correction, and the mean beside it."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> Any:
        source = a.first
        dtype = e.dtype(source)
        value, axes = e.of(source), a.get("dim")
        axes = [e.axis(source, axis) for axis in axes or range(e.rank(source))]
        named = e.ints(*axes)
        mean = e.op("ReduceMean", value, named, keepdims=1)
        centred = e.op("Sub", value, mean)
        squares = e.op("ReduceSum", e.op("Mul", centred, centred), named, keepdims=1)
        count = e.ints(1)
        for axis in axes:
            count = e.op("Mul", count, e.size(e.shape(source)[axis]))
        count = e.cast(e.op("Squeeze", count), torch.int64, dtype)
        correction = a.get("correction")
        correction = 1 if correction is None else correction
        if correction:
            count = e.op("Sub", count, e.number(float(correction), dtype))
        found = e.op("Div", squares, count)
        if not a.get("keepdim", False):
            found, mean = (e.op("Squeeze", part, named) for part in (found, mean))
        return (found, mean) if with_mean else found

    return row


def extreme(operator: str, index: str) -> Row:
    """The largest or least element along an axis, and its position."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> Any:
        axis, keep = e.axis(a.first, a["dim"]), int(bool(a.get("keepdim", False)))
        value = e.of(a.first)
        found = e.op(operator, value, e.ints(axis), keepdims=keep)
        return found, e.op(index, value, axis=axis, keepdims=keep)

    return row


def position(operator: str) -> Row:
    """The position of the largest or least element."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        value, axis = e.of(a.first), a.get("dim")
        if axis is None:
            flat = e.op("Reshape", value, e.ints(-1))
            return e.op(operator, flat, axis=0, keepdims=0)
        keep = int(bool(a.get("keepdim", False)))
        return e.op(operator, value, axis=e.axis(a.first, axis), keepdims=keep)

    return row


def clamp(low: str = "min", high: str = "max") -> Row:
    """Limits to a range; either end may be missing."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        value = e.read(a.first, dtype)
        for operator, bound in (("Max", a.get(low)), ("Min", a.get(high))):
            if bound is not None:
                value = e.op(operator, value, e.read(bound, dtype))
        return value

    return row


def power(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A power; small integral exponents are products."""
    dtype, (base, exponent) = _result(node), a.values[:2]
    value = e.read(base, dtype)
    if exponent == 2 and not isinstance(exponent, fx.Node):
        return e.op("Mul", value, value)
    if exponent == 3 and not isinstance(exponent, fx.Node):
        return e.op("Mul", e.op("Mul", value, value), value)
    return e.op("Pow", value, e.read(exponent, dtype))


def remainder(sign_of_divisor: bool) -> Row:
    """The remainder of a division, with the sign of the divisor or of the dividend."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        first, second = (e.read(value, dtype) for value in a.values[:2])
        if not sign_of_divisor:
            return e.op("Mod", first, second, fmod=1)
        if not dtype.is_floating_point:
            return e.op("Mod", first, second)
        whole = e.op("Floor", e.op("Div", first, second))
        return e.op("Sub", first, e.op("Mul", whole, second))

    return row


def inverse_root(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The reciprocal of the square root."""
    return e.op("Reciprocal", e.op("Sqrt", e.read(a.first, _result(node))))


def shifted(operator: str, before: float, after: float) -> Row:
    """An operator of the operand plus one number, plus another: log1p, expm1."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        value = e.read(a.first, dtype)
        value = e.op("Add", value, e.number(before, dtype)) if before else value
        value = e.op(operator, value)
        return e.op("Add", value, e.number(after, dtype)) if after else value

    return row


def log2(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The logarithm to base 2."""
    dtype = _result(node)
    return e.op("Mul", e.op("Log", e.read(a.first, dtype)), e.number(1.4426950408889634, dtype))


def truncated(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Rounding towards zero."""
    value = e.of(a.first)
    return e.op("Mul", e.op("Sign", value), e.op("Floor", e.op("Abs", value)))


def choice(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`where`: elements of one tensor or another."""
    condition, first, second = a.values[:3]
    dtype = _result(node)
    return e.op("Where", e.of(condition), e.read(first, dtype), e.read(second, dtype))


def filled_where(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`masked_fill`: a value where a mask is true."""
    dtype = _result(node)
    return e.op("Where", e.of(a["mask"]), e.read(a["value"], dtype), e.read(a.first, dtype))


def running_sum(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The cumulative sum along an axis."""
    axis = e.op("Squeeze", e.ints(e.axis(a.first, a["dim"])))
    return e.op("CumSum", e.read(a.first, _result(node)), axis)


def top(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """The k largest or least elements and their positions."""
    axis = e.axis(a.first, a["dim"])
    largest, is_sorted = int(a["largest"]), int(a["sorted"])
    return e.op(
        "TopK", e.of(a.first), e.size(a["k"]), outputs=2,
        axis=axis, largest=largest, sorted=is_sorted,
    )  # fmt: skip


def fused_product(op: str) -> Row:
    """`addcmul` and `addcdiv`: a tensor plus a scaled product or quotient of two others."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        dtype = _result(node)
        start, first, second = (e.read(value, dtype) for value in a.values[:3])
        found = e.op(op, first, second)
        if a.get("value", 1) != 1:
            found = e.op("Mul", found, e.number(a["value"], dtype))
        return e.op("Add", start, found)

    return row


_UNARY = {
    "abs": "Abs", "acos": "Acos", "asin": "Asin", "atan": "Atan", "ceil": "Ceil", "cos": "Cos",
    "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor", "log": "Log",
    "reciprocal": "Reciprocal", "round": "Round", "sigmoid": "Sigmoid",
    "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
_COMPARISONS = {
    "eq": ("Equal", False), "ne": ("Equal", True), "lt": ("Less", False), "gt": ("Greater", False),
    "le": ("LessOrEqual", False), "ge": ("GreaterOrEqual", False),
}  # fmt: skip

TABLE: Table = {
    **cheap({
        "aten.add.Tensor": scaled("Add"),
        "aten.add.Scalar": scaled("Add"),
        "aten.sub.Tensor": scaled("Sub"),
        "aten.sub.Scalar": scaled("Sub"),
        "aten.mul.Tensor": product,
        "aten.mul.Scalar": product,
        "aten.div.Tensor": quotient,
        "aten.div.Scalar": quotient,
        "aten.div.Tensor_mode": quotient,
        "aten.neg.default": unary("Neg"),
        "aten.relu.default": unary("Relu"),
        "aten.hardtanh.default": clamp("min_val", "max_val"),
        "aten.where.self": choice,
        "aten.where.ScalarSelf": choice,
        "aten.where.ScalarOther": choice,
    }),
    **{f"aten.{name}.default": unary(operator) for name, operator in _UNARY.items()},
    **{
        f"aten.{name}.{kind}": compare(*what)
        for name, what in _COMPARISONS.items()
        for kind in ("Tensor", "Scalar")
    },
    "aten.rsub.Tensor": scaled("Sub", reverse=True),
    "aten.rsub.Scalar": scaled("Sub", reverse=True),
    "aten.true_divide.Tensor": quotient,
    "aten.pow.Tensor_Scalar": power,
    "aten.pow.Tensor_Tensor": power,
    "aten.pow.Scalar": power,
    **{
        f"aten.{name}.{kind}": remainder(name == "remainder")
        for name in ("remainder", "fmod")
        for kind in ("Tensor", "Scalar")
    },
    "aten.maximum.default": binary("Max"),
    "aten.minimum.default": binary("Min"),
    "aten.addcmul.default": fused_product("Mul"),
    "aten.addcdiv.default": fused_product("Div"),
    "aten.rsqrt.default": inverse_root,
    "aten.log1p.default": shifted("Log", 1.0, 0.0),
    "aten.expm1.default": shifted("Exp", 0.0, -1.0),
    "aten.log2.default": log2,
    "aten.trunc.default": truncated,
    "aten.isnan.default": same_type("IsNaN"),
    "aten.isinf.default": same_type("IsInf"),
    "aten.logical_and.default": logical("And"),
    "aten.logical_or.default": logical("Or"),
    "aten.logical_xor.default": logical("Xor"),
    "aten.logical_not.default": logical("Not"),
    "aten.bitwise_and.Tensor": bitwise("And", "BitwiseAnd"),
    "aten.bitwise_or.Tensor": bitwise("Or", "BitwiseOr"),
    "aten.bitwise_xor.Tensor": bitwise("Xor", "BitwiseXor"),
    "aten.bitwise_and.Scalar": bitwise("And", "BitwiseAnd"),
    "aten.bitwise_or.Scalar": bitwise("Or", "BitwiseOr"),
    "aten.bitwise_not.default": bitwise("Not", "BitwiseNot"),
    "aten.clamp.default": clamp(),
    "aten.clamp.Tensor": clamp(),
    "aten.clamp_min.default": clamp(),
    "aten.clamp_max.default": clamp(),
    "aten.masked_fill.Scalar": filled_where,
    "aten.masked_fill.Tensor": filled_where,
    "aten.sum.default": reduction("ReduceSum"),
    "aten.sum.dim_IntList": reduction("ReduceSum"),
    "aten.mean.default": reduction("ReduceMean"),
    "aten.mean.dim": reduction("ReduceMean"),
    "aten.prod.default": reduction("ReduceProd"),
    "aten.prod.dim_int": reduction("ReduceProd"),
    "aten.amax.default": reduction("ReduceMax"),
    "aten.amin.default": reduction("ReduceMin"),
    "aten.max.default": reduction("ReduceMax"),
    "aten.min.default": reduction("ReduceMin"),
    "aten.any.default": reduction("ReduceMax"),
    "aten.any.dim": reduction("ReduceMax"),
    "aten.any.dims": reduction("ReduceMax"),
    "aten.all.default": reduction("ReduceMin"),
    "aten.all.dim": reduction("ReduceMin"),
    "aten.var.correction": variance(False),
    "aten.var_mean.correction": variance(True),
    "aten.max.dim": extreme("ReduceMax", "ArgMax"),
    "aten.min.dim": extreme("ReduceMin", "ArgMin"),
    "aten.argmax.default": position("ArgMax"),
    "aten.argmin.default": position("ArgMin"),
    "aten.cumsum.default": running_sum,
    "aten.topk.default": top,
    **_table_movement.TABLE,
    **_table_layers.TABLE,
    **_table_activations.TABLE,
}  # fmt: skip


def emit(e: Emitter, node: fx.Node) -> Any:
    """Emits one node of an FX graph. Returns the name of its value, or a tuple of names."""
    row = TABLE.get(str(node.target))
    if row is None:
        raise Unsupported(f"{node.target} is not in the table")
    e.scope = node.name
    return row(e, node, arguments(node))


def _cost(node: fx.Node) -> Cost:
    cost: Cost = getattr(TABLE.get(str(node.target)), "cost", Cost.FULL)
    return cost


def is_free(node: fx.Node) -> bool:
    """Whether computing a node again costs nothing, so that its result is not worth keeping."""
    return _cost(node) is Cost.FREE


def is_cheap(node: fx.Node) -> bool:
    """Whether computing a node again costs about as much as reading its result."""
    return _cost(node) is Cost.CHEAP
