"""Enumerations: those of the native module, as `IntEnum`.

They print as onnxruntime's do: `repr` is `<ExecutionMode.ORT_PARALLEL: 1>`, `str` is
`ExecutionMode.ORT_PARALLEL`. Being `IntEnum`, they can also be ordered, iterated and indexed by
name. A number that is no member is a ValueError.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "ArenaExtendStrategy",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "OrtAllocatorType",
    "OrtCompileApiFlags",
    "OrtCompiledModelCompatibility",
    "OrtDeviceEpIncompatibilityReason",
    "OrtDeviceMemoryType",
    "OrtExecutionProviderDevicePolicy",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
    "kNextPowerOfTwo",
    "kSameAsRequested",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class NativeEnum(IntEnum):
    """Base of the enumerations: an `IntEnum` that prints its class and name."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __bool__(self) -> bool:
        # As in onnxruntime, so that `level or default` keeps ORT_DISABLE_ALL.
        return True


class ArenaExtendStrategy(NativeEnum):
    """How an arena grows."""

    kNextPowerOfTwo = 0
    kSameAsRequested = 1


class ExecutionMode(NativeEnum):
    """Whether nodes may run in parallel. Both modes run one node after another here."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(NativeEnum):
    """The order in which nodes run."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class GraphOptimizationLevel(NativeEnum):
    """How much of the graph may be rewritten before it runs."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class OrtAllocatorType(NativeEnum):
    """The kind of an allocator."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtCompileApiFlags(NativeEnum):
    """What `ModelCompiler` takes for an error."""

    NONE = 0
    ERROR_IF_NO_NODES_COMPILED = 1
    ERROR_IF_OUTPUT_FILE_EXISTS = 2


class OrtCompiledModelCompatibility(NativeEnum):
    """How well a compiled model fits a device."""

    EP_NOT_APPLICABLE = 0
    EP_SUPPORTED_OPTIMAL = 1
    EP_SUPPORTED_PREFER_RECOMPILATION = 2
    EP_UNSUPPORTED = 3


class OrtDeviceEpIncompatibilityReason(NativeEnum):
    """Why a device does not suit an execution provider. The values are bits of a mask."""

    NONE = 0
    DRIVER_INCOMPATIBLE = 1
    DEVICE_INCOMPATIBLE = 2
    MISSING_DEPENDENCY = 4
    UNKNOWN = -2147483648


class OrtDeviceMemoryType(NativeEnum):
    """Whether the CPU can access a device's memory."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtExecutionProviderDevicePolicy(NativeEnum):
    """Which devices `SessionOptions.set_provider_selection_policy` prefers."""

    DEFAULT = 0
    PREFER_CPU = 1
    PREFER_NPU = 2
    PREFER_GPU = 3
    MAX_PERFORMANCE = 4
    MAX_EFFICIENCY = 5
    MIN_OVERALL_POWER = 6


class OrtHardwareDeviceType(NativeEnum):
    """The kind of a hardware device."""

    CPU = 0
    GPU = 1
    NPU = 2


class OrtMemType(NativeEnum):
    """Which memory a provider's value lies in. `CPU` is another name of `CPU_OUTPUT`."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtMemoryInfoDeviceType(NativeEnum):
    """The kind of a device in `OrtMemoryInfo.create_v2`."""

    CPU = 0
    GPU = 1
    NPU = 3
    FPGA = 2


class OrtSparseFormat(NativeEnum):
    """The format of a sparse tensor."""

    ORT_SPARSE_UNDEFINED = 0
    ORT_SPARSE_COO = 1
    ORT_SPARSE_CSRC = 2
    ORT_SPARSE_BLOCK_SPARSE = 4


kNextPowerOfTwo = ArenaExtendStrategy.kNextPowerOfTwo
kSameAsRequested = ArenaExtendStrategy.kSameAsRequested

for _name in __all__:
    if not _name.startswith("k"):
        globals()[_name].__module__ = _NATIVE
del _name
