"""What run returns: kinds, memory, lifetime."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import models
import numpy as np
from harness import CPU, Gives, case, check, f32, ort, session, strings, table
from models import DTYPES

SMALL = {
    "bfloat16": ml_dtypes.bfloat16,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}
FLOAT8 = {
    "float8e4m3fn": [0, 56, 64],
    "float8e4m3fnuz": [0, 64, 72],
    "float8e5m2": [0, 60, 64],
    "float8e5m2fnuz": [0, 64, 68],
}


@table(
    "element, expected",
    [case(e, e, Gives([np.array([0, 1, 2]).astype(d)])) for e, d in DTYPES.items()]
    + [case(e, e, Gives([np.array([0, 1, 2], d)])) for e, d in SMALL.items()]
    + [case(e, e, Gives([np.array(bits, np.uint8)])) for e, bits in FLOAT8.items()]
    + [case("string", "string", Gives([strings("0", "1", "2")]))],
)
def test_element_type(element: str, expected: Any) -> None:
    """The dtype of each element type; float8 comes as its bits."""
    check(expected, lambda: session("cast", "float", element).run(None, {"x": f32(0, 1, 2)}))


def one(name: str = "scale", x: np.ndarray | None = None) -> np.ndarray:
    """The first output of a model of one input."""
    return session(name).run(None, {"x": f32(1, 2) if x is None else x})[0]


def zipped(key: str, labels: tuple[Any, ...]) -> dict[Any, float]:
    """The dict that a classifier with these labels gives for the numbers 1, 2, 3."""
    return session("zip_map", key, labels).run(None, {"x": f32(1, 2, 3).reshape(1, 3)})[0][0]


@table(
    "read, expected",
    [
        case("list", lambda: type(session("scale").run(None, {"x": f32(1)})) is list, Gives(True)),
        case("array_itself", lambda: type(one()) is np.ndarray, Gives(True)),
        case("contiguous", lambda: one().flags.c_contiguous, Gives(True)),
        case("aligned", lambda: one().flags.aligned, Gives(True)),
        case("writable", lambda: one().flags.writeable, Gives(True)),
        case("memory_of_the_runtime", lambda: one().flags.owndata, Gives(False)),
        case("has_a_base", lambda: one().base is not None, Gives(True)),
        case("native_byte_order", lambda: one().dtype.isnative, Gives(True)),
        case(
            "scalar_is_an_array",
            lambda: type(session("sequence_length").run(None, {"x": []})[0]) is np.ndarray,
            Gives(True),
        ),
        case(
            "string_is_str",
            lambda: type(session("identity", "string").run(None, {"x": np.array(["a"])})[0][0]) is str,
            Gives(True),
        ),
        case(
            "string_writable",
            lambda: session("identity", "string").run(None, {"x": ["a"]})[0].flags.writeable,
            Gives(True),
        ),
        case(
            "map_value_is_float",
            lambda: type(session("zip_map").run(None, {"x": np.ones((1, 3), np.float32)})[0][0]["a"]) is float,
            Gives(True),
        ),
        case(
            "map_key_is_int",
            lambda: type(next(iter(session("zip_map", "int64").run(None, {"x": np.ones((1, 3), np.float32)})[0][0]))) is int,
            Gives(True),
        ),
        case("keys_sorted", lambda: list(zipped("string", ("c", "a", "b"))), Gives(["a", "b", "c"])),
        case("int_keys_sorted", lambda: zipped("int64", (5, -1, 3)), Gives({-1: 2.0, 3: 3.0, 5: 1.0})),
        case("upper_case_first", lambda: list(zipped("string", ("b", "é", "B"))), Gives(["B", "b", "é"])),
        case("empty", lambda: one(x=f32()), Gives(f32())),
    ],
)
def test_form(read: Callable[[], Any], expected: Any) -> None:
    """The form of a returned array or dict."""
    check(expected, read)


def shared(name: str, x: np.ndarray) -> list[bool]:
    """Which outputs share memory with the input."""
    return [bool(np.shares_memory(y, x)) for y in session(name).run(None, {"x": x})]


def written_weight(name: str, place: int) -> np.ndarray:
    """A weight that is an output, read again after a caller wrote into it."""
    session(name).run(None, {"x": f32(1, 2)})[place][:] = 9
    return session(name).run(None, {"x": f32(1, 2)})[place]


def written_output() -> list[np.ndarray]:
    """An output that a caller wrote into is not seen by the next run."""
    first = one()
    first[:] = 9
    second = one()
    return [first, second]


def two_outputs_of_one_value() -> bool:
    first, second, _ = session("passed_through").run(None, {"x": f32(1, 2)})
    return bool(np.shares_memory(first, second))


@table(
    "read, expected",
    [
        case("identity", lambda: shared("identity", f32(1, 2)), Gives([False])),
        case("identity_chains", lambda: shared("passed_through", f32(1, 2)), Gives([False] * 3)),
        case("input_is_output", lambda: shared("input_output", f32(1, 2)), Gives([False] * 2)),
        case(
            "reshape",
            lambda: shared("reshape_view", np.ones((2, 3), np.float32)),
            Gives([False]),
        ),
        case("weight", lambda: shared("weight_output", f32(1, 2)), Gives([False] * 2)),
        case(
            "weight_value",
            lambda: session("weight_output").run(None, {"x": f32(1)})[1],
            Gives(f32(5, 6)),
        ),
        case("weight_written", lambda: written_weight("weight_output", 1), Gives(f32(5, 6))),
        case("weight_copy_written", lambda: written_weight("passed_through", 2), Gives(f32(5, 6))),
        case("output_written", written_output, Gives([f32(9, 9), f32(2, 4)])),
        case("two_outputs", two_outputs_of_one_value, Gives(False)),
        case(
            "two_runs",
            lambda: bool(np.shares_memory(*[one(x=np.ones(100, np.float32)) for _ in "ab"])),
            Gives(False),
        ),
    ],
)
def test_memory_is_not_shared(read: Callable[[], Any], expected: Any) -> None:
    """Outputs never alias inputs, weights or one another."""
    check(expected, read)


def fresh(name: str, *args: Any) -> Any:
    """A session of its own, to be dropped."""
    return ort.InferenceSession(models.data(name, *args), providers=[CPU])


def after_session() -> list[np.ndarray]:
    made = fresh("scale")
    outputs = made.run(None, {"x": np.arange(4096, dtype=np.float32)})
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    for _ in range(5):  # Memory that was given back would be used again here.
        fresh("scale").run(None, {"x": np.full(4096, 7, np.float32)})
    return outputs


def views_of_dead() -> np.ndarray:
    made = fresh("scale")
    part = made.run(None, {"x": np.arange(4096, dtype=np.float32)})[0][5:8]
    del made
    gc.collect()
    fresh("scale").run(None, {"x": np.full(4096, 7, np.float32)})
    return part


def strings_after_session() -> np.ndarray:
    made = fresh("identity", "string")
    out = made.run(None, {"x": np.array(["word" * 50] * 20)})[0]
    del made
    gc.collect()
    return out


def value_after_session() -> np.ndarray:
    made = fresh("scale")
    value = made.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(f32(1, 2))})[0]
    del made
    gc.collect()
    return value.numpy()


def array_after_value() -> np.ndarray:
    feed = {"x": ort.OrtValue.ortvalue_from_numpy(np.arange(4096, dtype=np.float32))}
    array = session("scale").run_with_ort_values(None, feed)[0].numpy()
    del feed
    gc.collect()
    session("scale").run(None, {"x": np.full(4096, 7, np.float32)})
    return array


def input_freed_after_run() -> np.ndarray:
    x = np.arange(4096, dtype=np.float32)
    out = session("identity").run(None, {"x": x})[0]
    x[:] = -1
    del x
    gc.collect()
    return out


def input_released() -> bool:
    """A run keeps no reference to its inputs."""
    x = np.ones(8, np.float32).view(type("Tracked", (np.ndarray,), {}))
    gone = weakref.ref(x)
    session("scale").run(None, {"x": x})
    del x
    gc.collect()
    return gone() is None


def many_kept() -> bool:
    kept = [session("scale").run(None, {"x": np.full(64, i, np.float32)})[0] for i in range(300)]
    return all(bool((y == 2 * i).all()) for i, y in enumerate(kept))


RAMP = np.arange(4096, dtype=np.float32)


@table(
    "read, expected",
    [
        case("session_gone", after_session, Gives([2 * RAMP])),
        case("view_of_output", views_of_dead, Gives(f32(10, 12, 14))),
        case("strings", strings_after_session, Gives(strings(*["word" * 50] * 20))),
        case("ort_value", value_after_session, Gives(f32(2, 4))),
        case("array_of_ort_value", array_after_value, Gives(2 * RAMP)),
        case("input_changed_after", input_freed_after_run, Gives(RAMP)),
        case("input_released", input_released, Gives(True)),
        case("many_kept", many_kept, Gives(True)),
    ],
)
def test_lifetime(read: Callable[[], Any], expected: Any) -> None:
    """Outputs stay valid without their session; inputs are not kept."""
    check(expected, read)


@table(
    "read, expected",
    [
        case(
            "numpy",
            lambda: np.from_dlpack(one()),
            Gives(f32(2, 4)),
        ),
        case("memory_view", lambda: memoryview(one()).tolist(), Gives([2.0, 4.0])),
        case("fed_again", lambda: one(x=one()), Gives(f32(4, 8))),
        case("pickled", lambda: pickle.loads(pickle.dumps(one())), Gives(f32(2, 4))),
    ],
)
def test_use(read: Callable[[], Any], expected: Any) -> None:
    """Outputs are ordinary arrays for others."""
    check(expected, read)
