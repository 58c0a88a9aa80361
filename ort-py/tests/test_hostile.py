"""Arguments, callbacks and memory that mean harm: an exception comes out, never a panic or a crash.

What may end the process runs in a script of its own.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import models
import numpy as np
import pytest
from harness import (
    CPU,
    IS_ORIGINAL,
    C,
    Gives,
    Raises,
    case,
    check,
    check_script,
    f32,
    options,
    ort,
    session,
    strings,
    table,
)

pytestmark = pytest.mark.skipif(IS_ORIGINAL, reason="much of this ends the original's process")

A = np.arange(6, dtype=np.float32).reshape(2, 3)
X = f32(1, 2)
WAIT = 10


def value(array: np.ndarray) -> Any:
    """An OrtValue over an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy that must not be written."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


# Callbacks.


class Stop(BaseException):
    """Stands for KeyboardInterrupt and SystemExit, which must never be swallowed."""


class Raising:
    """An object all of whose methods that the package may call raise one exception."""

    def __init__(self, error: type[BaseException], *methods: str) -> None:
        self.error = error
        # Special methods are looked up in the class.
        own = {name: self._raise for name in methods}
        self.__class__ = type("Raising", (Raising,), own)

    @staticmethod
    def _raise(self: Raising, *_: Any, **__: Any) -> Any:
        raise self.error("from a callback")


def names_until(error: type[BaseException]) -> Any:
    """A generator of output names that raises after the first."""
    yield "y"
    raise error("from a callback")


class Feed(Mapping):
    """A mapping whose keys and values come from functions."""

    def __init__(self, keys: Callable[[], Any], values: Callable[[], Any]) -> None:
        self.keys, self.values = keys, values  # type: ignore[method-assign]

    def __getitem__(self, key: Any) -> Any:
        return self.values()[0]

    def __iter__(self) -> Any:
        return iter(self.keys())

    def __len__(self) -> int:
        return 1


def raiser(error: type[BaseException]) -> Callable[..., Any]:
    """A function that raises."""

    def call(*_: Any, **__: Any) -> Any:
        raise error("from a callback")

    return call


def delegated(error: type[BaseException]) -> Any:
    """A session whose providers a function chooses."""
    made = ort.SessionOptions()
    made.set_provider_selection_policy_delegate(raiser(error))
    return ort.InferenceSession(models.data("scale"), made)


SWALLOWED = "map_err in the Rust source takes any exception, KeyboardInterrupt and SystemExit too"

CALLBACKS: list[tuple[str, Callable[[type[BaseException]], Any]]] = [
    ("feed_keys", lambda e: session("scale").run(None, Feed(raiser(e), lambda: [X]))),
    ("feed_values", lambda e: session("scale").run(None, Feed(lambda: ["x"], raiser(e)))),
    ("names", lambda e: session("scale").run(names_until(e), {"x": X})),
    ("array", lambda e: session("scale").run(None, {"x": Raising(e, "__array__")})),
    ("dlpack", lambda e: session("scale").run(None, {"x": Raising(e, "__dlpack__")})),
    ("from_dlpack", lambda e: ort.OrtValue.from_dlpack(Raising(e, "__dlpack__"))),
    ("getattr", lambda e: session("scale").run(None, {"x": Raising(e, "__getattr__")})),
    ("value", lambda e: session("scale").run_with_ort_values(None, {"x": Raising(e, "__array__")})),
    ("map_keys", lambda e: session("dict_vectorizer").run(None, {"x": Feed(raiser(e), lambda: [1.0])})),
    ("map_values", lambda e: session("dict_vectorizer").run(None, {"x": Feed(lambda: ["a"], raiser(e))})),
    ("sequence", lambda e: session("sequence_identity").run(None, {"x": [Raising(e, "__array__")]})),
    ("string", lambda e: session("identity", "string").run(None, {"x": strings(Raising(e, "__str__"))})),
    ("shape", lambda e: ort.OrtValue.ortvalue_from_shape_and_type([Raising(e, "__index__")], np.float32)),
    ("pointer", lambda e: session("scale").io_binding().bind_output(
        "y", "cpu", 0, np.float32, [2], Raising(e, "__index__"))),
    ("plan", lambda e: session("scale").plan(n=Raising(e, "__index__"))),
    ("path", lambda e: ort.InferenceSession(Raising(e, "__fspath__"))),
    ("serialize", lambda e: ort.InferenceSession(Raising(e, "SerializeToString"))),
]  # fmt: skip


@table(
    "call, error",
    [case(f"{name}_{error.__name__}", call, error) for name, call in CALLBACKS for error in (KeyError, Stop)]
    + [
        case("bind", lambda e: session("scale").io_binding().bind_cpu_input("x", Raising(e, "__array__")),
              Stop),
        case("list", lambda e: session("scale").run(None, {"x": [Raising(e, "__float__")]}),
              Stop),
        case("map_value", lambda e: session("dict_vectorizer").run(
            None, {"x": {"a": Raising(e, "__float__")}}), Stop),
    ],
)  # fmt: skip
def test_callback(call: Callable[[type[BaseException]], Any], error: type[BaseException]) -> None:
    """What a callback raises comes out as it is, and the session goes on."""
    with pytest.raises(error):
        call(error)
    assert session("scale").run(None, {"x": X})[0].tolist() == [2, 4]


