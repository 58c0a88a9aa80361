"""Matrix products: MatMul, Gemm, FusedMatMul, with biases of all shapes, activations, residuals,
regrouped axes."""

import numpy as np

from evaluate import MICROSOFT
from families.elementwise import STEPS as ELEMENTWISE
from families.elementwise import clip, float_type, grow, is_float, spelled_gelu, spelled_silu, unary
from graph import Builder, Unfit, Value

ACTIVATIONS = ["Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "HardSigmoid", "Elu", "Gelu", "Mish", "Softplus"]


def weight(b: Builder, dtype, shape) -> Value:
    array = (b.draw.rng.standard_normal(shape) * 0.5).astype(dtype)
    return b.constant(array) if b.draw.chance(0.85) else b.root.input(array)


def columns(b: Builder, k: int) -> int:
    # Square results are where rows and columns are mistaken for each other.
    return b.draw.choice([1, 2, 3, 4, 5, 8, 16, k, k])


def activation(b: Builder, x: Value) -> Value:
    kind = b.draw.weighted({"operator": 6, "clip": 1, "silu": 1, "gelu": 1})
    if kind == "operator":
        return unary(b, x, b.draw.choice(ACTIVATIONS))
    return {"clip": clip, "silu": spelled_silu, "gelu": spelled_gelu}[kind](b, x)


def bias_shape(b: Builder, shape) -> tuple[int, ...]:
    """What may be added to a result: [N], [1, N], [M, 1], scalars, the whole."""
    m, n = shape[-2] if len(shape) > 1 else 1, shape[-1]
    return b.draw.choice([(n,), (n,), (n,), (1, n), (m, 1), (), (1,), (1, 1), tuple(shape), (1,) * len(shape), (1, 1, n)])


def with_bias(b: Builder, x: Value) -> Value:
    bias = weight(b, x.dtype, bias_shape(b, x.shape)) if x.ndim else weight(b, x.dtype, ())
    return b.node("Add", [x, bias] if b.draw.chance(0.7) else [bias, x])


def residual(b: Builder, x: Value) -> Value:
    shape = x.shape if b.draw.chance(0.7) else b.draw.broadcastable(x.shape, grow=True)
    other = b.random(x.dtype, shape)
    return b.node("Add", [x, other] if b.draw.chance(0.7) else [other, x])


def after(b: Builder, y: Value) -> Value:
    """What usually follows a product."""
    if b.draw.chance(0.5):
        y = with_bias(b, y)
    if b.draw.chance(0.2):
        y = residual(b, y)
    if b.draw.chance(0.5):
        y = activation(b, y)
    return y


def matmul(b: Builder, x: Value) -> Value:
    check(x, 1)
    k = x.shape[-1]
    batch = b.draw.broadcastable(x.shape[:-2]) if x.ndim > 2 and b.draw.chance(0.25) else ()
    w = weight(b, x.dtype, (*batch, k, columns(b, k)) if b.draw.chance(0.93) else (k,))
    if w.ndim == 2 and b.draw.chance(0.2):
        w = transposed_weight(b, w)
    return after(b, b.node("MatMul", [x, w]))


def transposed_weight(b: Builder, w: Value) -> Value:
    turned = b.constant(np.ascontiguousarray(w.array.T))
    return b.node("Transpose", [turned], perm=[1, 0] if b.draw.chance(0.8) else None)


def product_of_values(b: Builder, x: Value) -> Value:
    """Both sides from inputs, with broadcast batches."""
    check(x, 2)
    batch = b.draw.broadcastable(x.shape[:-2], grow=True)
    sizes = (x.shape[-1], columns(b, x.shape[-1]))
    is_turned = b.draw.chance(0.4)
    other = b.root.input(b.draw.elements(x.dtype, (*batch, *(sizes[::-1] if is_turned else sizes))))
    if is_turned:
        other = b.node("Transpose", [other], perm=[*range(other.ndim - 2), other.ndim - 1, other.ndim - 2])
    return after(b, b.node("MatMul", [x, other]))


def gemm(b: Builder, x: Value) -> Value:
    check(x, 2)
    draw = b.draw
    if x.ndim != 2:
        x = b.node("Flatten", [x], axis=draw.integer(0, x.ndim))
    trans_a, trans_b = int(draw.chance(0.2)), int(draw.chance(0.5))
    m, k = x.shape[::-1] if trans_a else x.shape
    n = draw.choice([columns(b, k), m])
    w = weight(b, x.dtype, (n, k) if trans_b else (k, n))
    inputs = [x, w]
    if draw.chance(0.75):
        bias = draw.choice([(n,), (n,), (1, n), (m, 1), (), (1,), (1, 1), (m, n)])
        inputs.append(weight(b, x.dtype, bias))
    scales = {name: draw.choice([1.0, 1.0, 0.5, 2.0]) for name in ("alpha", "beta")}
    y = b.node("Gemm", inputs, transA=trans_a, transB=trans_b, **scales)
    return activation(b, y) if draw.chance(0.4) else y


def fused_matmul(b: Builder, x: Value) -> Value:
    check(x, 2)
    if x.dtype == np.float16:
        raise Unfit("float16")
    draw = b.draw
    trans_b = int(draw.chance(0.5))
    k = x.shape[-1]
    shape = (columns(b, k), k) if trans_b else (k, columns(b, k))
    alpha = draw.choice([1.0, 0.5, 0.125])
    y = b.node("FusedMatMul", [x, weight(b, x.dtype, shape)], MICROSOFT, transB=trans_b, alpha=alpha)
    return after(b, y)


def regrouped(b: Builder, x: Value) -> Value:
    """Reshape, a product and what follows it, Reshape: rows are merged for the product and split
    again."""
    check(x, 2)
    draw = b.draw
    k = x.shape[-1]
    rows = x.array.size // max(1, k)
    flat = b.node("Reshape", [x, b.ints(draw.choice([[-1, k], [rows, k], [rows, -1]]))])
    y = flat
    n = columns(b, k)
    y = b.node("MatMul", [y, weight(b, x.dtype, (k, n))])
    for _ in range(draw.integer(0, 2)):
        y = draw.choice([with_bias, activation, residual])(b, y)
    if y.array.size != rows * n:
        return y
    lead = list(x.shape[:-1]) if draw.chance(0.7) else regroupings(draw, rows)
    shape = [*lead, n]
    if draw.chance(0.3) and y.array.size:
        shape[draw.integer(0, len(shape) - 1)] = -1
    return b.node("Reshape", [y, b.ints(shape)])


def regroupings(draw, rows: int) -> list[int]:
    """The sizes of axes that hold as many rows, in another grouping."""
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    first = draw.choice(divisors)
    return [first, rows // first]


def einsum(b: Builder, x: Value) -> Value:
    check(x, 2)
    letters = "abcdef"[: x.ndim]
    k = x.shape[-1]
    n = columns(b, k)
    equation = f"{letters},{letters[-1]}z->{letters[:-1]}z" if b.draw.chance(0.5) else f"{letters},z{letters[-1]}->z{letters[:-1]}"
    shape = (n, k) if ",z" in equation else (k, n)
    return b.node("Einsum", [x, weight(b, x.dtype, shape)], equation=equation)


def check(x: Value, rank: int) -> None:
    if x.ndim < rank or not is_float(x):
        raise Unfit("no matrix of floats")


STEPS = [matmul, matmul, matmul, gemm, gemm, regrouped, regrouped, product_of_values, fused_matmul, einsum]


def make(b: Builder) -> None:
    x = b.root.input(b.draw.elements(float_type(b), b.draw.shape(b.draw.choice([1, 2, 2, 2, 2]), 4, 160)))
    if b.draw.chance(0.2):
        x = grow(b, x, ELEMENTWISE, 1)
    x = grow(b, x, STEPS, b.draw.integer(1, 3))
    if b.draw.chance(0.3):
        grow(b, x, ELEMENTWISE, 1)
