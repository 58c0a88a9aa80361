"""Writes the scales, zero points and codes of onnxruntime.quantization, and ranges by NumPy, for the tests of ort-quant.

usage: python quantization_reference.py ort-quant/tests/data

Needs NumPy and onnxruntime 1.31.1 with onnx.

  linear.json   cases: type, symmetric, reduced, half, shape, axis, data, and scales, zero_points and codes
  float8.json   cases: shape, axis, data, and scales and codes of E4M3FN
  ranges.json   cases: the name of a set of numbers that `numbers` makes, and its ranges by each rule
  layers.onnx   a model with a layer of each kind, and what quantize_dynamic makes of it: layers_per_tensor.onnx and
                layers_per_channel.onnx
  layers_static.onnx, layers_qoperator.onnx, and the same per tensor
                what quantize_static makes of it, and the ranges that it found: layers_ranges.json

The ranges are computed from the elements and from histograms of NumPy, straight from the definitions: 2048 bins of each sign
up to the next power of two, the threshold of least Kullback-Leibler divergence, the range of least squared error.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.quant_utils import quantize_data

single = np.float32
BINS = 2048
TYPES = {
    "int4": QuantType.QInt4,
    "uint4": QuantType.QUInt4,
    "int8": QuantType.QInt8,
    "uint8": QuantType.QUInt8,
    "int16": QuantType.QInt16,
    "uint16": QuantType.QUInt16,
}


def float8_cases():
    """By ml_dtypes: the largest magnitude of a channel becomes 448, the largest number of E4M3FN."""
    random = np.random.default_rng(36)
    tensors = [
        np.zeros((2, 3)),
        np.array([[1e-40, 0.0]]),
        np.array([[448.0, -448.0, 17.0, 0.001953125, 0.0009765625, 0.00293]]),
        random.standard_normal((3, 7, 2)),
        random.standard_normal((4, 5)) * np.array([[1e-6], [1.0], [1e4], [0.0]]),
    ]
    for data in (tensor.astype(single) for tensor in tensors):
        for axis in (None, *range(data.ndim)):
            over = None if axis is None else tuple(other for other in range(data.ndim) if other != axis)
            scales = np.abs(data).max(axis=over, keepdims=True) / single(448)
            scales[scales < np.finfo(single).tiny] = 1
            codes = (data / scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            yield {
                "shape": data.shape,
                "axis": axis,
                "data": data.flatten().tolist(),
                "scales": scales.flatten().tolist(),
                "codes": codes.flatten().tolist(),
            }


def linear_cases():
    random = np.random.default_rng(35)
    tensors = [
        ("zeros", np.zeros((2, 3))),
        ("subnormal", np.array([[1e-40, 0.0]])),
        ("positive", np.array([[3.0, 5.0]])),
        ("negative", np.array([[-5.0, -3.0]])),
        ("ties", np.array([[-1.0, 1.0, 0.5, -0.5, 0.25]])),
        ("normal", random.standard_normal((3, 7, 2))),
        ("outlier", np.concatenate([random.standard_normal((4, 9)), [[0, 1e3, 0, 0, 0, 0, 0, -1e-3, 0]]])),
        ("wide", random.standard_normal((4, 5)) * np.array([[1e-6], [1.0], [1e4], [0.0]])),
    ]
    for name, data in tensors:
        for half in (False, True):
            array = data.astype(np.float16 if half else single)
            for kind, member in TYPES.items():
                for symmetric in (False, True):
                    for reduced in (False, True):
                        for axis in (None, 0, 1):
                            if axis is not None and (half or kind not in ("int8", "uint4", "int4")):
                                continue
                            parts = [array] if axis is None else np.split(array, array.shape[axis], axis)
                            results = [
                                quantize_data(part, member.tensor_type, symmetric, reduced) for part in parts
                            ]
                            codes = [np.reshape(np.asarray(codes, np.int32), part.shape)
                                     for part, (_, _, codes) in zip(parts, results)]
                            codes = codes[0] if axis is None else np.concatenate(codes, axis)
                            yield {
                                "name": name,
                                "type": kind,
                                "symmetric": symmetric,
                                "reduced": reduced,
                                "half": half,
                                "axis": axis,
                                "shape": list(array.shape),
                                "data": [float(value) for value in array.ravel()],
                                "scales": [float(scale) for _, scale, _ in results],
                                "zero_points": [int(zero) for zero, _, _ in results],
                                "codes": [int(code) for code in codes.ravel()],
                            }


def numbers(name):
    """Numbers that Rust can make with the same roundings: only sums and products, in float64, rounded to float32."""
    step = np.arange(20000, dtype=np.int64)
    unit = (step * 7919 % 20011).astype(np.float64) / 20011.0 - 0.5
    if name == "cubes":
        return (unit * unit * unit * 40.0 + unit).astype(single)
    if name == "one side":
        cubes = unit * unit * unit * unit * unit * 900.0
        return np.where(cubes > 0.0, cubes, 0.0).astype(single)
    if name == "rare side":
        return np.where(step % 10007 == 5, -3.0, unit + 0.5).astype(single)
    if name == "outlier":
        return np.where(step == 17, 400.0, unit).astype(single)
    raise ValueError(name)


def histogram(values):
    most = float(np.max(np.abs(values)))
    extent = 2.0 ** (np.floor(np.log2(most)) + 1)
    edges = np.linspace(0.0, extent, BINS + 1)
    low, _ = np.histogram(-values[values < 0].astype(np.float64), edges)
    high, _ = np.histogram(values[values > 0].astype(np.float64), edges)
    return low.astype(np.float64), high.astype(np.float64), extent / BINS


def grid(low, high, symmetric):
    low, high = min(low, 0.0), max(high, 0.0)
    if symmetric:
        high = max(high, -low)
        low = -high
    least, greatest = (-127, 127) if symmetric else (0, 255)
    scale = (high - low) / (greatest - least)
    zero = 0 if symmetric else int(np.round(least - low / scale))
    return single(scale), zero, (-128, 127) if symmetric else (0, 255)


def error_of(bins, low, high, symmetric):
    below, above, width = bins
    scale, zero, (least, greatest) = grid(low, high, symmetric)
    scale = np.float64(scale)
    middles = (np.arange(BINS) + 0.5) * width
    total = 0.0
    for counts, sign in ((below, -1.0), (above, 1.0)):
        values = sign * middles
        codes = np.clip(np.round(values / scale) + zero, least, greatest)
        total += float(np.sum(counts * (scale * (codes - zero) - values) ** 2))
    return total


def squared_error(values, symmetric):
    bins = histogram(values)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    shares = [percent / 100.0 for percent in range(98, 18, -2)]

    def best(candidates):
        return min(candidates, key=lambda ends: error_of(bins, *ends, symmetric))

    both = best([(low, high)] + [(low * share, high * share) for share in shares])
    if symmetric:
        return both
    lower = best([both] + [(low * share, both[1]) for share in shares + [1.0]])
    return best([lower] + [(lower[0], high * share) for share in shares + [1.0]])


def spread(kept, levels):
    """The bins in `levels` groups of equal width, each spread over its bins that are not empty."""
    size = len(kept)
    borders = np.arange(levels + 1) * (size / levels)
    result = np.zeros(size)
    for start, end in zip(borders[:-1], borders[1:]):
        bins = np.arange(int(np.floor(start)), min(int(np.ceil(end)), size))
        share = np.maximum(np.minimum(end, bins + 1.0) - np.maximum(start, bins), 0.0)
        share[kept[bins] == 0] = 0.0
        if share.sum() > 0:
            result[bins] += np.sum(kept[bins] * share) / share.sum() * share
    return result


def smooth(counts):
    empty = counts == 0
    given = 1e-4 * empty.sum() / max((~empty).sum(), 1)
    if empty.all() or np.any(counts[~empty] <= given):
        return None
    return np.where(empty, 1e-4, counts - given)


def threshold(counts, width, levels):
    used = int(np.max(np.nonzero(counts)[0], initial=-1)) + 1
    best, chosen = np.inf, used
    for candidate in range(used, levels - 1, -1):
        kept = counts[:candidate]
        clipped = kept.copy()
        clipped[-1] += counts[candidate:].sum()
        p, q = smooth(clipped), smooth(spread(kept, levels))
        if p is None or q is None:
            continue
        p, q = p / p.sum(), q / q.sum()
        divergence = float(np.sum(p * np.log(p / q)))
        if divergence < best - 1e-12:
            best, chosen = divergence, candidate
    return chosen * width


def entropy(values, symmetric):
    below, above, width = histogram(values)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if symmetric:
        most = threshold(below + above, width, 128)
        return max(low, -most), min(high, most)
    levels = 128 if low < 0.0 < high else 255
    return max(low, -threshold(below, width, levels)), min(high, threshold(above, width, levels))


def percentile(values, share, symmetric):
    """From the elements. The tests allow the width of a bin, and treat a side that vanishes on their own."""
    if symmetric:
        most = float(np.percentile(np.abs(values.astype(np.float64)), 100 * share))
        return -most, most
    ends = np.percentile(values.astype(np.float64), [50 * (1 - share), 50 * (1 + share)])
    return min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)


def range_cases():
    for name in ("cubes", "one side", "rare side", "outlier"):
        values = numbers(name)
        wide = values.astype(np.float64)
        case = {
            "name": name,
            "minmax": [float(values.min()), float(values.max())],
            "mean": float(np.mean(wide)),
            "deviation": float(np.std(wide)),
        }
        for symmetric in (False, True):
            suffix = " symmetric" if symmetric else ""
            case["mse" + suffix] = squared_error(values, symmetric)
            case["entropy" + suffix] = entropy(values, symmetric)
            case["percentile 0.99" + suffix] = percentile(values, 0.99, symmetric)
        yield case


def layers():
    """Products that share an input and a weight, a Gemm, a table, and convolutions with and without a bias."""
    random = np.random.default_rng(36)

    def weight(name, *shape):
        return numpy_helper.from_array(random.standard_normal(shape).astype(single), name)

    nodes = [
        helper.make_node("MatMul", ["x", "W1"], ["a"], name="mm1"),
        helper.make_node("MatMul", ["x", "W2"], ["b"], name="mm2"),
        helper.make_node("Add", ["a", "b"], ["c"], name="add"),
        helper.make_node("Gemm", ["c", "W3", "B3"], ["d"], name="gemm", transB=1),
        helper.make_node("Gather", ["E", "ids"], ["e"], name="gather"),
        helper.make_node("MatMul", ["e", "W1"], ["f"], name="mm3"),
        helper.make_node("Conv", ["image", "CW", "CB"], ["g"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["g", "CW2"], ["h"], name="conv2"),
        helper.make_node("Relu", ["d"], ["r"], name="relu"),
    ]
    inputs = [("x", TensorProto.FLOAT, [3, 4]), ("ids", TensorProto.INT64, [2]), ("image", TensorProto.FLOAT, [1, 3, 5, 5])]
    outputs = [("r", [3, 5]), ("f", [2, 6]), ("h", [1, 2, 5, 5])]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
        [weight("W1", 4, 6), weight("W2", 4, 6), weight("W3", 5, 6), weight("B3", 5), weight("E", 7, 4),
         weight("CW", 8, 3, 3, 3), weight("CB", 8), weight("CW2", 2, 8, 1, 1)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="layers")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


class Samples(CalibrationDataReader):
    """Three samples of the inputs of `layers`."""

    def __init__(self):
        random = np.random.default_rng(37)
        self.samples = iter([
            {
                "x": random.standard_normal((3, 4)).astype(single),
                "ids": random.integers(0, 7, 2),
                "image": random.standard_normal((1, 3, 5, 5)).astype(single),
            }
            for _ in range(3)
        ])

    def get_next(self):
        return next(self.samples, None)


def write_models(folder):
    path = str(folder / "layers.onnx")
    onnx.save(layers(), path)
    for per_channel in (False, True):
        name = "layers_per_channel.onnx" if per_channel else "layers_per_tensor.onnx"
        quantize_dynamic(path, str(folder / name), per_channel=per_channel)
    products = ["MatMul", "Gemm", "Conv"]
    ranges = folder / "layers_ranges.json"
    ranges.unlink(missing_ok=True)
    variants = [
        ("layers_static.onnx", QuantFormat.QDQ, True),
        ("layers_static_per_tensor.onnx", QuantFormat.QDQ, False),
        ("layers_qoperator.onnx", QuantFormat.QOperator, True),
        ("layers_qoperator_per_tensor.onnx", QuantFormat.QOperator, False),
    ]
    for name, form, per_channel in variants:
        quantize_static(
            path,
            str(folder / name),
            Samples(),
            quant_format=form,
            op_types_to_quantize=products,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"QuantizeBias": False, "OpTypesToExcludeOutputQuantization": products}
            if form == QuantFormat.QDQ
            else {},
            calibration_cache_path=str(ranges),
        )
    ranges.write_text(ranges.read_text().rstrip() + "\n")


def write(path, cases):
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "linear.json", linear_cases())
    write(folder / "float8.json", float8_cases())
    write(folder / "ranges.json", range_cases())
    write_models(folder)
