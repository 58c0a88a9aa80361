"""`Optimizer`: updates the parameters of a module."""

from __future__ import annotations

import os

from ...capi import onnxruntime_pybind11_state as C
from .module import Module


class Optimizer:
    """Updates the parameters of a module with their summed gradients.

    The learning rate is 0.001 at first.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._optimizer = C.TrainingOptimizer(os.fspath(optimizer_uri), module._module)

    def step(self) -> None:
        """Updates the parameters. The gradients stay until `Module.lazy_reset_grad`."""
        self._optimizer.step()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate."""
        self._optimizer.set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """Returns the learning rate."""
        return self._optimizer.learning_rate()
