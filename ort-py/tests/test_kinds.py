"""Values that are no tensors: sequences, maps, optionals."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Gives, Raises, case, check, f32, ort, session, strings, table


def value_of(array: np.ndarray) -> Any:
    """An OrtValue of an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


NOT_TENSOR = "Input is not a tensor"
ITERABLE = (
    "should be given as array for input 'x'"
    "|Input must be a list of dictionaries or a single numpy array for input 'x'"
)


@table(
    "element, fed, expected",
    [
        case("two", "float", lambda: [f32(1, 2), f32(3)], Gives([[f32(1, 2), f32(3)]])),
        case(
            "ranks_differ",
            "float",
            lambda: [f32(1), np.ones((1, 3), np.float32)],
            Gives([[f32(1), np.ones((1, 3), np.float32)]]),
        ),
        case("one", "float", lambda: [f32(1)], Gives([[f32(1)]])),
        case("empty", "float", list, Gives([[]])),
        case("empty_int64", "int64", list, Gives([[]])),
        case(
            "empty_element",
            "float",
            lambda: [np.empty(0, np.float32)],
            Gives([[np.empty(0, np.float32)]]),
        ),
        case(
            "scalars",
            "float",
            lambda: [np.array(1, np.float32)],
            Gives([[np.array(1, np.float32)]]),
        ),
        case(
            "strided",
            "float",
            lambda: [np.arange(6, dtype=np.float32)[::2]],
            Gives([[f32(0, 2, 4)]]),
        ),
        case(
            "fortran",
            "float",
            lambda: [np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))],
            Gives([[np.arange(6, dtype=np.float32).reshape(2, 3)]]),
        ),
        case("int64", "int64", lambda: [np.arange(2)], Gives([[np.arange(2)]])),
        case("double", "double", lambda: [np.ones(2)], Gives([[np.ones(2)]])),
        case(
            "float16",
            "float16",
            lambda: [np.ones(1, np.float16)],
            Gives([[np.ones(1, np.float16)]]),
        ),
        case("bool", "bool", lambda: [np.array([True])], Gives([[np.array([True])]])),
        case(
            "string",
            "string",
            lambda: [np.array(["a"]), strings("b", "é")],
            Gives([[strings("a"), strings("b", "é")]]),
        ),
        case(
            "many",
            "float",
            lambda: [f32(i) for i in range(200)],
            Gives([[f32(i) for i in range(200)]]),
        ),
        case(
            "other_type",
            "float",
            lambda: [np.ones(2)],
            Raises("RuntimeError", "different data type"),
        ),
        case(
            "mixed_types",
            "float",
            lambda: [f32(1), np.ones(2)],
            Raises("RuntimeError", "different data type"),
        ),
        case(
            "int64_other_type",
            "int64",
            lambda: [f32(1)],
            Raises("RuntimeError", "different data type"),
        ),
        case("numbers", "float", lambda: [1.0], Raises("RuntimeError", NOT_TENSOR)),
        case("lists", "float", lambda: [[1.0, 2.0]], Raises("RuntimeError", NOT_TENSOR)),
        case("words", "string", lambda: ["a"], Raises("RuntimeError", NOT_TENSOR)),
        case("none_element", "float", lambda: [None], Raises("RuntimeError", NOT_TENSOR)),
        case("tuple", "float", lambda: (f32(1), f32(2)), Raises("RuntimeError", ITERABLE)),
        case("generator", "float", lambda: (i for i in [f32(1)]), Raises("RuntimeError", ITERABLE)),
        case("str", "float", lambda: "a", Raises("RuntimeError", ITERABLE)),
        case(
            "array",
            "float",
            lambda: f32(1),
            Raises(
                "InvalidArgument",
                "input with name: 'x' expected to be of type: 3 but received a tensor",
            ),
        ),
        case(
            "dict",
            "float",
            lambda: {"a": 1.0},
            Raises(
                "InvalidArgument",
                r"Actual: \(\(map\(string,tensor\(float\)\)\)\) , expected: \(\(seq\(tensor\(float\)\)\)\)",
            ),
        ),
        case("ort_values", "float", lambda: [value_of(f32(1))], Gives([[f32(1)]])),
        case("big_endian", "float", lambda: [f32(1, 2).astype(">f4")], Gives([[f32(1, 2)]])),
        case(
            "none",
            "float",
            lambda: None,
            Raises("ValueError", r"Required inputs \(\['x'\]\) are missing"),
        ),
    ],
)
def test_sequence(element: str, fed: Callable[[], Any], expected: Any) -> None:
    """Sequences in and out: lists of arrays of one element type."""
    value = fed()
    check(expected, lambda: session("sequence_identity", element).run(None, {"x": value}))


