"""Operators that only move elements, and the arithmetic of shapes that exporters leave in
models."""

import numpy as np

from draw import FLOATS
from families.elementwise import STEPS as ELEMENTWISE
from families.elementwise import grow
from graph import Builder, Unfit, Value


def reshape(b: Builder, x: Value) -> Value:
    draw, sizes = b.draw, []
    rest = x.array.size
    if rest == 0:
        raise Unfit("empty")
    for _ in range(draw.integer(0, 3)):
        divisors = [size for size in range(1, rest + 1) if rest % size == 0]
        sizes.append(draw.choice(divisors))
        rest //= sizes[-1]
    sizes.append(rest)
    if draw.chance(0.4):
        sizes[draw.integer(0, len(sizes) - 1)] = -1
    for axis, size in enumerate(sizes):
        if axis < x.ndim and x.shape[axis] == size and draw.chance(0.3):
            sizes[axis] = 0
    return b.node("Reshape", [x, b.ints(sizes)])


def reshape_by_shape(b: Builder, x: Value) -> Value:
    """Reshape to sizes that the model computes of the shape of a value."""
    draw = b.draw
    if x.ndim < 2 or x.array.size == 0:
        raise Unfit("too few axes")
    sizes = b.node("Shape", [x])
    first = b.node("Gather", [sizes, b.constant(np.array(draw.choice([0, -x.ndim]), np.int64))])
    kind = draw.choice(["merge", "same", "halves"])
    if kind == "merge":
        parts = [b.node("Unsqueeze", [first, b.ints([0])]), b.ints([-1])]
        return b.node("Reshape", [x, b.node("Concat", parts, axis=0)])
    if kind == "same":
        other = draw.choice([reshape, transpose])(b, x)
        return b.node("Reshape", [other, sizes])
    last = b.node("Slice", [sizes, b.ints([1]), b.ints([2**31]), b.ints([0])])
    product = b.node("ReduceProd", [last], keepdims=1)
    parts = [product, b.node("Reshape", [first, b.ints([1])])]
    return b.node("Reshape", [x, b.node("Concat", parts, axis=0)])


def transpose(b: Builder, x: Value) -> Value:
    perm = b.draw.permutation(x.ndim)
    return b.node("Transpose", [x], perm=perm if perm and b.draw.chance(0.9) else None)


def squeeze(b: Builder, x: Value) -> Value:
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    if not ones:
        raise Unfit("no axis of 1")
    axes = b.draw.some(ones, b.draw.integer(1, len(ones)))
    axes = [axis - x.ndim if b.draw.chance(0.3) else axis for axis in axes]
    return b.node("Squeeze", [x, b.ints(axes)] if b.draw.chance(0.8) else [x])


def unsqueeze(b: Builder, x: Value) -> Value:
    if x.ndim > 4:
        raise Unfit("too many axes")
    axes = b.draw.some(range(x.ndim + 2), b.draw.integer(1, 2))
    axes = [axis for axis in axes if axis < x.ndim + len(axes)] or [0]
    return b.node("Unsqueeze", [x, b.ints(axes)])


def slice_(b: Builder, x: Value) -> Value:
    if x.ndim == 0:
        raise Unfit("a scalar")
    draw = b.draw
    axes = draw.some(range(x.ndim), draw.integer(1, x.ndim))
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        kind = draw.weighted({"part": 4, "all": 1, "backwards": 1, "rest": 2, "empty": 0.15})
        first = draw.integer(0, max(0, size - 1))
        if kind == "part":
            bounds = (first, draw.integer(first, size) or 1, draw.choice([1, 1, 2]))
        else:
            all_of = (0, 2**63 - 1, 1)
            bounds = {"all": all_of, "backwards": (-1, -(2**31), -1), "rest": (first - size, size, 1), "empty": (size, size, 1)}[kind]
        for listed, bound in zip((starts, ends, steps), bounds):
            listed.append(bound)
    inputs = [x, b.ints(starts), b.ints(ends), b.ints(axes)]
    if any(step != 1 for step in steps) or draw.chance(0.3):
        inputs.append(b.ints(steps))
    return b.node("Slice", inputs)


def concat(b: Builder, x: Value) -> Value:
    if x.ndim == 0:
        raise Unfit("a scalar")
    draw = b.draw
    axis = draw.integer(0, x.ndim - 1)
    shape = list(x.shape)
    parts = [x]
    for _ in range(draw.integer(0, 2)):
        shape[axis] = draw.choice([1, 2, x.shape[axis]])
        parts.append(b.random(x.dtype, shape) if draw.chance(0.7) or list(x.shape) != shape else x)
    order = draw.permutation(len(parts))
    return b.node("Concat", [parts[index] for index in order], axis=axis - x.ndim if draw.chance(0.3) else axis)


def split(b: Builder, x: Value) -> Value:
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    if not axes:
        raise Unfit("nothing to split")
    draw = b.draw
    axis = draw.choice(axes)
    first = draw.integer(1, x.shape[axis] - 1)
    sizes = [first, x.shape[axis] - first]
    if draw.chance(0.3):
        parts = b.nodes_of("Split", [x], 2, axis=axis, num_outputs=2)
    else:
        parts = b.nodes_of("Split", [x, b.ints(sizes)], 2, axis=axis)
    chosen = draw.integer(0, 1)
    if parts[0].shape == parts[1].shape and draw.chance(0.4):
        return b.node(draw.choice(["Concat"]), parts[::-1], axis=axis)
    return parts[chosen]


