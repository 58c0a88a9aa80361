"""Images and signals: convolutions, pools, normalizations, residuals, activations."""

import numpy as np

from families.elementwise import float_type, grow, is_float, number
from families.linear import activation
from graph import Builder, Unfit, Value


def image_shape(b: Builder) -> tuple[int, ...]:
    spatial = b.draw.weighted({2: 6, 1: 2, 3: 0.7})
    batch, channels = b.draw.choice([1, 1, 2, 3]), b.draw.choice([1, 2, 3, 4, 8])
    most = max(2, round((400 / (batch * channels)) ** (1 / spatial)))
    return (batch, channels, *(b.draw.integer(1, min(most, 9)) for _ in range(spatial)))


def check(x: Value) -> None:
    if x.ndim not in (3, 4, 5) or not is_float(x) or x.array.size == 0:
        raise Unfit("no image")


def constant(b: Builder, dtype, shape, scale: float = 0.5) -> Value:
    return b.constant((b.draw.rng.standard_normal(shape) * scale).astype(dtype))


def windows(b: Builder, x: Value, most: int = 3) -> dict:
    """Kernel, strides, paddings, dilations for the spatial axes."""
    draw, sizes = b.draw, x.shape[2:]
    kernel = [min(size, draw.integer(1, most)) for size in sizes]
    dilations = [draw.choice([1, 1, 1, 2]) if (k - 1) * 2 + 1 <= size else 1 for k, size in zip(kernel, sizes)]
    attributes = {"kernel_shape": kernel, "strides": [draw.choice([1, 1, 2, 3]) for _ in sizes]}
    if any(d > 1 for d in dilations):
        attributes["dilations"] = dilations
    kind = draw.weighted({"none": 3, "same": 2, "given": 3, "auto": 1})
    if kind == "same" and all(k % 2 for k in kernel):
        attributes["pads"] = [d * (k - 1) // 2 for k, d in zip(kernel, dilations)] * 2
    if kind == "given":
        attributes["pads"] = [draw.integer(0, k - 1) for k in kernel * 2]
    if kind == "auto" and "dilations" not in attributes:
        attributes["auto_pad"] = draw.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    return attributes


def conv(b: Builder, x: Value) -> Value:
    check(x)
    draw, channels = b.draw, x.shape[1]
    group = draw.choice([1, 1, 1, channels, *(size for size in (2, 4) if channels % size == 0)])
    filters = group * draw.choice([1, 1, 2, 3])
    if group == 1:
        filters = draw.choice([1, 2, 3, 4, 5, 8, channels])
    attributes = windows(b, x) if draw.chance(0.7) else {"kernel_shape": [1] * (x.ndim - 2)}
    inputs = [x, constant(b, x.dtype, (filters, channels // group, *attributes["kernel_shape"]))]
    if draw.chance(0.5):
        inputs.append(constant(b, x.dtype, (filters,)))
    return b.node("Conv", inputs, group=group, **attributes)


def conv_transpose(b: Builder, x: Value) -> Value:
    check(x)
    if x.ndim == 5:
        raise Unfit("three axes")
    draw, channels = b.draw, x.shape[1]
    group = draw.choice([1, 1, channels])
    filters = draw.choice([1, 2, 3])
    kernel = [draw.integer(1, 3) for _ in x.shape[2:]]
    strides = [draw.choice([1, 2]) for _ in kernel]
    inputs = [x, constant(b, x.dtype, (channels, filters, *kernel))]
    if draw.chance(0.5):
        inputs.append(constant(b, x.dtype, (filters * group,)))
    pads = [draw.integer(0, (k - 1) // 2) for k in kernel * 2] if draw.chance(0.4) else None
    extra = [draw.integer(0, s - 1) for s in strides] if draw.chance(0.3) else None
    return b.node("ConvTranspose", inputs, group=group, strides=strides, pads=pads, output_padding=extra)


def pool(b: Builder, x: Value) -> Value:
    check(x)
    draw = b.draw
    op = draw.choice(["MaxPool", "AveragePool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"])
    if op.startswith("Global"):
        return b.node(op, [x])
    attributes = windows(b, x)
    if op == "LpPool":
        attributes.pop("dilations", None)
        return b.node(op, [x], p=draw.choice([1, 2]), **attributes)
    if op == "AveragePool":
        attributes["count_include_pad"] = draw.choice([None, 1])
        if b.opset < 19:
            attributes.pop("dilations", None)
    attributes["ceil_mode"] = draw.choice([None, None, 1])
    return b.node(op, [x], **attributes)


def batch_norm(b: Builder, x: Value) -> Value:
    check(x)
    draw, shape = b.draw, (x.shape[1],)
    variance = b.constant((draw.rng.random(shape) + 0.1).astype(x.dtype))
    scale, bias, mean = (constant(b, x.dtype, shape, 1) for _ in range(3))
    return b.node("BatchNormalization", [x, scale, bias, mean, variance], epsilon=draw.choice([None, 1e-3]))


def instance_norm(b: Builder, x: Value) -> Value:
    check(x)
    shape = (x.shape[1],)
    return b.node("InstanceNormalization", [x, constant(b, x.dtype, shape), constant(b, x.dtype, shape)])


def group_norm(b: Builder, x: Value) -> Value:
    check(x)
    groups = b.draw.choice([size for size in range(1, x.shape[1] + 1) if x.shape[1] % size == 0])
    if b.opset < 21:
        raise Unfit("the older form has scales by group")
    scale, bias = (constant(b, x.dtype, (x.shape[1],)) for _ in range(2))
    return b.node("GroupNormalization", [x, scale, bias], num_groups=groups)


def lrn(b: Builder, x: Value) -> Value:
    check(x)
    return b.node("LRN", [x], size=b.draw.choice([1, 3, 5]), alpha=0.5)


def channel_constant(b: Builder, x: Value) -> Value:
    """A factor, addend, of all or of each channel, or of other axes that only look like
    channels."""
    check(x)
    ones = (1,) * (x.ndim - 2)
    channel = (x.shape[1], *ones)
    shape = b.draw.choice([channel, (1, *channel), (1, *channel), (), (1,), (1,) * x.ndim, x.shape[-1:], (*x.shape[:2], *ones)])
    other = constant(b, x.dtype, shape, 1)
    op = b.draw.choice(["Mul", "Add", "Add", "Sub", "Div"])
    return b.node(op, [x, other] if op in ("Sub", "Div") or b.draw.chance(0.7) else [other, x])


def residual(b: Builder, x: Value) -> Value:
    check(x)
    fitting = [v for v in b.made + b.inputs if v.shape == x.shape and v.dtype == x.dtype and v.name != x.name]
    if fitting and b.draw.chance(0.6):
        other = b.draw.choice(fitting)
    else:
        shape = x.shape if b.draw.chance(0.7) else b.draw.broadcastable(x.shape)
        other = b.root.input(b.draw.elements(x.dtype, shape))
    return b.node("Add", [x, other] if b.draw.chance(0.6) else [other, x])


def pad(b: Builder, x: Value) -> Value:
    check(x)
    draw = b.draw
    pads = [0, 0] + [draw.choice([0, 1, 2]) for _ in x.shape[2:]]
    pads = pads + [0, 0] + [draw.choice([0, 1]) for _ in x.shape[2:]]
    if draw.chance(0.1):
        pads[draw.integer(0, 1)] = 1
    mode = draw.choice(["constant", "constant", "constant", "reflect", "edge"])
    ends = [max(begin, end) for begin, end in zip(pads[: x.ndim], pads[x.ndim :], strict=True)]
    # ONNX Runtime refuses to reflect more than there is; numpy repeats it.
    if mode == "reflect" and any(end >= size for end, size in zip(ends, x.shape, strict=True) if end):
        mode = "edge"
    inputs = [x, b.ints(pads)]
    if mode == "constant" and draw.chance(0.4):
        inputs.append(number(b, x, draw.choice([0, 0, 1.5])))
        inputs[2] = b.constant(inputs[2].array.reshape(()))
    return conv(b, b.node("Pad", inputs, mode=mode))


def bounded(b: Builder, x: Value) -> Value:
    """Cut off at two numbers, which doubles hold more digits of than floats."""
    check(x)
    low, high = b.draw.choice([(0, 6), (-1, 1), (0.1, 0.7), (-1 / 3, 1 / 3)])
    return b.node("Clip", [x, b.constant(np.array(low, x.dtype)), b.constant(np.array(high, x.dtype))])


def squeeze_excite(b: Builder, x: Value) -> Value:
    check(x)
    y = b.node("GlobalAveragePool", [x])
    y = activation(b, conv_1x1(b, y))
    return b.node("Mul", [x, b.node("Sigmoid", [conv_1x1(b, y, x.shape[1])])])


def conv_1x1(b: Builder, x: Value, filters: int | None = None) -> Value:
    filters = filters or b.draw.choice([1, 2, 4])
    return b.node("Conv", [x, constant(b, x.dtype, (filters, x.shape[1], *(1,) * (x.ndim - 2)))])


def depthwise_after_pointwise(b: Builder, x: Value) -> Value:
    check(x)
    y = conv_1x1(b, x, b.draw.choice([2, 4, 8]))
    if b.draw.chance(0.6):
        y = activation(b, y) if b.draw.chance(0.5) else b.node("Clip", [y, *(b.constant(np.array(n, y.dtype)) for n in (0, 6))])
    channels = y.shape[1]
    attributes = windows(b, y)
    w = constant(b, y.dtype, (channels, 1, *attributes["kernel_shape"]))
    inputs = [y, w] + ([constant(b, y.dtype, (channels,))] if b.draw.chance(0.5) else [])
    y = b.node("Conv", inputs, group=channels, **attributes)
    return activation(b, y) if b.draw.chance(0.6) else y


STEPS = [
    conv, conv, conv, conv, activation, activation, activation, bounded, batch_norm, batch_norm, channel_constant, residual,
    residual, pool, pool, pad, conv_transpose, instance_norm, group_norm, squeeze_excite, depthwise_after_pointwise, lrn,
]


def make(b: Builder) -> None:
    x = b.root.input(b.draw.elements(float_type(b), image_shape(b)))
    x = conv(b, x) if b.draw.chance(0.7) else x
    grow(b, x, STEPS, b.draw.integer(1, 5))
