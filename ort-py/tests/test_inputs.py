"""Values given for tensor inputs: element types, containers, coercions, refusals."""

from __future__ import annotations

import array
import decimal
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import models
import numpy as np
from harness import Gives, Raises, case, check, f32, ort, session, strings, table
from models import DTYPES


class Arrays:
    """Has `__array__` and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


class Packed:
    """Has the DLPack protocol and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def ramp(dtype: type) -> np.ndarray:
    """24 values of a dtype: 0, 1, 2, ... or alternating truth values."""
    return (np.arange(24) % (2 if dtype is np.bool_ else 24)).astype(dtype)


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


def misaligned(values: np.ndarray) -> np.ndarray:
    raw = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:]
    return raw.view(values.dtype)


def mapped(values: np.ndarray) -> np.memmap:
    place = os.path.join(models.folder(), f"mapped-{values.dtype.name}.bin")
    values.tofile(place)
    return np.memmap(place, values.dtype, "r")


class Subclass(np.ndarray):
    """A subclass of arrays without anything of its own."""


# Container -> (what is fed, what must come out), both made from 24 values.
CONTAINERS: dict[str, Callable[[np.ndarray], tuple[Any, np.ndarray]]] = {
    "contiguous": lambda a: (a, a),
    "one": lambda a: (a[:1], a[:1]),
    "two_dimensions": lambda a: (a.reshape(4, 6), a.reshape(4, 6)),
    "four_dimensions": lambda a: (a.reshape(2, 3, 2, 2), a.reshape(2, 3, 2, 2)),
    "fortran": lambda a: (np.asfortranarray(a.reshape(4, 6)), a.reshape(4, 6)),
    "transposed": lambda a: (a.reshape(4, 6).T, np.ascontiguousarray(a.reshape(4, 6).T)),
    "strided": lambda a: (a[::3], a[::3].copy()),
    "reversed": lambda a: (a[::-1], a[::-1].copy()),
    "offset": lambda a: (a[5:9], a[5:9].copy()),
    "inner": lambda a: (a.reshape(4, 6)[1:3, 2:5], a.reshape(4, 6)[1:3, 2:5].copy()),
    "broadcast": lambda a: (np.broadcast_to(a[3], (2, 3)), np.full((2, 3), a[3])),
    "read_only": lambda a: (read_only(a), a),
    "misaligned": lambda a: (misaligned(a), a),
    "mapped": lambda a: (mapped(a), a),
    "subclass": lambda a: (a.view(Subclass), a),
    "matrix": lambda a: (a.view(np.matrix), a.reshape(1, 24)),
    "masked": lambda a: (np.ma.array(a, mask=[True, False] * 12), a),
    "record": lambda a: (a.view(np.recarray), a),
    "scalar_array": lambda a: (np.array(a[3]), np.array(a[3])),
    "empty": lambda a: (a[:0], a[:0]),
    "empty_rows": lambda a: (np.empty((0, 3), a.dtype), np.empty((0, 3), a.dtype)),
    "empty_columns": lambda a: (np.empty((3, 0), a.dtype), np.empty((3, 0), a.dtype)),
    "list": lambda a: (a[:4].tolist(), a[:4]),
    "list_of_lists": lambda a: (a.reshape(4, 6).tolist(), a.reshape(4, 6)),
    "list_of_arrays": lambda a: (list(a.reshape(4, 6)), a.reshape(4, 6)),
    "list_of_scalars": lambda a: (list(a[:4]), a[:4]),
    "empty_list": lambda a: ([], a[:0]),
    "ort_value": lambda a: (ort.OrtValue.ortvalue_from_numpy(a.copy()), a),
    "numpy_scalar": lambda a: (a[3], np.array(a[3])),
    "array_protocol": lambda a: (Arrays(a), a),
    "dlpack_object": lambda a: (Packed(a.copy()), a),
    "memory_view": lambda a: (memoryview(a), a),
    "native_ort_value": lambda a: (ort.OrtValue.ortvalue_from_numpy(a.copy())._ortvalue, a),
}


