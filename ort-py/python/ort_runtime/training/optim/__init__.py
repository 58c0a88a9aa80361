"""Optimizers and learning rate schedules."""

from typing import Any

from . import config, lr_scheduler
from .config import AdamConfig, LambConfig, SGDConfig
from .lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

__all__ = [
    "AdamConfig",
    "AdamWMode",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "FusedAdam",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "config",
    "lr_scheduler",
]


def __getattr__(name: str) -> Any:
    # The only part that needs torch.
    if name in ("AdamWMode", "FusedAdam"):
        from . import fused_adam

        return getattr(fused_adam, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
