"""`LinearLRScheduler`: a learning rate that rises from 0 and falls to 0."""

from __future__ import annotations

from ...capi import onnxruntime_pybind11_state as C
from .optimizer import Optimizer


class LinearLRScheduler:
    """Raises the learning rate from 0 to `initial_lr`, then lowers it to 0, both linearly.

    `warmup_step_count` updates raise it; it is 0 again after `total_step_count` updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        self._scheduler = C.TrainingScheduler(
            optimizer._optimizer, warmup_step_count, total_step_count, initial_lr
        )

    def step(self) -> None:
        """Sets the rate of the next update. Call it after each `Optimizer.step`."""
        self._scheduler.step()