@table(
    "element, container, expected",
    [
        case(f"{element}-{container}", element, container, Gives([make(ramp(dtype))[1]]))
        for element, dtype in DTYPES.items()
        for container, make in CONTAINERS.items()
    ],
)
def test_container(element: str, container: str, expected: Any) -> None:
    """Every element type in every container, through a model without a declared shape."""
    fed, _ = CONTAINERS[container](ramp(DTYPES[element]))
    check(expected, lambda: session("identity", element, None).run(None, {"x": fed}))


@table(
    "element, expected",
    [
        case(element, element, Gives([ramp(dtype)]))
        for element, dtype in DTYPES.items()
        if np.dtype(dtype).itemsize > 1
    ],
)
def test_big_endian(element: str, expected: Any) -> None:
    """Arrays of the other byte order keep their numbers."""
    values = ramp(DTYPES[element])
    fed = values.astype(values.dtype.newbyteorder(">"))
    check(expected, lambda: session("identity", element, None).run(None, {"x": fed}))


@table(
    "element, fed, expected",
    [
        case(
            f"{element}-{other}",
            element,
            other,
            Raises(
                "InvalidArgument",
                r"^\[ONNXRuntimeError\] : 2 : INVALID_ARGUMENT : .*Unexpected input data type\. "
                rf"Actual: \(tensor\({other}\)\) , expected: \(tensor\({element}\)\)",
            ),
        )
        for element in [*DTYPES, "string"]
        for other in [*DTYPES, "string"]
        if element != other
    ],
)
def test_no_casting(element: str, fed: str, expected: Any) -> None:
    """Arrays are never cast, not even where no value would change."""
    values = strings("1", "0") if fed == "string" else ramp(DTYPES[fed])[:2]
    check(expected, lambda: session("identity", element, None).run(None, {"x": values}))


RANK = "^.*INVALID_ARGUMENT : .*Invalid rank for input: x Got: {} Expected: {}"
DIMS = "INVALID_ARGUMENT : .*Got invalid dimensions for input: x for the following indices"


@table(
    "fed, expected",
    [
        case("right", lambda: np.ones((2, 3), np.float32), Gives([-np.ones((2, 3), np.float32)])),
        case("rank_1", lambda: f32(1, 2, 3, 4, 5, 6), Raises("InvalidArgument", RANK.format(1, 2))),
        case(
            "rank_3",
            lambda: np.ones((1, 2, 3), np.float32),
            Raises("InvalidArgument", RANK.format(3, 2)),
        ),
        case(
            "rank_0",
            lambda: np.array(1, np.float32),
            Raises("InvalidArgument", RANK.format(0, 2)),
        ),
        case(
            "first_dimension",
            lambda: np.ones((3, 3), np.float32),
            Raises("InvalidArgument", DIMS + r".* index: 0 Got: 3 Expected: 2"),
        ),
        case(
            "last_dimension",
            lambda: np.ones((2, 4), np.float32),
            Raises("InvalidArgument", DIMS + r".* index: 1 Got: 4 Expected: 3"),
        ),
        case(
            "both_dimensions",
            lambda: np.ones((3, 2), np.float32),
            Raises(
                "InvalidArgument", DIMS + r".* index: 0 Got: 3 Expected: 2\s+index: 1 Got: 2 Expected: 3"
            ),
        ),
        case(
            "empty",
            lambda: np.ones((0, 3), np.float32),
            Raises("InvalidArgument", DIMS + r".* index: 0 Got: 0 Expected: 2"),
        ),
        case(
            "list",
            lambda: [[1, 2, 3], [4, 5, 6]],
            Gives([f32(-1, -2, -3, -4, -5, -6).reshape(2, 3)]),
        ),
        case(
            "list_of_tuples",
            lambda: [(1, 2, 3), (4, 5, 6)],
            Gives([f32(-1, -2, -3, -4, -5, -6).reshape(2, 3)]),
        ),
        case("list_of_float64", lambda: [np.ones(3)] * 2, Gives([-np.ones((2, 3), np.float32)])),
        case("flat_list", lambda: [1, 2, 3, 4, 5, 6], Raises("InvalidArgument", RANK.format(1, 2))),
        case(
            "ort_value_rank",
            lambda: ort.OrtValue.ortvalue_from_numpy(f32(1)),
            Raises("InvalidArgument", RANK.format(1, 2)),
        ),
    ],
)
def test_shape(fed: Callable[[], Any], expected: Any) -> None:
    """Rank and dimensions against a declared [2, 3]."""
    value = fed()
    check(expected, lambda: session("fixed").run(None, {"x": value}))


