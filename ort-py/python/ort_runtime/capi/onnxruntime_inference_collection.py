"""The public classes around the native ones, in one module."""

from __future__ import annotations

from . import onnxruntime_pybind11_state as C  # noqa: F401
from ._adapter_format import AdapterFormat
from ._binding import IOBinding
from ._compiler import (
    GetInitializerLocationFunc,
    ModelCompiler,
    make_get_initializer_location_func_wrapper,
)
from ._inference_session import InferenceSession
from ._providers import check_and_normalize_provider_args
from ._public_devices import (
    OrtDevice,
    OrtDeviceVendorId,
    get_ort_device_type,
    get_vendor_id_for_device_type,
)
from ._session import Session
from ._sparse_tensor import SparseTensor
from ._values import OrtValue, copy_tensors

__all__ = [
    "AdapterFormat",
    "GetInitializerLocationFunc",
    "IOBinding",
    "InferenceSession",
    "ModelCompiler",
    "OrtDevice",
    "OrtDeviceVendorId",
    "OrtValue",
    "Session",
    "SparseTensor",
    "check_and_normalize_provider_args",
    "copy_tensors",
    "get_ort_device_type",
    "get_vendor_id_for_device_type",
    "make_get_initializer_location_func_wrapper",
]

for _class in (
    AdapterFormat,
    IOBinding,
    InferenceSession,
    ModelCompiler,
    OrtDevice,
    OrtDeviceVendorId,
    OrtValue,
    Session,
    SparseTensor,
):
    _class.__module__ = __name__
del _class
