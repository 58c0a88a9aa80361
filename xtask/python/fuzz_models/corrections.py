"""Operators that the `onnx` package's evaluator computes wrongly by what the standard says.

The first line of each class says what is wrong."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import microsoft
from onnx import GraphProto, helper, numpy_helper, shape_inference
from onnx.reference.op_run import OpRun
from onnx.reference.ops import (
    op_attention,
    op_average_pool,
    op_conv_transpose,
    op_grid_sample,
    op_instance_normalization,
    op_lp_pool,
    op_max_pool,
    op_pow,
    op_quantize_linear,
    op_reduce_log_sum_exp,
    op_resize,
)
from onnx.reference.ops._quant_utils import reshape_input
from scipy import special

CORRECTED: list[type[OpRun]] = []


def corrected(operator: type[OpRun]) -> type[OpRun]:
    CORRECTED.append(operator)
    return operator


@corrected
class Erf(OpRun):
    """Doubles are rounded to float32."""

    def _run(self, x):
        return (np.asarray(special.erf(x.astype(np.float64)).astype(x.dtype)),)


@corrected
class Gelu(OpRun):
    """Doubles are rounded to float32, as those of Erf. Other types keep their own arithmetic, whose
    rounding errors tell how far off a right result may be."""

    def _run(self, x, approximate="none"):
        number = x.dtype.type
        if approximate == "tanh":
            inner = number(np.sqrt(2 / np.pi)) * (x + number(0.044715) * x * x * x)
            return (np.asarray(number(0.5) * x * (number(1) + np.tanh(inner))),)
        function = special.erf((x / number(np.sqrt(2))).astype(np.float64)).astype(x.dtype)
        return (np.asarray(number(0.5) * x * (number(1) + function)),)


@corrected
class Pow(op_pow.Pow):
    """A negative base has a power if the exponent is whole, and none beside: rounding errors of the
    exponent decide."""

    def _run(self, x, y):
        if y.dtype.kind == "f":
            gap = np.abs(y.astype(np.float64) - np.rint(y.astype(np.float64)))
            is_nearly_whole = (gap > 0) & (gap < 2e-3 * np.maximum(1, np.abs(y)))
            if np.any((x < 0) & is_nearly_whole):
                raise ValueError("a negative base with an exponent that is nearly whole")
        return super()._run(x, y)


@corrected
class PRelu(OpRun):
    """Zero is multiplied by the slope, which may turn its sign."""

    def _run(self, x, slope):
        return (np.where(x < 0, x * slope, x).astype(x.dtype),)


@corrected
class LeakyRelu(OpRun):
    """As PRelu."""

    def _run(self, x, alpha=0.01):
        return (np.where(x < 0, x * x.dtype.type(alpha), x).astype(x.dtype),)


@corrected
class HardSwish(OpRun):
    """Its alpha of 1/6 is rounded to float32."""

    def _run(self, x):
        wide = x.astype(np.float64)
        return (np.asarray((wide * np.clip(wide / 6 + 0.5, 0, 1)).astype(x.dtype)),)


@corrected
class Mean(OpRun):
    """The first operand does not broadcast."""

    def _run(self, *operands):
        total = sum(operands[1:], start=operands[0])
        return (np.asarray(total / np.asarray(len(operands), total.dtype)).astype(operands[0].dtype),)


@corrected
class Pad(OpRun):
    """Negative pads, which cut, are refused."""

    def _run(self, data, pads, value=None, axes=None, mode="constant"):
        axes = range(data.ndim) if axes is None else [int(axis) % data.ndim for axis in axes]
        widths = [(0, 0)] * data.ndim
        for index, axis in enumerate(axes):
            widths[axis] = (int(pads[index]), int(pads[len(axes) + index]))
        cuts = tuple(slice(max(0, -low), size - max(0, -high)) for (low, high), size in zip(widths, data.shape))
        widths = [(max(0, low), max(0, high)) for low, high in widths]
        mode = mode or "constant"
        value = {"constant_values": 0 if value is None else np.asarray(value).item()} if mode == "constant" else {}
        return (np.pad(data[cuts], widths, mode=mode, **value).astype(data.dtype),)


@corrected
class GroupNormalization(OpRun):
    """It is no function without types, so nodes alone are refused."""

    def _run(self, x, scale, bias, epsilon=1e-5, num_groups=1, stash_type=1):
        grouped = x.reshape(x.shape[0], num_groups, -1)
        mean = grouped.mean(axis=-1, keepdims=True)
        variance = np.square(grouped - mean).mean(axis=-1, keepdims=True)
        normal = ((grouped - mean) / np.sqrt(variance + np.asarray(epsilon, x.dtype))).reshape(x.shape)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return ((normal * scale.reshape(shape) + bias.reshape(shape)).astype(x.dtype),)


class OfBody(OpRun):
    """What Loop and Scan share."""

    def need_context(self) -> bool:
        return True

    def outputs_of(self, context: dict, values: list) -> list:
        return self._run_body({**(context or {}), **dict(zip(self.body.input_names, values, strict=True))})


def shapes_of_outputs(body, values: list[np.ndarray], outer: dict) -> list[tuple[int, ...]]:
    """The shapes that a body's outputs have for inputs of these shapes, whatever their elements
    are. Known are the shapes of inputs for which the body declares one; ONNX Runtime knows no others."""
    graph = GraphProto()
    graph.CopyFrom(body.proto_)
    for info, array in zip(graph.input, values, strict=True):
        if info.type.tensor_type.HasField("shape"):
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, array.shape))
    for name, array in outer.items():
        if isinstance(array, np.ndarray) and array.dtype != object:
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(helper.make_tensor_value_info(name, dtype, None))
    opsets = [helper.make_opsetid(domain, version) for domain, version in body.opsets_.items()]
    model = shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), data_prop=True)
    kinds = [info.type.tensor_type for info in model.graph.output]
    if not all(kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim) for kind in kinds):
        raise ValueError("the text does not say which shape the items have if there are none")
    return [tuple(dim.dim_value for dim in kind.shape.dim) for kind in kinds]


@corrected
class Loop(OfBody):
    """Outputs of iterations are joined along an axis of theirs instead of stacked along a new one,
    and none at all fails.

    The items of no iteration have the shape that follows from the shapes of what is carried into the first one."""

    def _run(self, trips, condition, *carried, context=None, **attributes):
        carried = list(carried)
        count = len(self.body.output_names) - 1 - len(carried)
        stacks, number = [[] for _ in range(count)], 0
        goes_on = True if condition is None else bool(np.asarray(condition).reshape(()))
        while goes_on and (trips is None or number < int(np.asarray(trips).reshape(()))):
            outputs = self.outputs_of(context, [np.array(number, np.int64), np.array(goes_on), *carried])
            goes_on, carried = bool(np.asarray(outputs[0]).reshape(())), outputs[1 : 1 + len(carried)]
            for stack, item in zip(stacks, outputs[1 + len(carried) :]):
                stack.append(item)
            number += 1
        if number == 0 and count:
            values = [np.array(0, np.int64), np.array(True), *carried]
            first = 1 + len(carried)
            items = self.outputs_of(context, values)[first:]
            shapes = shapes_of_outputs(self.body, values, context or {})[first:]
            return (*carried, *(np.empty((0, *shape), item.dtype) for shape, item in zip(shapes, items)))
        return (*carried, *(np.stack(stack) for stack in stacks))


@corrected
class Scan(OfBody):
    """Other axes and directions than the first and forwards are refused."""

    def _run(self, *args, context=None, num_scan_inputs=1, scan_input_axes=None, scan_input_directions=None,
             scan_output_axes=None, scan_output_directions=None, **attributes):
        states, scanned = list(args[:-num_scan_inputs]), args[-num_scan_inputs:]
        axes = scan_input_axes or [0] * num_scan_inputs
        backwards = scan_input_directions or [0] * num_scan_inputs
        length = scanned[0].shape[axes[0]]
        stacks = [[] for _ in range(len(self.body.output_names) - len(states))]
        for step in range(length):
            places = [length - 1 - step if back else step for back in backwards]
            items = [np.take(values, place, axis) for values, place, axis in zip(scanned, places, axes)]
            outputs = self.outputs_of(context, [*states, *items])
            states = outputs[: len(states)]
            for stack, item in zip(stacks, outputs[len(states) :]):
                stack.append(item)
        directions = scan_output_directions or [0] * len(stacks)
        stacks = [stack[::-1] if back else stack for stack, back in zip(stacks, directions)]
        return (*states, *(np.stack(stack, axis) for stack, axis in zip(stacks, scan_output_axes or [0] * len(stacks))))


@corrected
class GlobalMaxPool(OpRun):
    """Right for images of two spatial axes alone."""

    def _run(self, x):
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


@corrected
class LRN(OpRun):
    """Counts channels by the size of the batch, and takes images of two spatial axes alone."""

    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=1):
        # Numbers of attributes come as float32, and so would their quotient.
        alpha, beta, bias = float(alpha), float(beta), float(bias)
        squares = np.zeros_like(x)
        for channel in range(x.shape[1]):
            first = max(0, channel - (size - 1) // 2)
            last = min(x.shape[1], channel + size // 2 + 1)
            squares[:, channel] = np.square(x[:, first:last]).sum(axis=1)
        return ((x / (bias + alpha / size * squares) ** beta).astype(x.dtype),)


@corrected
class Attention(op_attention.Attention_23):
    """The square root of the scale is rounded to float32; a causal mask has as many rows as a given
    one, if that is one."""

    def _run(self, q, k, v, mask=None, *others, scale=None, is_causal=0, **attributes):
        if is_causal and mask is not None and mask.shape[-2] == 1:
            mask = np.repeat(mask, q.shape[-2], axis=-2)
        scale = None if scale is None else float(scale)
        return super()._run(q, k, v, mask, *others, scale=scale, is_causal=is_causal, **attributes)


def padded(x: np.ndarray, auto_pad: str, kernel, strides, dilations) -> list[int]:
    """The pads that SAME_UPPER and SAME_LOWER stand for."""
    begins, ends = [], []
    for axis, size in enumerate(x.shape[2:]):
        stride, dilation = (strides or [1] * 9)[axis], (dilations or [1] * 9)[axis]
        whole = max(0, (-(-size // stride) - 1) * stride + (kernel[axis] - 1) * dilation + 1 - size)
        less, more = whole // 2, whole - whole // 2
        begins.append(more if auto_pad == "SAME_LOWER" else less)
        ends.append(less if auto_pad == "SAME_LOWER" else more)
    return begins + ends


class SamePads:
    """Sizes of automatic padding are rounded down instead of up."""

    def _run(self, x, auto_pad=None, kernel_shape=None, strides=None, dilations=None, pads=None, **attributes):
        if auto_pad and auto_pad.startswith("SAME"):
            pads, auto_pad = padded(x, auto_pad, kernel_shape, strides, dilations), "NOTSET"
        more = {"dilations": dilations} if dilations is not None else {}
        return super()._run(x, auto_pad=auto_pad, kernel_shape=kernel_shape, strides=strides, pads=pads, **more, **attributes)


class AnyMaxPool(op_max_pool.MaxPool):
    """Without strides and dilations, pads count only if there are two spatial axes."""

    def _run(self, x, auto_pad=None, ceil_mode=None, dilations=None, kernel_shape=None, pads=None, storage_order=None,
             strides=None):
        return self._max_pool(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides)


@corrected
class MaxPool(SamePads, AnyMaxPool):
    __doc__ = SamePads.__doc__


class RoundedUp:
    """If sizes are rounded up, half of what the last window reads beyond the image is put before
    it, which moves all windows."""

    def _run(self, x, ceil_mode=None, dilations=None, kernel_shape=None, pads=None, strides=None, **attributes):
        y = super()._run(x, ceil_mode=ceil_mode, dilations=dilations, kernel_shape=kernel_shape, pads=pads,
                         strides=strides, **attributes)[0]
        pads_itself = attributes.get("auto_pad") not in (None, "NOTSET")
        for axis, kernel in enumerate(kernel_shape if ceil_mode and not pads_itself else []):
            stride, dilation = (strides or [1] * 9)[axis], (dilations or [1] * 9)[axis]
            read = (y.shape[axis + 2] - 1) * stride + (kernel - 1) * dilation + 1
            if read > x.shape[axis + 2] + (sum(pads[axis :: len(kernel_shape)]) if pads else 0) + 1:
                raise ValueError("the windows are moved")
        return (y,)


@corrected
class AveragePool(RoundedUp, op_average_pool.AveragePool_19):
    __doc__ = RoundedUp.__doc__


@corrected
class LpPool(RoundedUp, op_lp_pool.LpPool):
    __doc__ = RoundedUp.__doc__


@corrected
class QLinearMatMul(OpRun):
    """The zero point is added before codes are rounded to the nearest, where the text adds it
    after: of two that are as near it is the even one, which an odd zero point turns."""

    def _run(self, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
        sums = np.matmul(a.astype(np.int64) - a_zero, b.astype(np.int64) - b_zero)
        codes = np.rint(sums * (a_scale * b_scale / y_scale)) + y_zero
        info = np.iinfo(y_zero.dtype)
        return (np.clip(codes, info.min, info.max).astype(y_zero.dtype),)


@corrected
class QLinearConv(microsoft.QLinearConv):
    """As QLinearMatMul."""

    op_domain = ""


@corrected
class DynamicQuantizeLinear(OpRun):
    """Zeros alone have a scale of 1/255, by the text it is 0: nothing can be said of their
    codes."""

    def _run(self, x):
        least, most = min(x.min(initial=0), 0), max(x.max(initial=0), 0)
        if not least < most:
            raise ValueError("a range of nothing")
        scale = np.asarray((most - least) / x.dtype.type(255), x.dtype)
        zero = np.clip(np.rint(-least / scale), 0, 255)
        codes = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8)
        return codes, scale, np.asarray(zero, np.uint8)


@corrected
class ConvTranspose(op_conv_transpose.ConvTranspose):
    """All groups get the bias of the first one."""

    def _run(self, x, w, bias=None, **attributes):
        y = super()._run(x, w, None, **attributes)[0]
        return (y if bias is None else y + bias.reshape([1, -1] + [1] * (y.ndim - 2)),)


def source(mode: str, index: int, scale: Fraction, length: int, resized: int) -> Fraction:
    """The coordinate in the image of an element of the resized one, by the formulas of the
    standard."""
    half = Fraction(1, 2)
    width = scale * length
    if mode == "align_corners" and width != resized:
        raise ValueError("the text means the length of the resized axis, the evaluator the product that was rounded down to it")
    if mode == "align_corners":
        return Fraction(0) if width == 1 else index * (length - 1) / (width - 1)
    if mode == "asymmetric":
        return index / scale
    if mode == "pytorch_half_pixel" and resized == 1:
        return Fraction(0)
    offset = Fraction(length, 2) * (1 - resized / width) if mode == "half_pixel_symmetric" else 0
    return offset + (index + half) / scale - half


# Between integers, this far from the middle is no tie.
NEARLY = 1e-6


def is_short(fraction: Fraction) -> bool:
    """Whether doubles have its powers without rounding."""
    return fraction.denominator in (1, 2, 4, 8, 16, 32, 64)


def is_clear(place: Fraction, factor: Fraction) -> bool:
    """Whether an error of float32 leaves a coordinate on its side of a whole number, and of the middle between two."""
    apart = abs(2 * place - round(2 * place))
    return apart == 0 and is_short(1 / factor) or apart > Fraction(1, 100_000) * max(1, abs(place))


NEAREST = {
    "round_prefer_floor": lambda x: math.ceil(x - Fraction(1, 2)),
    "round_prefer_ceil": lambda x: math.floor(x + Fraction(1, 2)),
    "floor": math.floor,
    "ceil": math.ceil,
}


def cubic(x: float, a: float) -> float:
    """The weight of an element at this distance."""
    x = abs(x)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


@dataclass
class Sampling:
    """How Resize finds one element of a resized axis: from which elements, by which weights."""

    mode: str
    nearest: str
    a: float
    excludes: bool
    antialias: bool

    def taps(self, place: Fraction, length: int, factor: Fraction) -> list[tuple[int, float]]:
        if self.mode == "nearest":
            taps = [(NEAREST[self.nearest](place), 1.0)]
        else:
            taps = self.around(place, min(factor, Fraction(1)) if self.antialias else Fraction(1))
        if self.excludes:
            taps = normalized([(index, weight) for index, weight in taps if 0 <= index < length])
        return [(min(max(index, 0), length - 1), weight) for index, weight in taps]

    def around(self, place: Fraction, shrink: Fraction) -> list[tuple[int, float]]:
        """Elements as far away as the kernel reaches, which antialiasing widens."""
        reach = (1 if self.mode == "linear" else 2) / shrink
        indices = range(math.floor(place - reach) + 1, math.ceil(place + reach))
        apart = [(index, float((index - place) * shrink)) for index in indices]
        weight = (lambda x: 1 - abs(x)) if self.mode == "linear" else (lambda x: cubic(x, self.a))
        taps = [(index, weight(x)) for index, x in apart]
        return normalized(taps) if self.antialias else taps

    def matrix(self, places: list[Fraction], length: int, factor: Fraction) -> np.ndarray:
        weights = np.zeros((len(places), length))
        for row, place in enumerate(places):
            for index, weight in self.taps(place, length, factor):
                weights[row, index] += weight
        return weights


def normalized(taps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    total = sum(weight for _, weight in taps)
    return [(index, weight / total) for index, weight in taps]


@corrected
class Resize(op_resize.Resize):
    """Wrong elements where a coordinate is nearly whole, or nearly between two, and infinities become finite: here coordinates
    are fractions, without errors."""

    def _run(self, x, roi=None, scales=None, sizes=None, antialias=0, axes=None, cubic_coeff_a=-0.75, exclude_outside=0,
             coordinate_transformation_mode="half_pixel", mode="nearest", nearest_mode="round_prefer_floor", **attributes):
        if scales is not None:
            factors = [Fraction(float(scale)) for scale in scales]
            sizes = [math.floor(factor * size) for factor, size in zip(factors, x.shape)]
        else:
            factors = [Fraction(int(size), own) for size, own in zip(sizes, x.shape)]
        if mode != "nearest" and not np.isfinite(x).all():
            raise ValueError("what a weight of zero makes of no finite number")
        sampling = Sampling(mode, nearest_mode, float(cubic_coeff_a), bool(exclude_outside), bool(antialias))
        y, is_rough = x.astype(np.float64), False
        for axis, (factor, size) in enumerate(zip(factors, sizes)):
            length = x.shape[axis]
            if factor == 1:
                continue
            places = [source(coordinate_transformation_mode, i, factor, length, int(size)) for i in range(int(size))]
            if mode == "nearest":
                if not all(is_clear(place, factor) for place in places):
                    raise ValueError("rounding errors decide which element is the nearest")
                y = np.take(y, [sampling.taps(place, length, factor)[0][0] for place in places], axis)
            else:
                matrix = sampling.matrix(places, length, factor)
                y = np.moveaxis(np.tensordot(matrix, y, ([1], [axis])), 0, axis)
            is_rough = is_rough or mode != "nearest" and not all(is_short(place) for place in places)
        if x.dtype.kind in "iu" and is_rough and np.any(np.abs(y - np.floor(y) - 0.5) < NEARLY):
            raise ValueError("rounding errors decide to which of two integers this rounds")
        if is_rough and np.any(np.abs(y) < NEARLY * np.max(np.abs(x), initial=0)):
            raise ValueError("rounding errors decide whether this is zero")
        return (numpy_helper.saturate_cast(y, x.dtype) if x.dtype.kind in "iu" else y.astype(x.dtype),)


@corrected
class ReduceLogSumExp(op_reduce_log_sum_exp.ReduceLogSumExp_18):
    """Of infinities the largest one is taken off itself."""

    def _run(self, data, axes=None, **attributes):
        reduced = super()._run(data, axes, **attributes)[0]
        if np.isinf(data).any():
            with np.errstate(all="ignore"):
                axes = tuple(axes.tolist()) if axes is not None and axes.size else None
                keeps = bool(attributes.get("keepdims", 1))
                least, most = (fold(data, axis=axes, keepdims=keeps) for fold in (np.min, np.max))
            reduced = np.where(np.isinf(most) & ~np.isnan(least), most, reduced).astype(data.dtype)
        return (reduced,)


@corrected
class InstanceNormalization(op_instance_normalization.InstanceNormalization):
    """Of values that are all the same it is zero here, and a rounding error of their mean many times as large elsewhere."""

    def _run(self, x, *parameters, **attributes):
        axes = tuple(range(2, x.ndim))
        if np.any(x.var(axis=axes) <= NEARLY**2 * np.square(x).max(axis=axes, initial=0)):
            raise ValueError("a variance of nothing")
        return super()._run(x, *parameters, **attributes)


@corrected
class GridSample(op_grid_sample.GridSample):
    """Coordinates of doubles are rounded to float32."""

    def _gs_denormalize_coordinates(self, n, dims, align_corners):
        places = [self._gs_denormalize(n=v, length=dim, align_corners=align_corners) for v, dim in zip(n, dims)]
        return np.asarray(places, np.asarray(n).dtype)


@corrected
class QuantizeLinear(op_quantize_linear.QuantizeLinear_25):
    """What is beyond the codes by more than an int32 wraps around."""

    def _run(self, x, y_scale, *zero_point, axis=1, block_size=0, **attributes):
        scale = reshape_input(y_scale, x.shape, axis, block_size).astype(np.float64)
        codes = x.astype(np.float64) / scale
        # As far away as no zero point brings back.
        far = np.abs(codes) > 2.0**24
        x = np.where(far, np.copysign(2.0**24, codes) * scale, x).astype(x.dtype)
        return super()._run(x, y_scale, *zero_point, axis=axis, block_size=block_size, **attributes)
