"""Training of torch modules. `ortmodule` has the wrapper, which needs torch."""

from __future__ import annotations

import importlib.util

__all__ = ["is_ortmodule_available"]


def is_ortmodule_available() -> bool:
    """Returns whether `ort_runtime.training.ortmodule` can be imported: whether torch is there."""
    return importlib.util.find_spec("torch") is not None
