"""Where ours and onnxruntime 1.31.1 part, row by row.

`DEVIATIONS` maps a test id to what the original does there and why ours does better; what ours does
is the expectation in the test's table. The list is exact: `conftest.py` finds entries without a
row, and a row that holds on the original too fails when the tests run against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from harness import AnyOf, Dies, Expectation, Gives, Raises, f32, strings
from models import DTYPES


@dataclass(frozen=True)
class Deviation:
    """What the original does, and why ours does something else."""

    original: Expectation
    why: str


EXCEPTIONS = (
    "Fail",
    "InvalidArgument",
    "NoSuchFile",
    "NoModel",
    "EngineError",
    "RuntimeException",
    "InvalidProtobuf",
    "ModelLoaded",
    "NotImplemented",
    "InvalidGraph",
    "EPFail",
    "ModelLoadCanceled",
    "ModelRequiresCompilation",
    "NotFound",
    "DeviceReset",
)

DEVIATIONS: dict[str, Deviation] = {}


def _add(why: str, rows: dict[str, Expectation]) -> None:
    """Lists rows of one reason; ids as pytest prints them."""
    for row, original in rows.items():
        assert row not in DEVIATIONS, row
        DEVIATIONS[row] = Deviation(original, why)


# test_exceptions.py

_add(
    "`except RuntimeError` around a run is what programs write; the original's classes slip through.",
    {
        f"test_exceptions.py::test_is_a_runtime_error[{name}]": Raises(name, "^what$")
        for name in EXCEPTIONS
    }
    | {"test_exceptions.py::test_situation[memory_runtime_error]": Raises("Fail", "Expand")},
)
_add(
    "Python has classes for wrong values, missing files and no memory: handlers for those work too.",
    {
        "test_exceptions.py::test_other_bases[invalid_argument]": Gives(False),
        "test_exceptions.py::test_other_bases[no_such_file]": Gives(False),
        "test_exceptions.py::test_situation[memory_error]": Raises("Fail", "Expand"),
        "test_exceptions.py::test_situation[input_value_error]": Raises("InvalidArgument"),
        "test_exceptions.py::test_situation[file_not_found]": Raises("NoSuchFile"),
    },
)

_add(
    "The model runs all the same, and `ort_runtime.check` warns: exporters are ahead of runtimes.",
    {
        f"test_exceptions.py::test_faulty_{form}[{name}]": Raises(
            "Fail", rf"^\[ONNXRuntimeError\] : 1 : FAIL : .*{word}"
        )
        for form in ("file", "bytes")
        for name, word in (("type_clash", "int64"), ("future_opset", "999"), ("future_ir", "999"))
    },
)

# test_inputs.py


def _byte_swapped(element: str) -> np.ndarray:
    values = np.arange(24).astype(DTYPES[element])
    return values.byteswap()


_add(
    "The original reads big-endian bytes as little-endian: wrong numbers without a word.",
    {
        f"test_inputs.py::test_big_endian[{element}]": Gives([_byte_swapped(element)])
        for element, dtype in DTYPES.items()
        if np.dtype(dtype).itemsize > 1
    },
)
_add(
    "An object whose dtype and shape are known is as good as an array; nothing is guessed.",
    {
        f"test_inputs.py::test_container[{element}-{container}]": Raises("RuntimeError", text)
        for element in DTYPES
        for container, text in {
            "numpy_scalar": "Unable to handle object of type <class 'numpy",
            "array_protocol": "Unable to handle object of type <class '.*Arrays'>",
            "dlpack_object": "Unable to handle object of type <class '.*Packed'>",
            "memory_view": "Input must be a list of dictionaries|Input 'x' must not be empty",
            "native_ort_value": "Unable to handle object of type <class '.*OrtValue'>",
        }.items()
    },
)
_add(
    "As for containers: the buffer protocol and numpy scalars say what they hold.",
    {
        "test_inputs.py::test_rank_zero[numpy_scalar]": Raises("RuntimeError", "Unable to handle"),
        "test_inputs.py::test_value[array_module]": Raises("RuntimeError", "Input must be a list"),
    },
)
_add(
    "None is a missing input and is named as such before the run, not by a kernel that meets nothing.",
    {"test_inputs.py::test_value[none]": Raises("Fail", "Non-zero status code returned while running")},
)
_add(
    "Arrays of ml_dtypes have the element type in their dtype.",
    {
        f"test_inputs.py::test_small_types_in[{element}]": Raises(
            "RuntimeError", r"Numpy_type \d+ can't be converted to MLDataType"
        )
        for element in (
            "bfloat16",
            "float8e4m3fn",
            "float8e4m3fnuz",
            "float8e5m2",
            "float8e5m2fnuz",
            "int4",
            "uint4",
        )
    },
)
_add(
    "Strings of the other byte order are strings.",
    {"test_inputs.py::test_strings[big_endian]": Raises("UnicodeDecodeError")},
)
_add(
    "numpy's variable-width strings are what numpy 2 users have.",
    {"test_inputs.py::test_strings[string_dtype]": Raises("RuntimeError", "Numpy_type")},
)


_add(
    "A scalar is planned as one, and stays one; a model that means any shape declares none.",
    {
        "test_inputs.py::test_rank_zero[vector]": Gives([f32(2)]),
        "test_inputs.py::test_rank_zero[list]": Gives([f32(2)]),
        "test_inputs.py::test_rank_zero[two_elements]": Gives([f32(2, 3)]),
    },
)

# test_kinds.py

_add(
    "Elements of a sequence are taken as tensors are.",
    {
        "test_kinds.py::test_sequence[ort_values]": Raises("RuntimeError", "Input is not a tensor"),
        "test_kinds.py::test_sequence[big_endian]": Gives([[f32(1, 2).byteswap()]]),
        "test_kinds.py::test_map[mapping_proxy]": Raises("RuntimeError", "Input must be a list of"),
    },
)
_add(
    "None is a missing input for sequences and maps too.",
    {
        f"test_kinds.py::{test}[none]": Raises("Fail", "Non-zero status code returned while running")
        for test in ("test_sequence", "test_map")
    },
)

# test_outputs.py

_add(
    "Element types that numpy lacks come as arrays of ml_dtypes, float8 as its bits.",
    {
        f"test_outputs.py::test_element_type[{element}]": Raises(
            "RuntimeError", "No corresponding Numpy type for Tensor Type"
        )
        for element in ("bfloat16", "int4", "uint4", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
    },
)

# test_load_errors.py

_add(
    "A weight may be an output of a model; a run of the original finds no dense value for it.",
    {"test_load_errors.py::test_sparse_weight[output]": Raises("Fail")},
)

# test_run.py

_add(
    "One arena of the list is enough, wherever it stands; the original asks for it first.",
    {
        "test_run.py::test_run_options[shrink_absent_first]": Raises(
            "InvalidArgument", "Did not find an arena based allocator .* shrink list: gpu:0"
        )
    },
)

_add(
    "Any iterable of names, and anything with keys, values and items, is enough to run.",
    {
        "test_run.py::test_names[list_iterator]": Raises("TypeError"),
        "test_run.py::test_feed[duck]": Raises("TypeError"),
    },
)
_add(
    "Arrays and native values say all that an OrtValue says.",
    {
        f"test_run.py::test_run_with_ort_values[{kind}]": Raises("AttributeError", "_get_c_value")
        for kind in ("arrays", "native_values")
    },
)
_add(
    "A run in the background needs a thread, not a pool of them.",
    {
        "test_run.py::test_relatives[async_one_thread]": Raises(
            "InvalidArgument", "intra op thread pool must have at least one thread for RunAsync"
        )
    },
)

# test_session.py

_add(
    "Serialized models come in every buffer type, and as ModelProto from onnx.",
    {
        f"test_session.py::test_source[{kind}]": Raises("TypeError", "Unable to load from type")
        for kind in ("bytearray", "memory_view", "model_proto")
    },
)
_add(
    "An empty path is a wrong value and is told so in one line.",
    {"test_session.py::test_source[empty_str]": Raises("TypeError", "incompatible constructor arguments")},
)
_add(
    "A model is known by its bytes, whatever the name of its file.",
    {
        "test_session.py::test_ort_format[other_name]": Raises("InvalidProtobuf", "Protobuf parsing failed"),
    },
)
_add(
    "ORT format is read, not written.",
    {"test_session.py::test_ort_format[saved]": Gives([np.ones((1, 3), np.float32)])},
)
_add(
    "A misspelt keyword is found.",
    {"test_session.py::test_arguments[unknown_keyword]": Gives(["CPUExecutionProvider"])},
)
_add(
    "The argument decides alone; the original hears only the environment and fails if they differ.",
    {
        "test_session.py::test_config_in_model[argument]": Gives("0"),
        "test_session.py::test_config_in_model[argument_off]": Raises("ScriptError", "RuntimeError"),
    },
)
_add(
    "Sessions go to worker processes: joblib, Ray, Spark and DataLoader pickle them.",
    {
        f"test_session.py::test_copies[{way}]": Raises("TypeError", "cannot pickle '.*InferenceSession'")
        for way in (
            "pickle_path",
            "pickle_bytes",
            "pickle_options",
            "pickle_providers",
            "pickle_class",
            "deep_copy",
            "deep_copy_in_list",
        )
    },
)
_add(
    "Arrays and native values are weights as well.",
    {
        f"test_session.py::test_weights[{kind}]": Raises("RuntimeError")
        for kind in ("replaced_by_native", "replaced_by_array")
    },
)
_add(
    "A weight is kept alive by the options, and has the shape and type of what it replaces.",
    {
        "test_session.py::test_weight_faults[kept_alive]": AnyOf((Dies(), Gives("False"))),
        "test_session.py::test_weight_faults[other_shape]": Raises("ScriptError", "Fail: .*running Add node"),
        "test_session.py::test_weight_faults[other_type]": Gives("False"),
    },
)

# test_metadata.py

_add(
    "Where a declared size contradicts the inferred one, the inferred one is shown.",
    {"test_metadata.py::test_shape[inferred_rank]": Gives([2, None])},
)
_add(
    "Metadata goes to worker processes along with what was read from it.",
    {
        "test_metadata.py::test_node_arg[pickle]": Raises("TypeError", "cannot pickle"),
        "test_metadata.py::test_node_arg[deep_copy]": Raises("TypeError", "cannot pickle"),
        "test_metadata.py::test_model_metadata[pickle]": Raises("TypeError", "cannot pickle"),
    },
)

# test_options.py

_add(
    "Paths are PathLike wherever they are taken.",
    {
        "test_options.py::test_setter[SessionOptions-optimized_model_filepath-path]": Raises("TypeError"),
        "test_options.py::test_setter[SessionOptions-profile_file_prefix-path]": Raises("TypeError"),
        "test_options.py::test_rest[path]": Raises("TypeError"),
    },
)
_add(
    "The number of a member is that member: options come from files.",
    {
        f"test_options.py::test_number_for_enum[{name}]": Raises("TypeError")
        for name in ("execution_mode", "execution_order", "graph_optimization_level")
    },
)
_add(
    "Enums are IntEnums: they can be ordered, listed and found by name, and have no strangers.",
    {
        # ExecutionOrder alone does not equal its numbers there.
        "test_options.py::test_enum[ExecutionOrder]": Gives([False, True]),
        "test_options.py::test_enum_object[unknown_number]": Gives("<GraphOptimizationLevel.???: 98>"),
        "test_options.py::test_enum_object[is_int]": Gives(False),
        "test_options.py::test_enum_object[same_object]": Gives(False),
        "test_options.py::test_enum_object[order]": Raises("TypeError", "'<' not supported"),
        "test_options.py::test_enum_object[iteration]": Raises("TypeError", "not iterable"),
        "test_options.py::test_enum_object[by_name]": Raises("TypeError", "not subscriptable"),
    },
)
_add(
    "Options are copied for the next session, and go to worker processes with it.",
    {
        f"test_options.py::test_copies[{kind}_{way}]": Raises("TypeError", "cannot pickle")
        for kind in ("session", "run")
        for way in ("copy", "deep_copy", "pickle", "apart")
    },
)
_add(
    "Names that training code and tutorials use, and the bound on memory.",
    {
        "test_options.py::test_more_properties[training_mode]": Raises("AttributeError"),
        "test_options.py::test_more_properties[enable_fp16]": Raises("AttributeError"),
        "test_options.py::test_more_properties[enable_fp16_set]": Raises("AttributeError"),
        "test_options.py::test_more_properties[memory_limit_set]": Raises("AttributeError"),
    },
)
_add(
    "A wrong argument does not end the process.",
    {f"test_options.py::test_none_entry[{kind}]": Dies() for kind in ("SessionOptions", "RunOptions")},
)
_add(
    "One pool for all sessions needs no call beforehand.",
    {
        "test_options.py::test_effect[shared_threads]": Raises(
            "RuntimeError", "EnvCreatedWithGlobalThreadPools", prints="EP Error"
        )
    },
)
_add(
    "Wrong options have nothing to do with providers: no fallback is tried, nothing printed.",
    {
        f"test_options.py::test_effect[{row}]": Raises("RuntimeError", prints="EP Error")
        for row in ("severity_9", "affinities")
    },
)

# test_providers.py

_CPU = ["CPUExecutionProvider"]
_LETTERS = [""] * 25  # Warnings about the letters of CPUExecutionProvider: 20, and 5 of duplicates.

_add(
    "A wrong argument is an error; the original prints it and gives a CPU session.",
    {
        f"test_providers.py::test_arguments[{row}]": Gives(_CPU, prints="EP Error")
        for row in (
            "set",
            "dict",
            "array",
            "list_pair",
            "int_name",
            "none_name",
            "one_tuple",
            "three_tuple",
            "pair_of_int",
            "lengths_differ",
            "no_options",
            "options_dict",
            "options_of_int",
            "options_twice",
        )
    }
    | {"test_providers.py::test_making[generator]": Gives(_CPU, prints="EP Error")},
)
_add(
    "A warning says that a name is unknown; nothing is printed on standard output.",
    {
        f"test_providers.py::test_arguments[{row}]": Gives(
            _CPU, warns=["is not in available provider names"], prints="EP Error Unknown Provider Type"
        )
        for row in ("unknown", "other_case")
    },
)
_add(
    "A string is one name, not a sequence of letters.",
    {
        "test_providers.py::test_making[plain_string]": Gives(
            _CPU, warns=_LETTERS, prints="Unknown Provider Type: C"
        ),
        "test_providers.py::test_set_providers[plain_string]": Raises(
            "RuntimeError", "Unknown Provider Type: C", warns=_LETTERS
        ),
    },
)
_add(
    "A change of providers that fails leaves the session as it was.",
    {
        "test_providers.py::test_set_providers[runs_after_wrong]": Raises("AttributeError", "NoneType"),
        "test_providers.py::test_set_providers[runs_after_unknown]": Raises(
            "AttributeError", "NoneType", warns=["is not in available provider names"]
        ),
    },
)
_add(
    "The method that tutorials use exists.",
    {"test_providers.py::test_options[append]": Raises("AttributeError", "append_execution_provider")},
)

# test_calibration.py

_add(
    "A misspelt option, or a value that no result can have, is found before the samples are run.",
    {
        f"test_calibration.py::test_refused[{row}]": Gives()
        for row in ("option", "percentile", "bins", "scenario", "levels")
    },
)
_add(
    "The message says which tuples are known; the original fails while it makes its own.",
    {"test_calibration.py::test_refused[tuple]": Raises("ValueError", "Unknown format code")},
)
