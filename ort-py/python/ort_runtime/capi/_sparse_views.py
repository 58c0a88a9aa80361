"""Views of a sparse tensor: the places of its elements, in each format."""

from __future__ import annotations

import numpy as np

__all__ = ["SparseBlockSparseView", "SparseCooView", "SparseCsrView"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class SparseCooView:
    """The places of elements in format COO."""

    __slots__ = ("__weakref__", "_indices")

    def __init__(self, indices: np.ndarray) -> None:
        self._indices = indices

    def indices(self) -> np.ndarray:
        """Returns linear places, or a row of coordinates for each element. Read-only."""
        return self._indices


class SparseCsrView:
    """The places of elements in format CSR."""

    __slots__ = ("__weakref__", "_inner", "_outer")

    def __init__(self, inner: np.ndarray, outer: np.ndarray) -> None:
        self._inner, self._outer = inner, outer

    def inner(self) -> np.ndarray:
        """Returns the column of each element. Read-only."""
        return self._inner

    def outer(self) -> np.ndarray:
        """Returns where each row begins, and where the last one ends. Read-only."""
        return self._outer


class SparseBlockSparseView:
    """The places of blocks."""

    __slots__ = ("__weakref__", "_indices")

    def __init__(self, indices: np.ndarray) -> None:
        self._indices = indices

    def indices(self) -> np.ndarray:
        """Returns a column of coordinates for each block, counted in blocks. Read-only."""
        return self._indices


for _name in __all__:
    globals()[_name].__module__ = _NATIVE
del _name
