"""Learning rate schedules with a linear warmup.

Each returns the rate of a step from an object with `optimization_step` and `optimizer_config.lr`.
"""

from __future__ import annotations

import abc
import math
from typing import Any

__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
]


class _LRScheduler(abc.ABC):
    """A schedule of `total_steps` steps, of which a share `warmup` raises the rate from 0."""

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if not isinstance(total_steps, int) or total_steps <= 0:
            raise AssertionError("total_steps must be a strict positive number")
        if not isinstance(warmup, float) or not 0 <= warmup < 1:
            raise AssertionError("warmup must be a float between (0, 1]")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = warmup * total_steps
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: Any) -> list[float]:
        """Returns the rate of a step, in a list."""
        step = train_step_info.optimization_step
        rate = train_step_info.optimizer_config.lr
        if step < self._warmup_steps:
            return [rate * step / max(1.0, self._warmup_steps)]
        return [self._after_warmup(step, rate)]

    def get_last_lr(self) -> list[float]:
        """Returns the rate of the last step."""
        return self._last_lr

    def _step(self, train_step_info: Any) -> None:
        self._last_lr = self.get_lr(train_step_info)
        train_step_info.optimizer_config.lr = self._last_lr[0]

    @abc.abstractmethod
    def _after_warmup(self, step: int, rate: float) -> float:
        """Returns the rate of a step after the warmup."""

    def _share(self, step: int) -> float:
        """Returns the share of the steps after the warmup that lie behind a step."""
        return (step - self._warmup_steps) / max(1.0, self.total_steps - self._warmup_steps)


class ConstantWarmupLRScheduler(_LRScheduler):
    """Keeps the rate after the warmup."""

    def _after_warmup(self, step: int, rate: float) -> float:
        return rate


class CosineWarmupLRScheduler(_LRScheduler):
    """Lowers the rate along a cosine, of which `cycles` waves fit after the warmup."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not isinstance(cycles, float) or cycles <= 0:
            raise AssertionError("cycles must be a positive float")
        self.cycles = cycles

    def _after_warmup(self, step: int, rate: float) -> float:
        wave = math.cos(math.pi * self.cycles * 2.0 * self._share(step))
        return rate * max(0.0, 0.5 * (1.0 + wave))


class LinearWarmupLRScheduler(_LRScheduler):
    """Lowers the rate linearly to 0."""

    def _after_warmup(self, step: int, rate: float) -> float:
        return rate * max(0.0, 1.0 - self._share(step))


class PolyWarmupLRScheduler(_LRScheduler):
    """Lowers the rate to `lr_end` along a power."""

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if not isinstance(lr_end, float) or lr_end < 0:
            raise AssertionError("lr_end must be a positive float")
        if not isinstance(power, float) or power < 0:
            raise AssertionError("power must be a positive float")
        self.lr_end = lr_end
        self.power = power

    def _after_warmup(self, step: int, rate: float) -> float:
        if step > self.total_steps:
            return self.lr_end
        return (rate - self.lr_end) * (1.0 - self._share(step)) ** self.power + self.lr_end
