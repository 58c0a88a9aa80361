"""`CheckpointState`: the parameters and properties of a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...capi import onnxruntime_pybind11_state as C


class Parameter:
    """A parameter of the model. `data` and `grad` are copies."""

    def __init__(self, name: str, state: C.CheckpointState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        """The name of the initializer in the model."""
        return self._name

    @property
    def data(self) -> npt.NDArray[Any]:
        """The value."""
        return self._state.data(self._name)

    @data.setter
    def data(self, value: npt.NDArray[Any]) -> None:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a parameter takes a numpy array, not {type(value).__name__}")
        self._state.set_data(self._name, value)

    @property
    def grad(self) -> npt.NDArray[Any] | None:
        """The gradient summed so far; None before the first batch and for frozen parameters."""
        return self._state.grad(self._name)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self._state.requires_grad(self._name)

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}")
    return name


class Parameters:
    """The parameters of a state by name. Iteration gives (name, Parameter) pairs."""

    def __init__(self, state: C.CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: npt.NDArray[Any]) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return _text(name) in self._state.parameter_names()

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._state.parameter_names():
            yield name, Parameter(name, self._state)

    def __len__(self) -> int:
        return len(self._state.parameter_names())

    def __repr__(self) -> str:
        return repr([parameter for _, parameter in self])


class Properties:
    """The properties of a state by name, each an int, a float or a str."""

    def __init__(self, state: C.CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._state.property(name)

    def __setitem__(self, name: str, value: int | float | str) -> None:
        self._state.set_property(_text(name), value)

    def __contains__(self, name: object) -> bool:
        return _text(name) in self._state.property_names()

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        for name in self._state.property_names():
            yield name, self._state.property(name)

    def __len__(self) -> int:
        return len(self._state.property_names())


class CheckpointState:
    """The parameters and properties of a training run.

    A state belongs to one module. Make states by `CheckpointState.load_checkpoint`.
    """

    def __init__(self, state: C.CheckpointState) -> None:
        if not isinstance(state, C.CheckpointState):
            raise TypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._state = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Loads a checkpoint file, which is mapped."""
        return cls(C.CheckpointState.load(os.fspath(checkpoint_uri)))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Writes a state into a file."""
        state._state.save(os.fspath(checkpoint_uri), include_optimizer_state)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The properties by name."""
        return self._properties
