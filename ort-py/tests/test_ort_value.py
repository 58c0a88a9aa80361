"""OrtValue: making, reading, changing values."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, DTYPES, NO_CRASH, Raises, native, row, run_program, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)

NOT_NUMERIC = Raises("RuntimeError", "only supported from non-string numpy arrays")
WRONG_DEVICE = Raises("Exception", "Unsupported device type: foo")


def facts(v: Any) -> tuple[Any, ...]:
    """Returns what an OrtValue says of itself."""
    kinds = (v.is_tensor(), v.is_sparse_tensor(), v.is_tensor_sequence(), v.has_value())
    form = (v.data_type(), v.element_type(), v.shape(), v.tensor_size_in_bytes())
    return *form, v.device_name(), kinds


@pytest.mark.parametrize(
    ("dtype", "name", "element", "size"), [row(d[0], *d) for d in DTYPES]
)
def test_dtype(ort: ModuleType, dtype: str, name: str, element: int, size: int):
    array = np.ones((2, 3), dtype)
    v = value(ort, array)
    kinds = (True, False, False, True)
    assert facts(v) == (name, element, [2, 3], 6 * size, "cpu", kinds)
    assert v.data_ptr() == array.ctypes.data
    assert v.numpy().dtype == array.dtype and v.numpy().tolist() == array.tolist()


@pytest.mark.parametrize(
    ("dtype", "name", "element", "size"), [row(d[0], *d) for d in DTYPES]
)
@pytest.mark.parametrize("form", ["dtype", "name", "onnx"])
def test_element_type(
    ort: ModuleType, dtype: str, name: str, element: int, size: int, form: str
):
    given = {"dtype": np.dtype(dtype), "name": dtype, "onnx": element}[form]
    v = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], given)
    assert facts(v)[:4] == (name, element, [2, 3], 6 * size)


def shared(make: Any) -> Any:
    """Returns a call: whether the memory is the array's own, the shape, the values."""

    def call(ort: ModuleType) -> Any:
        array = make()
        v = value(ort, array)
        return v.data_ptr() == array.ctypes.data, v.shape(), v.numpy().tolist()

    return call


def read_only() -> np.ndarray:
    array = A.copy()
    array.setflags(write=False)
    return array


ROWS = [[0, 1, 2], [3, 4, 5]]

LAYOUTS = [
    row("contiguous", shared(lambda: A), (True, [2, 3], ROWS)),
    row("fortran", shared(lambda: np.asfortranarray(A)), (False, [2, 3], ROWS)),
    row("transposed", shared(lambda: A.T), (False, [3, 2], [[0, 3], [1, 4], [2, 5]])),
    row("strided", shared(lambda: A[:, ::2]), (False, [2, 2], [[0, 2], [3, 5]])),
    row("reversed", shared(lambda: A[::-1]), (False, [2, 3], ROWS[::-1])),
    row("rows", shared(lambda: A[1:]), (True, [1, 3], ROWS[1:])),
    row("broadcast", shared(lambda: np.broadcast_to(A[0], (2, 3))), (False, [2, 3], [ROWS[0]] * 2)),
    row("read_only", shared(read_only), (True, [2, 3], ROWS)),
    row("scalar", shared(lambda: np.array(3, np.float32)), (True, [], 3)),
    row("matrix", shared(lambda: np.asmatrix(A)), (True, [2, 3], ROWS)),
    row("masked", shared(lambda: np.ma.masked_array(A, mask=A > 2)), (True, [2, 3], ROWS)),
    row("big_endian", shared(lambda: A.astype(">f4")), (False, [2, 3], ROWS)),
]


