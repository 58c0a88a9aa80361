"""The layout of FP4 weights that MoE kernels of CUDA read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["pack_fp4_weights_for_cuda_moe_gemm"]


def pack_fp4_weights_for_cuda_moe_gemm(
    q_weights: npt.ArrayLike, N: int, K: int
) -> npt.NDArray[np.uint8]:
    """Transposes weights of two elements a byte, from [N, K / 2] to [K, N / 2], flattened."""
    if N % 2 or K % 2:
        raise ValueError("N and K must be even for FP4 packing")
    packed: npt.NDArray[Any] = np.asarray(q_weights, np.uint8)
    if packed.shape != (N, K // 2):
        raise ValueError("q_weights must have shape (N, K / 2)")
    columns = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K).T
    return (columns[:, 0::2] | columns[:, 1::2] << 4).ravel()
