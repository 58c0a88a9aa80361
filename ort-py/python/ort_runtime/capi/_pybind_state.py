"""All names of the native module, under the name that programs import it by."""

from . import _ld_preload  # noqa: F401
from .onnxruntime_pybind11_state import *  # noqa: F403
