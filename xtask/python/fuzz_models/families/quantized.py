"""Quantized models as tools write them: QuantizeLinear and DequantizeLinear around operators of
floats.

Half of the models are exact: scales are powers of two and windows have two, four or eight elements, so that float32
rounds nowhere, ties are ties, and codes are known to the last one. In the others scales are arbitrary."""

from dataclasses import dataclass

import numpy as np

from families.linear import regroupings
from graph import Builder, Unfit, Value

CODES = (np.uint8, np.uint8, np.int8)


@dataclass
class Coded:
    """Codes, and the constants that say what they stand for."""

    codes: Value
    scale: Value
    zero: Value | None


def scale_of(b: Builder, size: int | None = None) -> np.ndarray:
    shape = () if size is None else (size,)
    if b.exact:
        return (2.0 ** b.draw.rng.integers(-3, 2, shape)).astype(np.float32)
    return np.asarray(b.draw.rng.uniform(0.004, 0.3, shape), np.float32)


def zero_of(b: Builder, dtype) -> np.ndarray:
    info = np.iinfo(dtype)
    middle = (int(info.min) + int(info.max) + 1) // 2
    zero = b.draw.choice([0, middle, middle - 1, 7, 3, b.draw.integer(info.min, info.max), info.min, info.max])
    return np.array(np.clip(zero, info.min, info.max), dtype)


def scalar(b: Builder, array: np.ndarray) -> Value:
    """A scale or zero point of a whole tensor."""
    return b.constant(np.asarray(array), fed=False)


def random_codes(b: Builder, dtype, shape) -> np.ndarray:
    info = np.iinfo(dtype)
    low, high = b.draw.choice([(info.min, info.max), (0, 20)])
    return b.draw.rng.integers(max(low, info.min), min(high, info.max) + 1, shape).astype(dtype)


def coded_input(b: Builder, shape, dtype=None) -> Coded:
    dtype = dtype or b.draw.choice(CODES)
    codes = b.root.input(random_codes(b, dtype, shape))
    return Coded(codes, scalar(b, scale_of(b)), scalar(b, zero_of(b, dtype)))


def dequantize(b: Builder, coded: Coded) -> Value:
    inputs = [coded.codes, coded.scale, coded.zero]
    return b.node("DequantizeLinear", inputs if coded.zero is not None else inputs[:2])


def quantize(b: Builder, x: Value, like: Coded | None = None) -> Coded:
    """Codes of floats: with the constants of others, or with own ones that cover most of the
    range."""
    if like is not None and b.draw.chance(0.4):
        scale, zero = like.scale, like.zero
    else:
        dtype = b.draw.choice(CODES)
        own = scale_of(b) if b.exact else np.float32(max(1e-3, np.abs(x.array).max(initial=0.1) / b.draw.choice([60, 120, 240])))
        if b.exact and b.draw.chance(0.8):
            most = float(np.abs(x.array).max(initial=1))
            own = np.float32(2.0 ** np.ceil(np.log2(max(most, 2.0**-6) / b.draw.choice([30, 120]))))
        scale = scalar(b, np.float32(own))
        zero = None if dtype == np.uint8 and b.draw.chance(0.1) else scalar(b, zero_of(b, dtype))
    codes = b.node("QuantizeLinear", [x, scale, zero] if zero is not None else [x, scale])
    return Coded(codes, scale, zero)


def weight(b: Builder, shape, axis: int | None) -> tuple[Value, np.ndarray]:
    """Dequantized weights, with scales for all or for each channel of an axis, and the scales."""
    draw = b.draw
    dtype = draw.choice([np.int8, np.int8, np.uint8])
    codes = random_codes(b, dtype, shape)
    per_channel = axis is not None and draw.chance(0.4)
    scale = scale_of(b, shape[axis] if per_channel else None)
    zero = np.zeros(scale.shape, dtype)
    if draw.chance(0.3) and not per_channel:
        zero = zero_of(b, dtype)
    inputs = [b.constant(codes, fed=False), scalar(b, scale)]
    if draw.chance(0.85) or np.any(zero) or dtype == np.uint8:
        inputs.append(scalar(b, zero))
    return b.node("DequantizeLinear", inputs, axis=axis if per_channel else None), scale


