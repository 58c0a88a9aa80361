"""Values: `OrtValue` and `SparseTensor` around the native ones, and where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from . import onnxruntime_pybind11_state as C
from ._adapters import native_value, value_from_bytes, value_to_bytes

__all__ = [
    "OrtDevice",
    "OrtDeviceVendorId",
    "OrtValue",
    "SparseTensor",
    "copy_tensors",
    "get_ort_device_type",
    "get_vendor_id_for_device_type",
]

_ONNX_STRING = 8


class OrtDeviceVendorId(IntEnum):
    """PCI numbers of the vendors of devices."""

    NONE = 0
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


_DEVICE_TYPES = {"cpu": 0, "cuda": 1, "cann": 3, "dml": 4, "webgpu": 1, "gpu": 1, "npu": 3}
_VENDORS = {
    "cuda": OrtDeviceVendorId.NVIDIA,
    "cann": OrtDeviceVendorId.HUAWEI,
    "dml": OrtDeviceVendorId.MICROSOFT,
    "webgpu": OrtDeviceVendorId.NONE,
}


def get_ort_device_type(device_type: str) -> int:
    """Returns the number of a device type: cpu, cuda, cann, dml, webgpu, gpu or npu, in any case.

    Raises ValueError for another name, TypeError for no str.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"device_type must be a str, not {type(device_type).__name__}")
    try:
        return _DEVICE_TYPES[device_type.lower()]
    except KeyError:
        raise ValueError(f"Unsupported device type: {device_type}") from None


def get_vendor_id_for_device_type(device_type: str) -> OrtDeviceVendorId | None:
    """Returns the vendor of a device type, None where it can be any."""
    get_ort_device_type(device_type)
    return _VENDORS.get(device_type.lower())


class OrtDevice:
    """A device: what kind, and which one of them."""

    def __init__(self, c_ort_device: C.OrtDevice) -> None:
        if not isinstance(c_ort_device, C.OrtDevice):
            raise ValueError(
                "`Provided object` needs to be of type "
                f"`{C.OrtDevice.__module__}.OrtDevice`"
            )
        self._ort_device = c_ort_device

    @staticmethod
    def make(
        ort_device_name: str, device_id: int, vendor_id: int | OrtDeviceVendorId = -1
    ) -> OrtDevice:
        """Returns a device by its name and number. A vendor of -1 is the name's own.

        Raises ValueError for an unknown name.

        Example: `OrtDevice.make("cuda", 0)`
        """
        return OrtDevice(_native_device(ort_device_name, device_id, vendor_id))

    def _get_c_device(self) -> C.OrtDevice:
        return self._ort_device

    def device_id(self) -> int:
        """Returns the number of the device among those of its type."""
        return self._ort_device.device_id()

    def device_mem_type(self) -> int:
        """Returns the number of the memory type."""
        return self._ort_device.mem_type()

    def device_type(self) -> int:
        """Returns the number of the device type."""
        return self._ort_device.device_type()

    def device_vendor_id(self) -> int:
        """Returns the vendor's PCI number, 0 if it does not matter."""
        return self._ort_device.vendor_id()


def _native_device(name: str, device_id: int, vendor_id: int) -> C.OrtDevice:
    kind = get_ort_device_type(name)
    if vendor_id < 0:
        vendor_id = get_vendor_id_for_device_type(name) or OrtDeviceVendorId.NONE
    return C.OrtDevice(kind, C.OrtDevice.default_memory(), int(vendor_id), device_id)


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

    @staticmethod
    def ortvalue_from_numpy(
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
        device = _native_device(device_type, device_id, vendor_id)
        value = C.OrtValue.ortvalue_from_numpy(numpy_obj, device)
        return OrtValue(value, numpy_obj if device.device_type() == 0 else None)

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: np.ndarray, /, onnx_element_type: int) -> OrtValue:
        """Returns a tensor that reads an array as another type of the same size, without a copy.

        Example: a uint16 array as bfloat16, whose ONNX element type is 16.
        """
        value = C.OrtValue.ortvalue_from_numpy_with_onnx_type(data, onnx_element_type)
        return OrtValue(value, data)

    @staticmethod
    def ortvalue_from_shape_and_type(
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
            if not isinstance(memory_info, C.OrtMemoryInfo):
                raise TypeError(
                    f"memory_info must be an OrtMemoryInfo, not {type(memory_info).__name__}"
                )
            kind = 0 if memory_info.name == "Cpu" else 1
            mem_type, vendor = memory_info.device_mem_type, memory_info.device_vendor_id
            device = C.OrtDevice(kind, mem_type, vendor, memory_info.device_id)
        else:
            device = _native_device(device_type, device_id, vendor_id)
        return OrtValue(_make_tensor(C.OrtValue, shape, element_type, device))

    @staticmethod
    def ort_value_from_sparse_tensor(sparse_tensor: SparseTensor) -> OrtValue:
        """Returns a value that holds a sparse tensor."""
        if not isinstance(sparse_tensor, SparseTensor):
            kind = type(sparse_tensor).__name__
            raise TypeError(f"sparse_tensor must be a SparseTensor, not {kind}")
        return OrtValue(C.OrtValue.ort_value_from_sparse_tensor(sparse_tensor._get_c_tensor()))

    @staticmethod
    def from_dlpack(data: Any, /) -> OrtValue:
        """Returns a tensor over the memory of another library's, without a copy.

        `data` has `__dlpack__`, or is a DLPack capsule that is not consumed yet.

        Example: `OrtValue.from_dlpack(torch.ones(2, 3))`
        """
        is_bool = str(getattr(data, "dtype", "")).rpartition(".")[2] == "bool"
        return OrtValue(C.OrtValue.from_dlpack(data, is_bool))

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


def _make_tensor(
    owner: Any, shape: Sequence[int], element_type: Any, device: C.OrtDevice
) -> C.OrtValue:
    """Makes a tensor in the memory of `owner`: the native value class, or a native session."""
    sizes = [int(size) for size in shape]
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
            f"The input {given[0]} of {given[1]} bytes does not match the OrtValue, "
            f"{wanted[0]} of {wanted[1]} bytes."
        )
    if source.device_name().lower() == target.device_name().lower() == "cpu":
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
    sources = [native_value(value, "a value of src") for value in src]
    targets = [native_value(value, "a value of dst") for value in dst]
    if len(sources) != len(targets):
        raise RuntimeError("Invalid arguments provided to CopyTensors.")
    for source, target in zip(sources, targets, strict=True):
        _copy_tensor(source, target)


