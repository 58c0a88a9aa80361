"""Sparse tensors."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, Raises, native, row, value
from more_models import package  # noqa: F401  (the fixture `ort`)

V3 = np.array([1, 2, 3], np.float32)
LINEAR = np.array([0, 5, 11])
PAIRS = np.array([[0, 0], [1, 1], [2, 3]])
INNER, OUTER = np.array([0, 1, 3]), np.array([0, 1, 2, 3])
COO, CSR = 1, 2


def cpu(ort: ModuleType) -> Any:
    return ort.OrtDevice.make("cpu", 0)


def coo_of(ort: ModuleType, shape: Any = (3, 4), values: Any = V3, indices: Any = LINEAR) -> Any:
    return ort.SparseTensor.sparse_coo_from_numpy(shape, values, indices, cpu(ort))


def csr_of(ort: ModuleType, shape: Any = (3, 4), values: Any = V3, inner: Any = INNER,
           outer: Any = OUTER) -> Any:
    return ort.SparseTensor.sparse_csr_from_numpy(shape, values, inner, outer, cpu(ort))


def coo(*arguments: Any) -> Any:
    """Returns a call: what a COO tensor made of `arguments` says of itself."""

    def call(ort: ModuleType) -> Any:
        t = coo_of(ort, *arguments)
        assert int(t.format()) == COO and t.device_name() == "cpu"
        indices = t.as_coo_view().indices().tolist()
        return t.dense_shape(), t.data_type(), t.values().tolist(), indices

    return call


def csr(*arguments: Any) -> Any:
    """Returns a call: what a CSR tensor made of `arguments` says of itself."""

    def call(ort: ModuleType) -> Any:
        t = csr_of(ort, *arguments)
        assert int(t.format()) == CSR and t.device_name() == "cpu"
        view = t.as_csrc_view()
        made = (view.inner().tolist(), view.outer().tolist())
        return t.dense_shape(), t.data_type(), t.values().tolist(), *made

    return call


FLOATS = ([3, 4], "sparse_tensor(float)", [1, 2, 3])
NONE = np.zeros(0, np.int64)

MADE = [
    row("coo_linear", coo([3, 4], V3, LINEAR), (*FLOATS, [0, 5, 11])),
    row("coo_pairs", coo([3, 4], V3, PAIRS), (*FLOATS, PAIRS.tolist())),
    row("coo_tuple", coo((3, 4), V3, LINEAR), (*FLOATS, [0, 5, 11])),
    row("coo_array", coo(np.array([3, 4]), V3, LINEAR), (*FLOATS, [0, 5, 11])),
    row("coo_unsorted", coo([3, 4], V3, LINEAR[::-1].copy()), (*FLOATS, [11, 5, 0])),
    row("coo_1d", coo([12], V3, LINEAR), ([12], *FLOATS[1:], [0, 5, 11])),
    row("coo_3d", coo([2, 3, 4], V3, LINEAR), ([2, 3, 4], *FLOATS[1:], [0, 5, 11])),
    row("coo_empty", coo([3, 4], V3[:0], NONE), ([3, 4], "sparse_tensor(float)", [], [])),
    row("coo_int64", coo([3, 4], np.array([1, 2, 3]), LINEAR),
        ([3, 4], "sparse_tensor(int64)", [1, 2, 3], [0, 5, 11])),
    row("coo_double", coo([3, 4], V3.astype(float), LINEAR),
        ([3, 4], "sparse_tensor(double)", [1, 2, 3], [0, 5, 11])),
    row("coo_int32_indices", coo([3, 4], V3, LINEAR.astype(np.int32)), (*FLOATS, [0, 5, 11])),
    row("coo_list_indices", coo([3, 4], V3, [0, 5, 11]), (*FLOATS, [0, 5, 11])),
    row("coo_few_indices", coo([3, 4], V3, np.array([0, 5])), Raises("RuntimeError")),
    row("coo_list_values", coo([3, 4], [1.0, 2.0], LINEAR), Raises("TypeError")),
    row("coo_complex", coo([3, 4], V3.astype(np.complex64), LINEAR), Raises("RuntimeError")),
    row("csr", csr([3, 4], V3, INNER, OUTER), (*FLOATS, [0, 1, 3], [0, 1, 2, 3])),
    row("csr_array", csr(np.array([3, 4]), V3, INNER, OUTER), (*FLOATS, [0, 1, 3], [0, 1, 2, 3])),
    row("csr_int64", csr([3, 4], np.array([1, 2, 3]), INNER, OUTER),
        ([3, 4], "sparse_tensor(int64)", [1, 2, 3], [0, 1, 3], [0, 1, 2, 3])),
    row("csr_empty", csr([3, 4], V3[:0], NONE, NONE),
        ([3, 4], "sparse_tensor(float)", [], [], [])),
    row("csr_outer", csr([3, 4], V3, INNER, np.array([0, 1, 3])), Raises("RuntimeError")),
    row("csr_inner", csr([3, 4], V3, INNER[:2], OUTER), Raises("RuntimeError")),
    row("csr_1d", csr([12], V3, INNER, OUTER), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), MADE)
def test_made(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


VIEWS = [
    row("csr_of_coo", lambda o: coo_of(o).as_csrc_view(), Raises("RuntimeError")),
    row("blocks_of_coo", lambda o: coo_of(o).as_blocksparse_view(), Raises("RuntimeError")),
    row("coo_of_csr", lambda o: csr_of(o).as_coo_view(), Raises("RuntimeError")),
    row("blocks_of_csr", lambda o: csr_of(o).as_blocksparse_view(), Raises("RuntimeError")),
    row("values_shared", lambda o: coo_of(o).values().ctypes.data == V3.ctypes.data, True),
    row("values_read_only", lambda o: coo_of(o).values().flags.writeable, False),
    row("indices_read_only", lambda o: coo_of(o).as_coo_view().indices().flags.writeable, False),
    row("inner_read_only", lambda o: csr_of(o).as_csrc_view().inner().flags.writeable, False),
    row("outer_read_only", lambda o: csr_of(o).as_csrc_view().outer().flags.writeable, False),
    row("indices_int64", lambda o: str(coo_of(o).as_coo_view().indices().dtype), "int64"),
    row("shape_is_list", lambda o: type(coo_of(o).dense_shape()), list),
    row("format_class", lambda o: coo_of(o).format() == o.OrtSparseFormat.ORT_SPARSE_COO, True),
    row("format_csr", lambda o: csr_of(o).format() == o.OrtSparseFormat.ORT_SPARSE_CSRC, True),
]


@pytest.mark.parametrize(("call", "expected"), VIEWS)
def test_view(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_views_outlive_tensor(ort: ModuleType):
    t = coo_of(ort, [3, 4], np.array([7, 8, 9], np.float32))
    values, view = t.values(), t.as_coo_view()
    indices = view.indices()
    del t
    gc.collect()
    assert values.tolist() == [7, 8, 9]
    assert indices.tolist() == [0, 5, 11] and view.indices().tolist() == [0, 5, 11]


def as_value(ort: ModuleType) -> Any:
    return ort.OrtValue.ort_value_from_sparse_tensor(coo_of(ort))


VALUES = [
    row("is_sparse", lambda o: as_value(o).is_sparse_tensor(), True),
    row("is_tensor", lambda o: as_value(o).is_tensor(), False),
    row("is_sequence", lambda o: as_value(o).is_tensor_sequence(), False),
    row("has_value", lambda o: as_value(o).has_value(), True),
    row("data_type", lambda o: as_value(o).data_type(), "sparse_tensor(float)"),
    row("element_type", lambda o: as_value(o).element_type(), 1),
    row("shape", lambda o: as_value(o).shape(), [3, 4]),
    row("device_name", lambda o: as_value(o).device_name(), "cpu"),
    row("numpy", lambda o: as_value(o).numpy(), Raises("RuntimeError")),
    row("data_ptr", lambda o: as_value(o).data_ptr(), Raises("RuntimeError")),
    row("size", lambda o: as_value(o).tensor_size_in_bytes(), Raises("RuntimeError")),
    row("dlpack", lambda o: as_value(o).__dlpack__(), Raises("RuntimeError")),
    row("back", lambda o: as_value(o).as_sparse_tensor().values().tolist(), [1, 2, 3]),
    row("back_class", lambda o: type(as_value(o).as_sparse_tensor()) is o.SparseTensor, True),
    row("dense", lambda o: value(o, A).as_sparse_tensor(), Raises("RuntimeError")),
    row("from_array", lambda o: o.OrtValue.ort_value_from_sparse_tensor(A),
        Raises("AttributeError")),
    row("wrap", lambda o: o.SparseTensor(coo_of(o)._tensor).dense_shape(), [3, 4]),
    row("wrap_array", lambda o: o.SparseTensor(V3), Raises("ValueError", "needs to be of type")),
    row("native", lambda o: type(coo_of(o)._get_c_tensor()) is native(o).SparseTensor, True),
    row("to_cuda", lambda o: coo_of(o).to_cuda(o.OrtDevice.make("cuda", 0)),
        Raises("RuntimeError")),
    row("no_device", lambda o: o.SparseTensor.sparse_coo_from_numpy([3, 4], V3, LINEAR, None),
        Raises("AttributeError")),
]


@pytest.mark.parametrize(("call", "expected"), VALUES)
def test_value(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)