def test_callback_of_compiler() -> None:
    """What the function of `compile_to_stream` raises becomes a Fail, as in the original."""
    compiler = ort.ModelCompiler(ort.SessionOptions(), models.data("scale"))
    check(Raises("Fail", "KeyError"), lambda: compiler.compile_to_stream(raiser(KeyError)))
    with pytest.raises(Stop):
        compiler.compile_to_stream(raiser(Stop))


def test_callback_of_delegate() -> None:
    """What the function that chooses providers raises becomes a Fail, as in the original."""
    check(Raises("Fail", "EP selection delegate failed: KeyError"), lambda: delegated(KeyError))
    with pytest.raises(Stop):
        delegated(Stop)


@table(
    "keys, values, expected",
    [
        case("not_strings", ["x", 1], [X, X], Raises("TypeError")),
        case("unhashable", [[]], [X], Raises("TypeError")),
        case("more_keys", ["x", "y"], [X], Raises("ValueError", "zip")),
        case("more_values", ["x"], [X, X], Raises("ValueError", "zip")),
        case("none", None, None, Raises("TypeError")),
        case("surrogate", ["x", "\ud800"], [X, X], Raises("UnicodeEncodeError")),
        case("nul", ["x", "a\0"], [X, X], Raises("InvalidArgument", "Invalid input name")),
    ],
)
def test_feed(keys: Any, values: Any, expected: Any) -> None:
    """Feeds that make no sense."""
    check(expected, lambda: session("scale").run(None, Feed(lambda: keys, lambda: values)))


@table(
    "names, expected",
    [
        case("surrogate", ["\ud800"], Raises("UnicodeEncodeError")),
        case("nul", ["y\0"], Raises("InvalidArgument", "Invalid output name")),
        case("int", [1], Raises("TypeError")),
        case("none", [None], Raises("TypeError")),
        case("no_utf8", [b"\xff"], Raises("UnicodeDecodeError")),
        case("many", ["y"] * 100_000, Gives(100_000)),
    ],
)
def test_names(names: Any, expected: Any) -> None:
    """Output names that make no sense."""
    check(expected, lambda: len(session("scale").run(names, {"x": X})))


@table(
    "keys, values, expected",
    [
        case("empty", [], [], Raises("RuntimeError", "empty")),
        case("mixed_keys", ["a", 1], [1.0, 2.0], Raises("RuntimeError", "key type")),
        case("surrogate", ["\ud800"], [1.0], Raises("RuntimeError", "key type")),
        case("huge_int", [1 << 70], [1.0], Raises("RuntimeError", "key type")),
        case("same_key", ["a", "a"], [1.0, 2.0], Gives([[2.0, 0.0, 0.0]])),
        case("more_keys", ["a", "b"], [1.0], Raises(("RuntimeError", "ValueError"))),
        case("more_values", ["a"], [1.0, 2.0], Raises(("RuntimeError", "ValueError"))),
    ],
)  # fmt: skip
def test_map(keys: Any, values: Any, expected: Any) -> None:
    """Mappings that contradict themselves."""
    given = Feed(lambda: keys, lambda: values)
    check(expected, lambda: session("dict_vectorizer").run(None, {"x": given})[0].tolist())


# Containers that change while they are read.


class Growing:
    """Adds an entry to a dict when it is read: what another thread may do at that moment."""

    def __init__(self, target: dict[str, Any], result: Any) -> None:
        self.target, self.result = target, result

    def _grow(self) -> Any:
        self.target[f"more{len(self.target)}"] = self
        return self.result

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._grow()

    def __index__(self) -> int:
        return self._grow()


def growing(call: Callable[[dict[str, Any]], Any], name: str, result: Any) -> Any:
    """Calls with a dict that grows while it is read."""
    target: dict[str, Any] = {}
    target[name] = Growing(target, result)
    return call(target)


ITERATES = "PyO3's iterator over a dict panics when the dict grows; iterate over a copy or .items()"


@table(
    "call, name, result",
    [
        case("run", lambda d: session("scale").run(None, d), "x", X),
        case("run_with_ort_values", lambda d: session("scale").run_with_ort_values(None, d), "x", X),
        case("native_plan", lambda d: session("scale")._sess.plan(d), "n", 1),
    ],
)  # fmt: skip
def test_dict_grows(call: Callable[[dict[str, Any]], Any], name: str, result: Any) -> None:
    """A dict that changes while it is read is no panic."""
    try:
        growing(call, name, result)
    except (RuntimeError, ValueError, TypeError):
        pass


