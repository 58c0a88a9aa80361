"""Devices: where values lie and what the machine has, as programs name it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._enums import (
    OrtAllocatorType,
    OrtDeviceMemoryType,
    OrtHardwareDeviceType,
    OrtMemoryInfoDeviceType,
    OrtMemType,
)
from ._fields import (
    Slotted,
    read_only,
    refuse,
    to_enum,
    to_int,
    to_int64,
    to_str,
    to_unsigned,
    typed,
)

__all__ = [
    "OrtArenaCfg",
    "OrtDevice",
    "OrtEpDevice",
    "OrtHardwareDevice",
    "OrtMemoryInfo",
    "OrtSyncStream",
    "get_ep_devices",
    "get_hardware_devices",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"

AMD, INTEL, MICROSOFT, NVIDIA, QUALCOMM = 0x1002, 0x8086, 0x1414, 0x10DE, 0x5143

_HOST, _GPU, _FPGA, _NPU, _DML = range(5)


class OrtDevice(Slotted):
    """A device's memory: `OrtDevice(type, mem_type, vendor_id, device_id)`.

    `OrtDevice(type, mem_type, device_id)` has vendor 0. The numbers of types are what the static
    methods `cpu()`, `gpu()`, `npu()` and so on return.
    """

    __slots__ = ("_id", "_mem_type", "_type", "_vendor_id")

    def __init__(self, *numbers: int) -> None:
        if len(numbers) == 3:
            numbers = (*numbers[:2], 0, numbers[2])
        if len(numbers) != 4:
            raise TypeError(f"OrtDevice takes 3 or 4 numbers, not {len(numbers)}")
        checked = [to_int(number, "a number of OrtDevice") for number in numbers]
        self._type, self._mem_type, self._vendor_id, self._id = checked
        if self._type == _DML:
            self._type, self._vendor_id = _GPU, MICROSOFT

    def device_type(self) -> int:
        """Returns the number of the device type."""
        return self._type

    def mem_type(self) -> int:
        """Returns the number of the memory type."""
        return self._mem_type

    def vendor_id(self) -> int:
        """Returns the vendor's PCI number, 0 if it does not matter."""
        return self._vendor_id

    def device_id(self) -> int:
        """Returns the number of the device among those of its type."""
        return self._id

    @staticmethod
    def cpu() -> int:
        """Returns the type number of the host."""
        return _HOST

    @staticmethod
    def default_memory() -> int:
        """Returns the number of ordinary memory."""
        return 0

    @staticmethod
    def fpga() -> int:
        """Returns the type number of FPGAs."""
        return _FPGA

    @staticmethod
    def npu() -> int:
        """Returns the type number of NPUs."""
        return _NPU

    @staticmethod
    def dml() -> int:
        """Returns the type number of DirectML devices."""
        return _DML

    @staticmethod
    def gpu() -> int:
        """Returns the type number of GPUs."""
        return _GPU

    cann = npu
    cuda = webgpu = gpu

    def __repr__(self) -> str:
        return (
            f"OrtDevice(type={self._type}, mem_type={self._mem_type}, "
            f"vendor_id={self._vendor_id}, device_id={self._id})"
        )


class _Memory(NamedTuple):
    """What a name in `OrtMemoryInfo` stands for."""

    vendor_id: int
    mem_type: OrtDeviceMemoryType


_DEFAULT, _SHARED = OrtDeviceMemoryType.DEFAULT, OrtDeviceMemoryType.HOST_ACCESSIBLE
_MEMORIES = {
    "Cpu": _Memory(0, _DEFAULT),
    "Cuda": _Memory(NVIDIA, _DEFAULT),
    "CudaPinned": _Memory(NVIDIA, _SHARED),
    "DML": _Memory(MICROSOFT, _DEFAULT),
    "HipPinned": _Memory(AMD, _SHARED),
    "OpenVINO_GPU": _Memory(INTEL, _DEFAULT),
    "OpenVINO_RT_NPU": _Memory(INTEL, _DEFAULT),
    "QnnHtpShared": _Memory(QUALCOMM, _SHARED),
    "WebGPU_Buf": _Memory(0, _DEFAULT),
    "WebGPU_Buffer": _Memory(0, _DEFAULT),
}