@table(
    "make, expected",
    [
        case(
            "built",
            lambda: session("sequence_make").run(None, {"a": f32(1), "b": f32(2)}),
            Gives([[f32(1), f32(2)]]),
        ),
        case(
            "length",
            lambda: session("sequence_length").run(None, {"x": [f32(1)] * 3}),
            Gives([np.array(3)]),
        ),
        case(
            "length_of_none",
            lambda: session("sequence_length").run(None, {"x": []}),
            Gives([np.array(0)]),
        ),
    ],
)
def test_sequence_operators(make: Callable[[], Any], expected: Any) -> None:
    """Sequences that operators make and read."""
    check(expected, make)


def _sequence_value() -> Any:
    feed = {"a": value_of(f32(1)), "b": value_of(f32(2))}
    return session("sequence_make").run_with_ort_values(None, feed)[0]


@table(
    "read, expected",
    [
        case("data_type", lambda v: v.data_type(), Gives("seq(tensor(float))")),
        case("is_sequence", lambda v: v.is_tensor_sequence(), Gives(True)),
        case("is_tensor", lambda v: v.is_tensor(), Gives(False)),
        case(
            "fed_again",
            lambda v: session("sequence_identity").run(None, {"x": v}),
            Gives([[f32(1), f32(2)]]),
        ),
        case(
            "fed_twice",
            lambda v: [session("sequence_length").run(None, {"x": v}) for _ in "ab"],
            Gives([[np.array(2)]] * 2),
        ),
    ],
)
def test_sequence_value(read: Callable[[Any], Any], expected: Any) -> None:
    """An OrtValue that holds a sequence."""
    value = _sequence_value()
    check(expected, lambda: read(value))


def row(*values: float) -> list[np.ndarray]:
    """What DictVectorizer gives."""
    return [np.array([values], np.float32)]


