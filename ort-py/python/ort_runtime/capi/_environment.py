"""Process-wide settings: thread pools, shared allocators, telemetry, compatibility queries.

A session applies them to its copy of the options, see `apply_to`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._devices import (
    OrtArenaCfg,
    OrtEpDevice,
    OrtHardwareDevice,
    OrtMemoryInfo,
    arena_settings,
    check_ep_devices,
)
from ._enums import OrtCompiledModelCompatibility
from ._errors import InvalidArgument, NoSuchFile, status
from ._fields import refuse, str_dict, to_int, to_path, to_str
from ._options import SessionOptions

__all__ = [
    "SessionObjectInitializer",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_compatibility_info_from_model",
    "get_compatibility_info_from_model_bytes",
    "get_default_session_options",
    "get_hardware_device_ep_incompatibility_details",
    "get_model_compatibility_for_ep_devices",
    "get_registered_ep_kernel_defs",
    "get_session_initializer",
    "has_collective_ops",
    "is_dlpack_uint8_tensor",
    "set_global_thread_pool_sizes",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class GlobalThreads(NamedTuple):
    """The sizes of the pools that sessions share; 0 is the number of cores."""

    intra_op: int = 0
    inter_op: int = 0


class SharedAllocator(NamedTuple):
    """An allocator for sessions with `session.use_env_allocators` set to "1"."""

    provider: str
    memory_info: OrtMemoryInfo
    options: dict[str, str]
    arena: OrtArenaCfg | None


global_threads: GlobalThreads | None = None
allocators: list[SharedAllocator] = []


class SessionObjectInitializer:
    """A placeholder that onnxruntime's backend interface passes on."""

    __slots__ = ("__weakref__",)


def set_global_thread_pool_sizes(
    intra_op_num_threads: int = 0, inter_op_num_threads: int = 0
) -> None:
    """Sets the thread counts for sessions that keep none of their own.

    These are sessions with `SessionOptions.use_per_session_threads` off. Sessions with it on are
    made as before.
    """
    global global_threads
    global_threads = GlobalThreads(
        to_int(intra_op_num_threads, "intra_op_num_threads"),
        to_int(inter_op_num_threads, "inter_op_num_threads"),
    )


def create_and_register_allocator(memory_info: OrtMemoryInfo, arena: OrtArenaCfg | None) -> None:
    """Sets the arena of sessions that set `session.use_env_allocators` to "1".

    Its `max_mem` then bounds what such a session allocates on the CPU.

    Raises RuntimeError if the memory is not the host's.

    Example::

        info = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, OrtMemType.DEFAULT)
        create_and_register_allocator(info, OrtArenaCfg({"max_mem": 1 << 30}))
    """
    _register("CPUExecutionProvider", memory_info, {}, arena)


def create_and_register_allocator_v2(
    provider: str, memory_info: OrtMemoryInfo, options: Mapping[str, str], arena: OrtArenaCfg | None
) -> None:
    """Does what `create_and_register_allocator` does, for a provider by name."""
    name = to_str(provider, "provider")
    if name != "CPUExecutionProvider":
        raise RuntimeError(
            "Error when creating and registering allocator in create_and_register_allocator_v2: "
            f"{name} is not implemented in CreateAndRegisterAllocatorV2()"
        )
    _register(name, memory_info, str_dict(options, "options"), arena)


def _register(
    provider: str, info: OrtMemoryInfo, options: dict[str, str], arena: OrtArenaCfg | None
) -> None:
    if not isinstance(info, OrtMemoryInfo):
        refuse("memory_info", "an OrtMemoryInfo", info)
    if arena is not None and not isinstance(arena, OrtArenaCfg):
        refuse("arena", "an OrtArenaCfg", arena)
    if info.name != "Cpu":
        raise RuntimeError(
            "Error when creating and registering allocator: Only CPU devices are supported. "
            "Please call CreateAndRegisterAllocatorV2() for other device."
        )
    allocators[:] = [SharedAllocator(provider, info, options, arena)]


def apply_to(options: SessionOptions) -> None:
    """Applies the settings to the options of a session that uses what sessions share."""
    if global_threads is not None and not options.use_per_session_threads:
        options.intra_op_num_threads, options.inter_op_num_threads = global_threads
    if options._entries.get("session.use_env_allocators") != "1":
        return
    for allocator in allocators:
        arena = allocator.arena
        if arena is None:
            continue
        limits = [limit for limit in (arena.max_mem, options.memory_limit) if limit]
        options.memory_limit = min(limits, default=None)
        for name, value in arena_settings(arena).items():
            options._entries.setdefault(name, str(value))


def enable_telemetry_events() -> None:
    """Does nothing: there is no telemetry."""


def disable_telemetry_events() -> None:
    """Does nothing: there is no telemetry."""


def has_collective_ops() -> bool:
    """Returns False: there are no collective operators."""
    return False