class OrtMemoryInfo(Slotted):
    """A place that values are allocated in: `OrtMemoryInfo(name, allocator_type, id, mem_type)`.

    Raises RuntimeError for an unknown name; `create_v2` takes any.

    Example: `OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, OrtMemType.DEFAULT)`
    """

    __slots__ = (
        "_allocator_type",
        "_device_id",
        "_device_mem_type",
        "_device_vendor_id",
        "_mem_type",
        "_name",
    )

    def __init__(
        self, name: str, allocator_type: OrtAllocatorType, id: int, mem_type: OrtMemType, /
    ) -> None:
        name = to_str(name, "name")
        self._allocator_type = to_enum(OrtAllocatorType)(allocator_type, "allocator_type")
        self._mem_type = to_enum(OrtMemType)(mem_type, "mem_type")
        device_id = to_int(id, "id")
        if name not in _MEMORIES:
            raise RuntimeError("Specified device is not supported. Try CreateMemoryInfo_V2.")
        self._name = "WebGPU_Buf" if name == "WebGPU_Buffer" else name
        self._device_id = 0 if name == "Cpu" else device_id
        self._device_vendor_id, self._device_mem_type = _MEMORIES[name]

    @staticmethod
    def create_v2(
        name: str,
        device_type: OrtMemoryInfoDeviceType,
        vendor_id: int,
        device_id: int,
        mem_type: OrtDeviceMemoryType,
        alignment: int,
        allocator_type: OrtAllocatorType,
        /,
    ) -> OrtMemoryInfo:
        """Returns the description of a place with any name."""
        info = OrtMemoryInfo.__new__(OrtMemoryInfo)
        to_enum(OrtMemoryInfoDeviceType)(device_type, "device_type")
        to_int64(alignment, "alignment")
        info._name = to_str(name, "name")
        info._allocator_type = to_enum(OrtAllocatorType)(allocator_type, "allocator_type")
        info._device_id = to_int(device_id, "device_id")
        info._device_vendor_id = to_int64(vendor_id, "vendor_id")
        info._device_mem_type = to_enum(OrtDeviceMemoryType)(mem_type, "mem_type")
        host = info._device_mem_type is OrtDeviceMemoryType.HOST_ACCESSIBLE
        info._mem_type = OrtMemType.CPU_OUTPUT if host else OrtMemType.DEFAULT
        return info

    name = read_only("name", "The name of the place.")
    allocator_type = read_only("allocator_type", "The kind of the allocator.")
    device_id = read_only("device_id", "The number of the device.")
    device_mem_type = read_only("device_mem_type", "Whether the host can access the memory.")
    device_vendor_id = read_only("device_vendor_id", "The vendor's PCI number, 0 for the host.")
    mem_type = read_only("mem_type", "Which memory of a provider this is.")


_ARENA_OPTIONS = (
    "max_mem",
    "arena_extend_strategy",
    "initial_chunk_size_bytes",
    "max_dead_bytes_per_chunk",
    "initial_growth_chunk_size_bytes",
    "max_power_of_two_extend_bytes",
)


def _arena_option(name: str, doc: str) -> property:
    return typed(name, to_unsigned if name == "max_mem" else to_int64, doc)


class OrtArenaCfg(Slotted):
    """How an arena grows: `OrtArenaCfg(max_mem, strategy, initial_chunk, max_dead)`, or a dict.

    The dict takes the names of the attributes; an unknown one is a RuntimeError. What is not set is
    -1, and `max_mem` is then 0: no limit.

    Example: `OrtArenaCfg({"max_mem": 1 << 30, "arena_extend_strategy": 1})`
    """

    __slots__ = tuple(f"_{name}" for name in _ARENA_OPTIONS)

    def __init__(self, *settings: Any) -> None:
        fault: type[Exception]
        if len(settings) == 1 and isinstance(settings[0], dict):
            named, fault = settings[0], RuntimeError
        elif len(settings) == 4:
            named, fault = dict(zip(_ARENA_OPTIONS, settings, strict=False)), TypeError
        else:
            raise TypeError("OrtArenaCfg takes four numbers or a dict")
        for name in _ARENA_OPTIONS:
            setattr(self, f"_{name}", 0 if name == "max_mem" else -1)
        for name, value in named.items():
            if name not in _ARENA_OPTIONS:
                raise RuntimeError(f"Invalid OrtArenaCfg option: {name}")
            try:
                setattr(self, name, value)
            except TypeError as error:
                raise fault(str(error)) from None

    max_mem = _arena_option("max_mem", "The most bytes the arena holds, 0 for no limit.")
    arena_extend_strategy = _arena_option(
        "arena_extend_strategy", "0 doubles the growth, 1 adds what is asked for."
    )
    initial_chunk_size_bytes = _arena_option("initial_chunk_size_bytes", "The first growth.")
    max_dead_bytes_per_chunk = _arena_option(
        "max_dead_bytes_per_chunk", "How many bytes of a block may stay unused."
    )
    initial_growth_chunk_size_bytes = _arena_option(
        "initial_growth_chunk_size_bytes", "The first growth after a shrink."
    )
    max_power_of_two_extend_bytes = _arena_option(
        "max_power_of_two_extend_bytes", "The largest growth by doubling."
    )


def arena_settings(arena: OrtArenaCfg) -> dict[str, int]:
    """Returns what was set of an arena's configuration, by the names of its attributes."""
    values = {name: getattr(arena, name) for name in _ARENA_OPTIONS}
    unset = {"max_mem": 0}
    return {name: value for name, value in values.items() if value > unset.get(name, -1)}


