"""Devices by name: the public `OrtDevice` around the native one."""

from __future__ import annotations

from enum import IntEnum

from . import onnxruntime_pybind11_state as C

__all__ = [
    "OrtDevice",
    "OrtDeviceVendorId",
    "get_ort_device_type",
    "get_vendor_id_for_device_type",
]


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
        return OrtDevice(native_device(ort_device_name, device_id, vendor_id))

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


def native_device(name: str, device_id: int, vendor_id: int) -> C.OrtDevice:
    """Returns the native device of a name. A vendor of -1 is the name's own."""
    kind = get_ort_device_type(name)
    if vendor_id < 0:
        vendor_id = get_vendor_id_for_device_type(name) or OrtDeviceVendorId.NONE
    return C.OrtDevice(kind, C.OrtDevice.default_memory(), int(vendor_id), device_id)