def get_default_session_options() -> SessionOptions:
    """Returns new session options."""
    return SessionOptions()


def get_session_initializer() -> SessionObjectInitializer:
    """Returns a placeholder."""
    return SessionObjectInitializer()


def get_registered_ep_kernel_defs(ep_name: str) -> list[Any]:
    """Returns the kernels of a provider. Raises RuntimeError if there is none of that name."""
    from .onnxruntime_pybind11_state import get_all_opkernel_def, get_available_providers

    name = to_str(ep_name, "ep_name")
    if name not in get_available_providers():
        raise RuntimeError(
            f"No devices found for EP '{name}'. Ensure the plugin EP library is registered via "
            "register_execution_provider_library()."
        )
    return [kernel for kernel in get_all_opkernel_def() if kernel.provider == name]


def get_compatibility_info_from_model(
    model_path: str | os.PathLike[str], ep_type: str
) -> str | None:
    """Returns what a compiler wrote into a model for a provider, None if it wrote nothing.

    Raises NoSuchFile, RuntimeError for a file that is no model or an empty name.
    """
    path, name = to_path(model_path, "model_path"), to_str(ep_type, "ep_type")
    if not name:
        raise RuntimeError("Invalid argument provided to GetCompatibilityInfoFromModel.")
    if not os.path.exists(path):
        raise status(NoSuchFile, f"Load model {path} failed. File doesn't exist")
    if not os.path.getsize(path):
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _compatibility_info(data, name)


def get_compatibility_info_from_model_bytes(model_data: Any, ep_type: str) -> str | None:
    """Does what `get_compatibility_info_from_model` does, for a serialized model."""
    name = to_str(ep_type, "ep_type")
    with memoryview(model_data) as view:
        if not name or not view.nbytes:
            raise RuntimeError("Invalid argument provided to GetCompatibilityInfoFromModelBytes.")
        return _compatibility_info(view.cast("B"), name)


def _compatibility_info(model: Any, name: str) -> str | None:
    """Returns the metadata entry of a provider. The graph is skipped: its operators may be ours or
    not.
    """
    found = None
    for field, entry in _messages(model):
        if field == 14:  # metadata_props, with key and value as fields 1 and 2
            texts = {number: text.decode("utf-8", "replace") for number, text in _messages(entry)}
            if texts.get(1) == f"ep_compatibility_info.{name}":
                found = texts.get(2, "")
    return found


def _messages(data: Any) -> Iterator[tuple[int, bytes]]:
    """Yields the number and content of the fields with a length in a protobuf message.

    The graph, which is field 7 of a model, is skipped.
    """
    position, end = 0, len(data)

    def number() -> int:
        nonlocal position
        value = shift = 0
        while position < end and shift < 70:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise RuntimeError("Protobuf parsing failed.")

    while position < end:
        field, kind = divmod(number(), 8)
        if kind == 2:
            size = number()
            if field and size <= end - position:
                if field != 7:
                    yield field, bytes(data[position : position + size])
                position += size
                continue
        elif field and kind in (0, 1, 5):
            if kind == 0:
                number()
            else:
                position += 8 if kind == 1 else 4
            if position <= end:
                continue
        raise RuntimeError("Protobuf parsing failed.")


def get_model_compatibility_for_ep_devices(
    ep_devices: Sequence[OrtEpDevice], compatibility_info: str
) -> OrtCompiledModelCompatibility:
    """Returns EP_NOT_APPLICABLE: models here are not bound to a provider."""
    if not check_ep_devices(ep_devices, "ep_devices"):
        raise RuntimeError("Invalid argument provided to GetModelCompatibilityForEpDevices.")
    to_str(compatibility_info, "compatibility_info")
    return OrtCompiledModelCompatibility.EP_NOT_APPLICABLE


def get_hardware_device_ep_incompatibility_details(
    ep_name: str, device: OrtHardwareDevice
) -> dict[str, Any]:
    """Returns why a device does not suit a provider: nothing known. Unknown: InvalidArgument."""
    from .onnxruntime_pybind11_state import get_available_providers

    if not isinstance(device, OrtHardwareDevice):
        refuse("device", "an OrtHardwareDevice", device)
    name = to_str(ep_name, "ep_name")
    if name not in get_available_providers():
        raise status(InvalidArgument, f"No valid factory found for execution provider '{name}'.")
    return {"reasons_bitmask": 0, "notes": None, "error_code": 0}


class _DLTensor(ctypes.Structure):
    """DLPack's tensor, as far as its element type."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


def is_dlpack_uint8_tensor(capsule: Any) -> bool:
    """Tells whether a DLPack capsule that is not consumed yet holds uint8.

    Older producers send booleans as uint8. Raises ValueError for any other object.
    """
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    unsigned = 1
    return tensor.code == unsigned and tensor.bits == 8


for _name in __all__:
    globals()[_name].__module__ = _NATIVE
del _name