class OrtHardwareDevice(Slotted):
    """A device of the machine."""

    __slots__ = ("_device_id", "_metadata", "_type", "_vendor", "_vendor_id")

    def __init__(
        self,
        type: OrtHardwareDeviceType,
        vendor: str,
        vendor_id: int,
        device_id: int = 0,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._type, self._vendor, self._vendor_id = type, vendor, vendor_id
        self._device_id, self._metadata = device_id, dict(metadata or {})

    type = read_only("type", "The kind of the device.")
    vendor = read_only("vendor", "The vendor's name.")
    vendor_id = read_only("vendor_id", "The vendor's PCI number.")
    device_id = read_only("device_id", "The device's PCI number.")
    metadata = read_only("metadata", "More about the device, as strings.")


def memory_device(memory_info: OrtMemoryInfo) -> OrtDevice:
    """Returns the device that a place to allocate in belongs to. Raises TypeError."""
    if not isinstance(memory_info, OrtMemoryInfo):
        refuse("memory_info", "an OrtMemoryInfo", memory_info)
    kind = _HOST if memory_info.name == "Cpu" else _GPU
    mem_type, vendor = memory_info.device_mem_type, memory_info.device_vendor_id
    return OrtDevice(kind, mem_type, vendor, memory_info.device_id)


class OrtSyncStream:
    """A queue of a device's work. Devices here order their own work, so a stream is a name only."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: int = 0) -> None:
        self._handle = handle

    def get_handle(self) -> int:
        """Returns the native handle, 0 for the device's own stream."""
        return self._handle


class OrtEpDevice(Slotted):
    """An execution provider together with a device that it runs on."""

    __slots__ = ("_device", "_ep_metadata", "_ep_name", "_ep_options", "_ep_vendor")

    def __init__(
        self,
        ep_name: str,
        ep_vendor: str,
        device: OrtHardwareDevice,
        ep_options: dict[str, str] | None = None,
        ep_metadata: dict[str, str] | None = None,
    ) -> None:
        self._ep_name, self._ep_vendor, self._device = ep_name, ep_vendor, device
        self._ep_options, self._ep_metadata = dict(ep_options or {}), dict(ep_metadata or {})

    ep_name = read_only("ep_name", "The provider's name.")
    ep_vendor = read_only("ep_vendor", "Who made the provider.")
    device = read_only("device", "The device.")
    ep_options = read_only("ep_options", "The provider's options for the device.")
    ep_metadata = read_only("ep_metadata", "More about the provider, as strings.")

    def memory_info(self, mem_type: OrtDeviceMemoryType) -> OrtMemoryInfo | None:
        """Returns the device's memory, None if it is the host's."""
        to_enum(OrtDeviceMemoryType)(mem_type, "mem_type")
        if self._device.type is OrtHardwareDeviceType.CPU:
            return None
        kind = OrtMemoryInfoDeviceType.GPU
        vendor, number = self._device.vendor_id, self._device.device_id
        return OrtMemoryInfo.create_v2(
            self._ep_name, kind, vendor, number, mem_type, 0, OrtAllocatorType.ORT_DEVICE_ALLOCATOR
        )

    def create_sync_stream(self) -> OrtSyncStream:
        """Returns a stream of the device. Raises RuntimeError for the CPU."""
        if self._device.type is OrtHardwareDeviceType.CPU:
            raise RuntimeError("ep_device does not use DEFAULT memory of a non-CPU device.")
        return OrtSyncStream()


_VENDORS = {"GenuineIntel": ("Intel", INTEL), "AuthenticAMD": ("AMD", AMD)}
_GPU_VENDORS = {"CUDAExecutionProvider": ("NVIDIA", NVIDIA)}


@functools.cache
def _processor() -> OrtHardwareDevice:
    vendor, vendor_id = "Unknown", 0
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("vendor_id"):
                    name = line.partition(":")[2].strip()
                    vendor, vendor_id = _VENDORS.get(name, (name, 0))
                    break
    except OSError:
        pass
    return OrtHardwareDevice(OrtHardwareDeviceType.CPU, vendor, vendor_id)


def _device_of(provider: str) -> OrtHardwareDevice:
    if provider == "CPUExecutionProvider":
        return _processor()
    vendor, vendor_id = _GPU_VENDORS.get(provider, ("Unknown", 0))
    return OrtHardwareDevice(OrtHardwareDeviceType.GPU, vendor, vendor_id)


def get_ep_devices() -> list[OrtEpDevice]:
    """Returns the providers that work here, each with its device; the CPU is the last."""
    from .onnxruntime_pybind11_state import get_available_providers, get_version_string

    version = {"version": get_version_string()}
    return [
        OrtEpDevice(name, "ort-runtime", _device_of(name), ep_metadata=version)
        for name in get_available_providers()
    ]


def get_hardware_devices() -> list[OrtHardwareDevice]:
    """Returns the devices that providers run on, the CPU first."""
    others = [device.device for device in get_ep_devices() if device.device is not _processor()]
    return [_processor(), *others]


def check_ep_devices(devices: Sequence[OrtEpDevice], name: str) -> list[OrtEpDevice]:
    """Returns the devices as a list, or raises TypeError if one is something else."""
    listed = list(devices)
    for device in listed:
        if not isinstance(device, OrtEpDevice):
            refuse(name, "a sequence of OrtEpDevice", device)
    return listed


for _name in __all__:
    globals()[_name].__module__ = _NATIVE
del _name
