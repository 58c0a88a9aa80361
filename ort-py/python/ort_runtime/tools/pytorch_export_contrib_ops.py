"""Contrib operators for torch's TorchScript exporter.

After `register()`, `torch.onnx.export(..., dynamo=False)` writes gelu, grid_sampler, inverse, tril
and triu as single nodes of the domain `com.microsoft`. It needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPSET = 1

#: The operators that are registered, for `unregister`.
_registered: set[str] = set()


def _symbolics() -> dict[str, Callable[..., Any]]:
    """Returns what writes each operator of torch: a function of the graph and its arguments."""
    from torch.onnx import symbolic_helper

    def constant(value: Any, kind: str) -> Any:
        return symbolic_helper._maybe_get_const(value, kind)

    def gelu(g: Any, self: Any, approximate: Any = None) -> Any:
        if approximate is not None and constant(approximate, "s") == "tanh":
            return g.op("com.microsoft::FastGelu", self).setType(self.type())
        return g.op("com.microsoft::Gelu", self).setType(self.type())

    def inverse(g: Any, self: Any) -> Any:
        return g.op("com.microsoft::Inverse", self).setType(self.type())

    def grid_sampler(g: Any, data: Any, grid: Any, mode: Any, padding: Any, align: Any) -> Any:
        modes = ["bilinear", "nearest", "bicubic"]
        paddings = ["zeros", "border", "reflection"]
        return g.op(
            "com.microsoft::GridSample",
            data,
            grid,
            mode_s=modes[constant(mode, "i")],
            padding_mode_s=paddings[constant(padding, "i")],
            align_corners_i=int(constant(align, "b")),
        )

    def triangle(upper: int) -> Callable[..., Any]:
        def write(g: Any, self: Any, diagonal: Any) -> Any:
            return g.op("com.microsoft::Trilu", self, diagonal, upper_i=upper).setType(self.type())

        return write

    return {
        "gelu": gelu,
        "grid_sampler": grid_sampler,
        "inverse": inverse,
        "tril": triangle(0),
        "triu": triangle(1),
    }


def register(opset_version: int = _OPSET) -> None:
    """Makes torch's exporter write the contrib operators.

    Args:
        opset_version: the first opset that they are written for; 1 stands for all.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch

    for name, symbolic in _symbolics().items():
        torch.onnx.register_custom_op_symbolic(f"::{name}", symbolic, opset_version)
        _registered.add(name)


def unregister(opset_version: int = _OPSET) -> None:
    """Makes torch's exporter write its own forms again; takes what `register` took."""
    import torch

    for name in sorted(_registered):
        torch.onnx.unregister_custom_op_symbolic(f"::{name}", opset_version)
    _registered.clear()
