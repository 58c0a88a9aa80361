"""Operators of codes: QLinearMatMul, QLinearConv, MatMulInteger, ConvInteger,
DynamicQuantizeLinear, and those of com.microsoft. Ties are common: half of the models have scales
that are powers of two."""

import numpy as np

from evaluate import MICROSOFT
from families.quantized import CODES, Coded, coded_input, dequantize, quantize, random_codes, scalar, scale_of, zero_of
from graph import Builder, Unfit, Value


def output_constants(b: Builder, dtype, spread: float) -> tuple[Value, Value]:
    """A scale and a zero point that keep values of this size in the range of the codes."""
    scale = spread / b.draw.choice([20, 60, 120])
    scale = 2.0 ** np.ceil(np.log2(max(scale, 1e-4))) if b.exact else scale
    return scalar(b, np.float32(scale)), scalar(b, zero_of(b, dtype))


def codes_constant(b: Builder, dtype, shape) -> Value:
    codes = random_codes(b, dtype, shape)
    return b.constant(codes, fed=False) if b.draw.chance(0.8) else b.root.input(codes)


def qlinear_matmul(b: Builder, x: Coded) -> Coded:
    a = x.codes
    if a.ndim < 2:
        raise Unfit("no matrix")
    k, dtype = a.shape[-1], b.draw.choice([a.dtype, np.int8]) if a.dtype == np.uint8 else np.int8
    w = codes_constant(b, dtype, (k, b.draw.choice([1, 2, 4, 5, k])))
    w_scale, w_zero = scalar(b, scale_of(b)), scalar(b, zero_of(b, dtype))
    spread = float(np.sqrt(k) * 3000 * x.scale.array * w_scale.array)
    y_scale, y_zero = output_constants(b, a.dtype, spread)
    y = b.node("QLinearMatMul", [a, x.scale, x.zero, w, w_scale, w_zero, y_scale, y_zero])
    return Coded(y, y_scale, y_zero)


def qlinear_conv(b: Builder, x: Coded) -> Coded:
    draw, a = b.draw, x.codes
    if a.ndim not in (3, 4):
        raise Unfit("no image")
    last = draw.chance(0.3)
    channels, spatial = (a.shape[-1], a.shape[1:-1]) if last else (a.shape[1], a.shape[2:])
    dtype = np.int8 if a.dtype == np.int8 or draw.chance(0.6) else np.uint8
    filters = draw.choice([1, 2, 3, 4])
    kernel = [min(size, draw.choice([1, 2, 3])) for size in spatial]
    w = codes_constant(b, dtype, (filters, channels, *kernel))
    per_channel = draw.chance(0.4)
    w_scale = scalar(b, scale_of(b, filters if per_channel else None))
    w_zero = scalar(b, np.zeros(filters, dtype) if per_channel else zero_of(b, dtype))
    count = channels * int(np.prod(kernel))
    spread = float(np.sqrt(count) * 3000 * x.scale.array * np.max(w_scale.array))
    y_scale, y_zero = output_constants(b, a.dtype, spread)
    inputs = [a, x.scale, x.zero, w, w_scale, w_zero, y_scale, y_zero]
    if draw.chance(0.5):
        inputs.append(b.constant(draw.rng.integers(-500, 500, filters).astype(np.int32), fed=False))
    pads = [draw.choice([0, 0, 1]) for _ in range(2 * len(kernel))]
    attributes = {"pads": pads, "strides": [draw.choice([1, 2]) for _ in kernel]}
    if last:
        return Coded(b.node("QLinearConv", inputs, MICROSOFT, channels_last=1, **attributes), y_scale, y_zero)
    return Coded(b.node("QLinearConv", inputs, **attributes), y_scale, y_zero)


def qlinear_binary(b: Builder, x: Coded) -> Coded:
    a, op = x.codes, b.draw.choice(["QLinearAdd", "QLinearMul"])
    shape = a.shape if b.draw.chance(0.6) else b.draw.broadcastable(a.shape, grow=True)
    other = coded_input(b, shape, a.dtype)
    if b.draw.chance(0.3):
        other = Coded(b.constant(other.codes.array, fed=False), other.scale, other.zero)
    spread = 150 * float(x.scale.array + other.scale.array)
    spread = spread if op == "QLinearAdd" else 10000 * float(x.scale.array * other.scale.array)
    y_scale, y_zero = output_constants(b, a.dtype, spread)
    triples = [[a, x.scale, x.zero], [other.codes, other.scale, other.zero]]
    if b.draw.chance(0.3):
        triples.reverse()
    y = b.node(op, [*triples[0], *triples[1], y_scale, y_zero], MICROSOFT)
    return Coded(y, y_scale, y_zero)


