"""Mixed precision: factors on losses."""

from . import loss_scaler
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