class Reentrant:
    """Calls a function when it is asked for an array."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.action()
        return X


def test_reentrant() -> None:
    """Objects that use or drop what is at work on them."""
    opened = ort.InferenceSession(models.data("scale"), providers=[CPU])
    binding = opened.io_binding()
    inner = Reentrant(lambda: opened.run(None, {"x": X}))
    assert opened.run(None, {"x": inner})[0].tolist() == [2, 4]
    for action in (
        lambda: opened.set_providers([CPU]),
        lambda: opened.__dict__.pop("_sess", None),
    ):
        assert opened.run(None, {"x": Reentrant(action)})[0].tolist() == [2, 4]
    busy = Raises("RuntimeError", "borrowed")
    for method in (binding.clear_binding_inputs, binding.copy_outputs_to_cpu, binding.get_outputs):
        check(busy, lambda: binding.bind_cpu_input("x", Reentrant(method)))
    vector = C.OrtValueVector()
    vector.push_back(value(X)._ortvalue)
    check(busy, lambda: vector.to_dlpacks(lambda _: vector.push_back(vector[0])))


# Arrays.


class Lying(np.ndarray):
    """Says something else about itself than its memory."""

    shape = property(lambda self: (1_000_000,))  # type: ignore[assignment]
    dtype = property(lambda self: np.dtype("f8"))  # type: ignore[assignment]
    flags = property(raiser(KeyError))  # type: ignore[assignment]


class Listing(np.ndarray):
    """Gives another list than its elements."""

    def tolist(self) -> Any:
        return ["a"] * 3


class Numbering(np.ndarray):
    """Gives no list."""

    def tolist(self) -> Any:
        return 7


def misaligned(dtype: Any) -> np.ndarray:
    """Four elements at an odd address."""
    raw = bytearray(1) + bytearray(np.arange(4, dtype=np.float32).tobytes())
    return np.frombuffer(raw, dtype, offset=1)


def cyclic_list() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep_list(depth: int) -> Any:
    made: Any = 1.0
    for _ in range(depth):
        made = [made]
    return made


RANK = Raises("InvalidArgument", "Invalid rank")
STRING = Raises("InvalidArgument", r"Actual: \(tensor\(string\)\)")
NO_TYPE = Raises("RuntimeError", "can't be converted")
NO_TENSOR = Raises("RuntimeError", "Could not create tensor")
PACKED = np.dtype([("flag", "i1"), ("number", "f4")])

ARRAYS = [
    case("empty", np.zeros(0, np.float32), Gives([])),
    case("scalar", np.array(3, np.float32), RANK),
    case("reversed", f32(1, 2, 3)[::-1], Gives([6.0, 4.0, 2.0])),
    case("broadcast", np.broadcast_to(np.float32(2), (3,)), Gives([4.0, 4.0, 4.0])),
    case("zero_strides", np.broadcast_to(np.float32(2), (0,)), Gives([])),
    case("big_endian", np.array([1, 2], ">f4"), Gives([2.0, 4.0])),
    case("misaligned", misaligned(np.float32), Gives([0.0, 2.0, 4.0, 6.0])),
    case("field", np.zeros(2, PACKED)["number"], Gives([0.0, 0.0])),
    case("masked", np.ma.array(f32(1, 2), mask=[0, 1]), Gives([2.0, 4.0])),
    case("matrix", f32(1, 2).view(np.matrix), RANK),
    case("read_only", read_only(X), Gives([2.0, 4.0])),
    case("lying", f32(1, 2).view(Lying), Gives([2.0, 4.0])),
    case("lying_strided", f32(1, 0, 2)[::2].view(Lying), Raises("ValueError", "reshape")),
    case("structured", np.zeros(2, PACKED), STRING),
    case("objects", strings(1.0, None), STRING),
    case("no_bytes", np.zeros(2, "V0"), STRING),
    case("dates", np.array(["2020"], "M8[s]"), NO_TYPE),
    case("long_double", np.ones(2, np.longdouble), NO_TYPE),
    case("cyclic_list", cyclic_list(), NO_TENSOR),
    case("deep_list", deep_list(60), RANK),
    case("very_deep_list", deep_list(50_000), NO_TENSOR),
    case("terabytes", np.lib.stride_tricks.as_strided(X, (1 << 40,), (0,)), Raises("MemoryError")),
]


@table("given, expected", ARRAYS)
def test_array(given: Any, expected: Any) -> None:
    """Arrays of every layout and type for an input of float."""
    check(expected, lambda: session("scale").run(None, {"x": given})[0].tolist())


def cyclic_objects() -> np.ndarray:
    made = np.array([None], object)
    made[0] = made
    return made


MASK = "arrays.rs strings_of: tolist() of the subclass; take it of the base class"


@table(
    "given, expected",
    [
        case("nul", strings("a\0b", "\0"), Gives(["a\0b", "\0"])),
        case("no_characters", np.zeros(2, "U0"), Gives(["", ""])),
        case("cycle", cyclic_objects(), Gives(["[array(..., dtype=object)]"])),
        case("list_cycle", strings(None, cyclic_list()), Gives(["None", "[[...]]"])),
        case("structured", np.zeros(1, PACKED), Gives(["(0, 0.0)"])),
        case("surrogate", strings("\ud800"), Raises("UnicodeEncodeError")),
        case("surrogate_text", np.array(["\ud800"]), Raises("UnicodeEncodeError")),
        case("more_listed", strings("a").view(Listing), Gives(["a"])),
        case("not_listed", strings("a").view(Numbering), Gives(["a"])),
        case("masked", np.ma.array(["a", "b"], mask=[0, 1]), Gives(["a", "b"])),
    ],
)
def test_strings(given: Any, expected: Any) -> None:
    """Arrays of every kind for an input of strings."""
    check(expected, lambda: session("identity", "string").run(None, {"x": given})[0].tolist())


def test_matrix_of_strings() -> None:
    """np.matrix is taken for strings as it is for numbers."""
    opened = session("identity", "string", ("n", "m"))
    given = np.array([["a", "b"], ["c", "d"]]).view(np.matrix)
    assert opened.run(None, {"x": given})[0].tolist() == [["a", "b"], ["c", "d"]]


@table(
    "model, expected",
    [
        case("identity", ("identity", "bool"), [False, True, True]),
        *(case(f"cast_{to}", ("cast", "bool", to), [0, 1, 1])
          for to in ("int8", "uint8", "int32", "int64", "float16", "float", "double")),
        case("cast_string", ("cast", "bool", "string"), ["0", "1", "1"]),
    ],
)  # fmt: skip
def test_bool_of_other_bits(model: tuple[str, ...], expected: Any) -> None:
    """Booleans are bytes, of which any but 0 is true."""
    given = np.array([0, 2, 255], np.uint8).view(np.bool_)
    got = session(*model).run(None, {"x": given})[0]
    assert got.tolist() == expected


@table(
    "operator, expected",
    [
        case("And", "And", [False, False, True, True]),
        case("Or", "Or", [False, True, True, True]),
        case("Xor", "Xor", [False, True, False, False]),
        case("Equal", "Equal", [True, False, True, True]),
    ],
)
def test_logic_of_other_bits(operator: str, expected: Any) -> None:
    """The same for operators of two booleans."""
    a, b = (np.array(bits, np.uint8).view(np.bool_) for bits in ([0, 0, 2, 255], [0, 2, 255, 4]))
    got = session("logic", operator).run(None, {"a": a, "b": b})[0]
    assert got.tolist() == expected and got.view(np.uint8).max() == 1


@table("reduction, expected", [case("max", "max", [1, 1, 1]), case("min", "min", [0, 1, 0])])
def test_scatter_of_other_bits(reduction: str, expected: Any) -> None:
    """The same for scatters that combine booleans."""
    a, b = (np.array(bits, np.uint8).view(np.bool_) for bits in ([0, 2, 4], [2, 5, 0]))
    got = session("scatter_bools", reduction).run(None, {"a": a, "i": np.arange(3), "b": b})[0]
    assert got.view(np.uint8).tolist() == expected


# Sizes and addresses.


def shaped(shape: Any, element: Any = np.float32) -> Any:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, element)


def bound(name: str, shape: Any, pointer: Any, element: Any = np.float32) -> Any:
    binding = session("scale").io_binding()
    bind = binding.bind_input if name == "x" else binding.bind_output
    return bind(name, "cpu", 0, element, shape, pointer)


def limited(**values: Any) -> Any:
    return ort.InferenceSession(models.data("scale"), options(**values)).run(None, {"x": X})


def fixed(size: int) -> Any:
    made = ort.SessionOptions()
    made.add_free_dimension_override_by_name("n", size)
    return ort.InferenceSession(models.data("scale"), made).get_inputs()[0].shape


LARGE = Raises("InvalidArgument", "too large|too many")
OVERFLOW = Raises("OverflowError")

SIZES = [
    case("negative", lambda: shaped([-1]), Raises("RuntimeError")),
    case("product", lambda: shaped([1 << 62, 4]), LARGE),
    case("bytes", lambda: shaped([(1 << 63) - 1]), LARGE),
    case("exabytes", lambda: shaped([1 << 61]), Raises("MemoryError")),
    case("zero_of_many", lambda: shaped([0, 1 << 62, 1 << 62]), LARGE),
    case("no_int64", lambda: shaped([1 << 64]), Raises("TypeError")),
    case("rank_65", lambda: shaped([1] * 65).numpy(), Raises("ValueError", "dimensions")),
    case("rank_100000", lambda: shaped([1] * 100_000).numpy(), Raises("ValueError", "dimensions")),
    case("rank_70_run", lambda: session("scale").run(None, {"x": shaped([1] * 70)}), RANK),
    case("null_input", lambda: bound("x", [4], 0), Raises("InvalidArgument", "address")),
    case("null_of_nothing", lambda: bound("x", [0], 0), Gives(None)),
    case("end_of_memory", lambda: bound("x", [4], (1 << 64) - 8), Raises("RuntimeError", "past the end")),
    case("end_of_memory_out", lambda: bound("y", [4], (1 << 64) - 8), Raises("RuntimeError", "past")),
    case("negative_address", lambda: bound("y", [4], -8), OVERFLOW),
    case("large_address", lambda: bound("y", [4], 1 << 70), OVERFLOW),
    case("large_output", lambda: bound("y", [1 << 62], 4096), LARGE),
    case("negative_output", lambda: bound("y", [-4], 4096), Raises("RuntimeError", "negative")),
    case("odd_output", lambda: bound("y", [4], 4097), Raises("InvalidArgument", "multiple of 4")),
    case("plan_negative", lambda: session("scale").plan(n=-1), Raises("InvalidArgument")),
    case("plan_large", lambda: session("scale").plan(n=(1 << 63) - 1), LARGE),
    case("plan_overflow", lambda: session("scale").plan(n=1 << 70), OVERFLOW),
    case("plan_nul", lambda: session("scale").plan({"a\0": 1}), Raises("InvalidArgument")),
    case("batch_none", lambda: session("scale").largest_batch("n", 0), Gives(None)),
    case("batch_overflow", lambda: session("scale").largest_batch("n", 1 << 64), OVERFLOW),
    case("dimension_negative", lambda: fixed(-1), Raises("InvalidArgument")),
    case("dimension_large", lambda: fixed((1 << 63) - 1), Gives([(1 << 63) - 1])),
    case("dimension_overflow", lambda: fixed(1 << 63), OVERFLOW),
    case("limit_zero", lambda: limited(memory_limit=0), Raises("MemoryError")),
    case("limit_overflow", lambda: limited(memory_limit=1 << 64), OVERFLOW),
    case("budget_overflow", lambda: limited(budget=ort.Budget(1 << 70)), OVERFLOW),
    case("two_billion_threads", lambda: limited(intra_op_num_threads=(1 << 31) - 1), Gives([f32(2, 4)])),
    case("seed_overflow", lambda: ort.set_seed(1 << 63), OVERFLOW),
]


@table("action, expected", SIZES)
def test_size(action: Callable[[], Any], expected: Any) -> None:
    """Sizes, addresses and counts at the end of their range."""
    check(expected, action)


@table(
    "path, expected",
    [
        case("nul", "a\0b", Raises("RuntimeError")),
        case("surrogate", "\ud800", Raises("UnicodeEncodeError")),
        case("long", "x" * 5000, Raises("RuntimeError")),
        case("device", os.devnull, Raises("RuntimeError")),
        case("no_size", "/proc/self/status", Raises("RuntimeError")),
    ],
)
def test_path(path: str, expected: Any) -> None:
    """Paths that lead to no model."""
    check(expected, lambda: ort.InferenceSession(path))


# Memory that must not be written, or is not what it is said to be.

WRITES = "ort_value.rs keeps no flag for read-only memory; a mapped file or a bytes object is written"


@table(
    "make",
    [
        case("writable", lambda: value(A.copy()).numpy().flags.writeable is True),
        case("array", lambda: not value(read_only(A)).numpy().flags.writeable),
        case("bytes", lambda: not value(np.frombuffer(bytes(8), np.float32)).numpy().flags.writeable),
        case("capsule", lambda: not ort.OrtValue.from_dlpack(
            read_only(A).__dlpack__(max_version=(1, 0))).numpy().flags.writeable),
    ],
)  # fmt: skip
def test_read_only(make: Callable[[], Any]) -> None:
    """An array over memory that must not be written cannot be written."""
    assert make()


@table(
    "write",
    [
        case("array", lambda v: v.update_inplace(A + 1)),
        case("value", lambda v: v.update_inplace(value(A + 1))),
        case("copy", lambda v: ort.copy_tensors([value(A + 1)], [v])),
    ],
)
def test_write_read_only(write: Callable[[Any], Any]) -> None:
    """Memory that must not be written is not written: an array over `bytes` here."""
    kept = bytes(A.tobytes())
    held = value(np.frombuffer(kept, np.float32).reshape(2, 3))
    check(Raises(("RuntimeError", "ValueError")), lambda: write(held))
    assert kept == A.tobytes()


MAPPED = """
    place = models.path("scale") + ".bin"
    np.zeros(1 << 16, np.float32).tofile(place)
    held = np.memmap(place, np.float32, "r")
    full = np.ones(1 << 16, np.float32)
    session = ort.InferenceSession(models.data("scale"))
    value = ort.OrtValue.ortvalue_from_numpy
    try:
        {}
        print("wrote")
    except (RuntimeError, ValueError):
        print("refused")
