"""Values of session options: a shared budget, and where weights lie."""

from __future__ import annotations

from typing import Any

from ._fields import Slotted, read_only, refuse, to_int64, to_path, to_size

__all__ = ["Budget", "OrtExternalInitializerInfo"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class OrtExternalInitializerInfo(Slotted):
    """Where a weight lies outside the model: `OrtExternalInitializerInfo(path, offset, bytes)`."""

    __slots__ = ("_byte_size", "_file_offset", "_filepath")

    def __init__(self, filepath: str, file_offset: int, byte_size: int, /) -> None:
        self._filepath = to_path(filepath, "filepath")
        self._file_offset = to_int64(file_offset, "file_offset")
        self._byte_size = to_int64(byte_size, "byte_size")

    filepath = read_only("filepath", "The file, relative to the model.")
    file_offset = read_only("file_offset", "Where the weight begins in the file.")
    byte_size = read_only("byte_size", "How many bytes it has.")


class Budget(Slotted):
    """A number of bytes that the sessions that are given this object share.

    Example::

        budget = ort_runtime.Budget("4GiB")
        sessions = [InferenceSession(path, budget=budget) for path in paths]
    """

    # The native module keeps its own object in `_shared`.
    __slots__ = ("_limit", "_shared")

    def __init__(self, limit: int | str) -> None:
        self._limit = to_size(limit, "the limit of a Budget")
        if self._limit is None:
            refuse("the limit of a Budget", "a number of bytes", limit)
        self._shared: Any = None

    limit = read_only("limit", "The number of bytes.")

    def __getstate__(self) -> dict[str, Any]:
        return {"_limit": self._limit, "_shared": None}


Budget.__module__ = OrtExternalInitializerInfo.__module__ = _NATIVE
