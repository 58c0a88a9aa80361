"""Weights in blocks: codes, scales and zero points for `MatMulNBits`, `DequantizeLinear` and
`GatherBlockQuantized`.

A block is some rows of a column of a matrix [K, N], and has a scale of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..capi import _pybind_state as native

#: The elements of a weight that NumPy takes at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Blocks:
    """A weight in the layout of an operator. Symmetric blocks have no zero points."""

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


@dataclass(frozen=True)
class Scheme:
    """How a weight becomes blocks."""

    bits: int
    block_size: int
    is_symmetric: bool


def _packed_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns codes along the last axis in bytes, the first one of a byte in the low bits."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    if missing:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    groups = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = np.zeros(groups.shape[:-1], np.uint8)
    for place in range(per_byte):
        packed |= groups[..., place] << (place * bits)
    return packed


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes in bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed.reshape(-1, 1) >> shifts) & ((1 << bits) - 1)).ravel()[:count]


def min_max(weight: np.ndarray, scheme: Scheme) -> Blocks:
    """Returns the blocks of a matrix for `MatMulNBits`, with all values in their ranges."""
    (k, n), bits, size = weight.shape, scheme.bits, scheme.block_size
    blocks = math.ceil(k / size)
    codes = np.zeros((n, blocks, size * bits // 8), np.uint8)
    scales = np.zeros((n, blocks), weight.dtype)
    points = np.zeros((n, _packed_bytes(blocks, bits)), np.uint8)
    quantize = getattr(native, f"quantize_matmul_{bits}bits")
    quantize(codes, weight, scales, points, size, n, k, scheme.is_symmetric)
    return Blocks(codes, scales, None if scheme.is_symmetric else points)


def min_max_qdq(weight: np.ndarray, scheme: Scheme) -> Blocks:
    """Returns the blocks of a matrix for `DequantizeLinear`, in the shape of the matrix.

    Codes and zero points are int4 in bytes of their own if symmetric, uint4 otherwise.
    """
    (k, n), size = weight.shape, scheme.block_size
    blocks = math.ceil(k / size)
    codes = np.zeros(_packed_bytes(k * n, 4), np.uint8)
    scales = np.zeros((blocks, n), weight.dtype)
    points = np.zeros(_packed_bytes(blocks * n, 4), np.uint8)
    native.quantize_qdq_matmul_4bits(codes, weight, scales, points, size, n, k, scheme.is_symmetric)
    whole = unpack(codes, 4, k * n).reshape(k, n)
    if scheme.is_symmetric:
        return Blocks(whole, scales, None)
    return Blocks(whole, scales, unpack(points, 4, blocks * n).reshape(blocks, n))


def by_method(weight: np.ndarray, scheme: Scheme, method: str, **hessian: Any) -> Blocks:
    """Returns the blocks of a matrix for `MatMulNBits`, by a method of the engine."""
    (k, n), size = weight.shape, scheme.block_size
    blocks = math.ceil(k / size)
    codes, scales, points, _ = native.quantize_blocks(
        weight, size, scheme.bits, scheme.is_symmetric, method, **hessian
    )
    return Blocks(
        codes.reshape(n, blocks, -1),
        scales.reshape(n, blocks),
        None if points is None else points.reshape(n, -1),
    )


def round_to_nearest(weight: np.ndarray, scheme: Scheme, ratio: float) -> Blocks:
    """Returns the blocks of a matrix for `MatMulNBits`, whose ranges are a part of the values'.

    Symmetric scales spread the codes evenly over both signs, and asymmetric ranges include 0.
    """
    (k, n), bits, size = weight.shape, scheme.bits, scheme.block_size
    blocks = math.ceil(k / size)
    codes = np.empty((n, blocks, size * bits // 8), np.uint8)
    scales = np.empty((n, blocks), weight.dtype)
    points = np.empty((n, blocks), np.uint8)
    columns = max(1, _CHUNK // max(k, 1))
    for start in range(0, n, columns):
        part = slice(start, min(start + columns, n))
        values = np.zeros((part.stop - start, blocks * size), np.float32)
        values[:, :k] = weight[:, part].T
        values = values.reshape(-1, blocks, size)
        found = _nearest(values, scheme, ratio, weight.dtype)
        codes[part] = pack(found[0], bits)
        scales[part], points[part] = found[1], found[2]
    return Blocks(codes, scales, None if scheme.is_symmetric else pack(points, bits))


def _nearest(
    values: np.ndarray, scheme: Scheme, ratio: float, stored: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, scales and zero points of blocks along the last axis."""
    largest, middle = (1 << scheme.bits) - 1, 1 << (scheme.bits - 1)
    if scheme.is_symmetric:
        low = np.zeros(values.shape[:-1], np.float32)
        extent = np.abs(values).max(-1) * np.float32(ratio) * 2
    else:
        low = np.minimum(values.min(-1), 0) * np.float32(ratio)
        extent = np.maximum(values.max(-1), 0) * np.float32(ratio) - low
    # Codes are quotients in float64, where the ends of symmetric ranges are ties, half to even.
    scale = extent.astype(np.float64) / largest
    if stored == np.float16:
        # Its rounding is coarse: the codes have to be those of the scale that is stored.
        scale = scale.astype(stored).astype(np.float64)
    scale[scale == 0] = 1
    points = np.full(scale.shape, float(middle)) if scheme.is_symmetric else np.rint(-low / scale)
    codes = np.rint(values / scale[..., None]) + points[..., None]
    np.clip(codes, 0, largest, out=codes)
    return codes.astype(np.uint8), scale, np.clip(points, 0, largest).astype(np.uint8)


def rows_of_table(data: np.ndarray, axis: int, scheme: Scheme) -> Blocks:
    """Returns the blocks of 4 bits along an axis of a table, for `GatherBlockQuantized`.

    Codes and zero points have a byte of their own, int4 if symmetric and uint4 otherwise.
    """
    front = np.moveaxis(data, axis, 0)
    matrix = np.ascontiguousarray(front).reshape(front.shape[0], -1)
    found = min_max_qdq(matrix, scheme)

    def placed(array: np.ndarray | None) -> Any:
        if array is None:
            return None
        return np.ascontiguousarray(np.moveaxis(array.reshape(-1, *front.shape[1:]), 0, axis))

    return Blocks(placed(found.codes), placed(found.scales), placed(found.zero_points))
