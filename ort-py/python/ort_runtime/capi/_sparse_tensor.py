"""Sparse tensors: `SparseTensor` around the native one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import onnxruntime_pybind11_state as C
from ._fields import to_sizes
from ._public_devices import OrtDevice

__all__ = ["SparseTensor"]


class SparseTensor:
    """A tensor of which only some elements are stored.

    Example::

        device = OrtDevice.make("cpu", 0)
        tensor = SparseTensor.sparse_coo_from_numpy([3, 3], values, np.array([1, 5]), device)
        tensor.as_coo_view().indices()
    """

    def __init__(self, sparse_tensor: C.SparseTensor) -> None:
        if not isinstance(sparse_tensor, C.SparseTensor):
            raise ValueError(
                f"`Provided object` needs to be of type `{C.SparseTensor.__module__}.SparseTensor`"
            )
        self._tensor = sparse_tensor

    def _get_c_tensor(self) -> C.SparseTensor:
        return self._tensor

    @staticmethod
    def sparse_coo_from_numpy(
        dense_shape: Sequence[int],
        values: np.ndarray,
        coo_indices: np.ndarray,
        ort_device: OrtDevice,
    ) -> SparseTensor:
        """Returns a tensor from values and their places, linear or one row of coordinates each."""
        shape, device = to_sizes(dense_shape, "dense_shape"), ort_device._get_c_device()
        indices = np.asarray(coo_indices, np.int64)
        return SparseTensor(C.SparseTensor.sparse_coo_from_numpy(shape, values, indices, device))

    @staticmethod
    def sparse_csr_from_numpy(
        dense_shape: Sequence[int],
        values: np.ndarray,
        inner_indices: np.ndarray,
        outer_indices: np.ndarray,
        ort_device: OrtDevice,
    ) -> SparseTensor:
        """Returns a tensor from values, their columns (inner) and where rows begin (outer)."""
        shape, device = to_sizes(dense_shape, "dense_shape"), ort_device._get_c_device()
        inner, outer = np.asarray(inner_indices, np.int64), np.asarray(outer_indices, np.int64)
        made = C.SparseTensor.sparse_csr_from_numpy(shape, values, inner, outer, device)
        return SparseTensor(made)

    def values(self) -> np.ndarray:
        """Returns the stored elements, read-only."""
        return self._tensor.values()

    def as_coo_view(self) -> C.SparseCooView:
        """Returns the places. Raises RuntimeError if the format is not COO."""
        return self._tensor.get_coo_data()

    def as_csrc_view(self) -> C.SparseCsrView:
        """Returns columns and rows. Raises RuntimeError if the format is not CSR."""
        return self._tensor.get_csrc_data()

    def as_blocksparse_view(self) -> C.SparseBlockSparseView:
        """Returns the places of blocks. Raises RuntimeError if the format has none."""
        return self._tensor.get_blocksparse_data()

    def dense_shape(self) -> list[int]:
        """Returns the sizes of the whole tensor."""
        return self._tensor.dense_shape()

    def format(self) -> C.OrtSparseFormat:
        """Returns the format."""
        return self._tensor.format

    def data_type(self) -> str:
        """Returns the type as text, such as `sparse_tensor(float)`."""
        return self._tensor.data_type()

    def device_name(self) -> str:
        """Returns `cpu`: sparse tensors lie there."""
        return self._tensor.device_name().lower()

    def to_cuda(self, ort_device: OrtDevice) -> SparseTensor:
        """Raises RuntimeError: sparse tensors stay on the CPU."""
        self._tensor.to_cuda(ort_device._get_c_device())
        return self
