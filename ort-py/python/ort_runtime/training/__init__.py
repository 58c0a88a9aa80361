"""Training: on devices (`api`, `artifacts`, `onnxblock`), with optimizers, schedules and scalers.

The names are those of onnxruntime.training. Nothing here needs torch except `optim.FusedAdam`.
"""

from . import amp, api, artifacts, optim, utils

__all__ = ["amp", "api", "artifacts", "optim", "utils"]
