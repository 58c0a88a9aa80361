"""`ORTModule`: a torch module whose forward and backward passes run in this runtime.

Example::

    from ort_runtime.training.ortmodule import ORTModule

    model = ORTModule(model)
    loss = criterion(model(inputs), labels)
    loss.backward()
    optimizer.step()
"""

from __future__ import annotations

from ._fallback import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from ._options import DebugOptions, LogLevel

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as problem:
    raise ImportError(
        "ORTModule needs PyTorch, which is not installed; `pip install torch` adds it"
    ) from problem

from .ortmodule import ORTModule

__all__ = [
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
]
