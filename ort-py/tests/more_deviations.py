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
NOT_AN_ARRAY = Raises("RuntimeError", "Unable to create OrtValue from the given python object")
NO_OUTPUT = Raises("RuntimeError", "At least one output should be requested")
NO_PICKLE = Raises("TypeError", "pickle")
NO_NUMPY_TYPE = Raises("RuntimeError", "No corresponding Numpy type")
UPPER_CASE = Raises("Exception", "Unsupported device type: CPU")
CPU = "CPUExecutionProvider"
ROWS = [[0, 1, 2], [3, 4, 5]]
SQUARES = [[0, 1, 4], [9, 16, 25]]

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
FEEDS = "a binding takes what run takes"
ALL_OUTPUTS = "with no output bound, all outputs are"
COMPLEX = "complex numbers are element types of ONNX"
FLOAT8 = "DLPack has codes for 8-bit floats"
OUT_OF_MEMORY = "the class for a lack of memory, a Fail and a MemoryError"
POOLS = "sessions with threads of their own go with a global pool"

#: Test id -> (what onnxruntime does, what ours does, why).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "test_ort_value.py::test_refused[complex64]": (
        Raises("RuntimeError"),
        ("tensor(complex64)", [2], [1, 1]),
        COMPLEX,
    ),
    "test_ort_value.py::test_refused[complex128]": (
        Raises("RuntimeError"),
        ("tensor(complex128)", [2], [1, 1]),
        COMPLEX,
    ),
    "test_ort_value.py::test_with_onnx_type[complex]": (
        Raises("RuntimeError", "tensor type 14 is not supported"),
        Anything(None),
        COMPLEX,
    ),
    "test_ort_value.py::test_element_form[complex]": (
        Raises("RuntimeError"),
        Anything(None),
        COMPLEX,
    ),
    "test_dlpack.py::test_object[complex]": (
        Raises("RuntimeError"),
        ("tensor(complex64)", [2], True, [1, 1]),
        COMPLEX,
    ),
    "test_sparse.py::test_made[coo_complex]": (
        Raises("RuntimeError"),
        ([3, 4], "sparse_tensor(complex64)", [1, 2, 3], [0, 5, 11]),
        COMPLEX,
    ),
    **{
        f"test_dlpack.py::test_round_trip[{kind}]": (
            Raises("RuntimeError"),
            f"tensor({kind})",
            FLOAT8,
        )
        for kind in ("float8e4m3fn", "float8e5m2")
    },
    "test_io_binding.py::test_bind_cpu_input[ort_value]": (NOT_AN_ARRAY, [SQUARES], FEEDS),
    **{
        f"test_devices.py::test_program[{limit}]": ("1 Fail 1", "1 OutOfMemory 1", OUT_OF_MEMORY)
        for limit in ("limit", "limit_v2")
    },
    "test_devices.py::test_program[global_pool_twice]": ("exit 1", "", POOLS),
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
    "test_ort_value.py::test_object[pickle]": (NO_PICKLE, ROWS, PICKLES),
    "test_ort_value.py::test_object[deep_copy]": (NO_PICKLE, ROWS, PICKLES),
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
    "test_io_binding.py::test_bind_cpu_input[big_endian]": (
        [Anything(SQUARES)],
        [SQUARES],
        BYTE_ORDER,
    ),
    "test_io_binding.py::test_bind_cpu_input[list]": (NOT_AN_ARRAY, [SQUARES], FEEDS),
    "test_io_binding.py::test_bind_cpu_input[strings]": (
        Raises("RuntimeError", "Only binding non-string Tensors"),
        [["a", "b"]],
        FEEDS,
    ),
    "test_io_binding.py::test_bind_input[upper_device]": (UPPER_CASE, [SQUARES], ANY_CASE),
    "test_io_binding.py::test_bind_output[upper_device]": (UPPER_CASE, [SQUARES], ANY_CASE),
    "test_io_binding.py::test_order[no_output]": (NO_OUTPUT, [[6, 6], [-4, -4]], ALL_OUTPUTS),
    "test_io_binding.py::test_run[cleared_outputs]": (NO_OUTPUT, SQUARES, ALL_OUTPUTS),
    "test_io_binding.py::test_run[larger_batch]": (
        Raises("RuntimeError", "Error in execution: "),
        [5, 3],
        "an output bound to a device is given anew when its shape changes",
    ),
    "test_io_binding.py::test_before_run[copy]": (Like("signal"), "RuntimeError", SAFE),
    "test_io_binding.py::test_before_run[data_type]": (Like("signal"), "RuntimeError", SAFE),
    "test_io_binding.py::test_bind_after_failure": (Like("signal"), "12.0", SAFE),
    "test_async.py::test_run_async[one_thread]": (
        Raises("InvalidArgument", "must have at least one thread"),
        [[SQUARES], "mine", ""],
        "programs limit the threads and still want the call",
    ),
    "test_async.py::test_keyboard_interrupt": (
        "timeout",
        "KeyboardInterrupt",
        "a long run ends at Ctrl-C",
    ),
    "test_processes.py::test_fork[made_in_child_after_parent]": (
        "timeout",
        "24.0\n0",
        "workers start anew in each process",
    ),
    "test_processes.py::test_end[daemon_thread]": (
        OneOf((Like("signal"), "")),
        "",
        "sessions alive at exit do not crash",
    ),
    "test_processes.py::test_end[async_pending]": (
        OneOf((Like("signal"), "")),
        "",
        "sessions alive at exit do not crash",
    ),
    "test_processes.py::test_import[threads]": (
        Like("[2-9]$"),
        "1",
        "engines such as Spark fork after the import",
    ),
    **{
        f"test_processes.py::test_copy[{way}-{kind}]": (NO_PICKLE, made, PICKLES)
        for way in ("pickle", "deep_copy", "copy")
        for kind, made in {
            "session": SQUARES,
            "session_options": (3, "b"),
            "run_options": "mine",
            "node_arg": ("x", ["n", 3]),
            "metadata": "square",
            "device": 2,
            "memory_info": ("Cpu", 0),
            "arena_config": 5,
        }.items()
        if (way, kind) not in {("copy", "session"), ("copy", "device")}
    },
    **{
        f"test_processes.py::test_spawn[{kind}]": ("exit 1", "[12.0, 27.0]", PICKLES)
        for kind in ("path", "bytes")
    },
    "test_adapters.py::test_file[path_object]": (
        Raises("TypeError"),
        (1, 1, 7),
        "paths may be os.PathLike, as the signature says",
    ),
    "test_compiler.py::test_compile[file_without_path]": (
        Raises("TypeError"),
        [0, 1, 2],
        "the path may be left out, as the signature says",
    ),
    "test_private_names.py::test_provider_arguments[str]": (
        (list(dict.fromkeys(CPU)), [{}] * len(set(CPU))),
        ([CPU], [{}]),
        "a string is one name, not a sequence of letters",
    ),
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
