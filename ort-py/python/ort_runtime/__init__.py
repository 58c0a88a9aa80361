"""An ONNX runtime that computes the peak memory of a run before it starts.

It has the API of onnxruntime. A program that says `import onnxruntime as ort` runs with `import
ort_runtime as ort`.

Example::

    import numpy as np
    import ort_runtime as ort

    session = ort.InferenceSession("model.onnx")
    print(session.plan(batch=1))
    outputs = session.run(None, {"x": np.zeros((1, 3), np.float32)})
"""

from __future__ import annotations

from .capi import onnxruntime_validation
from .capi._compiler import check, compile
from .capi._cuda_libraries import (  # noqa: F401
    _extract_cuda_major_version,
    _get_cuda_plugin_ep_library_path,
    _get_cufft_version,
    _get_nvidia_dll_paths,
    _get_package_root,
    _get_package_version,
    _register_bundled_cuda_plugin_ep,
)
from .capi._pybind_state import (
    Budget,
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    LoraAdapter,
    ModelMetadata,
    NodeArg,
    OrtAllocatorType,
    OrtArenaCfg,
    OrtCompileApiFlags,
    OrtDeviceMemoryType,
    OrtEpAssignedNode,
    OrtEpAssignedSubgraph,
    OrtEpContextData,
    OrtEpContextDataBuffer,
    OrtEpDevice,
    OrtExecutionProviderDevicePolicy,
    OrtExternalInitializerInfo,
    OrtHardwareDevice,
    OrtHardwareDeviceType,
    OrtMemoryInfo,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    OrtSparseFormat,
    OrtSyncStream,
    RunOptions,
    SessionIOBinding,
    SessionOptions,
    create_and_register_allocator,
    create_and_register_allocator_v2,
    disable_telemetry_events,
    enable_telemetry_events,
    get_all_providers,
    get_available_providers,
    get_build_info,
    get_device,
    get_ep_devices,
    get_runtime_version,
    get_version_string,
    has_collective_ops,
    register_execution_provider_library,
    set_default_logger_severity,
    set_default_logger_verbosity,
    set_global_thread_pool_sizes,
    set_seed,
    unregister_execution_provider_library,
)
from .capi.build_and_package_info import cuda_version, package_name
from .capi.onnxruntime_inference_collection import (
    AdapterFormat,
    InferenceSession,
    IOBinding,
    ModelCompiler,
    OrtDevice,
    OrtDeviceVendorId,
    OrtValue,
    SparseTensor,
    copy_tensors,
)

__author__ = "The ort-runtime authors"
# The version of onnxruntime whose interface this is, which programs compare.
version = __version__ = get_version_string()

# Programs look here for why the native module is missing; without it the import has failed.
import_capi_exception = None


def preload_dlls(
    cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None
) -> None:
    """Does nothing: providers find their own libraries."""


def print_debug_info() -> None:
    """Prints the package's version, what it was built from, and what it runs on."""
    import os
    import platform

    path = os.environ.get("LD_LIBRARY_PATH", "(unset)")
    print(f"{package_name} version: {get_runtime_version()}, interface of onnxruntime {__version__}")
    print(f"platform: {platform.platform()}")
    print(f"Python: {platform.python_version()}, package at {os.path.dirname(__file__)}")
    print(f"build: {get_build_info()}")
    print(f"CUDA version used in build: {cuda_version or '(none)'}")
    print(f"available providers: {', '.join(get_available_providers())}")
    print(f"device: {get_device()}")
    print(f"LD_LIBRARY_PATH={path}")


__all__ = [
    "AdapterFormat",
    "Budget",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "LoraAdapter",
    "ModelCompiler",
    "ModelMetadata",
    "NodeArg",
    "OrtAllocatorType",
    "OrtArenaCfg",
    "OrtCompileApiFlags",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtEpAssignedNode",
    "OrtEpAssignedSubgraph",
    "OrtEpContextData",
    "OrtEpContextDataBuffer",
    "OrtEpDevice",
    "OrtExecutionProviderDevicePolicy",
    "OrtExternalInitializerInfo",
    "OrtHardwareDevice",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
    "OrtSyncStream",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "SparseTensor",
    "__version__",
    "check",
    "copy_tensors",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "cuda_version",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_runtime_version",
    "get_version_string",
    "has_collective_ops",
    "import_capi_exception",
    "onnxruntime_validation",
    "package_name",
    "preload_dlls",
    "print_debug_info",
    "register_execution_provider_library",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
    "unregister_execution_provider_library",
    "version",
]
