"""`Module`: a model in training or evaluation mode."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ...capi import onnxruntime_pybind11_state as C
from ...capi._options import SessionOptions
from ...capi._values import OrtValue
from .checkpoint_state import CheckpointState

Output = npt.NDArray[Any] | OrtValue

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def _providers(device: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the providers of a device such as `cpu` or `cuda:1`."""
    kind, _, number = device.partition(":")
    if kind not in _PROVIDERS or (number and not number.isdecimal()):
        raise ValueError(f"there is no device '{device}'; it is cpu, cuda or cuda:N")
    cpu: tuple[str, dict[str, str]] = (_PROVIDERS["cpu"], {})
    options = {"device_id": number} if number else {}
    return [cpu] if kind == "cpu" else [(_PROVIDERS[kind], options), cpu]


def _input(value: object) -> npt.NDArray[Any] | C.OrtValue:
    if isinstance(value, OrtValue):
        return value._ortvalue
    if isinstance(value, np.ndarray):
        return value
    raise TypeError(f"an input is a numpy array or an OrtValue, not {type(value).__name__}")


class Module:
    """A model in training.

    A call computes the loss of a batch, and in training mode adds up the gradients. The inputs are
    numpy arrays or OrtValues. It returns the loss, or a tuple of the loss and the additional
    outputs, as numpy arrays if an input is one.

    `session_options` set the threads, the precision and, as `memory_limit`, the bytes that
    parameters, optimizer state, gradients and activations may take together. Of its activations a
    step keeps what the limit leaves room for, and computes the others again. `recompute_level` 1
    and 2 do so without a limit, as the levels of `ORTMODULE_MEMORY_OPT_LEVEL` do.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: SessionOptions | None = None,
        *,
        recompute_level: int = 0,
    ) -> None:
        self.training = True
        self._state = state
        self._module = C.TrainingModule(
            os.fspath(train_model_uri),
            state._state,
            None if eval_model_uri is None else os.fspath(eval_model_uri),
            session_options or SessionOptions(),
            _providers(device),
            recompute_level,
        )

    def __call__(self, *user_inputs: Any) -> Output | tuple[Output, ...]:
        """Returns the loss of a batch, and the additional outputs if there are any."""
        outputs = self._module.call([_input(value) for value in user_inputs])
        is_numpy = any(isinstance(value, np.ndarray) for value in user_inputs)
        made = tuple(value.numpy() if is_numpy else OrtValue(value) for value in outputs)
        return made[0] if len(made) == 1 else made

    def train(self, mode: bool = True) -> Module:
        """Selects training mode, or evaluation mode. Returns the module."""
        self.training = mode
        self._module.train(bool(mode))
        return self

    def eval(self) -> Module:
        """Selects evaluation mode, which needs the evaluation model. Returns the module."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Lets the next batch replace the summed gradients."""
        self._module.lazy_reset_grad()

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """Returns all parameters, one after the other, in one dimension."""
        return OrtValue(self._module.contiguous_parameters(trainable_only))

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Returns the number of elements of the parameters."""
        return self._module.parameters_size(trainable_only)

    def copy_buffer_to_parameters(self, buffer: OrtValue, trainable_only: bool = True) -> None:
        """Sets the parameters from what `get_contiguous_parameters` returns."""
        if not isinstance(buffer, OrtValue):
            raise TypeError(f"expected an OrtValue, not {type(buffer).__name__}")
        self._module.copy_buffer_to_parameters(buffer._ortvalue, trainable_only)

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Writes the trained model with these outputs."""
        self._module.export_model_for_inferencing(
            os.fspath(inference_model_uri), graph_output_names
        )

    def input_names(self) -> list[str]:
        """Returns the names of the inputs of a call, in their order."""
        return self._module.input_names()

    def output_names(self) -> list[str]:
        """Returns the names of what a call returns, in their order."""
        return self._module.output_names()

    def plan(self, **dims: int) -> dict[str, int]:
        """Returns the bytes of a training step with these sizes, by what they are for.

        They are known before the first step. Example: `sum(module.plan(batch=8).values())`.
        """
        return self._module.memory(dims)
