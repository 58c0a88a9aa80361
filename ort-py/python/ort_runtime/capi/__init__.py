"""The parts of the package: the native module, and the classes around it."""

from . import _exports, _ld_preload, onnxruntime_pybind11_state

_exports.install(onnxruntime_pybind11_state)

from ._compiler import ModelCompiler  # noqa: E402

onnxruntime_pybind11_state.ModelCompiler = ModelCompiler
onnxruntime_pybind11_state.__all__.append("ModelCompiler")