@table(
    "fed, expected",
    [
        case("scalar", lambda: np.array(2, np.float32), Gives([np.array(2, np.float32)])),
        case("vector", lambda: f32(2), Gives([np.array(2, np.float32)])),
        case("list", lambda: [2.0], Gives([np.array(2, np.float32)])),
        case("two_elements", lambda: f32(2, 3), Raises("InvalidArgument", RANK.format(1, 0))),
        case("numpy_scalar", lambda: np.float32(2), Gives([np.array(2, np.float32)])),
    ],
)
def test_rank_zero(fed: Callable[[], Any], expected: Any) -> None:
    """A declared rank of 0 takes one element, and is a scalar."""
    value = fed()
    check(expected, lambda: session("identity", "float", ()).run(None, {"x": value}))


LIST = "Could not create tensor from given input list"
ITERABLE = "Input must be a list of dictionaries or a single numpy array for input 'x'"
ARRAYS = "Iterable of <class 'numpy.ndarray'> should be given as array for input 'x'"
EMPTY = "Input 'x' must not be empty"
OBJECT = r"Unable to handle object of type <class '{}'>"


@table(
    "element, fed, expected",
    [
        # Lists take the model's element type.
        case("ints_for_float", "float", lambda: [1, 2], Gives([f32(1, 2)])),
        case("bools_for_float", "float", lambda: [True, False], Gives([f32(1, 0)])),
        case("float64_scalars_for_float", "float", lambda: [np.float64(3)], Gives([f32(3)])),
        case("none_for_float", "float", lambda: [1, None], Gives([f32(1, np.nan)])),
        case("nan_for_float", "float", lambda: [float("nan")], Gives([f32(np.nan)])),
        case("decimals_for_float", "float", lambda: [decimal.Decimal(1)], Gives([f32(1)])),
        case("floats_for_int64", "int64", lambda: [1.9, -1.9], Gives([np.array([1, -1])])),
        case("bools_for_int64", "int64", lambda: [True], Gives([np.array([1])])),
        case("ints_for_bool", "bool", lambda: [1, 0, 2], Gives([np.array([True, False, True])])),
        case("none_for_int64", "int64", lambda: [None], Raises("RuntimeError", LIST)),
        case("too_large_for_int64", "int64", lambda: [2**63], Raises("RuntimeError", LIST)),
        case("words_for_float", "float", lambda: ["a"], Raises("RuntimeError", LIST)),
        case("ragged", "float", lambda: [[1, 2], [3]], Raises("RuntimeError", LIST)),
        case("objects", "float", lambda: [object()], Raises("RuntimeError", LIST)),
        case("list_rank", "float", lambda: [[1, 2]], Raises("InvalidArgument", RANK.format(2, 1))),
        # Other iterables and objects are refused.
        case("tuple", "float", lambda: (1.0, 2.0), Raises("RuntimeError", ITERABLE)),
        case("range", "float", lambda: range(3), Raises("RuntimeError", ITERABLE)),
        case("str", "float", lambda: "abc", Raises("RuntimeError", ITERABLE)),
        case("generator", "float", lambda: (i for i in [1.0]), Raises("RuntimeError", ITERABLE)),
        case("set", "float", lambda: {1.0}, Raises("RuntimeError", ITERABLE)),
        case("arrays", "float", lambda: (f32(1), f32(2)), Raises("RuntimeError", ARRAYS)),
        case("yields_array", "float", lambda: (i for i in [f32(1)]), Raises("RuntimeError", ARRAYS)),
        case("no_element", "float", lambda: (), Raises("RuntimeError", EMPTY)),
        case("no_letter", "float", lambda: "", Raises("RuntimeError", EMPTY)),
        case("float", "float", lambda: 1.5, Raises("RuntimeError", OBJECT.format("float"))),
        case("int", "float", lambda: 1, Raises("RuntimeError", OBJECT.format("int"))),
        case("bool", "bool", lambda: True, Raises("RuntimeError", OBJECT.format("bool"))),
        case("class", "float", lambda: np.float32, Raises("RuntimeError", OBJECT.format("type"))),
        case("object", "float", object, Raises("RuntimeError", OBJECT.format("object"))),
        case("empty_dict", "float", dict, Raises("RuntimeError", "Size of dictionary is empty")),
        case(
            "dict",
            "float",
            lambda: {"a": 1.0},
            Raises(
                "InvalidArgument",
                r"Actual: \(\(map\(string,tensor\(float\)\)\)\) , expected: \(\(tensor\(float\)\)\)",
            ),
        ),
        # Python's own buffers.
        case("array_module", "float", lambda: array.array("f", [1, 2]), Gives([f32(1, 2)])),
        case(
            "array_module_other_type",
            "float",
            lambda: array.array("d", [1]),
            Raises("RuntimeError"),
        ),
        case("bytes", "float", lambda: b"abc", Raises("RuntimeError")),
        case("scalar_of_other_type", "float", lambda: np.int64(1), Raises("RuntimeError")),
        # Arrays of element types that ONNX lacks, and of objects.
        case(
            "complex",
            "float",
            lambda: np.zeros(2, np.complex64),
            Raises("RuntimeError", "can't be converted|complex64"),
        ),
        case(
            "date",
            "int64",
            lambda: np.array(["2020"], "M8[D]"),
            Raises("RuntimeError", "can't be converted|datetime64"),
        ),
        case(
            "time_difference",
            "int64",
            lambda: np.array([1], "m8[s]"),
            Raises("RuntimeError", "can't be converted|timedelta64"),
        ),
        case(
            "long_double",
            "double",
            lambda: np.ones(2, np.longdouble),
            Raises("RuntimeError", "can't be converted|longdouble|float128"),
        ),
        case(
            "objects_for_float",
            "float",
            lambda: np.array([1.0, 2.0], object),
            Raises(
                "InvalidArgument", r"Actual: \(tensor\(string\)\) , expected: \(tensor\(float\)\)"
            ),
        ),
        # Aliases of C integer types.
        case("long_long", "int64", lambda: np.arange(3, dtype=np.longlong), Gives([np.arange(3)])),
        case("pointer_sized", "int64", lambda: np.arange(3, dtype=np.intp), Gives([np.arange(3)])),
        case(
            "c_int",
            "int32",
            lambda: np.arange(3, dtype=np.intc),
            Gives([np.arange(3, dtype=np.int32)]),
        ),
        case(
            "bool_of_other_bits",
            "bool",
            lambda: np.array([2, 0], np.uint8).view(bool),
            Gives([np.array([True, False])]),
        ),
        # OrtValues are taken as they are.
        case(
            "ort_value_of_other_type",
            "float",
            lambda: ort.OrtValue.ortvalue_from_numpy(np.arange(3)),
            Raises(
                "InvalidArgument", r"Actual: \(tensor\(int64\)\) , expected: \(tensor\(float\)\)"
            ),
        ),
        # None is a missing input.
        case(
            "none",
            "float",
            lambda: None,
            Raises("ValueError", r"Required inputs \(\['x'\]\) are missing"),
        ),
    ],
)
def test_value(element: str, fed: Callable[[], Any], expected: Any) -> None:
    """Coercions and refusals, against a vector of one element type."""
    value = fed()
    check(expected, lambda: session("identity", element).run(None, {"x": value}))