def qlinear_unary(b: Builder, x: Coded) -> Coded:
    op = b.draw.choice(["QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"])
    if op == "QLinearSoftmax" and x.codes.ndim == 0:
        raise Unfit("a scalar")
    dtype = x.codes.dtype
    spread = 150 * float(x.scale.array) if op == "QLinearLeakyRelu" else 1.0
    y_scale, y_zero = output_constants(b, dtype, spread)
    attributes = {}
    if op == "QLinearLeakyRelu":
        attributes = {"alpha": 0.25}
    if op == "QLinearSoftmax":
        attributes = {"axis": b.draw.choice([-1, x.codes.ndim - 1, 0]), "opset": 13}
    inputs = [x.codes, x.scale, x.zero, y_scale, y_zero]
    exact = b.root.exact
    b.root.exact = exact and op == "QLinearLeakyRelu"
    return Coded(b.node(op, inputs, MICROSOFT, **attributes), y_scale, y_zero)


def qlinear_pool(b: Builder, x: Coded) -> Coded:
    a, draw = x.codes, b.draw
    if a.ndim not in (3, 4):
        raise Unfit("no image")
    dtype = a.dtype
    y_scale, y_zero = (x.scale, x.zero) if draw.chance(0.4) else output_constants(b, dtype, 100 * float(x.scale.array))
    last = int(draw.chance(0.3))
    spatial = a.shape[1:-1] if last else a.shape[2:]
    inputs = [a, x.scale, x.zero, y_scale, y_zero]
    if draw.chance(0.5):
        window = int(np.prod(spatial))
        b.root.exact = b.root.exact and not window & (window - 1)
        y = b.node("QLinearGlobalAveragePool", inputs, MICROSOFT, channels_last=last)
        return Coded(y, y_scale, y_zero)
    kernel = [min(size, draw.choice([1, 2])) for size in spatial]
    attributes = {"kernel_shape": kernel, "strides": [draw.choice([1, 2]) for _ in kernel]}
    y = b.node("QLinearAveragePool", inputs, MICROSOFT, channels_last=last, **attributes)
    return Coded(y, y_scale, y_zero)


def qlinear_concat(b: Builder, x: Coded) -> Coded:
    a = x.codes
    if a.ndim == 0:
        raise Unfit("a scalar")
    y_scale, y_zero = output_constants(b, a.dtype, 150 * float(x.scale.array))
    axis = b.draw.integer(0, a.ndim - 1)
    other = coded_input(b, a.shape, a.dtype)
    inputs = [y_scale, y_zero, a, x.scale, x.zero, other.codes, other.scale, other.zero]
    return Coded(b.node("QLinearConcat", inputs, MICROSOFT, axis=axis), y_scale, y_zero)


def integer_product(b: Builder, x: Coded) -> Coded:
    """MatMulInteger or ConvInteger, then a scale, as dynamically quantized models have it."""
    draw, a = b.draw, x.codes
    dtype = draw.choice([np.int8, np.uint8])
    if a.ndim == 4 and a.dtype == np.uint8 and draw.chance(0.5):
        w = codes_constant(b, dtype, (draw.choice([1, 2, 3]), a.shape[1], 1, min(2, a.shape[3])))
        zeros = [x.zero, scalar(b, zero_of(b, dtype))] if draw.chance(0.7) else []
        y = b.node("ConvInteger", [a, w, *zeros])
    else:
        if a.ndim < 2:
            raise Unfit("no matrix")
        n = draw.choice([1, 3, 4, a.shape[-1]])
        w = codes_constant(b, dtype, (a.shape[-1], n))
        zeros = [x.zero, scalar(b, zero_of(b, dtype))] if draw.chance(0.7) else []
        if zeros and draw.chance(0.4):
            zeros[1] = scalar(b, random_codes(b, dtype, (n,)))
        y = b.node("MatMulInteger", [a, w, *zeros])
    floats = b.node("Cast", [y], to=1)
    factor = scalar(b, scale_of(b) if draw.chance(0.5) or y.ndim != 2 else scale_of(b, y.shape[-1]))
    y = b.node("Mul", [floats, factor])
    if draw.chance(0.5):
        y = b.node("Add", [y, b.constant(np.float32(draw.rng.integers(-9, 9, y.shape[-1:])))])
    return quantize(b, y)


def dynamic(b: Builder, x: Coded) -> Coded:
    """Codes whose scale the run finds."""
    b.root.exact = False
    codes, scale, zero = b.nodes_of("DynamicQuantizeLinear", [dequantize(b, x)], 3)
    return Coded(codes, scale, zero)


OPERATORS = [
    qlinear_matmul, qlinear_conv, qlinear_binary, qlinear_binary, qlinear_unary, qlinear_pool, qlinear_pool, qlinear_concat,
    integer_product, dynamic,
]


def make(b: Builder) -> None:
    draw = b.draw
    b.exact = draw.chance(0.6)
    rank = draw.weighted({1: 1, 2: 3, 3: 2, 4: 4})
    x = coded_input(b, draw.shape(rank, rank, 150), draw.choice(CODES))
    for _ in range(draw.integer(1, 3)):
        if x.zero is None:
            # QLinear operators want to be told.
            x = Coded(x.codes, x.scale, scalar(b, np.zeros((), x.codes.dtype)))
        try:
            x = draw.choice(OPERATORS)(b, x)
        except Unfit:
            continue