"""


@table(
    "code",
    [
        case("numpy", "value(held).numpy()[0] = 1"),
        case("update_inplace", "value(held).update_inplace(full)"),
        case(
            "bound_output",
            "b = session.io_binding(); b.bind_cpu_input('x', full);"
            " b.bind_ortvalue_output('y', value(held)); session.run_with_iobinding(b)",
        ),
    ],
)
def test_mapped_file(code: str) -> None:
    """A file that is mapped for reading is not written."""
    check_script(Gives("refused"), MAPPED.format(code))


def small(name: str, *numbers: int) -> Any:
    return value(np.array(numbers, getattr(ml_dtypes, name)))


PACKS = "ort_value.rs numpy() of Held::Host: elements below 8 bits are packed, but read one a byte"


@table(
    "name, way",
    [case(f"{name}_kept", name, lambda v: v) for name in ("int4", "uint4", "int2", "uint2")]
    + [
        case(f"{name}_pickled", name, lambda v: pickle.loads(pickle.dumps(v)))
        for name, why in (
            ("int4", PACKS),
            ("uint4", PACKS),
            ("int2", "_adapters.py value_from_bytes counts two elements a byte; int2 has four"),
            ("uint2", "_adapters.py value_from_bytes counts two elements a byte; uint2 has four"),
        )
    ],
)
def test_small_elements(name: str, way: Callable[[Any], Any]) -> None:
    """Elements of fewer than 8 bits are what they were."""
    assert way(small(name, 1, 0, 1, 1, 0, 1, 1)).numpy().tolist() == [1, 0, 1, 1, 0, 1, 1]


@table(
    "code",
    [
        case("int4", "22"),
        case("uint2", "25"),
    ],
)
def test_small_elements_in_memory(code: str) -> None:
    """An array of elements of fewer than 8 bits stays inside its memory."""
    check_script(
        Gives("done"),
        f"""
        try:
            held = ort.OrtValue.ortvalue_from_shape_and_type([4_000_000], {code})
            held.numpy().view(np.uint8)[:] = 1
        except (RuntimeError, ValueError):
            pass
        more = [ort.OrtValue.ortvalue_from_shape_and_type([1000], 1) for _ in range(100)]
        del more
        print("done")
        """,
    )


@table(
    "array, code, expected",
    [
        case("objects", strings("a", "b"), 7, Raises("RuntimeError")),
        case("objects_in_fields", np.zeros(2, [("a", object)]), 7, Raises("RuntimeError")),
        case("misaligned", misaligned("V4"), 1, Gives("tensor(float)")),
        case("other_size", np.zeros(2, np.uint8), 1, Raises("RuntimeError", "size")),
        case("string", np.zeros(2, "V8"), 8, Raises("RuntimeError")),
        case("no_type", X, 99, Raises("RuntimeError", "not supported")),
        case("huge_type", X, 1 << 70, OVERFLOW),
    ],
)  # fmt: skip
def test_reinterpreted(array: np.ndarray, code: int, expected: Any) -> None:
    """Arrays read as another type."""
    make = ort.OrtValue.ortvalue_from_numpy_with_onnx_type
    check(expected, lambda: make(array, code).data_type())


def test_reinterpreted_misaligned() -> None:
    """Elements at odd addresses are copied to be read, and refused where a run would write them."""
    held = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(misaligned("V4"), 1)
    opened = session("scale")
    assert opened.run(None, {"x": held})[0].tolist() == [0, 2, 4, 6]
    binding = opened.io_binding()
    check(Raises("InvalidArgument", "multiple of 4"), lambda: binding.bind_ortvalue_output("y", held))
    assert held.numpy().tolist() == [0, 1, 2, 3]


def test_null_in_vector() -> None:
    """Address 0 is no memory."""
    vector, device = C.OrtValueVector(), C.OrtDevice(0, 0, 0)
    refused = Raises(("RuntimeError", "InvalidArgument"))
    check(refused, lambda: vector.push_back_batch([A], [0], [np.float32], [[2, 3]], [device]))


# What outputs share.

SHARES = "convert.rs object_of: a sequence or optional that is passed through keeps the input's arrays"


@table(
    "model, given",
    [
        case("tensor", "identity", X.copy()),
        case("graph_input", "input_output", X.copy()),
        case("sequence", "sequence_identity", [X.copy()]),
        case("optional", "optional_identity", X.copy()),
    ],
)
def test_output_is_apart(model: str, given: Any) -> None:
    """An output never has the memory of an input."""
    array = given[0] if isinstance(given, list) else given
    result = session(model).run(None, {"x": given})[0]
    result = result[0] if isinstance(result, list) else result
    assert result.tolist() == array.tolist() and not np.shares_memory(result, array)


@table("model", [case(m, m) for m in ("weight_output", "passed_through", "no_inputs")])
def test_output_is_no_weight(model: str) -> None:
    """Writing to outputs changes no weight and no other output."""
    opened = session(model)
    feed = {"x": X} if opened.get_inputs() else {}
    before = [a.copy() for a in opened.run(None, feed)]
    outputs = opened.run(None, feed)
    for place, output in enumerate(outputs):
        output[...] = -1 - place
    for place, output in enumerate(outputs):
        assert (output == -1 - place).all()
    for again, want in zip(opened.run(None, feed), before):
        assert again.tolist() == want.tolist()


# DLPack structs made by hand.


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class Capsule:
    """A capsule over 64 floats of ones with these fields; counts the calls of its deleter."""

    def __init__(
        self,
        shape: tuple[int, ...] | None = (4,),
        strides: tuple[int, ...] | None = None,
        ndim: int | None = None,
        name: bytes = b"dltensor",
        **fields: int,
    ) -> None:
        self.memory, self.deleted, self.name = np.ones(64, np.float32), 0, name
        tensor = {"data": self.memory.ctypes.data, "device_type": 1, "code": 2, "bits": 32, "lanes": 1}
        self.made = _Managed(tensor=_DLTensor(**{**tensor, **fields}), deleter=_DELETER(self._delete))
        self.made.tensor.ndim = len(shape or ()) if ndim is None else ndim
        self.numbers = []
        for field, sizes in (("shape", shape), ("strides", strides)):
            if sizes is not None:
                self.numbers.append((ctypes.c_int64 * max(len(sizes), 1))(*sizes))
                pointer = ctypes.cast(self.numbers[-1], ctypes.POINTER(ctypes.c_int64))
                setattr(self.made.tensor, field, pointer)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(ctypes.addressof(self.made), self.name, None)

    def _delete(self, _: int) -> None:
        self.deleted += 1


ONES = Gives([1.0] * 4)
NOT_CONTIGUOUS = Raises("InvalidArgument", "contiguous")
NO_ELEMENT = Raises("InvalidArgument", "element type")


@table(
    "fields, expected",
    [
        case("plain", {}, ONES),
        case("scalar", {"shape": ()}, Gives(1.0)),
        case("scalar_without_shape", {"shape": None, "ndim": 0}, Gives(1.0)),
        case("without_shape", {"shape": None, "ndim": 1}, Raises("RuntimeError", "no shape")),
        case("negative_rank", {"ndim": -1}, Raises("RuntimeError", "no shape")),
        case("negative_size", {"shape": (-1,)}, Raises("InvalidArgument", "invalid shape")),
        case("huge", {"shape": (1 << 62, 1 << 62)}, LARGE),
        case("zero_of_many", {"shape": (0, 1 << 62, 1 << 62)}, LARGE),
        case("rank_70", {"shape": (1,) * 70}, Raises("ValueError", "dimensions")),
        case("lanes", {"lanes": 4}, NO_ELEMENT),
        case("no_lanes", {"lanes": 0}, NO_ELEMENT),
        case("seven_bits", {"bits": 7}, NO_ELEMENT),
        case("four_bits", {"code": 1, "bits": 4}, NO_ELEMENT),
        case("no_code", {"code": 99}, NO_ELEMENT),
        case("other_byte_order", {"strides": (-1,)}, NOT_CONTIGUOUS),
        case("every_second", {"strides": (2,)}, NOT_CONTIGUOUS),
        case("same_element", {"strides": (0,)}, NOT_CONTIGUOUS),
        case("far_apart", {"strides": (1 << 62,)}, NOT_CONTIGUOUS),
        case("far_apart_alone", {"shape": (1,), "strides": (1 << 62,)}, Gives([1.0])),
        case("null_of_nothing", {"shape": (0,), "data": 0}, Gives([])),
        case("null", {"data": 0}, Raises("RuntimeError", "null")),
        case("offset", {"byte_offset": 16}, ONES),
        case("offset_past_the_end", {"byte_offset": (1 << 64) - 8}, Raises("RuntimeError")),
    ],
)
def test_dlpack(fields: dict[str, Any], expected: Any) -> None:
    """Structs of every kind; the deleter is called once, whatever comes."""
    lent = Capsule(**fields)
    check(expected, lambda: ort.OrtValue.from_dlpack(lent.capsule).numpy().tolist())
    gc.collect()
    assert lent.deleted == 1


@table(
    "fields",
    [
        case("other_device", {"device_type": 2}),
        case("null", {"data": 0}),
    ],
)
def test_dlpack_class(fields: dict[str, Any]) -> None:
    """What has nothing to do with a lack of memory is no MemoryError: programs then shrink batches."""
    with pytest.raises(RuntimeError) as caught:
        ort.OrtValue.from_dlpack(Capsule(**fields).capsule)
    assert not isinstance(caught.value, MemoryError)


@table("name", [case("other", b"thing"), case("used", b"used_dltensor"), case("none", None)])
def test_dlpack_name(name: Any) -> None:
    """Capsules of other names are not touched."""
    lent = Capsule(name=name)
    check(Raises("TypeError", "capsule"), lambda: ort.OrtValue.from_dlpack(lent.capsule))
    assert lent.deleted == 0


# Sparse tensors.


def sparse(shape: list[int], places: list[int], count: int = 2) -> Any:
    device = ort.OrtDevice.make("cpu", 0)
    indices = np.array(places, np.int64)
    made = ort.SparseTensor.sparse_coo_from_numpy(shape, np.ones(count, np.float32), indices, device)
    return made.dense_shape()


def rows(shape: list[int], inner: list[int], outer: list[int], count: int = 2) -> Any:
    device = ort.OrtDevice.make("cpu", 0)
    indices = [np.array(numbers, np.int64) for numbers in (inner, outer)]
    make = ort.SparseTensor.sparse_csr_from_numpy
    return make(shape, np.ones(count, np.float32), *indices, device).dense_shape()


REFUSED = Raises(("RuntimeError", "ValueError"))


@table(
    "action, expected",
    [
        case("coo", lambda: sparse([3, 3], [1, 5]), Gives([3, 3])),
        case("negative_place", lambda: sparse([3, 3], [-1, 1]), REFUSED),
        case("place_outside", lambda: sparse([3, 3], [1, 9]), REFUSED),
        case("negative_size", lambda: sparse([-1, 3], [0, 1]), OVERFLOW),
        case("too_large", lambda: sparse([1 << 62, 4], [0, 1]), LARGE),
        case("no_size", lambda: sparse([0, 3], [0, 1]), REFUSED),
        case("csr", lambda: rows([2, 3], [0, 2], [0, 1, 2]), Gives([2, 3])),
        case("rows_fall", lambda: rows([2, 3], [0, 2], [2, 0, 2]), REFUSED),
        case("rows_negative", lambda: rows([2, 3], [0, 2], [-1, 0, 2]), REFUSED),
        case("rows_missing", lambda: rows([(1 << 63) - 1, 3], [0, 2], [0, 1, 2]), REFUSED),
        case("values_missing", lambda: rows([2, 3], [0, 2], [0, 1, 2], 1), REFUSED),
        case("column_outside", lambda: rows([2, 3], [0, 4], [0, 2, 2]), REFUSED),
        case("column_negative", lambda: rows([2, 3], [0, -1], [0, 1, 2]), REFUSED),
    ],
)  # fmt: skip
def test_sparse(action: Callable[[], Any], expected: Any) -> None:
    """Places that the shape does not have."""
    check(expected, action)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_sparse_is_not_made_dense() -> None:
    """A sparse tensor takes memory for its elements, not for its shape."""
    check_script(
        Gives("[1000000, 10000]"),
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        device, indices = ort.OrtDevice.make("cpu", 0), np.array([1, 5])
        make = ort.SparseTensor.sparse_coo_from_numpy
        print(make([1_000_000, 10_000], np.ones(2, np.float32), indices, device).dense_shape())
        """,
        RUST_BACKTRACE="0",
    )