@table(
    "key, fed, expected",
    [
        case("some", "string", lambda: {"a": 1.0, "c": 3.0}, Gives(row(1, 0, 3))),
        case("all", "string", lambda: {"c": 3.0, "b": 2.0, "a": 1.0}, Gives(row(1, 2, 3))),
        case("unknown_key", "string", lambda: {"z": 1.0}, Gives(row(0, 0, 0))),
        case("int_value", "string", lambda: {"a": 1}, Gives(row(1, 0, 0))),
        case("mixed_values", "string", lambda: {"a": 1.0, "b": 2}, Gives(row(1, 2, 0))),
        case("bool_value", "string", lambda: {"a": True}, Gives(row(1, 0, 0))),
        case("numpy_value", "string", lambda: {"a": np.float32(2)}, Gives(row(2, 0, 0))),
        case("float64_value", "string", lambda: {"a": np.float64(3)}, Gives(row(3, 0, 0))),
        case("numpy_key", "string", lambda: {np.str_("b"): 1.0}, Gives(row(0, 1, 0))),
        case("ordered", "string", lambda: collections.OrderedDict(a=1.0), Gives(row(1, 0, 0))),
        case(
            "default_dict",
            "string",
            lambda: collections.defaultdict(float, b=1.0),
            Gives(row(0, 1, 0)),
        ),
        case("int64", "int64", lambda: {1: 1.0, 3: 3.0}, Gives(row(1, 0, 3))),
        case("int64_numpy_key", "int64", lambda: {np.int64(2): 5.0}, Gives(row(0, 5, 0))),
        case("int64_int32_key", "int64", lambda: {np.int32(2): 5.0}, Gives(row(0, 5, 0))),
        case("int64_int_value", "int64", lambda: {1: 1}, Gives(row(1, 0, 0))),
        case(
            "empty",
            "string",
            dict,
            Raises("RuntimeError", "Size of dictionary is empty, unable to run the prediction"),
        ),
        case(
            "word_value",
            "string",
            lambda: {"a": "x"},
            Raises("RuntimeError", "Unexpected value type +<class 'str'>.* for input 'x'"),
        ),
        case(
            "none_value",
            "string",
            lambda: {"a": None},
            Raises("RuntimeError", "Unexpected value type +<class 'NoneType'>.* for input 'x'"),
        ),
        case("array_value", "string", lambda: {"a": np.array(2.0)}, Gives(row(2, 0, 0))),
        case(
            "array_of_one_value",
            "string",
            lambda: {"a": f32(1)},
            Raises("Fail", "<class 'TypeError'>: only 0-dimensional arrays can be converted"),
        ),
        case(
            "word_in_array",
            "string",
            lambda: {"a": np.array("b")},
            Raises("Fail", "<class 'ValueError'>: could not convert string to float: 'b'"),
        ),
        case(
            "complex_value",
            "string",
            lambda: {"a": 1 + 2j},
            Raises("Fail", "<class 'TypeError'>: must be real number, not complex"),
        ),
        case(
            "huge_value",
            "string",
            lambda: {"a": 10**400},
            Raises("Fail", "<class 'OverflowError'>: int too large to convert to float"),
        ),
        case(
            "complex_key",
            "int64",
            lambda: {1j: 1.0},
            Raises("RuntimeError", "Unexpected key type +<class 'complex'>.* for input 'x'"),
        ),
        case(
            "bytes_key",
            "string",
            lambda: {b"a": 1.0},
            Raises(
                "RuntimeError",
                r"Key type must be int or string \(not <class 'bytes'>\) for input 'x'",
            ),
        ),
        case(
            "float_key",
            "int64",
            lambda: {1: 1.0, 1.5: 1.0},
            Raises("RuntimeError", "Unexpected key type +<class 'float'>.*C type int64_t"),
        ),
        case(
            "int_key_for_string",
            "string",
            lambda: {1: 2.0},
            Raises(
                "InvalidArgument",
                r"Actual: \(\(map\(int64,tensor\(float\)\)\)\) , expected: \(\(map\(string,tensor\(float\)\)\)\)",
            ),
        ),
        case(
            "string_key_for_int64",
            "int64",
            lambda: {"a": 1.0},
            Raises(
                "InvalidArgument",
                r"Actual: \(\(map\(string,tensor\(float\)\)\)\) , expected: \(\(map\(int64,tensor\(float\)\)\)\)",
            ),
        ),
        case(
            "array",
            "string",
            lambda: f32(1),
            Raises(
                "InvalidArgument",
                "input with name: 'x' expected to be of type: 1 but received a tensor",
            ),
        ),
        case("pairs", "string", lambda: (("a", 1.0),), Raises("RuntimeError", ITERABLE)),
        case("list_of_dicts", "string", lambda: [{"a": 1.0}], Raises("RuntimeError")),
        case(
            "mapping_proxy",
            "string",
            lambda: types.MappingProxyType({"a": 1.0}),
            Gives(row(1, 0, 0)),
        ),
        case(
            "none",
            "string",
            lambda: None,
            Raises("ValueError", r"Required inputs \(\['x'\]\) are missing"),
        ),
    ],
)
def test_map(key: str, fed: Callable[[], Any], expected: Any) -> None:
    """Maps in: dicts with str or int keys and numbers as values."""
    value = fed()
    check(expected, lambda: session("dict_vectorizer", key, "float").run(None, {"x": value}))


