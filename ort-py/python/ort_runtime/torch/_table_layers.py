"""Rows of layers and of their gradients: matmul, softmax, normalization, convolution, pooling,
attention, embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import fx

from ._emitter import Emitter, Unsupported, expression_of
from ._rows import Arguments, Row, Table, cheap

__all__ = ["TABLE"]


# Matrices.


def _transposed(e: Emitter, node: fx.Node) -> tuple[str, int]:
    """Returns a matrix, and whether it is to be read as its transpose.

    A matrix that only exists as the transpose of another is read through the flag of `Gemm`.
    """
    given: Any = node.args
    target = str(node.target)
    is_turned = target == "aten.t.default"
    if target == "aten.permute.default":
        is_turned = [axis % 2 for axis in given[1]] == [1, 0]
    elif target == "aten.transpose.int":
        is_turned = given[1] % 2 != given[2] % 2
    if is_turned and isinstance(e.values.get(given[0]), str):
        return e.of(given[0]), 1
    return e.of(node), 0


def matmul(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The product of two matrices."""
    (first, turned), (second, second_turned) = (_transposed(e, one) for one in a.values[:2])
    return e.op("Gemm", first, second, transA=turned, transB=second_turned)


def matmul_added(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The product of two matrices, added to a third."""
    (first, turned), (second, second_turned) = (_transposed(e, one) for one in a.values[1:3])
    scales: dict[str, Any] = {key: float(a[key]) for key in ("alpha", "beta") if a.get(key, 1) != 1}
    return e.op(
        "Gemm", first, second, e.of(a.first), transA=turned, transB=second_turned, **scales
    )


def batched(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The products of batches of matrices."""
    return e.op("MatMul", e.of(a.values[0]), e.of(a.values[1]))


def batched_added(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The products of batches of matrices, added to a third."""
    dtype = node.meta["val"].dtype
    found, start = e.op("MatMul", e.of(a.values[1]), e.of(a.values[2])), e.of(a.first)
    if a.get("alpha", 1) != 1:
        found = e.op("Mul", found, e.number(a["alpha"], dtype))
    if a.get("beta", 1) != 1:
        start = e.op("Mul", start, e.number(a["beta"], dtype))
    return e.op("Add", start, found)


# Softmax.


def softmax(operator: str) -> Row:
    """Softmax or its logarithm along an axis."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        value = e.read(a.first, node.meta["val"].dtype)
        return e.op(operator, value, axis=e.axis(a.first, a["dim"]))

    return row


def _sum_along(e: Emitter, value: str, axis: int) -> str:
    return e.op("ReduceSum", value, e.ints(axis), keepdims=1)


def softmax_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`y * (dy - sum(dy * y))`."""
    upstream, output = e.of(a["grad_output"]), e.of(a["output"])
    total = _sum_along(e, e.op("Mul", upstream, output), e.axis(a["output"], a["dim"]))
    found = e.op("Mul", output, e.op("Sub", upstream, total))
    return e.cast(found, e.dtype(a["output"]), node.meta["val"].dtype)


def log_softmax_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`dy - exp(y) * sum(dy)`."""
    upstream, output = e.of(a["grad_output"]), e.of(a["output"])
    total = _sum_along(e, upstream, e.axis(a["output"], a["dim"]))
    found = e.op("Sub", upstream, e.op("Mul", e.op("Exp", output), total))
    return e.cast(found, e.dtype(a["output"]), node.meta["val"].dtype)


# Normalization.


def _wide(e: Emitter, *values: fx.Node | None) -> torch.dtype:
    """The type that normalization computes in: 16-bit values are widened."""
    dtypes = [e.dtype(value) for value in values if value is not None]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _as_result(e: Emitter, node: fx.Node, wide: torch.dtype, *names: str) -> tuple[str, ...]:
    """Casts results to the types that the FX node has. One that is not asked for has no name."""
    pairs = zip(names, node.meta["val"])
    return tuple(e.cast(name, wide, value.dtype) if name else "" for name, value in pairs)


def layer_norm(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Layer normalization, with the mean and the inverse deviation for its gradient."""
    source, shape = a["input"], a["normalized_shape"]
    weight, bias = a["weight"], a["bias"]
    wide = _wide(e, source, weight, bias)
    if weight is None:
        scale = e.op("Expand", e.number(1.0, wide), e.sizes(shape))
    else:
        scale = e.read(weight, wide)
    axis = e.rank(source) - len(shape)
    if wide == torch.float64:
        # The operator's statistics are float32.
        offset = e.read(bias, wide) if bias else ""
        inner = e.ints(*range(axis, e.rank(source)))
        found = _layer_norm_in_parts(e, e.read(source, wide), scale, offset, inner, float(a["eps"]))
        return _as_result(e, node, wide, *found)
    found = e.op(
        "LayerNormalization", e.read(source, wide), scale, e.read(bias, wide) if bias else "",
        outputs=3, axis=axis, epsilon=float(a["eps"]),
    )  # fmt: skip
    return _as_result(e, node, wide, *found)


def _layer_norm_in_parts(
    e: Emitter, x: str, scale: str, offset: str, inner: str, epsilon: float
) -> tuple[str, str, str]:
    mean = e.op("ReduceMean", x, inner, keepdims=1)
    centered = e.op("Sub", x, mean)
    variance = e.op("ReduceMean", e.op("Mul", centered, centered), inner, keepdims=1)
    deviation = e.op("Sqrt", e.op("Add", variance, e.number(epsilon, torch.float64)))
    inverse = e.op("Reciprocal", deviation)
    result = e.op("Mul", e.op("Mul", centered, inverse), scale)
    return (e.op("Add", result, offset) if offset else result), mean, inverse


def layer_norm_gradient(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """With the unit input `u` and the scaled upstream gradient `g`:
    `dx = (g - mean(g) - u * mean(g * u)) / deviation`."""
    source, weight = a["input"], a["weight"]
    wide = _wide(e, source, weight)
    upstream = e.read(a["grad_out"], wide)
    first = e.rank(source) - len(a["normalized_shape"])
    inner, outer = e.ints(*range(first, e.rank(source))), e.ints(*range(first))
    mean, inverse = e.read(a["mean"], wide), e.read(a["rstd"], wide)
    unit = e.op("Mul", e.op("Sub", e.read(source, wide), mean), inverse)
    of_source = of_weight = of_bias = ""
    if a["output_mask"][0]:
        scaled = e.op("Mul", upstream, e.read(weight, wide)) if weight else upstream
        level = e.op("ReduceMean", scaled, inner, keepdims=1)
        along = e.op("ReduceMean", e.op("Mul", scaled, unit), inner, keepdims=1)
        rest = e.op("Sub", e.op("Sub", scaled, level), e.op("Mul", unit, along))
        of_source = e.op("Mul", rest, inverse)
    if a["output_mask"][1]:
        of_weight = e.op("Mul", upstream, unit)
        of_weight = e.op("ReduceSum", of_weight, outer, keepdims=0) if first else of_weight
    if a["output_mask"][2]:
        of_bias = e.op("ReduceSum", upstream, outer, keepdims=0) if first else upstream
    return _as_result(e, node, wide, of_source, of_weight, of_bias)


def _channels(e: Emitter, value: str, rank: int) -> str:
    """Gives a vector of channels the shape [1, C, 1, ...]."""
    return e.op("Reshape", value, e.ints(1, -1, *[1] * (rank - 2)))


def _or_filled(
    e: Emitter, value: fx.Node | None, like: fx.Node, fill: float, dtype: torch.dtype
) -> str:
    """A vector of channels, or one number for each of them."""
    if value is not None:
        return e.read(value, dtype)
    return e.op("Expand", e.number(fill, dtype), e.sizes([e.shape(like)[1]]))


def batch_norm(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Batch normalization by the statistics of the batch, which update the running ones.

    The runtime's statistics update with the variance of the population; torch's with that of the
    sample, so they are updated here. The operator is then the same with and without them.
    """
    source, epsilon = a["input"], float(a["eps"])
    rank = e.rank(source)
    if not a.get("training", True):
        return (*batch_norm_fixed(e, node, a), e.of(a["running_mean"]), e.of(a["running_var"]))
    wide = _wide(e, source)
    x = e.read(source, wide)

    def filled(value: fx.Node | None, fill: float) -> str:
        return _or_filled(e, value, source, fill, wide)

    mean, inverse = e.own(
        "BatchNormalizationStatistics", x, filled(None, 0.0), filled(None, 1.0),
        outputs=2, epsilon=epsilon,
    )  # fmt: skip
    scale = _channels(e, filled(a["weight"], 1.0), rank)
    bias = _channels(e, filled(a["bias"], 0.0), rank)
    centred = e.op("Sub", x, mean)
    output = e.op("Add", e.op("Mul", centred, e.op("Mul", inverse, scale)), bias)
    flat = e.ints(-1)
    saved_mean, saved_inverse = e.op("Reshape", mean, flat), e.op("Reshape", inverse, flat)
    found = [output, saved_mean, saved_inverse]
    if a.get("running_mean") is not None:
        found += _running(e, a, saved_mean, saved_inverse, wide)
    return _as_result(e, node, wide, *found)


def _running(
    e: Emitter, a: Arguments, mean: str, inverse: str, dtype: torch.dtype
) -> list[str]:
    """The running mean and variance after a batch."""
    source = a["input"]
    momentum, epsilon = float(a["momentum"]), float(a["eps"])
    squared = e.op("Reciprocal", e.op("Mul", inverse, inverse))
    population = e.op("Sub", squared, e.number(epsilon, dtype))
    count = e.ints(1)
    for axis in [0, *range(2, e.rank(source))]:
        count = e.op("Mul", count, e.size(e.shape(source)[axis]))
    count = e.cast(count, torch.int64, dtype)
    less = e.op("Sub", count, e.number(1.0, dtype))
    sample = e.op("Mul", population, e.op("Div", count, less))
    keep, take = e.number(1 - momentum, dtype), e.number(momentum, dtype)
    pairs = ((a["running_mean"], mean), (a["running_var"], sample))
    return [
        e.op("Add", e.op("Mul", e.read(old, dtype), keep), e.op("Mul", new, take))
        for old, new in pairs
    ]


def batch_norm_fixed(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Batch normalization by the running statistics. The statistics of the batch are empty."""
    source = a["input"]
    wide = _wide(e, source)
    found = e.op(
        "BatchNormalization",
        e.read(source, wide),
        _or_filled(e, a["weight"], source, 1.0, wide),
        _or_filled(e, a["bias"], source, 0.0, wide),
        e.read(a["running_mean"], wide),
        e.read(a["running_var"], wide),
        epsilon=float(a["eps"]),
    )
    empty = e.frozen(torch.empty(0, dtype=wide))
    return _as_result(e, node, wide, found, empty, empty)


def batch_norm_gradient(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """The gradients by the input, the scale and the bias."""
    source = a["input"]
    rank, wide = e.rank(source), _wide(e, source)
    x, upstream = e.read(source, wide), e.read(a["grad_out"], wide)
    scale = _or_filled(e, a["weight"], source, 1.0, wide)
    if a["train"]:
        mean = _channels(e, e.read(a["save_mean"], wide), rank)
        inverse = _channels(e, e.read(a["save_invstd"], wide), rank)
        made = e.own(
            "BatchNormalizationGrad", x, scale, upstream, mean, inverse,
            outputs=3, epsilon=float(a["eps"]),
        )  # fmt: skip
        return _as_result(e, node, wide, *_asked(a, made))
    variance = e.op("Add", e.read(a["running_var"], wide), e.number(float(a["eps"]), wide))
    inverse = e.op("Reciprocal", e.op("Sqrt", variance))
    factor = _channels(e, e.op("Mul", inverse, scale), rank)
    axes = e.ints(0, *range(2, rank))
    centred = e.op("Sub", x, _channels(e, e.read(a["running_mean"], wide), rank))
    unit = e.op("Mul", centred, _channels(e, inverse, rank))
    of_scale = e.op("ReduceSum", e.op("Mul", upstream, unit), axes, keepdims=0)
    of_bias = e.op("ReduceSum", upstream, axes, keepdims=0)
    made = (e.op("Mul", upstream, factor), of_scale, of_bias)
    return _as_result(e, node, wide, *_asked(a, made))


def _asked(a: Arguments, names: tuple[str, ...]) -> list[str]:
    """The gradients that a mask asks for; the others have no name."""
    return [name if asked else "" for name, asked in zip(names, a["output_mask"])]


# Convolution.


def _windows(a: Arguments, spatial: int) -> dict[str, Any]:
    """The attributes of a convolution."""

    def each(name: str) -> list[int]:
        values = list(a[name])
        return values * spatial if len(values) == 1 else values

    padding = each("padding")
    return {
        "strides": each("stride"),
        "dilations": each("dilation"),
        "pads": padding * 2,
        "group": a["groups"],
    }


def convolution(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Convolution, or the transposed one."""
    spatial = e.rank(a["input"]) - 2
    attributes = _windows(a, spatial)
    names = [e.of(a["input"]), e.of(a["weight"]), e.of(a["bias"]) if a["bias"] else ""]
    if not a["transposed"]:
        return e.op("Conv", *names, **attributes)
    extra = list(a["output_padding"])
    extra = extra * spatial if len(extra) == 1 else extra
    return e.op("ConvTranspose", *names, output_padding=extra, **attributes)


def convolution_gradient(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """The gradients by the input, the weights and the bias. Those of a transposed convolution are
    a convolution, and the gradient by weights with image and upstream exchanged."""
    upstream, source, weight = e.of(a["grad_output"]), e.of(a["input"]), e.of(a["weight"])
    rank = e.rank(a["input"])
    attributes, mask = _windows(a, rank - 2), a["output_mask"]
    of_source = of_weight = of_bias = ""
    if mask[0] and a["transposed"]:
        of_source = e.op("Conv", upstream, weight, **attributes)
    elif mask[0]:
        shape = e.sizes(e.shape(a["input"]))
        of_source = e.own("ConvGradInput", upstream, weight, shape, **attributes)
    if mask[1]:
        image, kernel = (upstream, source) if a["transposed"] else (source, upstream)
        shape = e.sizes(e.shape(a["weight"]))
        of_weight = e.own("ConvGradWeights", image, kernel, shape, **attributes)
    if mask[2]:
        of_bias = e.op("ReduceSum", upstream, e.ints(0, *range(2, rank)), keepdims=0)
    return of_source, of_weight, of_bias


# Pooling.


def _pair(values: Any) -> list[int]:
    values = list(values)
    return values * 2 if len(values) == 1 else values


def max_pool(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Max pooling; torch counts positions within a channel, ONNX within the whole tensor."""
    kernel = _pair(a["kernel_size"])
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": _pair(a["stride"] or kernel),
        "pads": _pair(a["padding"]) * 2,
        "dilations": _pair(a["dilation"]),
        "ceil_mode": int(a["ceil_mode"]),
    }
    found, places = e.op("MaxPool", e.of(a.first), outputs=2, **attributes)
    height, width = (e.size(size) for size in e.shape(a.first)[-2:])
    return found, e.op("Mod", places, e.op("Mul", height, width))


def max_pool_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Adds the upstream gradient to where each maximum was."""
    source, upstream, places = a["self"], a["grad_output"], a["indices"]
    shape = e.shape(source)
    if e.rank(source) != 4:
        raise Unsupported("the gradient of max pooling without a batch")
    rows = e.ints(0, 0, -1)
    plane = e.op("Mul", e.size(shape[2]), e.size(shape[3]))
    flat_shape = e.op("Concat", e.size(shape[0]), e.size(shape[1]), plane, axis=0)
    zeros = e.op("Expand", e.number(0.0, e.dtype(source)), flat_shape)
    updates, where = (e.op("Reshape", e.of(one), rows) for one in (upstream, places))
    found = e.op("ScatterElements", zeros, where, updates, axis=2, reduction="add")
    return e.reshape(found, shape)


def average_pool(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Average pooling."""
    kernel = _pair(a["kernel_size"])
    if a["divisor_override"] is not None:
        raise Unsupported("average pooling with divisor_override")
    return e.op(
        "AveragePool",
        e.of(a.first),
        kernel_shape=kernel,
        strides=_pair(a["stride"] or kernel),
        pads=_pair(a["padding"]) * 2,
        ceil_mode=int(a["ceil_mode"]),
        count_include_pad=int(a["count_include_pad"]),
    )


def average_pool_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The gradient of a depthwise convolution by a kernel of equal weights."""
    source, kernel, padding = a["self"], _pair(a["kernel_size"]), _pair(a["padding"])
    exact = not a["ceil_mode"] and (a["count_include_pad"] or not any(padding))
    if not exact or a["divisor_override"] is not None or e.rank(source) != 4:
        raise Unsupported("the gradient of average pooling over windows of several sizes")
    channels = expression_of(e.shape(source)[1])
    if not isinstance(channels, int):
        raise Unsupported("the gradient of average pooling over a symbolic number of channels")
    weight = torch.full((channels, 1, *kernel), 1 / math.prod(kernel), dtype=e.dtype(source))
    return e.own(
        "ConvGradInput", e.of(a["grad_output"]), e.frozen(weight), e.sizes(e.shape(source)),
        strides=_pair(a["stride"] or kernel), pads=padding * 2, group=channels,
    )  # fmt: skip


def _adaptive(e: Emitter, source: fx.Node, output: fx.Node) -> dict[str, Any]:
    """The equal windows of adaptive pooling."""
    sizes = [expression_of(size) for size in (*e.shape(source)[-2:], *e.shape(output)[-2:])]
    if not all(isinstance(size, int) for size in sizes):
        raise Unsupported("adaptive pooling of an image of symbolic size")
    windows = [sizes[axis] // sizes[axis + 2] for axis in (0, 1)]
    if any(sizes[axis] % sizes[axis + 2] for axis in (0, 1)) or e.rank(source) != 4:
        raise Unsupported(f"adaptive pooling from {sizes[:2]} to {sizes[2:]}: windows differ")
    return {"kernel_shape": windows, "strides": windows}


def adaptive_pool(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Average pooling to a size that divides the image's."""
    return e.op("AveragePool", e.of(a.first), **_adaptive(e, a.first, node))


def adaptive_pool_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Each window's share of the upstream gradient, repeated over the window."""
    upstream, source = a.values[:2]
    windows = _adaptive(e, source, upstream)["kernel_shape"]
    share = e.op("Div", e.of(upstream), e.number(math.prod(windows), e.dtype(source)))
    outer = [e.size(size) for size in e.shape(upstream)]
    one = e.ints(1)
    apart = e.op("Concat", *outer[:3], one, outer[3], one, axis=0)
    wide = e.op("Concat", *outer[:3], e.ints(windows[0]), outer[3], e.ints(windows[1]), axis=0)
    return e.reshape(e.op("Expand", e.op("Reshape", share, apart), wide), e.shape(source))


# Attention.


def _attention(e: Emitter, a: Arguments) -> list[str]:
    """The scaled queries, keys, values and mask of attention."""
    if a["dropout_p"]:
        raise Unsupported("fused attention with dropout")
    query, key = a["query"], a["key"]
    dtype, size = e.dtype(query), expression_of(e.shape(query)[-1])
    if not isinstance(size, int):
        raise Unsupported("attention whose heads have a symbolic size")
    scale = a.get("scale") or 1 / math.sqrt(size)
    queries = e.op("Mul", e.of(query), e.number(scale, dtype))
    mask = e.of(a["attn_mask"]) if a.get("attn_mask") is not None else ""
    if a["is_causal"]:
        square = e.sizes([e.shape(query)[-2], e.shape(key)[-2]])
        whole = e.op("Expand", e.constant(np.array(True)), square)
        mask = e.op("Trilu", whole, upper=0)
    return [queries, e.of(key), e.of(a["value"]), mask]


def attention(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Attention without a score matrix. The logarithms of sums are not computed: the gradient
    computes the scores again."""
    return e.own("TrainingAttention", *_attention(e, a)), None


def attention_gradient(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """The gradients by queries, keys and values."""
    inputs = _attention(e, a)
    upstream = e.of(a["grad_out"])
    found = e.own("TrainingAttentionGrad", upstream, *inputs, outputs=3)
    size = expression_of(e.shape(a["query"])[-1])
    scale = a.get("scale") or 1 / math.sqrt(size)
    of_queries = e.op("Mul", found[0], e.number(scale, e.dtype(a["query"])))
    return of_queries, found[1], found[2]


# Embedding.


def embedding(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Rows of a table."""
    return e.op("Gather", e.of(a["weight"]), e.of(a["indices"]), axis=0)


def embedding_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Adds the upstream gradient to the rows that were read, except the padding's."""
    if a["scale_grad_by_freq"]:
        raise Unsupported("the gradient of an embedding scaled by frequency")
    upstream, indices = a["grad_output"], a["indices"]
    shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
    updates = e.of(upstream)
    places = e.op("Unsqueeze", e.of(indices), e.ints(e.rank(indices)))
    padding = expression_of(a["padding_idx"])
    if padding != -1:
        is_padding = e.op("Equal", places, e.number(padding, e.dtype(indices)))
        updates = e.op("Where", is_padding, e.number(0.0, dtype), updates)
    zeros = e.op("Expand", e.number(0.0, dtype), e.sizes(shape))
    places = e.cast(places, e.dtype(indices), torch.int64)
    return e.op("ScatterND", zeros, places, updates, reduction="add")


_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

TABLE: Table = {
    **cheap({"aten.native_layer_norm.default": layer_norm}),
    "aten.mm.default": matmul,
    "aten.addmm.default": matmul_added,
    "aten.bmm.default": batched,
    "aten.matmul.default": batched,
    "aten.baddbmm.default": batched_added,
    "aten._softmax.default": softmax("Softmax"),
    "aten._log_softmax.default": softmax("LogSoftmax"),
    "aten._softmax_backward_data.default": softmax_gradient,
    "aten._log_softmax_backward_data.default": log_softmax_gradient,
    "aten.native_layer_norm_backward.default": layer_norm_gradient,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_fixed,
    "aten.native_batch_norm_backward.default": batch_norm_gradient,
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_gradient,
    "aten.max_pool2d_with_indices.default": max_pool,
    "aten.max_pool2d_with_indices_backward.default": max_pool_gradient,
    "aten._adaptive_avg_pool2d.default": adaptive_pool,
    "aten._adaptive_avg_pool2d_backward.default": adaptive_pool_gradient,
    "aten.avg_pool2d.default": average_pool,
    "aten.avg_pool2d_backward.default": average_pool_gradient,
    f"{_FLASH}.default": attention,
    f"{_FLASH}_backward.default": attention_gradient,
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_gradient,
}
