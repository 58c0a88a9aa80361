"""ONNX's backend interface: `prepare`, `run`, `supports_device`, `is_compatible`.

It needs the package `onnx`. `onnx.backend.test` and programs that switch between runtimes use it;
`ort_runtime.InferenceSession` does the same with less.
"""

from .backend import is_compatible, prepare, run, supports_device

__all__ = ["is_compatible", "prepare", "run", "supports_device"]
