"""Where `ort_runtime` deliberately differs from onnxruntime, for the tests beside `more_models`.

The tests assert both columns: the left one with `ORT_PACKAGE=onnxruntime`, the right one else.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from more_models import NO_CRASH, Anything, Like, OneOf, Raises

REFUSED = Raises("RuntimeError", "only supported from non-string numpy arrays")
CODE_6 = Raises("RuntimeError", "Unsupported code 6")
NO_TRANSFER = Raises("RuntimeError", "Data transfer implementation")
NO_NUMPY_TYPE = Raises("RuntimeError", "No corresponding Numpy type")
UPPER_CASE = Raises("Exception", "Unsupported device type: CPU")
ROWS = [[0, 1, 2], [3, 4, 5]]

STRINGS = "arrays of strings are values too"
SMALL_TYPES = "arrays of ml_dtypes are values too"
ANY_CASE = "device names are taken in any case"
BYTE_ORDER = "big-endian arrays are swapped, not misread"
CHECKED = "an update of another dtype leaves garbage or writes past the end"
PICKLES = "values cross process borders"
VERSIONED = "consumers of DLPack 1.0 pass these keywords"
BOOL_CODE = "numpy and torch send bool as DLPack code 6"
COPIES = "copies need no provider"
KEPT = "a capsule over freed memory reads garbage"
SAFE = "bad arguments must not end the process"
POOLS = "sessions with threads of their own go with a global pool"

#: Test id -> (what onnxruntime does, what ours does, why).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "test_ort_value.py::test_layout[big_endian]": (
        (True, [2, 3], Anything(ROWS)),
        (False, [2, 3], ROWS),
        BYTE_ORDER,
    ),
    **{
        f"test_ort_value.py::test_refused[{kind}]": (REFUSED, made, STRINGS)
        for kind, made in {
            "unicode": ("tensor(string)", [2], ["a", "bc"]),
            "octets": ("tensor(string)", [2], ["a", "bc"]),
            "objects": ("tensor(string)", [1], ["a"]),
        }.items()
    },
    **{
        f"test_ort_value.py::test_small_type[{kind}]": (REFUSED, f"tensor({name})", SMALL_TYPES)
        for kind, name in {
            "bfloat16": "bfloat16",
            "float8_e4m3fn": "float8e4m3fn",
            "float8_e4m3fnuz": "float8e4m3fnuz",
            "float8_e5m2": "float8e5m2",
            "float8_e5m2fnuz": "float8e5m2fnuz",
            "int4": "int4",
            "uint4": "uint4",
        }.items()
    },
    "test_ort_value.py::test_device[upper]": (UPPER_CASE, "cpu", ANY_CASE),
    "test_ort_value.py::test_numpy_of_small_type[bfloat16]": (
        NO_NUMPY_TYPE,
        ("bfloat16", 4),
        SMALL_TYPES,
    ),
    "test_ort_value.py::test_update_inplace[dtype]": (
        (Anything(ROWS), [2, 3]),
        Raises("RuntimeError"),
        CHECKED,
    ),
    "test_ort_value.py::test_update_inplace[big_endian]": (
        (Anything(ROWS), [2, 3]),
        (ROWS, [2, 3]),
        BYTE_ORDER,
    ),
    "test_ort_value.py::test_update_beyond_the_end": ("written", "RuntimeError", CHECKED),
    "test_ort_value.py::test_vector_run_without_devices": (Like("signal"), NO_CRASH, SAFE),
    "test_ort_value.py::test_object[pickle]": (Raises("TypeError", "pickle"), ROWS, PICKLES),
    "test_ort_value.py::test_object[deep_copy]": (Raises("TypeError", "pickle"), ROWS, PICKLES),
    "test_ort_value.py::test_copy_tensors[copies]": (NO_TRANSFER, ROWS, COPIES),
    "test_dlpack.py::test_import[bool]": (
        CODE_6,
        ("tensor(bool)", [2, 3], True, [[True] * 3] * 2),
        BOOL_CODE,
    ),
    "test_dlpack.py::test_object[exporter_bool]": (
        CODE_6,
        ("tensor(bool)", [1], True, [True]),
        BOOL_CODE,
    ),
    "test_dlpack.py::test_object[export_bool]": (
        ("uint8", [True, False]),
        (OneOf(("uint8", "bool")), [True, False]),
        "a versioned capsule can carry the bool code",
    ),
    **{
        f"test_dlpack.py::test_protocol[{keyword}]": (Raises("TypeError"), made, VERSIONED)
        for keyword, made in {
            "max_version": "PyCapsule",
            "dl_device": "PyCapsule",
            "copy": "PyCapsule",
            "numpy_copy": False,
            "numpy_device": ROWS,
        }.items()
    },
    "test_dlpack.py::test_lifetime[capsule]": (False, True, KEPT),
    "test_dlpack.py::test_lifetime[array]": (False, True, KEPT),
    "test_devices.py::test_make[upper]": (UPPER_CASE, (0, 0, 0, 0), ANY_CASE),
    "test_devices.py::test_program[global_pool_own_threads]": (
        Like(r"(.*\n)*RuntimeError$"),
        "12.0",
        POOLS,
    ),
    "test_devices.py::test_program[impossible_device]": (Like("signal"), NO_CRASH, SAFE),
}


def check(request: Any, ort: ModuleType, call: Any, expected: Any) -> None:
    """Asserts that `call(ort)` gives `expected`, or what `DEVIATIONS` lists for the package."""
    found = DEVIATIONS.get(f"{request.node.path.name}::{request.node.name}")
    if found is not None:
        expected = found[0] if ort.__name__ == "onnxruntime" else found[1]
    if isinstance(expected, Raises):
        expected.verify(ort, call)
    else:
        assert call(ort) == expected
