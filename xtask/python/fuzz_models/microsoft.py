"""Operators of the domain com.microsoft, from their formulas: the evaluator knows only the
standard's.

Quantized operators dequantize, compute and quantize: `round(y / scale) + zero`, halves to the even number, saturated."""

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from scipy import special

MICROSOFT_OPERATORS: list[type[OpRun]] = []


def known(operator: type[OpRun]) -> type[OpRun]:
    operator.op_domain = "com.microsoft"
    MICROSOFT_OPERATORS.append(operator)
    return operator


def along(values: np.ndarray, rank: int, axis: int) -> np.ndarray:
    """Scales or zero points of each element of an axis, to be broadcast; one of all stays."""
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def dequantized(codes, scale, zero, axis: int = 1) -> np.ndarray:
    scale = along(np.asarray(scale), codes.ndim, axis)
    offset = 0 if zero is None else along(np.asarray(zero), codes.ndim, axis).astype(np.int64)
    return (codes.astype(np.int64) - offset).astype(scale.dtype) * scale


def quantized(values, scale, zero, dtype=np.uint8) -> np.ndarray:
    dtype = dtype if zero is None else zero.dtype
    info = np.iinfo(dtype)
    offset = 0 if zero is None else np.asarray(zero).reshape(()).astype(np.float64)
    codes = np.rint(values / np.asarray(scale).reshape(())) + offset
    return np.clip(np.nan_to_num(codes, nan=0), info.min, info.max).astype(dtype)


def run_one(op: str, inputs: list, opset: int = 21, **attributes):
    """One operator of the standard."""
    from onnx import helper

    names = [f"i{index}" if value is not None else "" for index, value in enumerate(inputs)]
    attributes = {name: value for name, value in attributes.items() if value is not None}
    node = helper.make_node(op, names, ["y"], **attributes)
    feeds = {name: value for name, value in zip(names, inputs) if name}
    return ReferenceEvaluator(node, opsets={"": opset}).run(None, feeds)[0]


@known
class QLinearAdd(OpRun):
    def _run(self, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
        total = dequantized(a, a_scale, a_zero) + dequantized(b, b_scale, b_zero)
        return (quantized(total, y_scale, y_zero, a.dtype),)


@known
class QLinearMul(OpRun):
    def _run(self, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
        product = dequantized(a, a_scale, a_zero) * dequantized(b, b_scale, b_zero)
        return (quantized(product, y_scale, y_zero, a.dtype),)


@known
class QLinearGlobalAveragePool(OpRun):
    def _run(self, x, x_scale, x_zero, y_scale, y_zero, channels_last=0):
        axes = tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))
        mean = dequantized(x, x_scale, x_zero).mean(axis=axes, keepdims=True)
        return (quantized(mean, y_scale, y_zero),)


@known
class QLinearSigmoid(OpRun):
    def _run(self, x, x_scale, x_zero, y_scale, y_zero=None):
        values = dequantized(x, x_scale, x_zero)
        return (quantized(1 / (1 + np.exp(-values)), y_scale, y_zero, x.dtype),)


@known
class QLinearLeakyRelu(OpRun):
    def _run(self, x, x_scale, x_zero, y_scale, y_zero=None, alpha=0.01):
        values = dequantized(x, x_scale, x_zero)
        alpha = np.float32(0.01 if alpha is None else alpha).astype(values.dtype)
        return (quantized(np.where(values < 0, values * alpha, values), y_scale, y_zero, x.dtype),)


@known
class QLinearSoftmax(OpRun):
    """Of the steps in 1 only whole ones count, as in ONNX Runtime."""

    def _run(self, x, x_scale, x_zero, y_scale, y_zero, axis=-1, opset=13):
        values = dequantized(x, x_scale, x_zero)
        exponents = np.exp(values - values.max(axis=axis, keepdims=True))
        steps = np.floor(np.float32(1) / np.float32(y_scale)).astype(values.dtype)
        return (quantized(exponents / exponents.sum(axis=axis, keepdims=True) * steps, np.float32(1), y_zero, x.dtype),)


