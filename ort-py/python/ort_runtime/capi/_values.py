"""Values: `OrtValue` around the native one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onnxruntime_pybind11_state as C
from ._adapters import value_from_bytes, value_to_bytes
from ._devices import memory_device
from ._fields import to_sizes
from ._public_devices import OrtDeviceVendorId, native_device
from ._sparse_tensor import SparseTensor

__all__ = ["OrtValue", "copy_tensors"]

_ONNX_STRING = 8


class OrtValue:
    """A value that runs take and give: a tensor, a sequence, a map or a sparse tensor.

    Example::

        value = OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
        (result,) = session.run_with_ort_values(None, {"x": value})
        result.numpy()
    """

    def __init__(
        self,
        ortvalue: C.OrtValue,
        numpy_obj: np.ndarray | None = None,
        session: C.InferenceSession | None = None,
    ) -> None:
        if not isinstance(ortvalue, C.OrtValue):
            raise ValueError(
                f"`Provided ortvalue` needs to be of type `{C.OrtValue.__module__}.OrtValue`"
            )
        self._ortvalue = ortvalue
        # The array or the session whose memory the value shares.
        self._numpy_obj = numpy_obj
        self._session = session

    def _get_c_value(self) -> C.OrtValue:
        return self._ortvalue

    @classmethod
    def ortvalue_from_numpy(
        cls,
        numpy_obj: np.ndarray,
        /,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int | OrtDeviceVendorId = -1,
    ) -> OrtValue:
        """Returns a tensor of an array.

        A contiguous array on the CPU is shared, not copied: the value keeps it alive and sees later
        changes. Raises RuntimeError for anything but an array.
        """
        device = native_device(device_type, device_id, vendor_id)
        value = C.OrtValue.ortvalue_from_numpy(numpy_obj, device)
        return cls(value, numpy_obj if device.device_type() == 0 else None)

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(
        cls, data: np.ndarray, /, onnx_element_type: int
    ) -> OrtValue:
        """Returns a tensor that reads an array as another type of the same size, without a copy.

        Example: a uint16 array as bfloat16, whose ONNX element type is 16.
        """
        value = C.OrtValue.ortvalue_from_numpy_with_onnx_type(data, onnx_element_type)
        return cls(value, data)

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int | OrtDeviceVendorId = -1,
        memory_info: C.OrtMemoryInfo | None = None,
    ) -> OrtValue:
        """Returns a tensor with the given shape, whose content does not matter.

        `element_type` is a numpy type, dtype or its name, or ONNX's number of the type.
        `memory_info` replaces the device.

        Raises RuntimeError for a negative size, MemoryError if there is not enough memory.
        """
        if memory_info is not None:
            device = memory_device(memory_info)
        else:
            device = native_device(device_type, device_id, vendor_id)
        return cls(make_tensor(C.OrtValue, shape, element_type, device))

    @classmethod
    def ort_value_from_sparse_tensor(cls, sparse_tensor: SparseTensor) -> OrtValue:
        """Returns a value that holds a sparse tensor."""
        return cls(C.OrtValue.ort_value_from_sparse_tensor(sparse_tensor._get_c_tensor()))

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """Returns a tensor over the memory of another library's, without a copy.

        `data` has `__dlpack__`, or is a DLPack capsule that is not consumed yet.

        Example: `OrtValue.from_dlpack(torch.ones(2, 3))`
        """
        is_bool = str(getattr(data, "dtype", "")).rpartition(".")[2] == "bool"
        return cls(C.OrtValue.from_dlpack(data, is_bool))

    def as_sparse_tensor(self) -> SparseTensor:
        """Returns the sparse tensor that the value holds. Raises RuntimeError if it holds none."""
        return SparseTensor(self._ortvalue.as_sparse_tensor())

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self._ortvalue.data_ptr()

    def device_name(self) -> str:
        """Returns where the value lies: `cpu`, `cuda` and so on."""
        return self._ortvalue.device_name().lower()

    def shape(self) -> list[int]:
        """Returns the sizes of a tensor."""
        return self._ortvalue.shape()

    def data_type(self) -> str:
        """Returns the type as text, such as `tensor(float)`."""
        return self._ortvalue.data_type()

    def element_type(self) -> int:
        """Returns ONNX's number of the type of the elements."""
        return self._ortvalue.element_type()

    def has_value(self) -> bool:
        """Returns False for an optional value that is absent."""
        return self._ortvalue.has_value()

    def is_tensor(self) -> bool:
        """Tells whether it is a tensor."""
        return self._ortvalue.is_tensor()

    def is_sparse_tensor(self) -> bool:
        """Tells whether it is a sparse tensor."""
        return self._ortvalue.is_sparse_tensor()

    def is_tensor_sequence(self) -> bool:
        """Tells whether it is a sequence of tensors."""
        return self._ortvalue.is_tensor_sequence()

    def tensor_size_in_bytes(self) -> int:
        """Returns the number of bytes of a tensor."""
        return self._ortvalue.tensor_size_in_bytes()

    def numpy(self) -> np.ndarray:
        """Returns a tensor as an array: over the same memory if it lies on the CPU, else a copy.

        Raises RuntimeError for anything but a tensor.
        """
        return self._ortvalue.numpy()

    def update_inplace(self, data: np.ndarray | OrtValue) -> None:
        """Copies the elements of an array or a value into this value's memory.

        Raises TypeError for anything else, RuntimeError if type or number of elements differ.
        """
        if isinstance(data, OrtValue):
            _copy_tensor(data._ortvalue, self._ortvalue)
        elif isinstance(data, np.ndarray):
            self._ortvalue.update_inplace(data)
        else:
            raise TypeError("data must be a numpy.ndarray or an OrtValue.")

    @property
    def _is_webgpu_buffer(self) -> bool:
        return self.device_name() == "webgpu"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError("a conversion to another dtype needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the value does not lie on device {dl_device}")
        if copy:
            return OrtValue(_copied(self._ortvalue)).__dlpack__(stream=stream)
        return self._ortvalue.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._ortvalue.__dlpack_device__()

    def __copy__(self) -> OrtValue:
        return type(self)(self._ortvalue, self._numpy_obj, self._session)

    def __reduce__(self) -> tuple[Any, ...]:
        value = self._ortvalue
        if not value.is_tensor():
            raise TypeError(f"cannot pickle an OrtValue of type {value.data_type()}")
        if value.element_type() == _ONNX_STRING:
            return OrtValue.ortvalue_from_numpy, (value.numpy(),)
        return _restored, (value.shape(), value.element_type(), value_to_bytes(value))