# Standard error that cannot be written.


class Broken(io.StringIO):
    """Cannot be written."""

    def write(self, _: str) -> int:
        raise OSError("no space left")


class Counted(io.StringIO):
    """Counts its writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def closed() -> io.StringIO:
    made = io.StringIO()
    made.close()
    return made


def misspelt() -> Any:
    made = ort.SessionOptions()
    made.add_session_config_entry("session.disable_prepackin", "1")
    return ort.InferenceSession(models.data("scale"), made).run(None, {"x": X})


LOGS = "_logging.py log: print() to sys.stderr is not guarded, so a log line fails the call"


@table("make", [
    case("raises", Broken),
    case("closed", closed),
    case("none", lambda: None),
])  # fmt: skip
def test_standard_error(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A log line that cannot be written changes nothing: not the exception, not the load."""
    wrong = Raises("InvalidArgument", "Unexpected input data type")
    monkeypatch.setattr(sys, "stderr", make())
    ort.set_default_logger_severity(2)
    try:
        check(wrong, lambda: session("scale").run(None, {"x": X.astype(float)}))
        check(Gives([f32(2, 4)]), misspelt)
    finally:
        ort.set_default_logger_severity(4)


def test_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log line is written at once."""
    monkeypatch.setattr(sys, "stderr", Counted())
    ort.set_default_logger_severity(2)
    try:
        misspelt()
    finally:
        ort.set_default_logger_severity(4)
    assert sys.stderr.getvalue().count("\n") == sys.stderr.writes == 1


# Runs in the background.


class Unspoken(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise KeyError("no text")


NEVER = "_session.py run_async: work() catches Exception around the run alone; nobody is told"


@table(
    "error",
    [
        case("exception", KeyError),
        case("interrupt", KeyboardInterrupt),
        case("exit", SystemExit),
        case("no_text", Unspoken),
    ],
)
def test_async_is_told(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback of run_async is called whatever the run raises: programs wait for it."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    told = threading.Event()

    def callback(results: Any, _: Any, text: str) -> None:
        assert results == [] and text
        told.set()

    session("scale").run_async(None, {"x": Raising(error, "__array__")}, callback, None)
    assert told.wait(1)


def test_async_feed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed is read before run_async returns: a caller may use its dict again."""
    started: list[threading.Thread] = []

    class Late(threading.Thread):
        """Starts when it is told."""

        def start(self) -> None:
            started.append(self)

    told, got = threading.Event(), []

    def callback(results: Any, _: Any, error: str) -> None:
        got.extend([error, *(r.tolist() for r in results)])
        told.set()

    feed = {"x": f32(1)}
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", Late)
        session("scale").run_async(None, feed, callback, None)
    feed["x"] = f32(5)
    for thread in started:
        threading.Thread.start(thread)
    assert told.wait(WAIT) and got == ["", [2]]


