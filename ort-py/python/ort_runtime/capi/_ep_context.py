"""EPContext data: the blocks that a provider keeps beside a compiled model.

No provider here writes or reads such blocks. The classes exist for programs that name them.
"""

from __future__ import annotations

from typing import Any

from ._fields import to_int64

__all__ = ["OrtEpContextData", "OrtEpContextDataBuffer"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class OrtEpContextData:
    """A block that a provider wrote."""

    __slots__ = ("__weakref__", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self._data)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes from `offset`, or all from there. Raises ValueError outside."""
        start = to_int64(offset, "offset")
        end = self.size if length is None else start + to_int64(length, "length")
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"bytes {start} to {end} are not in a block of {self.size}")
        return self._data[start:end]


class OrtEpContextDataBuffer:
    """A block for a provider to read, which the program allocates once and fills."""

    __slots__ = ("__weakref__", "_data", "_max_size")

    def __init__(self, max_size: int) -> None:
        self._data: bytearray | None = None
        self._max_size = max_size

    @property
    def max_size(self) -> int:
        """The most bytes that may be allocated."""
        return self._max_size

    @property
    def is_allocated(self) -> bool:
        """Whether `allocate` was called."""
        return self._data is not None

    @property
    def size(self) -> int:
        """The number of bytes allocated."""
        return 0 if self._data is None else len(self._data)

    def allocate(self, size: int) -> None:
        """Allocates the block. Raises ValueError above `max_size`, RuntimeError a second time."""
        count = to_int64(size, "size")
        if self._data is not None:
            raise RuntimeError("the buffer is allocated already")
        if not 0 <= count <= self._max_size:
            raise ValueError(f"size must be from 0 to {self._max_size}, not {count}")
        self._data = bytearray(count)

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies bytes into the block. Raises ValueError outside, RuntimeError without one."""
        content, start = bytes(data), to_int64(offset, "offset")
        if self._data is None:
            raise RuntimeError("the buffer is not allocated yet")
        end = start + len(content)
        if not 0 <= start <= end <= len(self._data):
            raise ValueError(f"bytes {start} to {end} are not in a block of {len(self._data)}")
        self._data[start:end] = content


OrtEpContextData.__module__ = OrtEpContextDataBuffer.__module__ = _NATIVE