def _restored(shape: list[int], element_type: int, content: bytes) -> OrtValue:
    return OrtValue(value_from_bytes(shape, element_type, content))


def _copied(value: C.OrtValue) -> C.OrtValue:
    return value_from_bytes(value.shape(), value.element_type(), value_to_bytes(value))


def make_tensor(
    owner: Any, shape: Sequence[int], element_type: Any, device: C.OrtDevice
) -> C.OrtValue:
    """Makes a tensor in the memory of `owner`: the native value class, or a native session."""
    sizes = to_sizes(shape, "shape")
    if min(sizes, default=0) < 0:
        raise RuntimeError(f"Tensor shape.Size() must be >= 0, got {sizes}")
    make = (
        owner.ortvalue_from_shape_and_type
        if owner is C.OrtValue
        else owner.create_ortvalue_from_shape_and_type
    )
    return make(sizes, np.float64 if element_type is None else element_type, device)


def _copy_tensor(source: C.OrtValue, target: C.OrtValue) -> None:
    """Copies a tensor into another one of the same type and size."""
    wanted, given = (
        (value.data_type(), value.tensor_size_in_bytes()) for value in (target, source)
    )
    if wanted != given:
        raise RuntimeError(
            "The values must have the same data type and the same size: "
            f"{given[0]} of {given[1]} bytes, and {wanted[0]} of {wanted[1]} bytes"
        )
    if source.device_name().lower() == target.device_name().lower() == "cpu":
        if not target.is_writable():
            raise RuntimeError("the memory of the value is read-only")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), given[1])
    else:
        target.update_inplace(source.numpy())


def copy_tensors(
    src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: C.OrtSyncStream | None = None
) -> None:
    """Copies tensors into others of the same types and sizes, on any devices.

    `stream` is accepted; the copies are done when the call returns. Raises RuntimeError if the
    lists differ in length, or a pair in type or size.
    """
    sources, targets = [value._ortvalue for value in src], [value._ortvalue for value in dst]
    if len(sources) != len(targets):
        raise RuntimeError("Invalid arguments provided to CopyTensors.")
    for source, target in zip(sources, targets, strict=True):
        _copy_tensor(source, target)
