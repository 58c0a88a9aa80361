"""`AdapterFormat`: reads and writes LoRA adapters."""

from __future__ import annotations

import os

from . import onnxruntime_pybind11_state as C
from ._values import OrtValue

__all__ = ["AdapterFormat"]


class AdapterFormat:
    """A LoRA adapter: named parameters that replace initializers of a model.

    Example::

        adapter = AdapterFormat()
        adapter.set_parameters({"layer.A": OrtValue.ortvalue_from_numpy(array)})
        adapter.export_adapter("adapter.onnx_adapter")
    """

    def __init__(self, adapter: C.AdapterFormat | None = None) -> None:
        self._adapter = C.AdapterFormat() if adapter is None else adapter

    @staticmethod
    def read_adapter(file_path: str | os.PathLike[str]) -> AdapterFormat:
        """Reads a file. Raises NoSuchFile, or RuntimeError if it is no adapter."""
        return AdapterFormat(C.AdapterFormat.read_adapter(file_path))

    def export_adapter(self, file_path: str | os.PathLike[str]) -> None:
        """Writes a file."""
        self._adapter.export_adapter(file_path)

    def get_format_version(self) -> int:
        """Returns the version of the file format."""
        return self._adapter.format_version

    def set_adapter_version(self, adapter_version: int) -> None:
        """Sets the version of the adapter."""
        self._adapter.adapter_version = adapter_version

    def get_adapter_version(self) -> int:
        """Returns the version of the adapter."""
        return self._adapter.adapter_version

    def set_model_version(self, model_version: int) -> None:
        """Sets the version of the model that the adapter fits."""
        self._adapter.model_version = model_version

    def get_model_version(self) -> int:
        """Returns the version of the model that the adapter fits."""
        return self._adapter.model_version

    def set_parameters(self, params: dict[str, OrtValue]) -> None:
        """Sets the parameters by name."""
        self._adapter.parameters = {name: value._ortvalue for name, value in params.items()}

    def get_parameters(self) -> dict[str, OrtValue]:
        """Returns the parameters by name."""
        return {name: OrtValue(value) for name, value in self._adapter.parameters.items()}