SMALL = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}


@table("element, expected", [case(e, e, Gives([f32(0, 1, 2, 3)])) for e in SMALL])
def test_small_types_in(element: str, expected: Any) -> None:
    """Arrays of ml_dtypes are inputs of the type of that name."""
    value = np.array([0, 1, 2, 3], SMALL[element])
    check(expected, lambda: session("cast", element, "float").run(None, {"x": value}))


@table(
    "element, expected",
    [case(e, e, Gives([f32(0, 1, 2, 3)])) for e in SMALL if not e.endswith("int4")],
)
def test_small_types_as_ort_values(element: str, expected: Any) -> None:
    """The form that works on both: bits under an ONNX type."""
    bits = np.array([0, 1, 2, 3], SMALL[element]).view(np.uint16 if element == "bfloat16" else np.uint8)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, models.ELEMENT_TYPES[element])
    check(expected, lambda: session("cast", element, "float").run(None, {"x": value}))


@table(
    "element, expected",
    [
        case(
            e,
            e,
            Raises("InvalidArgument", r"Unexpected input data type\. Actual: \(tensor\(uint8\)\)"),
        )
        for e in SMALL
    ],
)
def test_bits_are_not_small_types(element: str, expected: Any) -> None:
    """A uint8 array is no float8 array."""
    value = np.array([0, 1], np.uint8)
    check(expected, lambda: session("cast", element, "float").run(None, {"x": value}))


