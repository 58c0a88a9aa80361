"""Training: on devices (`api`, `artifacts`, `onnxblock`), and of torch modules (`ortmodule`).

The names are those of onnxruntime.training. Nothing here needs torch except `ortmodule` and
`optim.FusedAdam`.
"""

from __future__ import annotations

import importlib.util

from . import amp, api, artifacts, optim, utils

__all__ = ["amp", "api", "artifacts", "is_ortmodule_available", "optim", "utils"]


def is_ortmodule_available() -> bool:
    """Returns whether `ort_runtime.training.ortmodule` can be imported: whether torch is there."""
    return importlib.util.find_spec("torch") is not None
