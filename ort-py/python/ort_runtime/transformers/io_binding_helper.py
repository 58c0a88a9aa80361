"""Types of values as numpy and torch name them, and bindings of torch tensors.

Only this module of the package needs torch, and only its functions that return or take torch's
types import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..capi._binding import IOBinding
from ..capi._session import Session

if TYPE_CHECKING:
    import torch

# The names of ONNX, which in part are also those of torch, and numpy's types.
_NUMPY: dict[str, type] = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint64": np.uint64,
    "uint32": np.uint32,
    "uint16": np.uint16,
    "uint8": np.uint8,
    "bool": bool,
}
_TORCH = {name: {"float": "float32", "double": "float64"}.get(name, name) for name in _NUMPY}
_ONNX = {
    "float": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "string": 8,
    "bool": 9,
    "float16": 10,
    "double": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
}


def _look_up(known: Mapping[Any, Any], key: Any) -> Any:
    try:
        return known[key]
    except (KeyError, TypeError):
        raise ValueError(f"{key} not found in map") from None


def _by_ort_type(names: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tensor({name})": value for name, value in names.items()}


def _torch_types() -> dict[str, torch.dtype]:
    import torch

    # Older versions lack the larger unsigned types.
    types = {name: getattr(torch, torch_name, None) for name, torch_name in _TORCH.items()}
    known = {name: dtype for name, dtype in types.items() if dtype is not None}
    return {**known, "bfloat16": torch.bfloat16}


class TypeHelper:
    """Translates types: `tensor(float)` as sessions tell it, numpy's, torch's, and the numbers of
    ONNX's TensorProto.

    A type that the other side lacks is a ValueError.

    Example: `TypeHelper.ort_type_to_numpy_type(session.get_inputs()[0].type)`
    """

    @staticmethod
    def get_input_type(ort_session: Session, name: str) -> str:
        """Returns the type of an input, such as `tensor(int64)`."""
        return _type_of(ort_session.get_inputs(), "input", name)

    @staticmethod
    def get_output_type(ort_session: Session, name: str) -> str:
        """Returns the type of an output, such as `tensor(float)`."""
        return _type_of(ort_session.get_outputs(), "output", name)

    @staticmethod
    def ort_type_to_numpy_type(ort_type: str) -> type:
        """Returns numpy's type, such as `numpy.float32` for `tensor(float)`."""
        return _look_up(_by_ort_type(_NUMPY), ort_type)

    @staticmethod
    def ort_type_to_torch_type(ort_type: str) -> torch.dtype:
        """Returns torch's type, such as `torch.float32` for `tensor(float)`."""
        return _look_up(_by_ort_type(_torch_types()), ort_type)

    @staticmethod
    def ort_type_to_onnx_type(ort_type: str) -> int:
        """Returns the number in ONNX's TensorProto, such as 1 for `tensor(float)`."""
        return _look_up(_by_ort_type(_ONNX), ort_type)

    @staticmethod
    def numpy_type_to_torch_type(numpy_type: type) -> torch.dtype:
        """Returns torch's type for a class of numpy's."""
        types = _torch_types()
        known = {_NUMPY[name]: types[name] for name in _NUMPY if name in types}
        return _look_up(known, numpy_type)

    @staticmethod
    def torch_type_to_numpy_type(torch_type: torch.dtype) -> type:
        """Returns numpy's class for a type of torch's."""
        known = {dtype: _NUMPY[name] for name, dtype in _torch_types().items() if name in _NUMPY}
        return _look_up(known, torch_type)

    @staticmethod
    def get_io_numpy_type_map(ort_session: Session) -> dict[str, type]:
        """Returns numpy's type of each input and output by name."""
        return _types(ort_session, TypeHelper.ort_type_to_numpy_type)

    @staticmethod
    def get_io_torch_type_map(ort_session: Session) -> dict[str, torch.dtype]:
        """Returns torch's type of each input and output by name."""
        return _types(ort_session, TypeHelper.ort_type_to_torch_type)

    @staticmethod
    def get_io_onnx_type_map(ort_session: Session) -> dict[str, int]:
        """Returns the number of each input's and output's type by name."""
        return _types(ort_session, TypeHelper.ort_type_to_onnx_type)


def _type_of(values: Sequence[Any], what: str, name: str) -> str:
    for value in values:
        if value.name == name:
            return value.type
    raise ValueError(f"{what} name {name} not found")


def _types(session: Session, translate: Any) -> dict[str, Any]:
    values = [*session.get_inputs(), *session.get_outputs()]
    return {value.name: translate(value.type) for value in values}


class IOBindingHelper:
    """Binds torch's tensors to a language model of the inputs `input_ids`, `position_ids`,
    `attention_mask` and `past_0`, `past_1`, ..."""

    @staticmethod
    def get_output_buffers(
        ort_session: Session, output_shapes: Mapping[str, Sequence[int]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Returns a flat tensor of as many elements as each shape has, by the outputs' names."""
        import torch

        def buffer(name: str, shape: Sequence[int]) -> torch.Tensor:
            dtype = TypeHelper.ort_type_to_torch_type(
                TypeHelper.get_output_type(ort_session, name)
            )
            return torch.empty(int(np.prod(shape)), dtype=dtype, device=device)

        return {name: buffer(name, shape) for name, shape in output_shapes.items()}

    @staticmethod
    def prepare_io_binding(
        ort_session: Session,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        past: Sequence[torch.Tensor] | None,
        output_buffers: Mapping[str, torch.Tensor],
        output_shapes: Mapping[str, Sequence[int]],
    ) -> IOBinding:
        """Returns a binding of the inputs that are given, and of all outputs to the buffers.

        The tensors are read and written in place, so that they must be contiguous and outlive the
        runs.
        """
        binding = ort_session.io_binding()
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            **{f"past_{layer}": tensor for layer, tensor in enumerate(past or ())},
        }
        for name, tensor in inputs.items():
            if tensor is not None:
                shape, dtype = tuple(tensor.shape), TypeHelper.torch_type_to_numpy_type(tensor.dtype)
                _bind(binding.bind_input, name, tensor, dtype, shape)
        for name, buffer in output_buffers.items():
            dtype = TypeHelper.torch_type_to_numpy_type(buffer.dtype)
            _bind(binding.bind_output, name, buffer, dtype, tuple(output_shapes[name]))
        return binding

    @staticmethod
    def get_outputs_from_io_binding_buffer(
        ort_session: Session,
        output_buffers: Mapping[str, torch.Tensor],
        output_shapes: Mapping[str, Sequence[int]],
        return_numpy: bool = True,
    ) -> list[Any]:
        """Returns the outputs of the last run in the session's order, of their shapes: copies, as
        arrays or as tensors."""
        outputs = []
        for output in ort_session.get_outputs():
            shape = output_shapes[output.name]
            flat = output_buffers[output.name][: int(np.prod(shape))]
            copy = flat.reshape(tuple(shape)).clone().detach()
            outputs.append(copy.cpu().numpy() if return_numpy else copy)
        return outputs


def _bind(bind: Any, name: str, tensor: torch.Tensor, dtype: type, shape: tuple[int, ...]) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor for '{name}' is not contiguous; call contiguous() on it")
    bind(name, tensor.device.type, tensor.device.index or 0, dtype, shape, tensor.data_ptr())