class Text(str):
    """A subclass of `str`."""


@table(
    "fed, expected",
    [
        case("unicode", lambda: np.array(["a", "é", "猫"]), Gives([strings("a", "é", "猫")])),
        case("bytes", lambda: np.array([b"a", b"xyz"]), Gives([strings("a", "xyz")])),
        case("void", lambda: np.array([b"ab"], "V2"), Gives([strings("ab")])),
        case("objects", lambda: strings("a", "bb"), Gives([strings("a", "bb")])),
        case("numbers", lambda: strings(3, None, 2.5), Gives([strings("3", "None", "2.5")])),
        case("numpy_str", lambda: [np.str_("a")], Gives([strings("a")])),
        case("list", lambda: ["a", "b"], Gives([strings("a", "b")])),
        case("list_of_numbers", lambda: [1, 2], Gives([strings("1", "2")])),
        case("mixed_list", lambda: ["a", 1], Gives([strings("a", "1")])),
        case("list_with_none", lambda: ["a", None], Gives([strings("a", "None")])),
        case("empty_list", lambda: [], Gives([np.empty(0, object)])),
        case("empty_objects", lambda: np.empty(0, object), Gives([np.empty(0, object)])),
        case("empty_unicode", lambda: np.empty(0, "U1"), Gives([np.empty(0, object)])),
        case("empty_text", lambda: np.array([""]), Gives([strings("")])),
        case("embedded_nul", lambda: strings("a\0b"), Gives([strings("a\0b")])),
        case("long", lambda: strings("x" * 100_000), Gives([strings("x" * 100_000)])),
        case("strided", lambda: np.array(["a", "b", "c"])[::2], Gives([strings("a", "c")])),
        case("strided_objects", lambda: strings("a", "b", "c")[::-2], Gives([strings("c", "a")])),
        case("char_array", lambda: np.char.array(["a", "b"]), Gives([strings("a", "b")])),
        case("read_only", lambda: read_only(np.array(["a"])), Gives([strings("a")])),
        case(
            "many",
            lambda: np.array([str(i) for i in range(5000)]),
            Gives([strings(*map(str, range(5000)))]),
        ),
        case("padded", lambda: np.array(["ab", "é", ""], "U5"), Gives([strings("ab", "é", "")])),
        case("str_objects", lambda: strings(np.str_("é"), Text("b")), Gives([strings("é", "b")])),
        case("text_then_number", lambda: strings("a", 1, None), Gives([strings("a", "1", "None")])),
        case("nothing", lambda: np.empty(2, object), Gives([strings("None", "None")])),
        case("shares_an_object", lambda: np.full(3, "猫", object), Gives([strings("猫", "猫", "猫")])),
        case("bare", lambda: "abc", Raises("RuntimeError", ITERABLE)),
        case("tuple", lambda: ("a",), Raises("RuntimeError", ITERABLE)),
        case("rank", lambda: [["a"]], Raises("InvalidArgument", RANK.format(2, 1))),
        case(
            "surrogate",
            lambda: strings("\ud800"),
            Raises(("UnicodeEncodeError", "RuntimeError")),
        ),
        case("bytes_objects", lambda: strings(b"by"), Gives([strings("b'by'")])),
        case("bytes_after_text", lambda: strings("a", b"by"), Gives([strings("a", "b'by'")])),
        case("bytes_utf8", lambda: strings("é".encode()), Gives([strings(r"b'\xc3\xa9'")])),
        case("numpy_bytes", lambda: strings(np.bytes_(b"by")), Gives([strings("b'by'")])),
        case("bytes_list", lambda: [b"by"], Gives([strings("b'by'")])),
        case("bytes_no_utf8", lambda: np.array([b"\xff\xfe"]), Raises("UnicodeDecodeError")),
        case(
            "bytes_objects_no_utf8",
            lambda: strings(b"\xff\xfe"),
            Gives([strings(r"b'\xff\xfe'")]),
        ),
        case(
            "big_endian",
            lambda: np.array(["ab", "c"]).astype(">U2"),
            Gives([strings("ab", "c")]),
        ),
        case(
            "string_dtype",
            lambda: np.array(["a", "é"], np.dtypes.StringDType()),
            Gives([strings("a", "é")]),
        ),
    ],
)
def test_strings(fed: Callable[[], Any], expected: Any) -> None:
    """Strings in and out of a model; the output is an object array of str."""
    value = fed()
    check(expected, lambda: session("identity", "string").run(None, {"x": value}))


