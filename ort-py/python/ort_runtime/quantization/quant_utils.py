"""Quantization arithmetic: types, ranges to scales and zero points, values to codes, names.

A real value is `scale * (code - zero_point)`. Ranges are widened to include 0, so that padding and
ReLU are exact. Scales are computed in float64 and rounded to the type of the tensor, zero points
before that rounding; codes are rounded half to even, as `QuantizeLinear` does.

Needs the package `onnx`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn, int4, uint4
from onnx import TensorProto

from ._calibration_table import write_calibration_table as write_calibration_table
from ._models import MODEL_SIZE_THRESHOLD as MODEL_SIZE_THRESHOLD
from ._models import add_infer_metadata as add_infer_metadata
from ._models import add_pre_process_metadata as add_pre_process_metadata
from ._models import attribute_to_kwarg as attribute_to_kwarg
from ._models import find_by_name as find_by_name
from ._models import generate_identified_filename as generate_identified_filename
from ._models import get_elem_index as get_elem_index
from ._models import get_mul_node as get_mul_node
from ._models import get_opset_version as get_opset_version
from ._models import load_model_with_shape_infer as load_model_with_shape_infer
from ._models import model_has_external_data as model_has_external_data
from ._models import model_has_infer_metadata as model_has_infer_metadata
from ._models import model_has_pre_process_metadata as model_has_pre_process_metadata
from ._models import (
    save_and_reload_model_with_shape_infer as save_and_reload_model_with_shape_infer,
)
from ._models import tensor_proto_to_array as tensor_proto_to_array
from ._models import update_opset_version as update_opset_version
from ._models import optimize_model as optimize_model
from ._types import QuantFormat as QuantFormat
from ._types import QuantizationMode as QuantizationMode
from ._types import QuantizedValueType as QuantizedValueType
from ._types import QuantType as QuantType

onnx_domain = "ai.onnx"
ms_domain = "com.microsoft"
QUANT_OP_NAME = "QuantizeLinear"
DEQUANT_OP_NAME = "DequantizeLinear"
QUANT_INPUT_SUFFIX = "_QuantizeLinear_Input"
DEQUANT_OUTPUT_SUFFIX = "_DequantizeLinear_Output"
TENSOR_NAME_QUANT_SUFFIX = "_quantized"
FLOAT8_TYPES = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
)

ONNX_TYPE_TO_NP_TYPE: dict[int, Any] = {
    TensorProto.INT8: np.dtype("int8"),
    TensorProto.UINT8: np.dtype("uint8"),
    TensorProto.INT16: np.dtype("int16"),
    TensorProto.UINT16: np.dtype("uint16"),
    TensorProto.FLOAT8E4M3FN: float8_e4m3fn,
    TensorProto.INT4: int4,
    TensorProto.UINT4: uint4,
}


def _ranges(limits: dict[int, tuple[int, int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns the limits of codes as scalars of their type."""
    types = ONNX_TYPE_TO_NP_TYPE
    return {
        key: (np.array(low, types[key]), np.array(high, types[key]))
        for key, (low, high) in limits.items()
    }


ONNX_INT_TYPE_RANGE = _ranges(
    {
        TensorProto.UINT8: (0, 255),
        TensorProto.INT8: (-128, 127),
        TensorProto.UINT16: (0, 65535),
        TensorProto.INT16: (-32768, 32767),
        TensorProto.UINT4: (0, 15),
        TensorProto.INT4: (-8, 7),
    }
)
ONNX_INT_TYPE_SYMMETRIC_RANGE = _ranges(
    {TensorProto.INT8: (-127, 127), TensorProto.INT16: (-32767, 32767)}
)
#: One bit less, for processors whose 8-bit products saturate.
ONNX_INT_TYPE_REDUCED_RANGE = _ranges(
    {
        TensorProto.UINT8: (0, 127),
        TensorProto.INT8: (-64, 64),
        TensorProto.UINT16: (0, 32767),
        TensorProto.INT16: (-16384, 16384),
        TensorProto.UINT4: (0, 7),
        TensorProto.INT4: (-4, 3),
    }
)