def gather(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or 0 in x.shape:
        raise Unfit("nothing to gather")
    draw = b.draw
    axis = draw.integer(0, x.ndim - 1)
    size = x.shape[axis]
    kind = draw.choice(["Gather", "Gather", "GatherElements", "GatherND"])
    index_type = draw.choice([np.int64, np.int64, np.int32])
    if kind == "Gather":
        indices = draw.rng.integers(-size, size, draw.shape(0, 2, 8)).astype(index_type)
        return b.node(kind, [x, b.constant(indices) if draw.chance(0.6) else b.root.input(indices)], axis=axis)
    if kind == "GatherElements":
        shape = list(x.shape)
        shape[axis] = draw.choice([1, 2, size])
        indices = draw.rng.integers(-size, size, shape).astype(index_type)
        return b.node(kind, [x, b.root.input(indices)], axis=axis)
    depth = draw.integer(1, x.ndim)
    rows = [draw.rng.integers(-extent, extent, draw.choice([3])) for extent in x.shape[:depth]]
    return b.node(kind, [x, b.root.input(np.stack(rows, -1).astype(np.int64))])


def scatter(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or 0 in x.shape:
        raise Unfit("nothing to scatter")
    draw = b.draw
    axis = draw.integer(0, x.ndim - 1)
    shape = list(x.shape)
    shape[axis] = 1
    indices = draw.rng.integers(-x.shape[axis], x.shape[axis], shape)
    return b.node("ScatterElements", [x, b.root.input(indices), b.random(x.dtype, shape)], axis=axis)


def pad(b: Builder, x: Value) -> Value:
    if x.ndim == 0 or 0 in x.shape:
        raise Unfit("nothing to pad")
    draw = b.draw
    mode = draw.choice(["constant", "constant", "reflect", "edge", *(["wrap"] if b.opset >= 19 else [])])
    most = 2 if mode == "constant" else min(1, min(x.shape) - 1)
    pads = [draw.integer(0, most) for _ in range(2 * x.ndim)]
    if draw.chance(0.2):
        pads = [draw.choice([0, -1]) if x.shape[axis % x.ndim] > 2 else 0 for axis in range(2 * x.ndim)]
    inputs = [x, b.ints(pads)]
    if mode == "constant" and draw.chance(0.4):
        inputs.append(b.constant(draw.elements(x.dtype, ())))
    return b.node("Pad", inputs, mode=mode)


def expand(b: Builder, x: Value) -> Value:
    draw = b.draw
    shape = [draw.choice([2, 3]) if size == 1 and draw.chance(0.6) else draw.choice([size, 1]) for size in x.shape]
    if draw.chance(0.3) and x.ndim < 4:
        shape = [draw.choice([1, 2]), *shape]
    return b.node("Expand", [x, b.ints(shape)])


def tile(b: Builder, x: Value) -> Value:
    return b.node("Tile", [x, b.ints([b.draw.choice([1, 1, 2]) for _ in x.shape])])


def flatten(b: Builder, x: Value) -> Value:
    return b.node("Flatten", [x], axis=b.draw.integer(-x.ndim, x.ndim))


def identity(b: Builder, x: Value) -> Value:
    return b.node("Identity", [x])


def back_and_forth(b: Builder, x: Value) -> Value:
    """A movement and its opposite."""
    draw = b.draw
    if draw.chance(0.5):
        perm = draw.permutation(x.ndim)
        y = b.node("Transpose", [x], perm=perm)
        y = grow(b, y, ELEMENTWISE, 1) if draw.chance(0.4) else y
        if y.ndim != x.ndim:
            return y
        return b.node("Transpose", [y], perm=[int(axis) for axis in np.argsort(perm)])
    axis = draw.integer(0, x.ndim)
    y = b.node("Unsqueeze", [x, b.ints([axis])])
    return b.node("Squeeze", [y, b.ints([axis])])


def trilu(b: Builder, x: Value) -> Value:
    if x.ndim < 2 or 0 in x.shape:
        raise Unfit("no matrix")
    inputs = [x, b.constant(np.array(b.draw.integer(-2, 2), np.int64))]
    return b.node("Trilu", inputs if b.draw.chance(0.7) else inputs[:1], upper=b.draw.integer(0, 1))


STEPS = [
    reshape, reshape, reshape_by_shape, transpose, transpose, squeeze, unsqueeze, slice_, slice_, concat, concat, split, split,
    gather, gather, scatter, pad, expand, tile, flatten, identity, back_and_forth, back_and_forth, trilu,
]


def make(b: Builder) -> None:
    dtype = b.draw.choice([*FLOATS, np.float32, np.int64, np.int32, np.uint8, np.bool_])
    x = b.root.input(b.draw.elements(dtype, b.draw.shape(1, 4, 120)))
    for _ in range(b.draw.integer(1, 3)):
        x = grow(b, x, STEPS, b.draw.integer(1, 4))
        if b.draw.chance(0.4):
            x = grow(b, x, ELEMENTWISE, 1)
