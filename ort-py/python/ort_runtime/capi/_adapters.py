"""LoRA adapters: the flatbuffer with identifier TORT, read and written without a library.

The root table has `format_version`, `adapter_version` and `model_version` (int32) and
`parameters`, a vector of tables with `name`, `dims` (int64), `data_type` (ONNX element type, int32)
and `raw_data`. Its file layout is that of FlatBuffers: offsets are relative and little-endian.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from typing import Any

import numpy as np

from ._errors import Fail, NoSuchFile, status
from ._fields import refuse, to_int, to_path

__all__ = ["AdapterFormat", "LoraAdapter"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"
_IDENTIFIER = b"TORT"
_FORMAT_VERSION = 1

# ONNX's numbers of element types.
_STRING, _BOOL = 8, 9
_INVALID = "The buffer does not appear to be a valid lora parameter format"

# A table of four fields: a vtable of 12 bytes, and 20 bytes of table.
_VTABLE = struct.pack("<6H", 12, 20, 4, 8, 12, 16)
_TABLE_BYTES = 20


class AdapterFormat:
    """The content of an adapter file, with the native values of its parameters."""

    __slots__ = ("__weakref__", "_versions", "parameters")

    def __init__(self) -> None:
        self._versions = [_FORMAT_VERSION, 0, 0]
        self.parameters: dict[str, Any] = {}

    @property
    def format_version(self) -> int:
        """The version of the file format."""
        return self._versions[0]

    @property
    def adapter_version(self) -> int:
        """The version of the adapter, as its author counts."""
        return self._versions[1]

    @adapter_version.setter
    def adapter_version(self, version: int) -> None:
        self._versions[1] = to_int(version, "adapter_version")

    @property
    def model_version(self) -> int:
        """The version of the model that the adapter fits."""
        return self._versions[2]

    @model_version.setter
    def model_version(self, version: int) -> None:
        self._versions[2] = to_int(version, "model_version")

    @staticmethod
    def read_adapter(path: str | os.PathLike[str]) -> AdapterFormat:
        """Reads a file. Raises NoSuchFile, or RuntimeError if it is no adapter."""
        return _decode(_read(to_path(path, "the path of an adapter")))

    def export_adapter(self, path: str | os.PathLike[str]) -> None:
        """Writes a file. Raises Fail if it cannot be written, RuntimeError for other parameters.

        Parameters are tensors of numbers with at least one dimension.
        """
        data = _encode(self)
        try:
            with open(to_path(path, "the path of an adapter"), "wb") as file:
                file.write(data)
        except OSError as error:
            raise status(Fail, f"the adapter cannot be written: {error}") from error


class LoraAdapter:
    """An adapter for `RunOptions.add_active_adapter`.

    Example::

        adapter = LoraAdapter()
        adapter.Load("adapter.onnx_adapter")
        options.add_active_adapter(adapter)
    """

    __slots__ = ("__weakref__", "_parameters")

    def __init__(self) -> None:
        self._parameters: dict[str, Any] = {}

    def Load(self, path: str | os.PathLike[str]) -> None:  # noqa: N802
        """Reads an adapter file. Raises NoSuchFile, or RuntimeError if it is no adapter."""
        self._parameters = AdapterFormat.read_adapter(path).parameters


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise status(NoSuchFile, f"Adapter file {path} does not exist") from None


class _Reader:
    """Reads tables of a flatbuffer. Each access is checked: the file may come from anywhere."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, form: str, at: int) -> int:
        if at < 0 or at + struct.calcsize(form) > len(self._data):
            raise RuntimeError(_INVALID)
        return struct.unpack_from(form, self._data, at)[0]

    def follow(self, at: int) -> int:
        return at + self.number("<I", at)

    def field(self, table: int, index: int) -> int | None:
        """Returns where a field of a table lies, None if it has its default."""
        vtable = table - self.number("<i", table)
        if 4 + 2 * index >= self.number("<H", vtable):
            return None
        offset = self.number("<H", vtable + 4 + 2 * index)
        return table + offset if offset else None

    def int32(self, table: int, index: int) -> int:
        at = self.field(table, index)
        return 0 if at is None else self.number("<i", at)

    def vector(self, table: int, index: int, item_bytes: int) -> tuple[int, int]:
        """Returns where the items of a vector begin, and how many there are."""
        at = self.field(table, index)
        if at is None:
            return 0, 0
        start = self.follow(at)
        count = self.number("<I", start)
        if start + 4 + count * item_bytes > len(self._data):
            raise RuntimeError(_INVALID)
        return start + 4, count

    def slice(self, table: int, index: int) -> bytes:
        start, count = self.vector(table, index, 1)
        return self._data[start : start + count]