class SparseTensor:
    """A tensor of which only some elements are stored.

    Example::

        device = OrtDevice.make("cpu", 0)
        tensor = SparseTensor.sparse_coo_from_numpy([3, 3], values, np.array([1, 5]), device)
        tensor.as_coo_view().indices()
    """

    def __init__(self, sparse_tensor: C.SparseTensor) -> None:
        if not isinstance(sparse_tensor, C.SparseTensor):
            raise ValueError(
                f"`Provided object` needs to be of type `{C.SparseTensor.__module__}.SparseTensor`"
            )
        self._tensor = sparse_tensor

    def _get_c_tensor(self) -> C.SparseTensor:
        return self._tensor

    @staticmethod
    def sparse_coo_from_numpy(
        dense_shape: Sequence[int],
        values: np.ndarray,
        coo_indices: np.ndarray,
        ort_device: OrtDevice,
    ) -> SparseTensor:
        """Returns a tensor from values and their places, linear or one row of coordinates each."""
        shape, device = [int(size) for size in dense_shape], ort_device._get_c_device()
        indices = np.asarray(coo_indices, np.int64)
        return SparseTensor(C.SparseTensor.sparse_coo_from_numpy(shape, values, indices, device))

    @staticmethod
    def sparse_csr_from_numpy(
        dense_shape: Sequence[int],
        values: np.ndarray,
        inner_indices: np.ndarray,
        outer_indices: np.ndarray,
        ort_device: OrtDevice,
    ) -> SparseTensor:
        """Returns a tensor from values, their columns (inner) and where rows begin (outer)."""
        shape, device = [int(size) for size in dense_shape], ort_device._get_c_device()
        inner, outer = np.asarray(inner_indices, np.int64), np.asarray(outer_indices, np.int64)
        made = C.SparseTensor.sparse_csr_from_numpy(shape, values, inner, outer, device)
        return SparseTensor(made)

    def values(self) -> np.ndarray:
        """Returns the stored elements, read-only."""
        return self._tensor.values()

    def as_coo_view(self) -> C.SparseCooView:
        """Returns the places. Raises RuntimeError if the format is not COO."""
        if self.format() is not C.OrtSparseFormat.ORT_SPARSE_COO:
            raise RuntimeError("This sparse tensor does not contain COO format")
        return C.SparseCooView(self._tensor.coo_indices())

    def as_csrc_view(self) -> C.SparseCsrView:
        """Returns columns and rows. Raises RuntimeError if the format is not CSR."""
        if self.format() is not C.OrtSparseFormat.ORT_SPARSE_CSRC:
            raise RuntimeError("This sparse tensor does not contain CSR(C) format")
        return C.SparseCsrView(*self._tensor.csr_indices())

    def as_blocksparse_view(self) -> C.SparseBlockSparseView:
        """Raises RuntimeError: no tensor here has blocks."""
        raise RuntimeError("This sparse tensor does not contain BlockSparse format")

    def dense_shape(self) -> list[int]:
        """Returns the sizes of the whole tensor."""
        return self._tensor.dense_shape()

    def format(self) -> C.OrtSparseFormat:
        """Returns the format."""
        return C.OrtSparseFormat(self._tensor.format())

    def data_type(self) -> str:
        """Returns the type as text, such as `sparse_tensor(float)`."""
        return self._tensor.data_type()

    def device_name(self) -> str:
        """Returns `cpu`: sparse tensors lie there."""
        return "cpu"

    def to_cuda(self, ort_device: OrtDevice) -> SparseTensor:
        """Raises RuntimeError: sparse tensors stay on the CPU."""
        raise RuntimeError("Cuda is not available in this build")
