"""Exception classes: one per status code of onnxruntime, with Python's own classes as bases.

onnxruntime derives its classes from `Exception` alone. Here they derive from `RuntimeError` as
well, so a program that catches `RuntimeError` around a run also catches an out-of-memory failure.
The native module raises these classes; it re-exports them, and their `__module__` is its name.
"""

from __future__ import annotations

__all__ = [
    "DeviceReset",
    "EPFail",
    "EngineError",
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelRequiresCompilation",
    "NoModel",
    "NoSuchFile",
    "NotFound",
    "NotImplemented",
    "OutOfMemory",
    "RuntimeException",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class _Status(RuntimeError):
    """Base of the exceptions that carry a status code.

    `code` and `label` are what the text of the exception begins with.
    """

    code = 0
    label = ""


class Fail(_Status):
    """Code 1: something failed that no other class describes, such as a cyclic graph."""

    code, label = 1, "FAIL"


class OutOfMemory(Fail, MemoryError):
    """Code 1: the memory does not suffice. The session stays usable."""


class InvalidArgument(_Status, ValueError):
    """Code 2: a value of the caller does not fit: an input's name, type or shape, an option."""

    code, label = 2, "INVALID_ARGUMENT"


class NoSuchFile(_Status, FileNotFoundError):
    """Code 3: a file that was named does not exist."""

    code, label = 3, "NO_SUCHFILE"


class NoModel(_Status):
    """Code 4: the file holds no model."""

    code, label = 4, "NO_MODEL"


class EngineError(_Status):
    """Code 5: the engine failed."""

    code, label = 5, "ENGINE_ERROR"


class RuntimeException(_Status):
    """Code 6: a kernel failed while the model ran."""

    code, label = 6, "RUNTIME_EXCEPTION"


class InvalidProtobuf(_Status):
    """Code 7: the bytes are no protocol buffer message."""

    code, label = 7, "INVALID_PROTOBUF"


class ModelLoaded(_Status):
    """Code 8: the session holds a model already."""

    code, label = 8, "MODEL_LOADED"


class NotImplemented(_Status):  # noqa: A001
    """Code 9: the model uses something that this build cannot run."""

    code, label = 9, "NOT_IMPLEMENTED"


class InvalidGraph(_Status):
    """Code 10: the model contradicts the ONNX standard."""

    code, label = 10, "INVALID_GRAPH"


class EPFail(_Status):
    """Code 11: an execution provider or its device failed. Sessions fall back on it."""

    code, label = 11, "EP_FAIL"


class ModelLoadCanceled(_Status):
    """Code 12: `SessionOptions.set_load_cancellation_flag` stopped the load."""

    code, label = 12, "MODEL_LOAD_CANCELED"


class ModelRequiresCompilation(_Status):
    """Code 13: the model has to be compiled first."""

    code, label = 13, "MODEL_REQUIRES_COMPILATION"


class NotFound(_Status):
    """Code 14: a named thing does not exist."""

    code, label = 14, "NOT_FOUND"


class DeviceReset(_Status):
    """Code 15: the device was reset; its sessions have to be made again."""

    code, label = 15, "DEVICE_RESET"


for _name in __all__:
    globals()[_name].__module__ = _NATIVE
del _name


def status(cls: type[_Status], message: str) -> _Status:
    """Returns an exception of `cls` with the text that onnxruntime would give it.

    Example: `raise status(InvalidArgument, "Invalid input name: q")` shows
    `[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Invalid input name: q`.
    """
    return cls(f"[ONNXRuntimeError] : {cls.code} : {cls.label} : {message}")