# Names.


def add_quant_suffix(tensor_name: str) -> str:
    """Returns the name of the node that quantizes the tensor."""
    return tensor_name + "_QuantizeLinear"


def add_quant_input_suffix(tensor_name: str) -> str:
    """Returns the name of the float value that becomes the graph output `tensor_name`."""
    return tensor_name + QUANT_INPUT_SUFFIX


def add_quant_output_suffix(tensor_name: str) -> str:
    """Returns the name of the tensor's codes."""
    return tensor_name + "_QuantizeLinear_Output"


def add_dequant_suffix(tensor_name: str) -> str:
    """Returns the name of the node that dequantizes the tensor."""
    return tensor_name + "_DequantizeLinear"


def add_dequant_input_suffix(tensor_name: str) -> str:
    """Returns the name of codes that a node dequantizes."""
    return tensor_name + "_DequantizeLinear_Input"


def add_dequant_output_suffix(tensor_name: str) -> str:
    """Returns the name of the tensor after quantization and dequantization."""
    return tensor_name + DEQUANT_OUTPUT_SUFFIX


# Ranges, scales, zero points.


def get_qmin_qmax_for_qType(
    qType: int, reduce_range: bool = False, symmetric: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the largest code; `reduce_range` wins over `symmetric`.

    Raises:
        ValueError: there is no quantization to that type.
        NotImplementedError: float8, whose codes are no range of integers.
    """
    if qType in FLOAT8_TYPES:
        raise NotImplementedError("float8 has no range of integer codes")
    if qType not in ONNX_INT_TYPE_RANGE:
        raise ValueError(
            f"Unexpected data type {qType} requested: INT8, UINT8, INT16, UINT16, INT4 and UINT4 "
            "are supported"
        )
    if reduce_range:
        return ONNX_INT_TYPE_REDUCED_RANGE[qType]
    full = ONNX_INT_TYPE_RANGE[qType]
    return ONNX_INT_TYPE_SYMMETRIC_RANGE.get(qType, full) if symmetric else full


def get_qrange_for_qType(qType: int, reduce_range: bool = False, symmetric: bool = False) -> int:
    """Returns the number of steps between the least and the largest code."""
    low, high = get_qmin_qmax_for_qType(qType, reduce_range, symmetric)
    return int(high) - int(low)


def normalize_axis(axis: int, rank: int) -> tuple[bool, int]:
    """Returns whether the axis exists, and its number counted from the front."""
    front = axis + rank if axis < 0 else axis
    return 0 <= front < rank, front


def compute_scale_zp(
    rmin: np.ndarray,
    rmax: np.ndarray,
    qmin: np.ndarray,
    qmax: np.ndarray,
    symmetric: bool = False,
    min_real_range: float | None = None,
) -> list[np.ndarray]:
    """Returns zero point and scale of a range, or of one range for each channel.

    Args:
        rmin: least real values, a scalar or one for each channel.
        rmax: largest real values, with the type that the scale gets.
        qmin: the least code, with the type that the zero point gets.
        qmax: the largest code.
        symmetric: puts the zero point in the middle.
        min_real_range: ranges become at least that wide, upwards.

    Returns:
        Zero point and scale. A range without extent has scale 1 and zero point 0.

    Raises:
        AssertionError: a bound is NaN.

    Example:
        >>> low, high = (np.array(v, np.uint8) for v in (0, 255))
        >>> compute_scale_zp(np.float32(-1), np.float32(1), low, high)
        [array(128, dtype=uint8), array(0.00784314, dtype=float32)]
    """
    low, high = _widened(np.asarray(rmin), np.asarray(rmax), symmetric, min_real_range)
    extent = high.astype(np.float64) - low.astype(np.float64)
    return _scale_zp(low, high, extent, qmin, qmax, symmetric)


def _widened(
    low: np.ndarray, high: np.ndarray, symmetric: bool, min_real_range: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ranges, in the type of their bounds, that include 0 and what else is asked for."""
    real = high.dtype.type
    low, high = np.minimum(low, real(0)), np.maximum(high, real(0))
    assert not (np.isnan(low).any() or np.isnan(high).any()), "a bound of a range is NaN"
    if min_real_range is not None:
        high = np.maximum(high, low + real(min_real_range))
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    return low, high


def _scale_zp(
    low: np.ndarray,
    high: np.ndarray,
    extent: np.ndarray,
    qmin: np.ndarray,
    qmax: np.ndarray,
    symmetric: bool,
) -> list[np.ndarray]:
    """Returns zero points and scales of ranges that `_widened` made."""
    first, last = float(qmin), float(qmax)
    scale = extent.astype(np.float64) / (last - first)
    # Divisions by less than the smallest normal number would overflow.
    empty = scale < np.finfo(high.dtype).tiny
    divisor = np.where(empty, 1.0, scale)
    with np.errstate(invalid="ignore"):
        zero = np.full(scale.shape, (first + last) / 2) if symmetric else first - low / divisor
    zero = np.where(empty | np.isnan(zero), 0.0, np.rint(zero))
    return [zero.astype(np.asarray(qmin).dtype), divisor.astype(high.dtype)]


@functools.cache
def _float8_deviation(element_type: int) -> float:
    """Returns the standard deviation of the finite values of the type."""
    if element_type != TensorProto.FLOAT8E4M3FN:
        raise ValueError(f"Quantization to element_type={element_type} not implemented.")
    values = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)
    return float(np.std(values[np.isfinite(values)]))


