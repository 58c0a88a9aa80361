"""Rows of activation functions, dropout, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import fx

from ._emitter import Emitter, expression_of
from ._rows import Arguments, Table, cheap

__all__ = ["TABLE"]


def gelu(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Gelu, exact or by tanh."""
    return e.op("Gelu", e.of(a.first), approximate=a.get("approximate", "none"))


def gelu_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`dy * (cdf(x) + x * pdf(x))`, or the derivative of the approximation by tanh."""
    dtype = e.dtype(a["self"])
    x, upstream = e.of(a["self"]), e.of(a["grad_output"])

    def times(value: str, factor: float) -> str:
        return e.op("Mul", value, e.number(factor, dtype))

    def plus(value: str, term: float) -> str:
        return e.op("Add", value, e.number(term, dtype))

    if a.get("approximate", "none") == "none":
        cdf = plus(times(e.op("Erf", times(x, math.sqrt(0.5))), 0.5), 0.5)
        density = e.op("Exp", times(e.op("Mul", x, x), -0.5))
        slope = e.op("Mul", x, times(density, 1 / math.sqrt(2 * math.pi)))
        return e.op("Mul", upstream, e.op("Add", cdf, slope))
    factor, cubic = math.sqrt(2 / math.pi), 0.044715
    square = e.op("Mul", x, x)
    tanh = e.op("Tanh", times(e.op("Mul", x, plus(times(square, cubic), 1.0)), factor))
    inner = times(plus(times(square, 3 * cubic), 1.0), factor)
    outer = e.op("Sub", e.number(1.0, dtype), e.op("Mul", tanh, tanh))
    slope = e.op("Mul", times(x, 0.5), e.op("Mul", outer, inner))
    return e.op("Mul", upstream, e.op("Add", plus(times(tanh, 0.5), 0.5), slope))


def tanh_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`dy * (1 - y * y)`."""
    upstream, output = (e.of(value) for value in a.values[:2])
    one = e.number(1.0, node.meta["val"].dtype)
    return e.op("Mul", upstream, e.op("Sub", one, e.op("Mul", output, output)))


def sigmoid_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`dy * y * (1 - y)`."""
    upstream, output = (e.of(value) for value in a.values[:2])
    rest = e.op("Sub", e.number(1.0, node.meta["val"].dtype), output)
    return e.op("Mul", upstream, e.op("Mul", output, rest))


def threshold_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The upstream gradient where the input, or the output of a relu, is above the threshold."""
    dtype = node.meta["val"].dtype
    above = e.op("Greater", e.of(a["self"]), e.number(a["threshold"], dtype))
    return e.op("Where", above, e.of(a["grad_output"]), e.number(0.0, dtype))


def silu(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`x * sigmoid(x)`."""
    return e.op("Mul", e.of(a.first), e.op("Sigmoid", e.of(a.first)))


def silu_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`dy * s * (1 + x * (1 - s))` with `s = sigmoid(x)`."""
    one = e.number(1.0, node.meta["val"].dtype)
    upstream, x = e.of(a["grad_output"]), e.of(a["self"])
    gate = e.op("Sigmoid", x)
    slope = e.op("Add", one, e.op("Mul", x, e.op("Sub", one, gate)))
    return e.op("Mul", upstream, e.op("Mul", gate, slope))


def leaky_relu(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A relu with a slope below zero."""
    return e.op("LeakyRelu", e.of(a.first), alpha=float(a["negative_slope"]))


def leaky_relu_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The upstream gradient, times the slope where the input is not above zero."""
    dtype, upstream = node.meta["val"].dtype, e.of(a["grad_output"])
    above = e.op("Greater", e.of(a["self"]), e.number(0.0, dtype))
    below = e.op("Mul", upstream, e.number(float(a["negative_slope"]), dtype))
    return e.op("Where", above, upstream, below)


def dropout(e: Emitter, node: fx.Node, a: Arguments) -> Any:
    """Dropout by a mask that torch draws before the run, so that a seed gives eager's numbers."""
    source, probability = a.first, float(a["p"])
    dtype, value = e.dtype(source), e.of(source)
    if not a.get("train", True) or probability == 0:
        every = e.op("Expand", e.constant(np.array(True)), e.sizes(e.shape(source)))
        return e.op("Identity", value), every
    shape = [expression_of(size) for size in e.shape(source)]
    mask = e.drawn(shape, 1 - probability)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    kept = e.op("Mul", value, e.number(scale, dtype))
    return e.op("Where", mask, kept, e.number(0.0, dtype)), mask


def random_booleans(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Booleans that torch draws before the run, in the type of the result."""
    value = node.meta["val"]
    drawn = e.drawn([expression_of(size) for size in value.shape], float(a["p"]))
    return e.cast(drawn, torch.bool, value.dtype)


def dropout_gradient(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The upstream gradient where the mask is true, scaled as the elements were."""
    dtype = node.meta["val"].dtype
    kept = e.op("Mul", e.of(a["grad_output"]), e.number(float(a["scale"]), dtype))
    return e.op("Where", e.of(a["mask"]), kept, e.number(0.0, dtype))


TABLE: Table = {
    **cheap({
        "aten.gelu.default": gelu,
        "aten.silu.default": silu,
        "aten.leaky_relu.default": leaky_relu,
        "aten.native_dropout_backward.default": dropout_gradient,
    }),
    "aten.gelu_backward.default": gelu_gradient,
    "aten.tanh_backward.default": tanh_gradient,
    "aten.sigmoid_backward.default": sigmoid_gradient,
    "aten.threshold_backward.default": threshold_gradient,
    "aten.silu_backward.default": silu_gradient,
    "aten.leaky_relu_backward.default": leaky_relu_gradient,
    "aten.bernoulli.p": random_booleans,
    "aten.native_dropout.default": dropout,
}  # fmt: skip