def bias(b: Builder, x_scale: np.ndarray, w_scale: np.ndarray, shape) -> Value:
    """A bias of floats, or of int32 codes with the product of the scales."""
    draw = b.draw
    codes = draw.rng.integers(-300, 300, shape).astype(np.int32)
    scale = (x_scale * w_scale).astype(np.float32)
    as_codes = draw.chance(0.6) and len(shape) == 1 and (scale.ndim == 0 or scale.shape[0] == shape[0])
    if as_codes:
        inputs = [b.constant(codes, fed=False), scalar(b, scale)]
        if draw.chance(0.7):
            inputs.append(scalar(b, np.zeros(scale.shape, np.int32)))
        return b.node("DequantizeLinear", inputs, axis=0 if scale.ndim else None)
    if b.exact:
        return b.constant((codes * float(np.min(scale))).astype(np.float32), fed=False)
    return b.constant((codes * float(np.mean(scale)) + 0.01).astype(np.float32), fed=False)


# Operators between DequantizeLinear and QuantizeLinear


def conv(b: Builder, x: Value, coded: Coded) -> Value:
    if x.ndim not in (3, 4):
        raise Unfit("no image")
    draw = b.draw
    channels = x.shape[1]
    group = draw.choice([1, 1, channels])
    filters = group * draw.choice([1, 2, 3]) if group > 1 else draw.choice([1, 2, 3, 4, channels])
    kernel = [min(size, draw.choice([1, 1, 2, 3])) for size in x.shape[2:]]
    w, w_scale = weight(b, (filters, channels // group, *kernel), 0)
    inputs = [x, w]
    if draw.chance(0.5):
        inputs.append(bias(b, coded.scale.array, w_scale, (filters,)))
    pads = [draw.choice([0, 0, 1]) for _ in range(2 * len(kernel))]
    strides = [draw.choice([1, 1, 2]) for _ in kernel]
    return b.node("Conv", inputs, group=group, pads=pads, strides=strides, kernel_shape=kernel if draw.chance(0.5) else None)


def matmul(b: Builder, x: Value, coded: Coded) -> Value:
    if x.ndim < 2:
        raise Unfit("no matrix")
    k = x.shape[-1]
    w, w_scale = weight(b, (k, b.draw.choice([1, 2, 3, 5, 8, k, x.shape[-2]])), 1)
    y = b.node("MatMul", [x, w])
    if b.draw.chance(0.5):
        shape = b.draw.choice([(y.shape[-1],), (y.shape[-1],), (1, y.shape[-1]), (y.shape[-2], 1), ()])
        other = bias(b, coded.scale.array, w_scale, shape)
        y = b.node("Add", [y, other] if b.draw.chance(0.7) else [other, y])
    return y


def gemm(b: Builder, x: Value, coded: Coded) -> Value:
    if x.ndim != 2:
        x = b.node("Flatten", [x], axis=1) if x.ndim > 1 else b.node("Reshape", [x, b.ints([1, -1])])
    draw = b.draw
    (m, k), trans_b = x.shape, int(draw.chance(0.5))
    n = draw.choice([1, 2, 3, 4, k, m, m])
    w, w_scale = weight(b, (n, k) if trans_b else (k, n), 0 if trans_b else 1)
    inputs = [x, w]
    if draw.chance(0.75):
        shape = draw.choice([(n,), (n,), (1, n), (m, 1), (), (1,), (m, n)])
        inputs.append(bias(b, coded.scale.array, w_scale, shape))
    scales = {name: draw.choice([None, None, None, 1.0, 0.5, 2.0]) for name in ("alpha", "beta")}
    return b.node("Gemm", inputs, transB=trans_b, **scales)


def add(b: Builder, x: Value, coded: Coded) -> Value:
    other = coded
    if b.draw.chance(0.6):
        shape = x.shape if b.draw.chance(0.6) else b.draw.broadcastable(x.shape)
        other = coded_input(b, shape, coded.codes.dtype if b.draw.chance(0.8) else None)
        if b.draw.chance(0.4) and other.codes.dtype == coded.codes.dtype:
            other = Coded(other.codes, coded.scale, coded.zero)
    op = b.draw.choice(["Add", "Add", "Mul", "Sub"])
    y = dequantize(b, other)
    return b.node(op, [x, y] if b.draw.chance(0.7) else [y, x])


def pool(b: Builder, x: Value, coded: Coded) -> Value:
    if x.ndim not in (3, 4):
        raise Unfit("no image")
    draw = b.draw
    kind = draw.choice(["AveragePool", "AveragePool", "MaxPool", "GlobalAveragePool", "ReduceMean"])
    window = int(np.prod(x.shape[2:]))
    if kind in ("GlobalAveragePool", "ReduceMean"):
        if b.exact and window & (window - 1):
            raise Unfit("a window that rounds")
        if kind == "GlobalAveragePool":
            return b.node(kind, [x])
        return b.node(kind, [x, b.ints(list(range(2, x.ndim)))], keepdims=draw.integer(0, 1))
    kernel = [min(size, draw.choice([1, 2, 2] if b.exact else [1, 2, 3])) for size in x.shape[2:]]
    strides = [draw.choice([1, 2]) for _ in kernel]
    pads = None if b.exact or draw.chance(0.6) else [draw.integer(0, (size - 1) // 2) for size in kernel * 2]
    counts = {"count_include_pad": draw.choice([None, 1])} if kind == "AveragePool" else {}
    return b.node(kind, [x], kernel_shape=kernel, strides=strides, pads=pads, **counts)


def activation(b: Builder, x: Value, coded: Coded) -> Value:
    op = b.draw.choice(["Relu", "Clip"] if b.exact else ["Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Softmax"])
    if op != "Clip":
        return b.node(op, [x])
    bounds = [b.constant(np.float32(bound), fed=False) for bound in b.draw.choice([(0, 6), (-1, 1), (0, 4)])]
    return b.node("Clip", [x, *bounds])


def moved(b: Builder, x: Value, coded: Coded) -> Value:
    draw = b.draw
    if x.ndim == 0 or x.array.size == 0:
        raise Unfit("a scalar")
    if draw.chance(0.5):
        return b.node("Transpose", [x], perm=draw.permutation(x.ndim))
    return b.node("Reshape", [x, b.ints(regroupings(draw, x.array.size))])


def concat(b: Builder, x: Value, coded: Coded) -> Value:
    if x.ndim == 0:
        raise Unfit("a scalar")
    axis = b.draw.integer(0, x.ndim - 1)
    shape = list(x.shape)
    shape[axis] = b.draw.choice([1, 2, 3])
    other = coded_input(b, shape, coded.codes.dtype)
    if b.draw.chance(0.4):
        other = Coded(other.codes, coded.scale, coded.zero)
    parts = [x, dequantize(b, other)]
    return b.node("Concat", parts if b.draw.chance(0.5) else parts[::-1], axis=axis)


OPERATORS = [conv, conv, matmul, gemm, gemm, gemm, add, add, add, pool, pool, pool, activation, moved, concat]


def make(b: Builder) -> None:
    draw = b.draw
    b.exact = draw.chance(0.6)
    rank = draw.weighted({1: 0.3, 2: 3, 3: 2, 4: 4})
    coded = coded_input(b, draw.shape(rank, rank, 150))
    for _ in range(draw.integer(1, 4)):
        try:
            x = dequantize(b, coded)
            y = draw.choice(OPERATORS)(b, x, coded)
            if draw.chance(0.35):
                y = activation(b, y, coded)
            coded = quantize(b, y, coded)
        except Unfit:
            continue
    if coded.codes.name in {value.name for value in b.inputs} or draw.chance(0.2):
        dequantize(b, coded)
