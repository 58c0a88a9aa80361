"""Functions of the native module that quantize weights: what they write, and what they refuse.

The values are compared bit by bit in `ort-quant/tests/vectors.rs`. Those for `MatMulNBits` are in
`test_private_names.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import IS_ORIGINAL, C

K, N = 37, 5  # An odd number of elements: rows share bytes.
WEIGHTS = np.random.default_rng(0).standard_normal((K, N)).astype(np.float32)

#: The values of the codes.
FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
NF4 = [
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0,
]  # fmt: skip
TYPES = [pytest.param(np.float32, id="float"), pytest.param(np.float16, id="half")]


def packed(count: int, bits: int) -> np.ndarray:
    """Returns room for values."""
    return np.zeros((count * bits + 7) // 8, np.uint8)


def unpacked(codes: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns packed values, the first in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((codes[:, None] >> shifts) & ((1 << bits) - 1)).ravel()[:count].astype(np.int32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block", [1, 7, 16, 64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "bits",
    [
        pytest.param(
            2, marks=pytest.mark.skipif(IS_ORIGINAL, reason="it writes 4 bits, past the end")
        ),
        4,
    ],
)
def test_qdq(bits: int, symmetric: bool, block: int, dtype: Any):
    blocks, levels = -(-K // block), 1 << bits
    codes, scales = packed(K * N, bits), np.zeros((blocks, N), dtype)
    zeros = packed(blocks * N, bits)
    weights = WEIGHTS.astype(dtype)
    quantize = getattr(C, f"quantize_qdq_matmul_{bits}bits")
    assert quantize(codes, weights, scales, zeros, block, N, K, symmetric) is symmetric
    values = unpacked(codes, bits, K * N).reshape(K, N)
    points = unpacked(zeros, bits, blocks * N).reshape(blocks, N).repeat(block, 0)[:K]
    if symmetric:
        values = np.where(values < levels // 2, values, values - levels)
        assert not zeros.any()
    step = np.abs(scales.astype(np.float32)).repeat(block, 0)[:K]
    back = (values - points) * scales.astype(np.float32).repeat(block, 0)[:K]
    # The range has no place for the positive extreme of symmetric blocks, so that may lose a step.
    assert (np.abs(back - weights) <= step * (1.01 if symmetric else 1.0) + 1e-6).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [0, 1])
def test_bnb4(kind: int, dtype: Any):
    count, block = K * N, 16
    codes, absmax = packed(count, 4), np.zeros(-(-count // block), dtype)
    assert C.quantize_matmul_bnb4(codes, WEIGHTS.astype(dtype), absmax, block, kind, N, K) is None
    values = np.array(NF4 if kind else [*FP4, *np.negative(FP4)], np.float32)
    nibbles = np.stack([codes >> 4, codes & 15], 1).ravel()[:count]
    scale = absmax.astype(np.float32).repeat(block)[:count]
    weights = WEIGHTS.astype(dtype).astype(np.float32).ravel()
    expected = np.abs(values - weights[:, None] / scale[:, None]).min(1)
    found = np.abs(values[nibbles] - weights / scale)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def arguments(**changed: Any) -> list[Any]:
    """Returns sound arguments of `quantize_matmul_4bits`, except those given."""
    sound = {
        "dst": np.zeros((2, 2, 8), np.uint8),
        "src": np.ones((32, 2), np.float32),
        "scales": np.zeros((2, 2), np.float32),
        "zero_points": np.zeros((2, 1), np.uint8),
        "block_size": 16,
        "n": 2,
        "k": 32,
        "is_symmetric": False,
    }
    return list((sound | changed).values())


SHARED = np.zeros(64, np.uint8)
READ_ONLY = np.zeros(32, np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.skipif(IS_ORIGINAL, reason="the original reads and writes past the end")
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        pytest.param({"dst": np.zeros(31, np.uint8)}, ValueError, id="short_dst"),
        pytest.param({"src": np.ones((31, 2), np.float32)}, ValueError, id="short_src"),
        pytest.param({"scales": np.zeros(3, np.float32)}, ValueError, id="short_scales"),
        pytest.param({"zero_points": np.zeros(1, np.uint8)}, ValueError, id="short_zero_points"),
        pytest.param({"dst": np.zeros((64,), np.uint8)[::2]}, ValueError, id="strided"),
        pytest.param({"dst": READ_ONLY}, ValueError, id="read_only"),
        pytest.param({"dst": SHARED, "zero_points": SHARED[:2]}, ValueError, id="overlap"),
        pytest.param({"dst": np.zeros(32, np.int8)}, TypeError, id="type_of_dst"),
        pytest.param({"src": np.ones((32, 2))}, TypeError, id="type_of_src"),
        pytest.param({"scales": np.zeros(4, np.float16)}, TypeError, id="type_of_scales"),
        pytest.param({"dst": [0] * 32}, TypeError, id="list"),
        pytest.param({"block_size": 12}, ValueError, id="block_size"),
        pytest.param({"n": -2}, ValueError, id="negative"),
        pytest.param({"k": 33}, ValueError, id="rows"),
    ],
)
def test_refused(changed: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        C.quantize_matmul_4bits(*arguments(**changed))


def test_room_left_over():
    longer = np.full(40, 9, np.uint8)
    C.quantize_matmul_4bits(*arguments(dst=longer))
    assert (longer[32:] == 9).all()


@pytest.mark.skipif(IS_ORIGINAL, reason="the original ignores strides")
def test_strides_of_weights():
    straight, turned = arguments(), arguments()
    weights = np.random.default_rng(1).standard_normal((32, 2)).astype(np.float32)
    straight[1], turned[1] = weights, np.asfortranarray(weights)
    C.quantize_matmul_4bits(*straight)
    C.quantize_matmul_4bits(*turned)
    for left, right in zip(straight[:4], turned[:4]):
        np.testing.assert_array_equal(left, right)
