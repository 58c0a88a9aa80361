"""`CudaQuantizer`: the name exists, the layouts that it writes do not.

onnxruntime's class arranges weights for its own CUDA kernels of mixture-of-experts layers and of
prepacked products. The provider `cuda` here takes the standard layouts of
`matmul_nbits_quantizer`, and arranges them itself when a session is made.
"""

from __future__ import annotations

from typing import Any, NoReturn


def has_cuda_weight_prepacking() -> bool:
    """Returns whether weights can be arranged for onnxruntime's CUDA kernels: they cannot."""
    return False


class CudaQuantizer:
    """Any use raises NotImplementedError, which names what to use instead."""


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"CudaQuantizer.{name} writes layouts of onnxruntime's own CUDA kernels; use "
        "matmul_nbits_quantizer.MatMulNBitsQuantizer, whose layout all providers take"
    )


def _refuser(name: str) -> Any:
    def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name)

    return staticmethod(refuse)


for _name in (
    "matmulnbits_blockwise_quantize",
    "matmulnbits_prepacked_blockwise_quantize",
    "qmoe_per_channel_quantize",
    "qmoe_prepacked_blockwise_quantize",
    "qmoe_symmetric_per_channel_quantize",
    "symmetric_blockwise_quantize",
):
    setattr(CudaQuantizer, _name, _refuser(_name))
