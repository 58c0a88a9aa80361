"""Factors on losses, which keep small gradients of float16 from becoming zero."""

from __future__ import annotations

from typing import Any

__all__ = ["DynamicLossScaler", "LossScaler"]


class LossScaler:
    """A factor on the loss, to derive from."""

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self._loss_scale = loss_scale
        self._initial_loss_scale = loss_scale

    @property
    def input_name(self) -> str | None:
        """The name of the model's input for the factor."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        if not isinstance(input_name, str) or not input_name:
            raise AssertionError("'input_name' must be a non-empty str")
        self._input_name = input_name

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        if not isinstance(loss_scale, float) or loss_scale <= 0:
            raise AssertionError("'loss_scale' must be a positive float")
        self._loss_scale = loss_scale

    def reset(self) -> None:
        """Sets the factor to its initial value."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: Any) -> float:
        """Returns the factor of the next step. `train_step_info.all_finite` tells of the last."""
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """A factor that doubles after a window of finite steps and halves after another.

    Example::

        scaler = DynamicLossScaler(loss_scale=2.0**16, up_scale_window=2000)
        scaler.update(step)  # where `step.all_finite` says whether the gradients were finite
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._finite_steps = 0

    def reset(self) -> None:
        super().reset()
        self._finite_steps = 0

    def update(self, train_step_info: Any) -> float:
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2.0)
            self._finite_steps = 0
            return self.loss_scale
        self._finite_steps += 1
        if self._finite_steps >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2.0)
            self._finite_steps = 0
        return self.loss_scale