@known
class QLinearConcat(OpRun):
    def _run(self, y_scale, y_zero, *triples, axis=0):
        parts = [dequantized(*triples[index : index + 3]) for index in range(0, len(triples), 3)]
        return (quantized(np.concatenate(parts, axis), y_scale, y_zero),)


@known
class QLinearConv(OpRun):
    """The same as the standard's, and with the channels last."""

    def _run(self, x, xs, xz, w, ws, wz, ys, yz, b=None, channels_last=0, **attributes):
        if channels_last:
            x = np.moveaxis(x, -1, 1)
        data = x.astype(np.int64) - int(xz)
        filters = w.astype(np.int64) - along(np.asarray(wz), w.ndim, 0).astype(np.int64)
        sums = run_one("Conv", [data.astype(np.float64), filters.astype(np.float64)], 11, **attributes)
        if b is not None:
            sums = sums + b.astype(np.float64).reshape([-1] + [1] * (sums.ndim - 2))
        factor = (xs * along(np.asarray(ws), sums.ndim, 1)).astype(xs.dtype)
        codes = quantized(sums * (factor / ys), np.float64(1), np.asarray(yz))
        return (np.moveaxis(codes, 1, -1) if channels_last else codes,)


@known
class FusedMatMul(OpRun):
    def _run(self, a, b, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
        def turned(array, transposes, moves_batch):
            if moves_batch and array.ndim > 2:
                array = np.moveaxis(array, 0, -2)
            return np.swapaxes(array, -1, -2) if transposes and array.ndim > 1 else array

        alpha = np.asarray(1.0 if alpha is None else alpha, a.dtype)
        return (np.asarray(np.matmul(turned(a, transA, transBatchA), turned(b, transB, transBatchB)) * alpha),)


@known
class Gelu(OpRun):
    def _run(self, x, approximate=None):
        wide = x.astype(np.float64)
        return (np.asarray((0.5 * wide * (1 + special.erf(wide / np.sqrt(2)))).astype(x.dtype)),)


@known
class QuickGelu(OpRun):
    def _run(self, x, alpha=1.702):
        alpha = np.float32(1.702 if alpha is None else alpha).astype(x.dtype)
        return (x / (1 + np.exp(-alpha * x)),)


def heads_apart(array: np.ndarray, heads: int) -> np.ndarray:
    batch, length, width = array.shape
    return array.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def softmax(scores: np.ndarray) -> np.ndarray:
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


@known
class MultiHeadAttention(OpRun):
    def _run(self, q, k=None, v=None, bias=None, padding=None, added=None, past_key=None, past_value=None,
             num_heads=1, scale=None, mask_filter_value=-10000.0, unidirectional=0):
        if bias is not None:
            parts = np.split(bias, [q.shape[-1], q.shape[-1] + k.shape[-1]])
            q, k, v = q + parts[0], k + parts[1], v + parts[2]
        q, k, v = heads_apart(q, num_heads), heads_apart(k, num_heads), heads_apart(v, num_heads)
        factor = 1 / np.sqrt(q.shape[-1]) if not scale else scale
        scores = (q @ k.swapaxes(-1, -2)) * np.asarray(factor, q.dtype)
        if added is not None:
            scores = scores + added
        if padding is not None:
            masked = padding[:, None, None, :] == 0
            scores = np.where(masked, scores + np.asarray(mask_filter_value, q.dtype), scores)
        joined = (softmax(scores) @ v).transpose(0, 2, 1, 3)
        return (joined.reshape(*joined.shape[:2], -1).astype(q.dtype),)


@known
class QLinearAveragePool(OpRun):
    def _run(self, x, x_scale, x_zero, y_scale, y_zero, channels_last=0, **attributes):
        values = dequantized(x, x_scale, x_zero)
        values = np.moveaxis(values, -1, 1) if channels_last else values
        pooled = run_one("AveragePool", [values], 19, **attributes)
        codes = quantized(pooled, y_scale, y_zero)
        return (np.moveaxis(codes, 1, -1) if channels_last else codes,)
