"""DLPack in both directions."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, DTYPES, Raises, native, row, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)


class Exporter:
    """An object of another library that speaks DLPack without versions."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = array.dtype

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def imported(array: np.ndarray, wrap: Any = None) -> Any:
    """Returns a call: type, shape, sharing and values of the OrtValue made of `array`."""

    def call(ort: ModuleType) -> Any:
        v = ort.OrtValue.from_dlpack(wrap(array) if wrap else array)
        shares = v.data_ptr() == array.ctypes.data
        return v.data_type(), v.shape(), shares, v.numpy().tolist()

    return call


NUMBERS = [
    row(dtype, imported(np.ones((2, 3), dtype)), (name, [2, 3], True, [[1] * 3] * 2))
    for dtype, name, _, _ in DTYPES
]


@pytest.mark.parametrize(("call", "expected"), NUMBERS)
def test_import(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize("dtype", [d[0] for d in DTYPES if d[0] != "bool"])
def test_export(ort: ModuleType, dtype: str):
    array = np.ones((2, 3), dtype)
    v = value(ort, array)
    seen = np.from_dlpack(v)
    assert seen.dtype == array.dtype and seen.ctypes.data == array.ctypes.data
    assert seen.tolist() == array.tolist()


def exported_bool(ort: ModuleType) -> Any:
    array = np.array([True, False])
    seen = np.from_dlpack(value(ort, array))
    return str(seen.dtype), seen.astype(bool).tolist()


def read_only() -> np.ndarray:
    array = A.copy()
    array.setflags(write=False)
    return array


def twice(ort: ModuleType) -> None:
    capsule = A.__dlpack__()
    ort.OrtValue.from_dlpack(capsule)
    ort.OrtValue.from_dlpack(capsule)


ROWS = A.tolist()
NOT_DLPACK = Raises("TypeError", "DLPack capsule|__dlpack__")
NOT_CONTIGUOUS = Raises("RuntimeError", "ontiguous")

OBJECTS = [
    row("capsule", imported(A, lambda a: a.__dlpack__()), ("tensor(float)", [2, 3], True, ROWS)),
    row("exporter", imported(A, Exporter), ("tensor(float)", [2, 3], True, ROWS)),
    row("exporter_bool", imported(np.array([True]), Exporter), ("tensor(bool)", [1], True, [True])),
    row("scalar", imported(np.array(3, np.float32)), ("tensor(float)", [], True, 3)),
    row("rows", imported(A[1:]), ("tensor(float)", [1, 3], True, ROWS[1:])),
    row("strided", imported(A[:, ::2]), NOT_CONTIGUOUS),
    row("fortran", imported(np.asfortranarray(A)), NOT_CONTIGUOUS),
    row("reversed", imported(A[::-1]), NOT_CONTIGUOUS),
    row("read_only", imported(read_only()), Raises("BufferError")),
    row("strings", imported(np.array(["a"])), Raises("BufferError")),
    row("complex", imported(np.ones(2, np.complex64)), Raises("RuntimeError")),
    row("twice", twice, Raises("TypeError")),
    row("none", lambda o: o.OrtValue.from_dlpack(None), NOT_DLPACK),
    row("number", lambda o: o.OrtValue.from_dlpack(1), NOT_DLPACK),
    row("list", lambda o: o.OrtValue.from_dlpack([1.0]), NOT_DLPACK),
    row("str", lambda o: o.OrtValue.from_dlpack("a"), NOT_DLPACK),
    row("object", lambda o: o.OrtValue.from_dlpack(object()), NOT_DLPACK),
    row("keyword", lambda o: o.OrtValue.from_dlpack(data=A), Raises("TypeError")),
    row("ort_value", lambda o: o.OrtValue.from_dlpack(value(o, A)).data_ptr(), A.ctypes.data),
    row(
        "ort_value_bool",
        lambda o: o.OrtValue.from_dlpack(value(o, np.array([True]))).data_type(),
        "tensor(bool)",
    ),
    row("export_bool", exported_bool, ("uint8", [True, False])),
    row("empty", lambda o: o.OrtValue.from_dlpack(np.zeros((0, 3), np.float32)).shape(), [0, 3]),
]


@pytest.mark.parametrize(("call", "expected"), OBJECTS)
def test_object(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


PROTOCOL = [
    row("device", lambda v: v.__dlpack_device__(), (1, 0)),
    row("capsule", lambda v: type(v.__dlpack__()).__name__, "PyCapsule"),
    row("name", lambda v: '"dltensor"' in repr(v.__dlpack__()), True),
    row("stream_none", lambda v: type(v.__dlpack__(stream=None)).__name__, "PyCapsule"),
    row("stream", lambda v: type(v.__dlpack__(stream=1)).__name__, "PyCapsule"),
    row("positional", lambda v: v.__dlpack__(None), Raises("TypeError")),
    row("max_version", lambda v: type(v.__dlpack__(max_version=(1, 0))).__name__, "PyCapsule"),
    row("dl_device", lambda v: type(v.__dlpack__(dl_device=(1, 0))).__name__, "PyCapsule"),
    row("copy", lambda v: type(v.__dlpack__(copy=True)).__name__, "PyCapsule"),
    row("numpy_copy", lambda v: np.from_dlpack(v, copy=True).ctypes.data == v.data_ptr(), False),
    row("numpy_device", lambda v: np.from_dlpack(v, device="cpu").tolist(), ROWS),
    row("native", lambda v: type(v._ortvalue.to_dlpack()).__name__, "PyCapsule"),
]


@pytest.mark.parametrize(("read", "expected"), PROTOCOL)
def test_protocol(request: Any, ort: ModuleType, read: Any, expected: Any):
    check(request, ort, lambda o: read(value(o, A)), expected)


U8, U16 = np.zeros(4, np.uint8), np.zeros(4, np.uint16)


def round_trip(array: np.ndarray, element: int) -> Any:
    """Returns a call: the type after leaving by DLPack and coming back."""

    def call(ort: ModuleType) -> str:
        made = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
        return ort.OrtValue.from_dlpack(made).data_type()

    return call


ROUND_TRIPS = [
    row("bfloat16", round_trip(U16, 16), "tensor(bfloat16)"),
    row("float16", round_trip(U16, 10), "tensor(float16)"),
    row("bool", round_trip(U8, 9), "tensor(bool)"),
    row("float8e4m3fn", round_trip(U8, 17), Raises("RuntimeError")),
    row("float8e5m2", round_trip(U8, 19), Raises("RuntimeError")),
    row("uint4", round_trip(U8, 21), Raises("RuntimeError")),
    row("int4", round_trip(U8, 22), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), ROUND_TRIPS)
def test_round_trip(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


NATIVE = [
    row("float", lambda c: c.OrtValue.from_dlpack(A.__dlpack__(), False).data_type(),
        "tensor(float)"),
    row("as_bool", lambda c: c.OrtValue.from_dlpack(U8.__dlpack__(), True).data_type(),
        "tensor(bool)"),
    row("as_uint8", lambda c: c.OrtValue.from_dlpack(U8.__dlpack__(), False).data_type(),
        "tensor(uint8)"),
    row("float_as_bool", lambda c: c.OrtValue.from_dlpack(A.__dlpack__(), True).data_type(),
        "tensor(float)"),
    row("is_uint8", lambda c: c.is_dlpack_uint8_tensor(U8.__dlpack__()), True),
    row("is_not_uint8", lambda c: c.is_dlpack_uint8_tensor(A.__dlpack__()), False),
]


@pytest.mark.parametrize(("read", "expected"), NATIVE)
def test_native(request: Any, ort: ModuleType, read: Any, expected: Any):
    check(request, ort, lambda o: read(native(o)), expected)


def test_value_keeps_source(ort: ModuleType):
    array = np.full(1000, 3, np.float32)
    alive = weakref.ref(array)
    v = ort.OrtValue.from_dlpack(array)
    del array
    gc.collect()
    assert alive() is not None and v.numpy()[-1] == 3
    del v
    gc.collect()
    assert alive() is None


def test_output_outlives_session(ort: ModuleType):
    out = session(ort, "square").run_with_ort_values(None, {"x": value(ort, A)})[0]
    seen = np.from_dlpack(out)
    del out
    gc.collect()
    assert seen.tolist() == (A * A).tolist()


def keeps_array(use: Any) -> Any:
    """Returns a call: whether what `use` makes keeps the array behind an OrtValue alive."""

    def call(ort: ModuleType) -> bool:
        array = np.ones(3, np.float32)
        alive = weakref.ref(array)
        made = use(value(ort, array))
        del array
        gc.collect()
        kept = alive() is not None
        del made
        gc.collect()
        assert alive() is None
        return kept

    return call


LIFETIMES = [
    row("capsule", keeps_array(lambda v: v.__dlpack__()), True),
    row("array", keeps_array(np.from_dlpack), True),
]


@pytest.mark.parametrize(("call", "expected"), LIFETIMES)
def test_lifetime(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_as_input(ort: ModuleType):
    opened = session(ort, "square")
    out = opened.run_with_ort_values(None, {"x": ort.OrtValue.from_dlpack(A)})[0]
    assert np.from_dlpack(out).tolist() == (A * A).tolist()