def _decode(data: bytes) -> AdapterFormat:
    if len(data) < 8 or data[4:8] != _IDENTIFIER:
        raise RuntimeError(_INVALID)
    reader = _Reader(data)
    root = reader.follow(0)
    adapter = AdapterFormat()
    adapter._versions = [reader.int32(root, index) for index in range(3)]
    if adapter.format_version != _FORMAT_VERSION:
        raise RuntimeError(f"Unsupported adapter format version: {adapter.format_version}")
    start, count = reader.vector(root, 3, 4)
    for index in range(count):
        table = reader.follow(start + 4 * index)
        first, rank = reader.vector(table, 1, 8)
        shape = [reader.number("<q", first + 8 * axis) for axis in range(rank)]
        try:
            name = reader.slice(table, 0).decode()
        except UnicodeDecodeError:
            raise RuntimeError(_INVALID) from None
        adapter.parameters[name] = value_from_bytes(
            shape, reader.int32(table, 2), reader.slice(table, 3)
        )
    return adapter


def _encode(adapter: AdapterFormat) -> bytes:
    """Lays out the file front to back: the root, the vector of offsets, then each parameter."""
    count = len(adapter.parameters)
    # The identifier ends at 8. The vtable, shared by all tables, fills 8 to 20, the root 20 to 40.
    data = bytearray(struct.pack("<I", 20) + _IDENTIFIER + _VTABLE)
    data += struct.pack("<iiiiI", 20 - 8, *adapter._versions, 4)
    data += struct.pack("<I", count)
    offsets = len(data)
    data += bytes(4 * count)
    for index, (name, value) in enumerate(adapter.parameters.items()):
        shape, content = value.shape(), value_to_bytes(value)
        if not shape or value.element_type() == _BOOL:
            raise RuntimeError(f"adapters hold no {value.data_type()} of shape {shape}: {name!r}")
        table, text = len(data), name.encode()
        struct.pack_into("<I", data, offsets + 4 * index, table - (offsets + 4 * index))
        data += struct.pack("<iIIiI", table - 8, 0, 0, value.element_type(), 0)
        _append_vector(data, table + 4, text + b"\0", len(text), 4)
        _append_vector(data, table + 8, struct.pack(f"<{len(shape)}q", *shape), len(shape), 8)
        _append_vector(data, table + 16, content, len(content), 8)
        data += bytes(-len(data) % 4)
    return bytes(data)


def _append_vector(data: bytearray, field: int, items: bytes, count: int, align: int) -> None:
    """Appends a vector whose items are aligned, and lets the field point to it."""
    data += bytes(-(len(data) + 4) % align)
    struct.pack_into("<I", data, field, len(data) - field)
    data += struct.pack("<I", count) + items


def value_to_bytes(value: Any) -> bytes:
    """Returns the bytes of a native value's numbers. Strings are a RuntimeError."""
    if value.element_type() == _STRING:
        raise RuntimeError("a tensor of strings has no bytes")
    if value.device_name().lower() != "cpu":
        return np.ascontiguousarray(value.numpy()).tobytes()
    return ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())


def value_from_bytes(shape: list[int], element_type: int, content: bytes) -> Any:
    """Returns a native value on the CPU. Raises RuntimeError if the bytes do not fill it."""
    from ._devices import OrtDevice
    from .onnxruntime_pybind11_state import OrtValue

    # Checked before anything is allocated: the shape may come from any file. The smallest elements
    # have two bits.
    if min(shape, default=0) < 0 or math.prod(shape) > 4 * len(content) or element_type == _STRING:
        raise RuntimeError(
            f"{len(content)} bytes do not fill a tensor of type {element_type} and shape {shape}"
        )
    value = OrtValue.ortvalue_from_shape_and_type(shape, element_type, OrtDevice(0, 0, 0))
    needed = value.tensor_size_in_bytes()
    if needed != len(content):
        raise RuntimeError(f"a tensor of shape {shape} has {needed} bytes, not {len(content)}")
    ctypes.memmove(value.data_ptr(), content, len(content))
    return value


def native_value(value: Any, name: str) -> Any:
    """Returns the native value behind an OrtValue, native or public."""
    from .onnxruntime_pybind11_state import OrtValue

    value = getattr(value, "_ortvalue", value)
    if not isinstance(value, OrtValue):
        refuse(name, "an OrtValue", value)
    return value


AdapterFormat.__module__ = LoraAdapter.__module__ = _NATIVE