@table(
    "shape, fed, expected",
    [
        case("rank_0", (), np.array("x"), Gives([np.array("x", object)])),
        case("rank_0_object", (), np.array("x", object), Gives([np.array("x", object)])),
        case("rank_2", ("n", 2), np.array([["a", "b"]]), Gives([np.array([["a", "b"]], object)])),
        case(
            "fortran",
            ("n", 2),
            np.array([["a", "b"], ["c", "d"]], order="F"),
            Gives([np.array([["a", "b"], ["c", "d"]], object)]),
        ),
        case(
            "fortran_objects",
            ("n", 2),
            np.array([["a", "b"], ["c", "d"]], object, order="F"),
            Gives([np.array([["a", "b"], ["c", "d"]], object)]),
        ),
        case("empty_rows", ("n", 2), np.empty((0, 2), "U3"), Gives([np.empty((0, 2), object)])),
    ],
)
def test_string_shapes(shape: Any, fed: np.ndarray, expected: Any) -> None:
    """Shapes of string tensors."""
    check(expected, lambda: session("identity", "string", shape).run(None, {"x": fed}))


@table(
    "expected",
    [case("concat", Gives([strings("ax", "bé")]))],
)
def test_string_operator(expected: Any) -> None:
    """Strings reach an operator that reads them."""
    feed = {"a": np.array(["a", "b"]), "b": ["x", "é"]}
    check(expected, lambda: session("concat_strings").run(None, feed))


@table(
    "container, expected",
    [
        case("contiguous", np.arange(6, dtype=np.float32), Gives(True)),
        case("strided", np.arange(12, dtype=np.float32)[::2], Gives(True)),
        case("read_only", read_only(np.arange(6, dtype=np.float32)), Gives(True)),
    ],
)
def test_inputs_are_not_written(container: np.ndarray, expected: Any) -> None:
    """A run leaves its inputs alone, also where an output could reuse their memory."""

    def unchanged() -> bool:
        before = container.copy()
        for name in ("scale", "passed_through", "input_output"):
            session(name).run(None, {"x": container})
        return bool((container == before).all())

    check(expected, unchanged)