# Garbage.


class Tagged(np.ndarray):
    """An array with attributes."""


def in_cycle(hold: Callable[[Any], Any]) -> bool:
    """Whether an array that refers to what holds it stays for ever."""
    import weakref

    array = np.ones(2, np.float32).view(Tagged)
    array.holder = hold(array)  # type: ignore[attr-defined]
    alive = weakref.ref(array)
    del array
    gc.collect()
    return alive() is not None


def held_by_binding(array: np.ndarray) -> Any:
    binding = session("scale").io_binding()
    binding.bind_cpu_input("x", array)
    return binding


def held_by_bound_value(array: np.ndarray) -> Any:
    binding = session("scale").io_binding()
    binding.bind_ortvalue_input("x", value(array))
    return binding


def held_by_target(array: np.ndarray, runs: bool = False) -> Any:
    binding = session("scale").io_binding()
    binding.bind_cpu_input("x", np.ones(2, np.float32))
    binding.bind_ortvalue_output("y", value(array))
    if runs:
        session("scale").run_with_iobinding(binding)
    return binding


def held_by_binding_that_ran(array: np.ndarray) -> Any:
    binding = held_by_binding(array)
    session("scale").run_with_iobinding(binding)
    return binding


def held_by_options(array: np.ndarray) -> Any:
    made = ort.SessionOptions()
    made.add_initializer("w", value(array))
    return made


