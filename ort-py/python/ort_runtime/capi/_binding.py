"""`IOBinding`: inputs and outputs of runs, bound to memory once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import onnxruntime_pybind11_state as C
from ._fields import to_sizes
from ._public_devices import native_device
from ._values import OrtValue

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["IOBinding"]


class IOBinding:
    """Memory for the runs of one session. It keeps the session and what is bound alive.

    With no output bound, all are. An output bound to a device is made anew when its shape changes.

    Example::

        binding = session.io_binding()
        binding.bind_cpu_input("x", array)
        session.run_with_iobinding(binding)
        binding.copy_outputs_to_cpu()
    """

    def __init__(self, session: Session) -> None:
        self._iobinding = C.SessionIOBinding(session._sess)
        self._session = session
        self._numpy_obj_references: dict[str, Any] = {}
        self._bound_outputs: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Binds an input to an array, or to what `run` accepts for the input.

        A contiguous array is not copied: changing it in place shows in the next run.
        """
        self._iobinding.bind_input(name, arr_on_cpu)
        self._numpy_obj_references[name] = arr_on_cpu

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Binds an input to memory at an address, which the caller keeps alive.

        `element_type` is a numpy type, dtype or its name, or ONNX's number of the type.
        """
        device = native_device(device_type, device_id, -1)
        pointer = operator.index(buffer_ptr)
        self._iobinding.bind_input(name, device, element_type, to_sizes(shape, "shape"), pointer)
        self._numpy_obj_references.pop(name, None)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Binds an input to a value."""
        self._iobinding.bind_ortvalue_input(name, ortvalue._ortvalue)
        self._numpy_obj_references[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Binds an output to the memory of a device, or to memory at an address.

        Without an address the runtime allocates the output, and type and shape have no effect.
        With one, both are needed (ValueError), and the caller keeps the memory alive.
        """
        device = native_device(device_type, device_id, -1)
        if buffer_ptr is None:
            self._iobinding.bind_output(name, device)
        elif element_type is None or shape is None:
            raise ValueError(
                "`element_type` and `shape` are to be provided if pre-allocated memory is provided"
            )
        else:
            pointer, sizes = operator.index(buffer_ptr), to_sizes(shape, "shape")
            self._iobinding.bind_output(name, device, element_type, sizes, pointer)
        self._bound_outputs.pop(name, None)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Binds an output to a value, whose memory the run writes."""
        self._iobinding.bind_ortvalue_output(name, ortvalue._ortvalue)
        self._bound_outputs[name] = ortvalue

    def synchronize_inputs(self) -> None:
        """Waits until devices have the inputs."""
        self._iobinding.synchronize_inputs()

    def synchronize_outputs(self) -> None:
        """Waits until devices have written the outputs."""
        self._iobinding.synchronize_outputs()

    def get_outputs(self) -> list[OrtValue]:
        """Returns the outputs of the last run, in the order of binding, where they lie."""
        return [OrtValue(value) for value in self._iobinding.get_outputs()]

    def get_outputs_as_ortvaluevector(self) -> C.OrtValueVector:
        """Returns the outputs of the last run as native values."""
        return self._iobinding.get_outputs()

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Returns copies of the outputs. Raises RuntimeError before the first run."""
        return self._iobinding.copy_outputs_to_cpu()

    def clear_binding_inputs(self) -> None:
        """Unbinds all inputs."""
        self._iobinding.clear_binding_inputs()
        self._numpy_obj_references.clear()

    def clear_binding_outputs(self) -> None:
        """Unbinds all outputs."""
        self._iobinding.clear_binding_outputs()
        self._bound_outputs.clear()
