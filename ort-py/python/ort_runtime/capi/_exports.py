"""Re-exports: the names of the native module that are written in Python.

`install` adds them to the native module. It holds what touches the engine; options, enumerations
and the like are in the modules listed here.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = tuple(
    importlib.import_module(f"{__package__}.{name}")
    for name in (
        "_adapters",
        "_devices",
        "_enums",
        "_environment",
        "_ep_context",
        "_errors",
        "_fp4",
        "_logging",
        "_metadata",
        "_option_values",
        "_options",
        "_schemas",
        "_sparse_views",
    )
)


def names() -> dict[str, object]:
    """Returns the public names of these modules."""
    return {name: getattr(module, name) for module in _MODULES for name in module.__all__}


def install(native: Any) -> None:
    """Adds the names to the native module and to its `__all__`."""
    add(native, **names())


def add(native: Any, **values: object) -> None:
    """Adds values to the native module and their names to its `__all__`."""
    for name, value in values.items():
        setattr(native, name, value)
    native.__all__ = sorted({*getattr(native, "__all__", ()), *values})