def compute_scale_zp_float8(element_type: int, std: np.ndarray) -> list[np.ndarray]:
    """Returns zero point and scale that give codes the deviation of all values of the type.

    Raises:
        ValueError: the type is not float8 E4M3.
    """
    deviation = np.asarray(std)
    # A constant has no deviation, and 0 is no scale.
    spread = np.where(deviation == 0, _float8_deviation(element_type), deviation)
    scale = np.array(spread / _float8_deviation(element_type), deviation.dtype)
    return [np.array(0, ONNX_TYPE_TO_NP_TYPE[element_type]), scale]


def compute_data_quant_params(
    data: np.ndarray,
    quant_type: int,
    symmetric: bool,
    reduce_range: bool = False,
    min_real_range: float | None = None,
    rmin_override: float | None = None,
    rmax_override: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns zero point and scale for all of an array.

    Raises:
        TypeError: `data` is no array.
        ValueError: there is no quantization to that type, or `data` is not of floats.
    """
    if not isinstance(data, np.ndarray):
        raise TypeError(f"Weight must be given as an array not {type(data)}.")
    if not np.issubdtype(data.dtype, np.floating):
        raise ValueError(f"only floats are quantized, not {data.dtype}")
    if quant_type == TensorProto.FLOAT8E4M3FN:
        if reduce_range:
            raise RuntimeError("reduce_range is for integer codes, not for float8")
        zero, scale = compute_scale_zp_float8(quant_type, np.std(data))
        return zero, scale
    if quant_type not in ONNX_INT_TYPE_RANGE:
        raise ValueError(f"Unexpected value for quant_type={quant_type}.")
    least, largest = (data.min(), data.max()) if data.size else (0.0, 0.0)
    low = np.array(least if rmin_override is None else rmin_override, data.dtype)
    high = np.array(largest if rmax_override is None else rmax_override, data.dtype)
    limits = get_qmin_qmax_for_qType(quant_type, reduce_range, symmetric)
    zero, scale = compute_scale_zp(low, high, *limits, symmetric, min_real_range)
    return zero, scale


def snap_zero_point_to_uint8(
    rmin: Any, rmax: Any, qmin: int = 0, qmax: int = 255, min_real_range: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns zero point and scale where the zero point is 0, or the middle for signed ranges.

    Neither end of the range is clipped. The scale is float32 unless `rmax` is an array.
    """
    real = getattr(rmax, "dtype", np.dtype("float32"))
    low, high = min(np.asarray(rmin).item(), 0.0), max(np.asarray(rmax).item(), 0.0)
    if min_real_range is not None:
        high = max(high, low + min_real_range)
    if low == high:
        high = 1.0
    zero = 0 if low == 0.0 else (qmin + qmax + 1) // 2
    scale = high / (qmax - zero)
    if zero > qmin:
        scale = max(scale, -low / (zero - qmin))
    return np.array(zero, np.uint8), np.array(scale, real)


# Codes.


def _broadcast(values: np.ndarray, shape: tuple[int, ...], axis: int | None, block: int) -> Any:
    """Returns parameters of channels, or of blocks along the axis, in a shape for the data."""
    if axis is None or values.ndim == 0:
        return values.reshape(()) if values.size == 1 else values
    if block:
        return values.repeat(block, axis).take(range(shape[axis]), axis)
    return values.reshape([-1 if place == axis else 1 for place in range(len(shape))])


def quantize_nparray(
    qType: int,
    arr: np.ndarray,
    scale: Any,
    zero_point: Any,
    low: float | None = None,
    high: float | None = None,
) -> np.ndarray:
    """Returns the codes of an array; scale and zero point broadcast to it.

    Raises:
        AssertionError: there is no quantization to that type.
        NotImplementedError: float8 with a zero point.
        RuntimeError: values that float8 has no code for.
    """
    assert qType in ONNX_TYPE_TO_NP_TYPE, (
        f"Unexpected data type {qType} requested: INT8, UINT8, INT16, UINT16, INT4, UINT4 and "
        "FLOAT8E4M3FN are supported"
    )
    if qType in FLOAT8_TYPES:
        if np.asarray(zero_point).astype(np.float32).any():
            raise NotImplementedError(f"the zero point of float8 is 0, not {zero_point!r}")
        return _quantize_float8(arr, np.asarray(scale))
    full = ONNX_INT_TYPE_RANGE[qType]
    least = float(full[0]) if low is None else max(low, float(full[0]))
    largest = float(full[1]) if high is None else min(high, float(full[1]))
    # In place: weights are large, and two more copies of one would double the peak.
    codes = np.asarray(np.asarray(arr, np.float32) / np.asarray(scale))
    np.rint(codes, out=codes)
    codes += np.asarray(zero_point).astype(np.float32)
    return np.clip(codes, least, largest, out=codes).astype(ONNX_TYPE_TO_NP_TYPE[qType])


def _quantize_float8(arr: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns codes of float8 E4M3, those of the ends of its range beyond them."""
    largest = 448.0
    codes = np.clip(np.asarray(arr, np.float32) / scale, -largest, largest).astype(float8_e4m3fn)
    if np.isnan(codes.astype(np.float32)).any():
        raise RuntimeError("a value is NaN, so its float8 code is")
    return codes


def quantize_data(
    data: np.ndarray,
    qType: int,
    symmetric: bool,
    reduce_range: bool = False,
    min_real_range: float | None = None,
    rmin_override: float | None = None,
    rmax_override: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns zero point, scale and codes of an array, with one scale for all of it."""
    zero, scale = compute_data_quant_params(
        data, qType, symmetric, reduce_range, min_real_range, rmin_override, rmax_override
    )
    return zero, scale, quantize_nparray(qType, data, scale, zero)


def compute_scale_zp_blocked(
    weight: np.ndarray, quant_type: int, axis: int, block_size: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns zero points and scales of blocks of a weight along an axis.

    Returns:
        Two arrays with the weight's shape, where the axis counts blocks; the last may be shorter.
    """
    starts = np.arange(0, weight.shape[axis], block_size)
    low = np.minimum.reduceat(weight, starts, axis)
    high = np.maximum.reduceat(weight, starts, axis)
    low, high = _widened(low, high, symmetric, None)
    limits = get_qmin_qmax_for_qType(quant_type, symmetric=symmetric)
    # Unlike those of whole channels, extents are differences in the weight's type.
    zero, scale = _scale_zp(low, high, high - low, *limits, symmetric)
    return zero, scale


def pack_bytes_to_4bit(src_8bit: bytes) -> bytearray:
    """Returns 4-bit codes in half as many bytes, the first of two in the low bits."""
    codes = np.frombuffer(src_8bit, np.uint8) & 15
    padded = np.append(codes, np.zeros(codes.size % 2, np.uint8))
    return bytearray((padded[::2] | padded[1::2] << 4).tobytes())


def codes_to_tensor(codes: np.ndarray, data_type: int, name: str) -> TensorProto:
    """Returns an initializer of codes, packed where the type has 4 bits."""
    tensor = TensorProto(data_type=data_type, name=name, dims=codes.shape)
    raw = codes.tobytes()
    four_bits = data_type in (TensorProto.INT4, TensorProto.UINT4)
    tensor.raw_data = bytes(pack_bytes_to_4bit(raw)) if four_bits else raw
    return tensor


def quantize_onnx_initializer(
    weight: TensorProto,
    quant_type: int,
    zero_point: np.ndarray,
    scale: np.ndarray,
    axis: int | None = None,
    quant_weight_name: str | None = None,
    block_size: int = 0,
) -> TensorProto:
    """Returns the weight's codes as an initializer, `<weight>_quantized` unless named.

    Args:
        weight: the weight.
        quant_type: the type of codes.
        zero_point: a scalar, one for each channel, or one for each block.
        scale: in the same shape.
        axis: the axis of channels or blocks, None for one scale.
        quant_weight_name: the initializer's name.
        block_size: the elements of a block along the axis, 0 for whole channels.
    """
    data = tensor_proto_to_array(weight)
    place = None if axis is None else normalize_axis(axis, data.ndim)[1]
    zeros = _broadcast(np.asarray(zero_point), data.shape, place, block_size)
    scales = _broadcast(np.asarray(scale), data.shape, place, block_size)
    codes = quantize_nparray(quant_type, data, scales, zeros)
    name = quant_weight_name or weight.name + TENSOR_NAME_QUANT_SUFFIX
    return codes_to_tensor(codes, quant_type, name)


class QuantizedValue:
    """What stands for a value after quantization."""

    def __init__(
        self,
        name: str,
        new_quantized_name: str,
        scale_name: str,
        zero_point_name: str,
        quantized_value_type: QuantizedValueType | None,
        axis: int | None = None,
        node_type: str | None = None,
        node_qtype: int | None = None,
        scale_type: int | None = None,
    ) -> None:
        self.original_name = name
        self.q_name = new_quantized_name
        self.scale_name = scale_name
        self.zp_name = zero_point_name
        self.value_type = quantized_value_type
        self.axis = axis
        self.node_type = node_type
        self.node_qtype = node_qtype
        self.scale_type = scale_type


class QuantizedInitializer:
    """A weight with its codes, zero points and scales."""

    def __init__(
        self,
        name: str,
        initializer: Any,
        rmins: Any,
        rmaxs: Any,
        zero_points: Any,
        scales: Any,
        data: Any = (),
        quantized_data: Any = (),
        axis: int | None = None,
    ) -> None:
        self.name = name
        self.initializer = initializer
        self.rmins, self.rmaxs = rmins, rmaxs
        self.zero_points, self.scales = zero_points, scales
        self.data, self.quantized_data = data, quantized_data
        self.axis = axis


class BiasToQuantize:
    """A bias with the names of what its scale is made of."""

    def __init__(self, bias_name: str, input_name: str, weight_name: str) -> None:
        self.bias_name = bias_name
        self.input_name = input_name
        self.weight_name = weight_name


def smooth_distribution(p: np.ndarray, eps: float = 0.0001) -> np.ndarray | None:
    """Returns a distribution without zeros: `eps` each, taken in equal parts from the others.

    None if all of it is zero.
    """
    empty = p == 0
    count = int(empty.sum())
    if count == p.size:
        return None
    taken = eps * count / (p.size - count)
    smooth = p.astype(np.float32) + np.where(empty, eps, -taken).astype(np.float32)
    assert (smooth > 0).all(), "eps is more than what there is to take it from"
    return smooth