@pytest.mark.parametrize(("call", "expected"), LAYOUTS)
def test_layout(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_empty_array(ort: ModuleType):
    v = value(ort, np.empty((0, 3), np.float32))
    assert facts(v)[2:4] == ([0, 3], 0) and v.numpy().shape == (0, 3)


def from_numpy(given: Any) -> Any:
    """Returns a call: type, shape and values of the OrtValue made of `given`."""

    def call(ort: ModuleType) -> Any:
        v = ort.OrtValue.ortvalue_from_numpy(given)
        return v.data_type(), v.shape(), v.numpy().tolist()

    return call


REFUSED = [
    row("list", from_numpy([1.0, 2.0]), NOT_NUMERIC),
    row("tuple", from_numpy((1.0,)), NOT_NUMERIC),
    row("float", from_numpy(1.0), NOT_NUMERIC),
    row("numpy_scalar", from_numpy(np.float32(1)), NOT_NUMERIC),
    row("none", from_numpy(None), NOT_NUMERIC),
    row("str", from_numpy("a"), NOT_NUMERIC),
    row("bytes", from_numpy(b"a"), NOT_NUMERIC),
    row("dict", from_numpy({}), NOT_NUMERIC),
    row("range", from_numpy(range(3)), NOT_NUMERIC),
    row("memoryview", from_numpy(memoryview(b"ab")), NOT_NUMERIC),
    row("datetime", from_numpy(np.ones(2, "datetime64[s]")), Raises("RuntimeError")),
    row("complex64", from_numpy(np.ones(2, np.complex64)), Raises("RuntimeError")),
    row("complex128", from_numpy(np.ones(2, complex)), Raises("RuntimeError")),
    row("unicode", from_numpy(np.array(["a", "bc"])), ("tensor(string)", [2], ["a", "bc"])),
    row("octets", from_numpy(np.array([b"a", b"bc"])), ("tensor(string)", [2], ["a", "bc"])),
    row("objects", from_numpy(np.array(["a"], object)), ("tensor(string)", [1], ["a"])),
]


@pytest.mark.parametrize(("call", "expected"), REFUSED)
def test_refused(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def small_type(name: str) -> Any:
    """Returns a call: the type string of an array of `ml_dtypes.<name>`."""

    def call(ort: ModuleType) -> str:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return value(ort, np.ones(2, getattr(ml_dtypes, name))).data_type()

    return call


SMALL_TYPES = [
    row(name, small_type(name), text)
    for name, text in {
        "bfloat16": "tensor(bfloat16)",
        "float8_e4m3fn": "tensor(float8e4m3fn)",
        "float8_e4m3fnuz": "tensor(float8e4m3fnuz)",
        "float8_e5m2": "tensor(float8e5m2)",
        "float8_e5m2fnuz": "tensor(float8e5m2fnuz)",
        "int4": "tensor(int4)",
        "uint4": "tensor(uint4)",
    }.items()
]


@pytest.mark.parametrize(("call", "expected"), SMALL_TYPES)
def test_small_type(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def on_device(*arguments: Any, **keywords: Any) -> Any:
    """Returns a call: the device of an OrtValue made with these arguments."""
    return lambda ort: ort.OrtValue.ortvalue_from_numpy(A, *arguments, **keywords).device_name()


DEVICES = [
    row("default", on_device(), "cpu"),
    row("cpu", on_device("cpu"), "cpu"),
    row("id", on_device("cpu", 1), "cpu"),
    row("vendor", on_device("cpu", 0, 0), "cpu"),
    row("keywords", on_device(device_type="cpu", device_id=0, vendor_id=-1), "cpu"),
    row("upper", on_device("CPU"), "cpu"),
    row("unknown", on_device("foo"), WRONG_DEVICE),
    row("nothing", on_device(""), Raises("Exception", "Unsupported device type: ")),
    row("none", on_device(None), Raises("TypeError")),
    row("id_str", on_device("cpu", "0"), Raises("TypeError")),
    row("array_keyword", lambda o: o.OrtValue.ortvalue_from_numpy(numpy_obj=A),
        Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), DEVICES)
def test_device(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize("device", ["cuda", "gpu", "dml", "cann", "npu", "webgpu"])
def test_absent_device(ort: ModuleType, device: str):
    if ort.get_available_providers() not in (
        ["CPUExecutionProvider"],
        ["AzureExecutionProvider", "CPUExecutionProvider"],
    ):
        pytest.skip("this build has other devices")
    with pytest.raises(RuntimeError):
        ort.OrtValue.ortvalue_from_numpy(A, device)
    with pytest.raises(RuntimeError):
        ort.OrtValue.ortvalue_from_shape_and_type([2], np.float32, device)


def with_type(array: np.ndarray, element: Any) -> Any:
    """Returns a call: type, shape, bytes of `array` seen as another type, without a copy."""

    def call(ort: ModuleType) -> Any:
        v = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
        assert v.data_ptr() == array.ctypes.data
        return v.data_type(), v.shape(), v.tensor_size_in_bytes()

    return call


U8, U16, I64 = np.arange(4, dtype=np.uint8), np.arange(4, dtype=np.uint16), np.arange(2)
BAD_SIZE = Raises("RuntimeError", "Items size in the incoming array")
BAD_TYPE = Raises("RuntimeError", "not supported|Not a valid ONNX Tensor data type")

REINTERPRETED = [
    row("bfloat16", with_type(U16, 16), ("tensor(bfloat16)", [4], 8)),
    row("float16", with_type(U16, 10), ("tensor(float16)", [4], 8)),
    row("bfloat16_of_float16", with_type(U16.view(np.float16), 16), ("tensor(bfloat16)", [4], 8)),
    row("float8e4m3fn", with_type(U8, 17), ("tensor(float8e4m3fn)", [4], 4)),
    row("float8e4m3fnuz", with_type(U8, 18), ("tensor(float8e4m3fnuz)", [4], 4)),
    row("float8e5m2", with_type(U8, 19), ("tensor(float8e5m2)", [4], 4)),
    row("float8e5m2fnuz", with_type(U8, 20), ("tensor(float8e5m2fnuz)", [4], 4)),
    row("uint8", with_type(U8, 2), ("tensor(uint8)", [4], 4)),
    row("int8", with_type(U8, 3), ("tensor(int8)", [4], 4)),
    row("bool", with_type(U8, 9), ("tensor(bool)", [4], 4)),
    row("int32_of_float", with_type(A, 6), ("tensor(int32)", [2, 3], 24)),
    row("float_of_float", with_type(A, 1), ("tensor(float)", [2, 3], 24)),
    row("double_of_int64", with_type(I64, 11), ("tensor(double)", [2], 16)),
    row("numpy_int", with_type(U16, np.int64(16)), ("tensor(bfloat16)", [4], 8)),
    row("too_wide", with_type(U8, 16), BAD_SIZE),
    row("too_wide_float", with_type(A, 11), BAD_SIZE),
    row("undefined", with_type(U8, 0), BAD_TYPE),
    row("unknown", with_type(U8, 99), BAD_TYPE),
    row("negative", with_type(U8, -1), BAD_TYPE),
    row("complex", with_type(np.ones(2, np.complex64), 14), BAD_TYPE),
    row("string", with_type(U8, 8), Raises("RuntimeError")),
    row("float_number", with_type(U16, 16.0), Raises("TypeError")),
    row("str_number", with_type(U16, "16"), Raises("TypeError")),
    row("list", lambda o: o.OrtValue.ortvalue_from_numpy_with_onnx_type([1], 7),
        Raises("TypeError")),
    row(
        "keyword",
        lambda o: o.OrtValue.ortvalue_from_numpy_with_onnx_type(
            U16, onnx_element_type=16
        ).element_type(),
        16,
    ),
]


@pytest.mark.parametrize(("call", "expected"), REINTERPRETED)
def test_with_onnx_type(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def numpy_of(array: np.ndarray, element: int) -> Any:
    """Returns a call: dtype and length of `numpy()` of `array` seen as another type."""

    def call(ort: ModuleType) -> Any:
        seen = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element).numpy()
        return str(seen.dtype), len(seen)

    return call


NUMPY_OF = [
    row("float8", numpy_of(U8, 17), ("uint8", 4)),
    row("float16", numpy_of(U16, 10), ("float16", 4)),
    row("bfloat16", numpy_of(U16, 16), ("bfloat16", 4)),
]


@pytest.mark.parametrize(("call", "expected"), NUMPY_OF)
def test_numpy_of_small_type(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def from_type(element: Any) -> Any:
    """Returns a call: the type string of a value of that element type."""
    return lambda o: o.OrtValue.ortvalue_from_shape_and_type([2, 3], element).data_type()


ELEMENTS = [
    row("float32_class", from_type(np.float32), "tensor(float)"),
    row("float16_class", from_type(np.float16), "tensor(float16)"),
    row("bool_class", from_type(np.bool_), "tensor(bool)"),
    row("python_float", from_type(float), "tensor(double)"),
    row("python_int", from_type(int), "tensor(int64)"),
    row("python_bool", from_type(bool), "tensor(bool)"),
    row("code", from_type("f4"), "tensor(float)"),
    row("name_float", from_type("float"), "tensor(double)"),
    row("bfloat16", from_type(16), "tensor(bfloat16)"),
    row("float8", from_type(17), "tensor(float8e4m3fn)"),
    row("int4", from_type(22), "tensor(int4)"),
    row("onnx_string", from_type(8), Raises("RuntimeError")),
    row("undefined", from_type(0), Raises("RuntimeError", "tensor type 0 is not supported")),
    row("unknown", from_type(99), Raises("RuntimeError", "tensor type 99 is not supported")),
    row("negative", from_type(-1), Raises("RuntimeError", "tensor type -1 is not supported")),
    row("number", from_type(1.0), Raises("RuntimeError", "Not a valid numpy type")),
    row("nonsense", from_type("foo"), Raises("RuntimeError", "Not a valid numpy type")),
    row("type_string", from_type("tensor(float)"),
        Raises("RuntimeError", "Not a valid numpy type")),
    row("str_class", from_type(str), NOT_NUMERIC),
    row("numpy_str", from_type(np.str_), NOT_NUMERIC),
    row("object_class", from_type(object), NOT_NUMERIC),
    row("complex", from_type(np.complex64), Raises("RuntimeError")),
    row("longdouble", from_type(np.longdouble), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), ELEMENTS)
def test_element_form(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def from_shape(shape: Any) -> Any:
    """Returns a call: shape and bytes of a float32 value of that shape."""

    def call(ort: ModuleType) -> Any:
        v = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
        assert list(v.numpy().shape) == v.shape()
        return v.shape(), v.tensor_size_in_bytes()

    return call


SHAPES = [
    row("list", from_shape([2, 3]), ([2, 3], 24)),
    row("tuple", from_shape((2, 3)), ([2, 3], 24)),
    row("array", from_shape(np.array([2, 3])), ([2, 3], 24)),
    row("range", from_shape(range(1, 4)), ([1, 2, 3], 24)),
    row("numpy_ints", from_shape([np.int32(2), np.int64(3)]), ([2, 3], 24)),
    row("scalar", from_shape([]), ([], 4)),
    row("scalar_tuple", from_shape(()), ([], 4)),
    row("no_rows", from_shape([0, 3]), ([0, 3], 0)),
    row("no_columns", from_shape([2, 0]), ([2, 0], 0)),
    row("int", from_shape(5), Raises("TypeError")),
    row("none", from_shape(None), Raises("TypeError")),
    row("floats", from_shape([1.5]), Raises("TypeError")),
    row("float_array", from_shape(np.array([2.0, 3.0])), Raises("TypeError")),
    row("strings", from_shape(["a"]), Raises("TypeError")),
    row("str", from_shape("ab"), Raises("TypeError")),
    row("dict", from_shape({2: 0}), Raises("TypeError")),
    row("wider_than_int64", from_shape([2**70]), Raises("TypeError")),
    row("negative", from_shape([-1, 3]), Raises("RuntimeError")),
    row("overflow", from_shape([2**40, 2**40]), Raises("RuntimeError")),
    row("too_large", from_shape([2**48]), Raises("MemoryError")),
]


@pytest.mark.parametrize(("call", "expected"), SHAPES)
def test_shape(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_shape_and_type_keywords(ort: ModuleType):
    v = ort.OrtValue.ortvalue_from_shape_and_type(
        shape=[2], element_type=np.float32, device_type="cpu", device_id=0, vendor_id=-1,
        memory_info=None,
    )
    assert v.shape() == [2]


def test_numpy_shares(ort: ModuleType):
    array = A.copy()
    v = value(ort, array)
    seen = v.numpy()
    assert seen.ctypes.data == array.ctypes.data
    assert seen.flags.writeable and not seen.flags.owndata and seen is not v.numpy()
    seen[0, 0] = 9
    assert array[0, 0] == 9
    array[0, 0] = 8
    assert v.numpy()[0, 0] == 8


def test_numpy_outlives_value(ort: ModuleType):
    v = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    seen = v.numpy()
    seen[:] = 7
    del v
    gc.collect()
    assert seen.tolist() == [[7] * 3] * 2


def test_value_keeps_array(ort: ModuleType):
    array = np.full(1000, 3, np.float32)
    alive = weakref.ref(array)
    v = value(ort, array)
    del array
    gc.collect()
    assert alive() is not None and v.numpy()[-1] == 3
    del v
    gc.collect()
    assert alive() is None


ARRAY = [
    row("shares", lambda o, v: np.asarray(v).ctypes.data == v.data_ptr(), True),
    row("copies", lambda o, v: np.array(v).ctypes.data == v.data_ptr(), False),
    row("never_copies", lambda o, v: np.asarray(v, copy=False).ctypes.data == v.data_ptr(), True),
    row("casts", lambda o, v: str(np.asarray(v, dtype=np.float64).dtype), "float64"),
    row("cannot_cast", lambda o, v: np.asarray(v, np.float64, copy=False), Raises("ValueError")),
    row("method", lambda o, v: v.__array__().tolist(), ROWS),
    row("method_dtype", lambda o, v: str(v.__array__(dtype=np.int64, copy=True).dtype), "int64"),
    row("sum", lambda o, v: float(np.sum(v)), 15.0),
    row("right_operand", lambda o, v: (A + v).tolist(), (A + A).tolist()),
    row("left_operand", lambda o, v: v + 1, Raises("TypeError")),
    row("length", lambda o, v: len(v), Raises("TypeError")),
    row("index", lambda o, v: v[0], Raises("TypeError")),
    row("iterate", lambda o, v: list(v), Raises("TypeError")),
    row("itself", lambda o, v: v == v, True),
    row("hash", lambda o, v: hash(v) == hash(v), True),
]


@pytest.mark.parametrize(("call", "expected"), ARRAY)
def test_as_array(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, lambda o: call(o, value(o, A)), expected)


def updated(make: Any) -> Any:
    """Returns a call: values, shape after `update_inplace`, at the same address."""

    def call(ort: ModuleType) -> Any:
        base = np.zeros((2, 3), np.float32)
        v = value(ort, base)
        assert v.update_inplace(make(ort)) is None
        assert v.data_ptr() == base.ctypes.data
        return v.numpy().tolist(), v.shape()

    return call


SAME = (ROWS, [2, 3])
BAD_LENGTH = Raises("RuntimeError", "size of numpy arrays does not match|same size")
BAD_KIND = Raises("TypeError", "must be a numpy.ndarray or an OrtValue")

UPDATES = [
    row("array", updated(lambda o: A), SAME),
    row("ort_value", updated(lambda o: value(o, A)), SAME),
    row("ort_value_reshaped", updated(lambda o: value(o, A.reshape(3, 2))), SAME),
    row("reshaped", updated(lambda o: A.reshape(3, 2)), SAME),
    row("flat", updated(lambda o: A.ravel()), SAME),
    row("fortran", updated(lambda o: np.asfortranarray(A)), SAME),
    row("reversed", updated(lambda o: A[::-1]), (ROWS[::-1], [2, 3])),
    row("read_only", updated(lambda o: read_only()), SAME),
    row("small", updated(lambda o: np.zeros(2, np.float32)), BAD_LENGTH),
    row("large", updated(lambda o: np.zeros((3, 3), np.float32)), BAD_LENGTH),
    row("ort_value_large", updated(lambda o: value(o, np.zeros(7, np.float32))), BAD_LENGTH),
    row("same_bytes", updated(lambda o: np.ones(3)), Raises("RuntimeError")),
    row("bytes", updated(lambda o: np.zeros(24, np.uint8)), Raises("RuntimeError")),
    row(
        "ort_value_dtype",
        updated(lambda o: value(o, A.astype(np.int32))),
        Raises("RuntimeError", "same data type"),
    ),
    row("dtype", updated(lambda o: np.zeros((2, 3), np.int32)), Raises("RuntimeError")),
    row("big_endian", updated(lambda o: A.astype(">f4")), SAME),
    row("list", updated(lambda o: ROWS), BAD_KIND),
    row("none", updated(lambda o: None), BAD_KIND),
    row("number", updated(lambda o: 1.0), BAD_KIND),
    row("strings", updated(lambda o: np.array(["a"])), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), UPDATES)
def test_update_inplace(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


BEYOND = """
v = ort.OrtValue.ortvalue_from_numpy(np.zeros(6, np.float32))
try:
    v.update_inplace(np.ones(6))
    print('written', flush=True)
except Exception as e:
    print('RuntimeError' if isinstance(e, RuntimeError) else type(e).__name__, flush=True)
os._exit(0)
"""


def test_update_beyond_the_end(request: Any, ort: ModuleType, tmp_path: Path):
    check(request, ort, lambda o: run_program(o, tmp_path, BEYOND), "RuntimeError")


def pair(ort: ModuleType) -> Any:
    """Returns an OrtValue that holds a sequence of two tensors."""
    feed = {"a": value(ort, np.ones(2, np.float32)), "b": value(ort, np.zeros(3, np.float32))}
    return session(ort, "pair").run_with_ort_values(None, feed)[0]


SEQUENCE = [
    row("data_type", lambda v: v.data_type(), "seq(tensor(float))"),
    row("element_type", lambda v: v.element_type(), 1),
    row("has_value", lambda v: v.has_value(), True),
    row("is_tensor", lambda v: v.is_tensor(), False),
    row("is_sparse_tensor", lambda v: v.is_sparse_tensor(), False),
    row("is_tensor_sequence", lambda v: v.is_tensor_sequence(), True),
    row("shape", lambda v: v.shape(), Raises("RuntimeError")),
    row("numpy", lambda v: v.numpy(), Raises("RuntimeError")),
    row("data_ptr", lambda v: v.data_ptr(), Raises("RuntimeError")),
    row("device_name", lambda v: v.device_name(), Raises("RuntimeError")),
    row("size", lambda v: v.tensor_size_in_bytes(), Raises("RuntimeError")),
    row("dlpack", lambda v: v.__dlpack__(), Raises("RuntimeError")),
    row("dlpack_device", lambda v: v.__dlpack_device__(), Raises("RuntimeError")),
    row("sparse", lambda v: v.as_sparse_tensor(), Raises("RuntimeError")),
    row("array", lambda v: np.asarray(v), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("read", "expected"), SEQUENCE)
def test_sequence(request: Any, ort: ModuleType, read: Any, expected: Any):
    check(request, ort, lambda o: read(pair(o)), expected)


def test_sequence_as_input(ort: ModuleType):
    opened = session(ort, "sequence")
    out = opened.run(None, {"x": pair(ort)})[0]
    assert [o.tolist() for o in out] == [[1, 1], [0, 0, 0]]
    out = opened.run_with_ort_values(None, {"x": pair(ort)})[0]
    assert out.is_tensor_sequence()


OBJECT = [
    row("wrap", lambda o, v: o.OrtValue(v._ortvalue).numpy().tolist(), ROWS),
    row("wrap_twice", lambda o, v: o.OrtValue(v), Raises("ValueError", "needs to be of type")),
    row("wrap_array", lambda o, v: o.OrtValue(A), Raises("ValueError", "needs to be of type")),
    row("wrap_none", lambda o, v: o.OrtValue(None), Raises("ValueError", "needs to be of type")),
    row("wrap_nothing", lambda o, v: o.OrtValue(), Raises("TypeError")),
    row("get_c_value", lambda o, v: v._get_c_value() is v._ortvalue, True),
    row("native_class", lambda o, v: type(v._ortvalue) is native(o).OrtValue, True),
    row("not_native", lambda o, v: o.OrtValue is native(o).OrtValue, False),
    row("attribute", lambda o, v: setattr(v, "mine", 1), None),
    row("native_attribute", lambda o, v: setattr(v._ortvalue, "mine", 1), Raises("AttributeError")),
    row("weak_reference", lambda o, v: weakref.ref(v)() is v, True),
    row("copy", lambda o, v: copy.copy(v).data_ptr() == v.data_ptr(), True),
    row("pickle", lambda o, v: pickle.loads(pickle.dumps(v)).numpy().tolist(), ROWS),
    row("deep_copy", lambda o, v: copy.deepcopy(v).numpy().tolist(), ROWS),
    row("no_to_dlpack", lambda o, v: hasattr(v, "to_dlpack"), False),
]


@pytest.mark.parametrize(("call", "expected"), OBJECT)
def test_object(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, lambda o: call(o, value(o, A)), expected)


def test_subclass(ort: ModuleType):
    class Mine(ort.OrtValue):
        pass

    made = Mine.ortvalue_from_numpy(A)
    assert type(made) is Mine and made.numpy().tolist() == ROWS
    assert type(Mine(value(ort, A)._ortvalue)) is Mine


def vector(ort: ModuleType, *arrays: np.ndarray) -> Any:
    """Returns an OrtValueVector of the arrays."""
    made = native(ort).OrtValueVector()
    for array in arrays:
        made.push_back(value(ort, array)._ortvalue)
    return made


BOOLS = np.array([True])

VECTOR = [
    row("empty", lambda o: (len(vector(o)), bool(vector(o))), (0, False)),
    row("length", lambda o: (len(vector(o, A, BOOLS)), bool(vector(o, A))), (2, True)),
    row("index", lambda o: vector(o, A)[0].shape(), [2, 3]),
    row("index_class", lambda o: type(vector(o, A)[0]) is native(o).OrtValue, True),
    row("iterate", lambda o: [v.data_type() for v in vector(o, A, BOOLS)],
        ["tensor(float)", "tensor(bool)"]),
    row("out_of_range", lambda o: vector(o, A)[5], Raises("IndexError")),
    row("bools", lambda o: list(vector(o, A, BOOLS).bool_tensor_indices()), [1]),
    row("no_bools", lambda o: list(vector(o, A).bool_tensor_indices()), []),
    row("element_type", lambda o: vector(o, A, BOOLS).element_type_at(1), 9),
    row("element_type_range", lambda o: vector(o, A).element_type_at(9), Raises("IndexError")),
    row("dlpack_at", lambda o: type(vector(o, A).dlpack_at(0)).__name__, "PyCapsule"),
    row("to_dlpacks", lambda o: [type(c).__name__ for c in vector(o, A).to_dlpacks(None)],
        ["PyCapsule"]),
    row("reserve", lambda o: vector(o, A).reserve(10), None),
    row("shrink", lambda o: vector(o, A).shrink_to_fit(), None),
    row("push_array", lambda o: vector(o).push_back(A), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), VECTOR)
def test_vector(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


class Torchlike:
    """What `push_back_batch` asks of a torch tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def test_vector_batch(ort: ModuleType):
    made = native(ort).OrtValueVector()
    device = ort.OrtDevice.make("cpu", 0)._get_c_device()
    made.push_back_batch([Torchlike(A)], [A.ctypes.data], [np.float32], [[2, 3]], [device])
    assert len(made) == 1 and made[0].numpy().tolist() == ROWS


def run_vector(feed: str, fetch: str) -> Any:
    """Returns a call: what `run_with_ortvaluevector` puts into `fetches`."""

    def call(ort: ModuleType) -> Any:
        device = ort.OrtDevice.make("cpu", 0)._get_c_device()
        fetches = native(ort).OrtValueVector()
        opened = session(ort, "square")
        opened.run_with_ortvaluevector(
            ort.RunOptions(), [feed], vector(ort, A), [fetch], fetches, [device]
        )
        return [v.numpy().tolist() for v in fetches]

    return call


VECTOR_RUNS = [
    row("works", run_vector("x", "y"), [(A * A).tolist()]),
    row("unknown_input", run_vector("q", "y"), Raises("InvalidArgument", "Invalid input name: q")),
    row("unknown_output", run_vector("x", "q"), Raises("InvalidArgument", "Invalid output name:q")),
]


@pytest.mark.parametrize(("call", "expected"), VECTOR_RUNS)
def test_vector_run(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


FEW_DEVICES = """
from {package}.capi.onnxruntime_pybind11_state import OrtValueVector
s = ort.InferenceSession('square.onnx')
feeds = OrtValueVector()
feeds.push_back(ort.OrtValue.ortvalue_from_numpy(np.ones((1, 3), np.float32))._ortvalue)
s.run_with_ortvaluevector(ort.RunOptions(), ['x'], feeds, ['y'], OrtValueVector(), [])
"""


def test_vector_run_without_devices(request: Any, ort: ModuleType, tmp_path: Path):
    code = FEW_DEVICES.replace("{package}", ort.__name__)
    check(request, ort, lambda o: run_program(o, tmp_path, code, "square"), NO_CRASH)


def copied(source: np.ndarray, target: np.ndarray) -> Any:
    """Returns a call: the target after `copy_tensors`."""

    def call(ort: ModuleType) -> Any:
        out = value(ort, target.copy())
        ort.copy_tensors([value(ort, source)], [out])
        return out.numpy().tolist()

    return call


COPIES = [
    row("copies", copied(A, np.zeros((2, 3), np.float32)), ROWS),
    row("shape", copied(A, np.zeros((4, 3), np.float32)), Raises("RuntimeError")),
    row("dtype", copied(A, np.zeros((2, 3), np.int32)), Raises("RuntimeError")),
    row("lengths", lambda o: o.copy_tensors([value(o, A)], []), Raises("RuntimeError")),
    row("arrays", lambda o: o.copy_tensors([A], [A]), Raises("AttributeError")),
]


@pytest.mark.parametrize(("call", "expected"), COPIES)
def test_copy_tensors(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


CREATED = [
    row("cpu", lambda s: s.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu").shape(),
        [2, 3]),
    row("onnx", lambda s: s.create_ortvalue_from_shape_and_type((2,), 7, "cpu").data_type(),
        "tensor(int64)"),
    row("no_device", lambda s: s.create_ortvalue_from_shape_and_type([2], np.float32),
        Raises("TypeError")),
]


@pytest.mark.parametrize(("make", "expected"), CREATED)
def test_created_by_session(request: Any, ort: ModuleType, make: Any, expected: Any):
    check(request, ort, lambda o: make(session(o, "square")), expected)