@table(
    "key, value, fed",
    [
        case("int64", "string", "int64", {"a": 1}),
        case("double", "string", "double", {"a": 1.0}),
        case("int_keys", "int64", "double", {1: np.float64(1)}),
    ],
)
def test_map_of_other_values(key: str, value: str, fed: dict[Any, Any]) -> None:
    """Values of dicts are floats, and maps to other types take none."""
    actual, expected = (rf"\(\(map\({key},tensor\({of}\)\)\)\)" for of in ("float", value))
    message = f"Unexpected input data type. Actual: {actual} , expected: {expected}"
    check(
        Raises("InvalidArgument", message),
        lambda: session("dict_vectorizer", key, value).run(None, {"x": fed}),
    )


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@table(
    "key, fed, expected",
    [
        case(
            "string",
            "string",
            X,
            Gives([[{"a": 0.0, "b": 1.0, "c": 2.0}, {"a": 3.0, "b": 4.0, "c": 5.0}]]),
        ),
        case(
            "int64",
            "int64",
            X,
            Gives([[{10: 0.0, 20: 1.0, 30: 2.0}, {10: 3.0, 20: 4.0, 30: 5.0}]]),
        ),
        case("one_row", "string", X[:1], Gives([[{"a": 0.0, "b": 1.0, "c": 2.0}]])),
        case("no_rows", "string", X[:0], Gives([[]])),
    ],
)
def test_map_output(key: str, fed: np.ndarray, expected: Any) -> None:
    """Sequences of maps out: lists of dicts of Python's own int, str and float."""
    check(expected, lambda: session("zip_map", key).run(None, {"x": fed}))


@table(
    "feed, expected",
    [
        case("array", lambda: {"x": f32(1, 2)}, Gives([np.array(True), f32(1, 2)])),
        case("list", lambda: {"x": [1.0, 2.0]}, Gives([np.array(True), f32(1, 2)])),
        case("empty_array", lambda: {"x": f32()}, Gives([np.array(True), f32()])),
        case("ort_value", lambda: {"x": value_of(f32(1))}, Gives([np.array(True), f32(1)])),
        case(
            "strided",
            lambda: {"x": np.arange(6, dtype=np.float32)[::3]},
            Gives([np.array(True), f32(0, 3)]),
        ),
        case("none", lambda: {"x": None}, Gives([np.array(False), f32(-1)])),
        case("left_out", dict, Gives([np.array(False), f32(-1)])),
        case(
            "other_type",
            lambda: {"x": np.ones(2)},
            Raises(
                "InvalidArgument", r"Actual: \(tensor\(double\)\) , expected: \(tensor\(float\)\)"
            ),
        ),
        case(
            "other_rank",
            lambda: {"x": np.ones((1, 2), np.float32)},
            Raises("InvalidArgument", "Invalid rank for input: x Got: 2 Expected: 1"),
        ),
    ],
)
def test_optional(feed: Callable[[], Any], expected: Any) -> None:
    """Optional tensors: None or left out is absent."""
    given = feed()
    check(expected, lambda: session("optional_tensor").run(None, given))


@table(
    "name, feed, expected",
    [
        case("present", "optional_identity", lambda: {"x": f32(1)}, Gives([f32(1)])),
        case("none", "optional_identity", lambda: {"x": None}, Gives([None])),
        case("left_out", "optional_identity", dict, Gives([None])),
        case("sequence", "optional_sequence", lambda: {"x": [f32(1)]}, Gives([np.array(True)])),
        case("empty_sequence", "optional_sequence", lambda: {"x": []}, Gives([np.array(True)])),
        case("no_sequence", "optional_sequence", lambda: {"x": None}, Gives([np.array(False)])),
        case("sequence_left_out", "optional_sequence", dict, Gives([np.array(False)])),
    ],
)
def test_optional_output(name: str, feed: Callable[[], Any], expected: Any) -> None:
    """An absent output is None."""
    given = feed()
    check(expected, lambda: session(name).run(None, given))
