"""The parts of the package: the native module, and the classes around it."""

from . import _exports, _ld_preload, onnxruntime_pybind11_state

_exports.install(onnxruntime_pybind11_state)

# These need the native module, so they come after it.
from . import _native_methods  # noqa: E402
from ._compiler import NativeCompiler  # noqa: E402
from ._values import copy_tensors  # noqa: E402

_native_methods.install(onnxruntime_pybind11_state)
_exports.add(
    onnxruntime_pybind11_state, ModelCompiler=NativeCompiler, copy_tensors=copy_tensors
)
