"""Reductions, normalizations and softmax, as operators and spelled out."""

import numpy as np

from families.elementwise import STEPS as ELEMENTWISE
from families.elementwise import constant_near, float_type, grow, is_float, swapped
from graph import Builder, Unfit, Value

REDUCTIONS = (
    "ReduceSum ReduceSum ReduceMean ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum"
    " ReduceLogSumExp ReduceSumSquare"
).split()


def axes_of(b: Builder, x: Value) -> list[int]:
    draw = b.draw
    if draw.chance(0.4):
        return [draw.choice([-1, x.ndim - 1])]
    return [axis - x.ndim if draw.chance(0.3) else axis for axis in draw.some(range(x.ndim), draw.integer(1, x.ndim))]


def reduce(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or x.dtype == np.bool_:
        raise Unfit("nothing to reduce")
    op = b.draw.choice(REDUCTIONS if is_float(x) else ["ReduceSum", "ReduceMax", "ReduceMin"])
    inputs = [x] if b.draw.chance(0.15) else [x, b.ints(axes_of(b, x))]
    return b.node(op, inputs, keepdims=b.draw.choice([None, 0, 1]))


def argument(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or 0 in x.shape or x.dtype == np.bool_:
        raise Unfit("nothing to search")
    attributes = {"axis": b.draw.integer(-x.ndim, x.ndim - 1), "keepdims": b.draw.integer(0, 1)}
    return b.node(b.draw.choice(["ArgMax", "ArgMin"]), [x], select_last_index=b.draw.choice([None, 1]), **attributes)


def softmax(b: Builder, x: Value) -> Value:
    check(x)
    op = b.draw.choice(["Softmax", "Softmax", "LogSoftmax", "Hardmax"])
    return b.node(op, [x], axis=b.draw.choice([None, -1, b.draw.integer(-x.ndim, x.ndim - 1)]))


def spelled_softmax(b: Builder, x: Value) -> Value:
    check(x)
    axis = b.draw.integer(-x.ndim, x.ndim - 1)
    most = b.node("ReduceMax", [x, b.ints([axis])], keepdims=1)
    powers = b.node("Exp", [b.node("Sub", [x, most])])
    return b.node("Div", [powers, b.node("ReduceSum", [powers, b.ints([axis])], keepdims=1)])


def scale(b: Builder, x: Value, count: int) -> Value:
    shape = x.shape[x.ndim - count:]
    return b.constant((b.draw.rng.standard_normal(shape) + 1).astype(x.dtype))


def layer_norm(b: Builder, x: Value) -> Value:
    check(x)
    count = b.draw.integer(1, min(2, x.ndim))
    inputs = [x, scale(b, x, count)] + ([scale(b, x, count)] if b.draw.chance(0.7) else [])
    return b.node("LayerNormalization", inputs, axis=-count, epsilon=b.draw.choice([None, 1e-3]))


def rms_norm(b: Builder, x: Value) -> Value:
    check(x)
    if b.opset < 23:
        raise Unfit("not yet there")
    return b.node("RMSNormalization", [x, scale(b, x, 1)], axis=-1, epsilon=b.draw.choice([None, 1e-3]))


def spelled_norm(b: Builder, x: Value) -> Value:
    """LayerNormalization or RMSNormalization in single steps."""
    check(x)
    draw = b.draw
    axes = [-1] if draw.chance(0.7) else axes_of(b, x)
    if len({axis % x.ndim for axis in axes}) < len(axes):
        raise Unfit("an axis twice")
    centred = x
    if draw.chance(0.6):
        centred = b.node("Sub", [x, b.node("ReduceMean", [x, b.ints(axes)], keepdims=1)])
    square = b.node("Pow", [centred, constant_near(b, x, 2)]) if draw.chance(0.5) else b.node("Mul", [centred, centred])
    mean = b.node("ReduceMean", [square, b.ints(axes)], keepdims=1)
    deviation = b.node("Sqrt", [swapped(b, "Add", mean, constant_near(b, x, 1e-3))])
    if draw.chance(0.6):
        y = b.node("Div", [centred, deviation])
    else:
        y = swapped(b, "Mul", centred, b.node("Reciprocal", [deviation]))
    if draw.chance(0.8):
        factor = scale(b, x, 1) if draw.chance(0.7) else b.constant(draw.elements(x.dtype, draw.broadcastable(x.shape)))
        y = swapped(b, "Mul", y, factor)
    if draw.chance(0.7):
        y = swapped(b, "Add", y, scale(b, x, 1))
    return y


def cumulative(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or x.dtype not in (np.float32, np.float64, np.int32, np.int64):
        raise Unfit("nothing to add up")
    axis = b.constant(np.array(b.draw.integer(-x.ndim, x.ndim - 1), np.int64))
    return b.node("CumSum", [x, axis], exclusive=b.draw.choice([None, 1]), reverse=b.draw.choice([None, 1]))


def top_k(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or 0 in x.shape or x.dtype == np.bool_:
        raise Unfit("nothing to sort")
    axis = b.draw.integer(-x.ndim, x.ndim - 1)
    count = b.ints([b.draw.integer(1, x.shape[axis])])
    values, indices = b.nodes_of("TopK", [x, count], 2, axis=axis, largest=b.draw.integer(0, 1))
    return values


def check(x: Value) -> None:
    if x.ndim == 0 or not is_float(x) or 0 in x.shape:
        raise Unfit("no row of floats")


STEPS = [reduce, reduce, reduce, argument, softmax, softmax, spelled_softmax, layer_norm, rms_norm, spelled_norm, spelled_norm,
         cumulative, top_k]


def make(b: Builder) -> None:
    dtype = float_type(b) if b.draw.chance(0.85) else b.draw.choice([np.int32, np.int64])
    array = b.draw.elements(dtype, b.draw.shape(1, 4, 150))
    if b.draw.chance(0.1) and is_kind_of_float(dtype):
        array = b.draw.specials(array)
    x = b.root.input(array)
    if b.draw.chance(0.3):
        x = grow(b, x, ELEMENTWISE, 1)
    x = grow(b, x, STEPS, b.draw.integer(1, 3))
    if b.draw.chance(0.3):
        grow(b, x, ELEMENTWISE, 1)


def is_kind_of_float(dtype) -> bool:
    return np.dtype(dtype).kind == "f"
