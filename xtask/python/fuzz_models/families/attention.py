"""Attention in the spellings of exporters: products, scales, masks, softmax, with heads split and
joined by Reshape and Transpose, over the batch as it comes or regrouped (windows, frames, divided
space and time); and as operators."""

from dataclasses import dataclass

import numpy as np

from evaluate import MICROSOFT
from families.linear import regroupings, weight, with_bias
from graph import Builder, Unfit, Value

LEAST = float(np.finfo(np.float32).min)


@dataclass
class Sizes:
    """Of one attention: queries [batch, heads, queries, width], keys [batch, heads, keys,
    width]."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    values: int  # the width of values


def drawn_sizes(b: Builder) -> Sizes:
    draw = b.draw
    queries = draw.choice([1, 2, 3, 4, 5, 8])
    width = draw.choice([1, 2, 4, 8])
    keys = queries if draw.chance(0.6) else draw.choice([1, 2, 3, 6, 9])
    heads = draw.choice([1, 1, 2, 3, 4])
    return Sizes(draw.choice([1, 2, 2, 3]), heads, queries, keys, width, width if draw.chance(0.85) else draw.choice([1, 3, 4]))


# Masks


def mask_shape(b: Builder, scores) -> tuple[int, ...]:
    """A shape that broadcasts to [batch, heads, queries, keys]: any axis may be 1, leading ones may
    be missing."""
    shape = [size if b.draw.chance(0.6) else 1 for size in scores]
    keep = b.draw.weighted({len(shape): 6, 3: 1, 2: 3, 1: 1, 0: 0.3})
    return tuple(shape[len(shape) - min(keep, len(shape)):])


def mask_elements(b: Builder, shape, dtype) -> np.ndarray:
    draw = b.draw
    kind = draw.weighted({"random": 3, "closed": 3, "rows": 2, "causal": 1, "zeros": 0.5})
    closed = draw.choice([-np.inf, -np.inf, -10000.0, LEAST if dtype != np.float16 else -65504.0])
    if kind == "random":
        return draw.rng.standard_normal(shape).astype(dtype)
    if kind == "zeros":
        return np.zeros(shape, dtype)
    is_open = draw.rng.random(shape) < draw.choice([0.3, 0.7, 0.9])
    if kind == "causal" and len(shape) >= 2:
        is_open = np.broadcast_to(np.tril(np.ones(shape[-2:], bool)), shape)
    if kind == "rows" and len(shape) >= 1:
        # Some rows are closed throughout, as those of padding are.
        is_open = is_open & (draw.rng.random((*shape[:-1], 1)) < 0.6)
    return np.where(is_open, 0.0, closed).astype(dtype)


def masked(b: Builder, scores: Value) -> Value:
    draw = b.draw
    kind = draw.weighted({"none": 3, "added": 6, "chosen": 2, "made": 1})
    if kind == "none":
        return scores
    shape = mask_shape(b, scores.shape)
    if kind == "added":
        array = mask_elements(b, shape, scores.dtype)
        mask = b.constant(array) if draw.chance(0.3) else b.root.input(array)
        return b.node("Add", [scores, mask] if draw.chance(0.8) else [mask, scores])
    is_open = draw.rng.random(shape) < draw.choice([0.4, 0.8])
    if draw.chance(0.3):
        is_open = is_open & (draw.rng.random((*shape[:-1], 1)) < 0.7) if shape else is_open
    closed = b.constant(np.full(draw.ones(), draw.choice([-np.inf, -10000.0]), scores.dtype))
    if kind == "chosen":
        keeps = draw.chance(0.5)
        condition = b.root.input(is_open if keeps else ~is_open)
        return b.node("Where", [condition, scores, closed] if keeps else [condition, closed, scores])
    # A mask of ones and zeros that the model turns into addends: (1 - mask) * closed.
    ones = b.constant(np.array(1, scores.dtype))
    mask = b.node("Sub", [ones, b.root.input(is_open.astype(scores.dtype))])
    factor = b.constant(np.array(-10000.0, scores.dtype))
    return b.node("Add", [scores, b.node("Mul", [mask, factor])])


# Scores


def scaled(b: Builder, x: Value, factor: float) -> Value:
    shape = b.draw.ones()
    if b.draw.chance(0.5):
        return b.node("Mul", [x, b.constant(np.full(shape, factor, x.dtype))])
    return b.node("Div", [x, b.constant(np.full(shape, 1 / factor, x.dtype))])


def turned_keys(b: Builder, k: Value) -> Value:
    perm = [*range(k.ndim - 2), k.ndim - 1, k.ndim - 2]
    return b.node("Transpose", [k], perm=perm)


def core(b: Builder, q: Value, k: Value, v: Value, keys_turned: bool = False) -> Value:
    """softmax(q k' * scale + mask) v."""
    draw = b.draw
    factor = 1 / np.sqrt(q.shape[-1]) if draw.chance(0.7) else draw.choice([0.3, 0.5, 1.0, 2.0])
    place = draw.weighted({"scores": 4, "queries": 2, "keys": 1, "both": 1, "nowhere": 1})
    if place == "both":
        q, k = scaled(b, q, np.sqrt(factor)), scaled(b, k, np.sqrt(factor))
    if place == "queries":
        q = scaled(b, q, factor)
    turned = k if keys_turned else turned_keys(b, k)
    if place == "keys":
        turned = scaled(b, turned, factor)
    scores = b.node("MatMul", [q, turned])
    if place == "scores":
        scores = scaled(b, scores, factor)
    scores = masked(b, scores)
    axis = -1 if draw.chance(0.8) else draw.choice([scores.ndim - 1, scores.ndim - 1, max(0, scores.ndim - 2)])
    weights = b.node("Softmax", [scores], axis=axis)
    if draw.chance(0.1):
        # Exporters put zeros where a row had no number.
        is_nan = b.node("IsNaN", [weights])
        weights = b.node("Where", [is_nan, b.constant(np.array(0, weights.dtype)), weights])
    return b.node("MatMul", [weights, v])


def bare(b: Builder, sizes: Sizes, dtype) -> None:
    """Over queries, keys and values that are inputs."""
    draw = b.draw
    lead = draw.choice([(sizes.batch, sizes.heads)] * 4 + [(sizes.batch,), (), (2, sizes.batch, sizes.heads)])
    q = b.random(dtype, (*lead, sizes.queries, sizes.width))
    own = lead if draw.chance(0.85) else draw.broadcastable(lead)
    k = b.random(dtype, (*own, sizes.keys, sizes.width))
    v = b.random(dtype, (*own, sizes.keys, sizes.values))
    y = core(b, q, k, v)
    if draw.chance(0.3) and y.ndim == 4:
        joined(b, y, [y.shape[0], y.shape[2], y.shape[1] * y.shape[3]])


# Heads


def projected(b: Builder, x: Value, width: int) -> Value:
    y = b.node("MatMul", [x, weight(b, x.dtype, (x.shape[-1], width))])
    return with_bias(b, y) if b.draw.chance(0.5) and y.ndim else y


def shape_of(b: Builder, sizes: list[int]) -> Value:
    """A constant shape, with a size that follows from the others or is copied now and then."""
    sizes = list(sizes)
    if b.draw.chance(0.35):
        sizes[b.draw.integer(0, len(sizes) - 1)] = -1
    return b.ints(sizes)


def apart(b: Builder, x: Value, batch: int, length: int, heads: int) -> Value:
    """[.., .., heads * width] as [batch, heads, length, width]."""
    y = b.node("Reshape", [x, shape_of(b, [batch, length, heads, x.shape[-1] // heads])])
    return b.node("Transpose", [y], perm=[0, 2, 1, 3])


def apart_turned(b: Builder, x: Value, batch: int, length: int, heads: int) -> Value:
    """The same with the last two axes exchanged at once."""
    y = b.node("Reshape", [x, shape_of(b, [batch, length, heads, x.shape[-1] // heads])])
    return b.node("Transpose", [y], perm=[0, 2, 3, 1])


def joined(b: Builder, y: Value, shape: list[int]) -> Value:
    turned = b.node("Transpose", [y], perm=[0, 2, 1, 3] if b.draw.chance(0.93) else [2, 0, 1, 3])
    return b.node("Reshape", [turned, shape_of(b, shape)])


def with_heads(b: Builder, sizes: Sizes, dtype) -> None:
    """Over [batch, length, channels]: heads are split and joined; in some models other groups of
    positions attend."""
    draw = b.draw
    channels, batch = sizes.heads * sizes.width, sizes.batch
    x = b.random(dtype, (batch, sizes.queries, channels))
    has_memory = sizes.keys != sizes.queries
    memory = b.random(dtype, (batch, sizes.keys, channels)) if has_memory or draw.chance(0.5) else x
    projects = draw.chance(0.4)
    sources = []
    for source, width in ((x, channels), (memory, channels), (memory, sizes.heads * sizes.values)):
        if projects:
            source = projected(b, source, width)
        elif draw.chance(0.5) or source.shape[-1] != width:
            source = b.random(dtype, (*source.shape[:2], width))
        sources.append(source)
    groups, length = (batch, sizes.queries)
    if not has_memory and draw.chance(0.5):
        groups, length = regroupings(draw, batch * sizes.queries)
    keys = sizes.keys if has_memory else length
    q = apart(b, sources[0], groups, length, sizes.heads)
    keys_turned = draw.chance(0.3)
    k = (apart_turned if keys_turned else apart)(b, sources[1], groups, keys, sizes.heads)
    v = apart(b, sources[2], groups, keys, sizes.heads)
    y = core(b, q, k, v, keys_turned)
    lead = [batch, sizes.queries] if draw.chance(0.7) else regroupings(draw, batch * sizes.queries)
    y = joined(b, y, [*lead, sizes.heads * sizes.values])
    if draw.chance(0.4):
        y = with_bias(b, b.node("MatMul", [y, weight(b, y.dtype, (y.shape[-1], channels))]))
    if draw.chance(0.2) and y.shape == x.shape:
        b.node("Add", [y, x])


def packed(b: Builder, sizes: Sizes, dtype) -> None:
    """Queries, keys and values from one product, split."""
    draw = b.draw
    channels = sizes.heads * sizes.width
    x = b.random(dtype, (sizes.batch, sizes.queries, channels))
    whole = projected(b, x, 3 * channels)
    if draw.chance(0.5):
        parts = b.nodes_of("Split", [whole, b.ints([channels] * 3)], 3, axis=-1 if draw.chance(0.5) else 2)
        q, k, v = (apart(b, part, sizes.batch, sizes.queries, sizes.heads) for part in parts)
    else:
        shape = [sizes.batch, sizes.queries, 3, sizes.heads, sizes.width]
        five = b.node("Transpose", [b.node("Reshape", [whole, shape_of(b, shape)])], perm=[2, 0, 3, 1, 4])
        q, k, v = (b.node("Gather", [five, b.constant(np.array(index))], axis=0) for index in range(3))
    y = core(b, q, k, v)
    joined(b, y, [sizes.batch, sizes.queries, channels])


def make(b: Builder) -> None:
    dtype = b.draw.choice([np.float32, np.float32, np.float32, np.float64, np.float16])
    sizes = drawn_sizes(b)
    b.draw.choice([bare, with_heads, with_heads, packed])(b, sizes, dtype)


# Operators


def native(b: Builder, sizes: Sizes) -> None:
    """The standard's Attention, of opset 23, with 3 or 4 axes, heads that share keys, masks, causal
    or not."""
    draw = b.draw
    b.opset = 23
    dtype = draw.choice([np.float32, np.float32, np.float64, np.float16])
    shares = draw.choice([1, 1, 1, 2])
    kv_heads, heads = sizes.heads, sizes.heads * shares
    is_flat = draw.chance(0.5)

    def operand(count: int, length: int, width: int) -> Value:
        shape = (sizes.batch, length, count * width) if is_flat else (sizes.batch, count, length, width)
        return b.random(dtype, shape)

    inputs = [
        operand(heads, sizes.queries, sizes.width),
        operand(kv_heads, sizes.keys, sizes.width),
        operand(kv_heads, sizes.keys, sizes.values),
    ]
    scores = (sizes.batch, heads, sizes.queries, sizes.keys)
    if draw.chance(0.6):
        shape = mask_shape(b, scores)
        shape = shape if len(shape) >= 2 else (sizes.queries, sizes.keys)
        if draw.chance(0.4):
            inputs.append(b.root.input(draw.rng.random(shape) < 0.7))
        else:
            inputs.append(b.root.input(mask_elements(b, shape, dtype)))
    b.node(
        "Attention", inputs,
        is_causal=draw.choice([None, 0, 1]),
        scale=draw.choice([None, 0.3, 1.0]),
        softcap=draw.choice([None, None, 2.0]),
        q_num_heads=heads if is_flat else None,
        kv_num_heads=kv_heads if is_flat else None,
    )


def native_between(b: Builder, sizes: Sizes) -> None:
    """Attention of 4 axes between splits and joins of heads, over other groups of positions."""
    b.opset = 23
    draw = b.draw
    dtype = draw.choice([np.float32, np.float64])
    channels = sizes.heads * sizes.width
    groups, length = regroupings(draw, sizes.batch * sizes.queries)
    parts = [b.random(dtype, (sizes.batch, sizes.queries, channels)) for _ in range(3)]
    q, k, v = (apart(b, part, groups, length, sizes.heads) for part in parts)
    y = b.node("Attention", [q, k, v], is_causal=draw.choice([None, 1]))
    joined(b, y, [sizes.batch, sizes.queries, channels])


def multi_head(b: Builder, sizes: Sizes) -> None:
    draw = b.draw
    dtype = np.float32
    batch, channels = sizes.batch, sizes.heads * sizes.width
    values = sizes.heads * sizes.values
    q, k, v = (
        b.random(dtype, (batch, length, width))
        for length, width in ((sizes.queries, channels), (sizes.keys, channels), (sizes.keys, values))
    )
    bias = b.constant(draw.rng.standard_normal(2 * channels + values).astype(dtype)) if draw.chance(0.4) else None
    padding = None
    if draw.chance(0.4):
        padding = b.root.input((draw.rng.random((batch, sizes.keys)) < 0.7).astype(np.int32))
    added = None
    if draw.chance(0.4):
        shape = [size if draw.chance(0.7) else 1 for size in (batch, sizes.heads)] + [sizes.queries, sizes.keys]
        added = b.root.input(draw.rng.standard_normal(shape).astype(dtype))
    inputs = [q, k, v, bias, padding, added]
    while inputs[-1] is None:
        inputs.pop()
    scale = draw.choice([None, 0.4])
    b.node("MultiHeadAttention", inputs, MICROSOFT, num_heads=sizes.heads, scale=scale)


def make_operators(b: Builder) -> None:
    try:
        b.draw.choice([native, native, native_between, multi_head])(b, drawn_sizes(b))
    except ValueError as problem:
        raise Unfit(str(problem)) from problem