@table(
    "hold",
    [
        case("value", value),
        case("binding", held_by_binding),
        case("binding_of_value", held_by_bound_value),
        case("target", held_by_target),
        case("run_binding", held_by_binding_that_ran),
        case("run_target", lambda array: held_by_target(array, runs=True)),
        case("options", held_by_options),
    ],
)
def test_cycle(hold: Callable[[Any], Any]) -> None:
    """A cycle through a value is collected, as in the original."""
    assert not in_cycle(hold)


def test_collected_binding_of_kept_results() -> None:
    """Results of a binding that was collected stay what they are."""
    array = np.ones(2, np.float32).view(Tagged)
    binding = session("scale").io_binding()
    binding.bind_cpu_input("x", array)
    binding.bind_ortvalue_output("y", value(np.zeros(2, np.float32)))
    array.holder = binding  # type: ignore[attr-defined]
    session("scale").run_with_iobinding(binding)
    results = binding.get_outputs()
    del array, binding
    gc.collect()
    assert results[0].numpy().tolist() == [2, 2]


# Elsewhere.


def test_subinterpreter() -> None:
    """The module says that it cannot be loaded there."""
    check_script(
        Gives("ImportError"),
        """
        try:
            import _interpreters as inner
        except ImportError:
            import _xxsubinterpreters as inner
        made = inner.create()
        try:
            # CPython returns the error from 3.13 on, and raised it before.
            error = inner.run_string(made, f"import sys; sys.path[:] = {sys.path!r}\\nimport ort_runtime")
        except Exception as raised:
            error = raised
        text = getattr(error, "formatted", str(error))
        print("ImportError" if "ImportError" in text else text)
        inner.destroy(made)
        """,
    )


def test_damaged_models() -> None:
    """A byte that is wrong is an exception, not a panic."""
    random = np.random.RandomState(7)
    for name in ("scale", "two", "slow", "zip_map", "optional_tensor", "overridable", "described"):
        content = models.data(name)[:4096]
        for _ in range(60):
            damaged = bytearray(content)
            damaged[random.randint(len(damaged))] = random.randint(256)
            try:
                ort.InferenceSession(bytes(damaged), providers=[CPU])
            except Exception:  # noqa: BLE001, S110
                pass
