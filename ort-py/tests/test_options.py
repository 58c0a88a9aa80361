"""SessionOptions, RunOptions, their keys, and the enums."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from harness import NATIVE, C, Gives, Raises, case, check, check_script, options, ort, table

X = np.ones((1, 3), np.float32)
TWO = np.full((1, 3), 2, np.float32)

LEVEL, MODE, ORDER = ort.GraphOptimizationLevel, ort.ExecutionMode, ort.ExecutionOrder

#: Property -> (kind, default); enums by their number.
SESSION: dict[str, tuple[str, Any]] = {
    "enable_cpu_mem_arena": ("bool", True),
    "enable_mem_pattern": ("bool", True),
    "enable_mem_reuse": ("bool", True),
    "enable_profiling": ("bool", False),
    "use_deterministic_compute": ("bool", False),
    "use_per_session_threads": ("bool", True),
    "intra_op_num_threads": ("int", 0),
    "inter_op_num_threads": ("int", 0),
    "log_severity_level": ("int", -1),
    "log_verbosity_level": ("int", 0),
    "logid": ("str", ""),
    "optimized_model_filepath": ("path", ""),
    "profile_file_prefix": ("path", "onnxruntime_profile_"),
    "execution_mode": ("enum", 0),
    "execution_order": ("enum", 0),
    "graph_optimization_level": ("enum", 99),
}
RUN: dict[str, tuple[str, Any]] = {
    "log_severity_level": ("int", -1),
    "log_verbosity_level": ("int", 0),
    "logid": ("str", ""),
    "only_execute_path_to_fetches": ("bool", False),
    "terminate": ("bool", False),
}
BOTH = [("SessionOptions", n, k, d) for n, (k, d) in SESSION.items()]
BOTH += [("RunOptions", n, k, d) for n, (k, d) in RUN.items()]

REFUSED = Raises("TypeError")
PLACE = pathlib.Path("/some/x")

#: Kind -> label -> (value given, what is read then).
VALUES: dict[str, dict[str, tuple[Any, Any]]] = {
    "bool": {
        "true": (True, Gives(True)),
        "false": (False, Gives(False)),
        "one": (1, Gives(True)),
        "zero": (0, Gives(False)),
        "numpy_bool": (np.True_, Gives(True)),
        "none": (None, Gives(False)),
        "text": ("1", REFUSED),
        "list": ([1], REFUSED),
    },
    "int": {
        "number": (2, Gives(2)),
        "zero": (0, Gives(0)),
        "numpy_int32": (np.int32(2), Gives(2)),
        "numpy_int64": (np.int64(3), Gives(3)),
        "bool": (True, Gives(1)),
        "float": (1.5, REFUSED),
        "whole_float": (2.0, REFUSED),
        "text": ("2", REFUSED),
        "none": (None, REFUSED),
        "list": ([1], REFUSED),
        "too_large": (2**40, REFUSED),
    },
    "str": {
        "text": ("a b", Gives("a b")),
        "empty": ("", Gives("")),
        "unicode": ("é 猫", Gives("é 猫")),
        "number": (1, REFUSED),
        "none": (None, REFUSED),
        "list": (["a"], REFUSED),
        "path": (PLACE, REFUSED),
    },
    "path": {
        "text": ("/some/a b", Gives("/some/a b")),
        "empty": ("", Gives("")),
        "unicode": ("é 猫", Gives("é 猫")),
        "number": (1, REFUSED),
        "none": (None, REFUSED),
        "path": (PLACE, Gives("/some/x")),
    },
    "enum": {
        "text": ("ORT_ENABLE_ALL", REFUSED),
        "none": (None, REFUSED),
        "float": (1.0, REFUSED),
        "list": ([1], REFUSED),
        "other_enum": (ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, REFUSED),
        "unknown_number": (98, Raises(("TypeError", "ValueError"))),
    },
}


def new(kind: str) -> Any:
    return getattr(ort, kind)()


def plain(value: Any) -> Any:
    """Enums as their number."""
    return value if type(value) in (int, bool, str) else int(value)


@table(
    "kind, name, expected",
    [case(f"{k}-{n}", k, n, Gives(default)) for k, n, _, default in BOTH],
)
def test_default(kind: str, name: str, expected: Any) -> None:
    """Every default."""
    check(expected, lambda: plain(getattr(new(kind), name)))


def set_and_get(kind: str, name: str, value: Any) -> Any:
    held = new(kind)
    setattr(held, name, value)
    return getattr(held, name)


@table(
    "kind, name, value, expected",
    [
        case(f"{k}-{n}-{label}", k, n, value, expected)
        for k, n, typed, _ in BOTH
        for label, (value, expected) in VALUES[typed].items()
    ],
)
def test_setter(kind: str, name: str, value: Any, expected: Any) -> None:
    """Every typed setter with right and wrong values."""
    check(expected, lambda: set_and_get(kind, name, value))


def kept_after(kind: str, name: str, wrong: Any) -> Any:
    """A refused value leaves the old one."""
    held = new(kind)
    try:
        setattr(held, name, wrong)
    except TypeError:
        pass
    return plain(getattr(held, name))


@table(
    "kind, name, expected",
    [case(f"{k}-{n}", k, n, Gives(default)) for k, n, _, default in BOTH],
)
def test_refused_value_changes_nothing(kind: str, name: str, expected: Any) -> None:
    """The default stands after a TypeError."""
    check(expected, lambda: kept_after(kind, name, object()))


ENUM_PROPERTIES = {
    "execution_mode": "ExecutionMode",
    "execution_order": "ExecutionOrder",
    "graph_optimization_level": "GraphOptimizationLevel",
}
MEMBERS: dict[str, dict[str, int]] = {
    "ExecutionMode": {"ORT_SEQUENTIAL": 0, "ORT_PARALLEL": 1},
    "ExecutionOrder": {"DEFAULT": 0, "PRIORITY_BASED": 1, "MEMORY_EFFICIENT": 2},
    "GraphOptimizationLevel": {
        "ORT_DISABLE_ALL": 0,
        "ORT_ENABLE_BASIC": 1,
        "ORT_ENABLE_EXTENDED": 2,
        "ORT_ENABLE_LAYOUT": 3,
        "ORT_ENABLE_ALL": 99,
    },
    "OrtAllocatorType": {"INVALID": -1, "ORT_DEVICE_ALLOCATOR": 0, "ORT_ARENA_ALLOCATOR": 1},
    "OrtMemType": {"CPU_INPUT": -2, "CPU_OUTPUT": -1, "CPU": -1, "DEFAULT": 0},
    "OrtDeviceMemoryType": {"DEFAULT": 0, "HOST_ACCESSIBLE": 5},
    "OrtMemoryInfoDeviceType": {"CPU": 0, "GPU": 1, "NPU": 3, "FPGA": 2},
    "OrtSparseFormat": {
        "ORT_SPARSE_UNDEFINED": 0,
        "ORT_SPARSE_COO": 1,
        "ORT_SPARSE_CSRC": 2,
        "ORT_SPARSE_BLOCK_SPARSE": 4,
    },
    "OrtHardwareDeviceType": {"CPU": 0, "GPU": 1, "NPU": 2},
    "OrtExecutionProviderDevicePolicy": {
        "DEFAULT": 0,
        "PREFER_CPU": 1,
        "PREFER_NPU": 2,
        "PREFER_GPU": 3,
        "MAX_PERFORMANCE": 4,
        "MAX_EFFICIENCY": 5,
        "MIN_OVERALL_POWER": 6,
    },
    "OrtCompileApiFlags": {
        "NONE": 0,
        "ERROR_IF_NO_NODES_COMPILED": 1,
        "ERROR_IF_OUTPUT_FILE_EXISTS": 2,
    },
    "OrtDeviceVendorId": {
        "NONE": 0,
        "AMD": 4098,
        "NVIDIA": 4318,
        "ARM": 5045,
        "MICROSOFT": 5140,
        "HUAWEI": 6629,
        "QUALCOMM": 20803,
        "INTEL": 32902,
    },
}


@table(
    "name, member, expected",
    [
        case(f"{n}-{m}", n, m, Gives([True, value]))
        for n, enum in ENUM_PROPERTIES.items()
        for m, value in MEMBERS[enum].items()
    ],
)
def test_enum_setter(name: str, member: str, expected: Any) -> None:
    """Every member of every enum property."""
    value = getattr(getattr(ort, ENUM_PROPERTIES[name]), member)
    check(
        expected,
        lambda: (lambda got: [got == value, int(got)])(set_and_get("SessionOptions", name, value)),
    )


@table(
    "name, value, expected",
    [
        case("execution_mode", "execution_mode", 1, Gives("ExecutionMode.ORT_PARALLEL")),
        case("execution_order", "execution_order", 1, Gives("ExecutionOrder.PRIORITY_BASED")),
        case(
            "graph_optimization_level",
            "graph_optimization_level",
            2,
            Gives("GraphOptimizationLevel.ORT_ENABLE_EXTENDED"),
        ),
    ],
)
def test_number_for_enum(name: str, value: int, expected: Any) -> None:
    """Numbers of members."""
    check(expected, lambda: str(set_and_get("SessionOptions", name, value)))


@table("name, expected", [case(n, n, Gives(m)) for n, m in MEMBERS.items()])
def test_members(name: str, expected: Any) -> None:
    """Names and numbers of every enum."""
    check(expected, lambda: {k: int(v) for k, v in getattr(ort, name).__members__.items()})


NATIVE_ENUMS = {n: m for n, m in MEMBERS.items() if n != "OrtDeviceVendorId"}


def round_trips(name: str) -> list[bool]:
    enum = getattr(ort, name)
    seen = []
    for member in enum.__members__.values():
        number = int(member)
        seen.append(enum(number) == member)
        seen.append(pickle.loads(pickle.dumps(member)) == member)
        seen.append(copy.copy(member) == member and copy.deepcopy(member) == member)
        seen.append(member == number and number == member and not member == number + 1000)
        seen.append(hash(member) == hash(number))
        seen.append(type(member.value) is int and member.value == number)
        seen.append(repr(member) == f"<{name}.{member.name}: {number}>")
        seen.append(str(member) == f"{name}.{member.name}" == f"{member}")
        seen.append(isinstance(member, enum) and type(member) is enum)
    return [all(seen), enum.__module__ == NATIVE]


@table("name, expected", [case(n, n, Gives([True, True])) for n in NATIVE_ENUMS])
def test_enum(name: str, expected: Any) -> None:
    """Enums by number, text, pickle, copy and hash."""
    check(expected, lambda: round_trips(name))


ALL = LEVEL.ORT_ENABLE_ALL


@table(
    "read, expected",
    [
        case("repr", lambda: repr(ALL), Gives("<GraphOptimizationLevel.ORT_ENABLE_ALL: 99>")),
        case("str", lambda: str(ALL), Gives("GraphOptimizationLevel.ORT_ENABLE_ALL")),
        case("format", lambda: f"{ALL}", Gives("GraphOptimizationLevel.ORT_ENABLE_ALL")),
        case("percent", lambda: "%d" % ALL, Gives("99")),
        case("name", lambda: ALL.name, Gives("ORT_ENABLE_ALL")),
        case("value", lambda: ALL.value, Gives(99)),
        case("int", lambda: int(ALL), Gives(99)),
        case("index", lambda: list(range(LEVEL.ORT_ENABLE_EXTENDED)), Gives([0, 1])),
        case("of_number", lambda: LEVEL(99) == ALL, Gives(True)),
        case("of_str", lambda: LEVEL("x"), Raises(("TypeError", "ValueError"))),
        case("unequal", lambda: ALL != 99, Gives(False)),
        case("numpy", lambda: bool(np.int64(99) == ALL), Gives(True)),
        case("not_none", lambda: ALL == None, Gives(False)),  # noqa: E711
        case("as_key", lambda: {ALL: 1}[99], Gives(1)),
        case(
            "other_enum_same_number",
            lambda: MODE.ORT_PARALLEL == LEVEL.ORT_ENABLE_BASIC,
            Gives(True),
        ),
        case("through_a_member", lambda: ALL.ORT_ENABLE_BASIC.name, Gives("ORT_ENABLE_BASIC")),
        case("read_only", lambda: setattr(ALL, "name", "x"), Raises("AttributeError")),
        case("alias", lambda: str(ort.OrtMemType.CPU), Gives("OrtMemType.CPU_OUTPUT")),
        case(
            "flags",
            lambda: ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED | ort.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS,
            Gives(3),
        ),
        case(
            "arena_strategy",
            lambda: [repr(C.kNextPowerOfTwo), repr(C.kSameAsRequested)],
            Gives(
                ["<ArenaExtendStrategy.kNextPowerOfTwo: 0>", "<ArenaExtendStrategy.kSameAsRequested: 1>"],
            ),
        ),
        case("truth", lambda: bool(LEVEL.ORT_DISABLE_ALL), Gives(True)),
        case("arena_strategy_number", lambda: int(C.kSameAsRequested), Gives(1)),
        case("unknown_number", lambda: repr(LEVEL(98)), Raises("ValueError")),
        case("is_int", lambda: isinstance(ALL, int), Gives(True)),
        case("same_object", lambda: LEVEL(99) is ALL, Gives(True)),
        case("order", lambda: LEVEL.ORT_DISABLE_ALL < ALL, Gives(True)),
        case("iteration", lambda: [int(m) for m in LEVEL], Gives([0, 1, 2, 3, 99])),
        case("by_name", lambda: LEVEL["ORT_ENABLE_ALL"] == ALL, Gives(True)),
    ],
)
def test_enum_object(read: Callable[[], Any], expected: Any) -> None:
    """Enums in the small; ours are IntEnums."""
    check(expected, read)


# Objects.


def set_foo(held: Any) -> None:
    held.foo = 1


@table(
    "kind, act, expected",
    [
        case(f"{kind}-{label}", kind, act, expected)
        for kind in ("SessionOptions", "RunOptions")
        for label, act, expected in [
            ("unknown_attribute_set", lambda k: set_foo(new(k)), Raises("AttributeError", "foo")),
            ("unknown_attribute_read", lambda k: new(k).foo, Raises("AttributeError", "foo")),
            ("deleted", lambda k: delattr(new(k), "logid"), Raises("AttributeError")),
            ("keyword", lambda k: getattr(ort, k)(logid="x"), Raises("TypeError")),
            ("position", lambda k: getattr(ort, k)(1), Raises("TypeError")),
            ("run_tag", lambda k: new(k).run_tag, Raises("AttributeError", "run_tag")),
            ("subclass", lambda k: type("Mine", (getattr(ort, k),), {})().logid, Gives("")),
            ("subclass_attribute", lambda k: set_foo(type("Mine", (getattr(ort, k),), {})()), Gives(None)),
            ("weak_reference", lambda k: (lambda o: weakref.ref(o)() is o)(new(k)), Gives(True)),
            ("not_equal", lambda k: new(k) == new(k), Gives(False)),
            ("hashable", lambda k: (lambda o: {o: 1}[o])(new(k)), Gives(1)),
            ("repr", lambda k: repr(new(k)).startswith(f"<{NATIVE}.{k} object at 0x"), Gives(True)),
        ]
    ],
)
def test_object(kind: str, act: Callable[[str], Any], expected: Any) -> None:
    """Options as objects: misspelt names are found."""
    check(expected, lambda: act(kind))


def filled_session() -> Any:
    held = options(
        intra_op_num_threads=3,
        enable_mem_pattern=False,
        logid="me",
        graph_optimization_level=LEVEL.ORT_ENABLE_BASIC,
    )
    held.add_session_config_entry("a.b", "c")
    held.add_free_dimension_override_by_name("batch", 4)
    return held


def filled_run() -> Any:
    held = ort.RunOptions()
    held.logid = "me"
    held.terminate = True
    held.add_run_config_entry("a.b", "c")
    return held


def session_facts(held: Any) -> list[Any]:
    shape = ort.InferenceSession(models.path("add_one"), held).get_inputs()[0].shape
    return [
        held.intra_op_num_threads,
        held.enable_mem_pattern,
        held.logid,
        int(held.graph_optimization_level),
        held.get_session_config_entry("a.b"),
        shape,
    ]


def run_facts(held: Any) -> list[Any]:
    return [held.logid, held.terminate, held.get_run_config_entry("a.b")]


def apart(copied: Any, first: Any) -> list[str]:
    copied.logid = "other"
    return [first.logid, copied.logid]


FACTS = [3, False, "me", 1, "c", [4, 3]]


@table(
    "act, expected",
    [
        case("session_copy", lambda: session_facts(copy.copy(filled_session())), Gives(FACTS)),
        case(
            "session_deep_copy",
            lambda: session_facts(copy.deepcopy(filled_session())),
            Gives(FACTS),
        ),
        case(
            "session_pickle",
            lambda: session_facts(pickle.loads(pickle.dumps(filled_session()))),
            Gives(FACTS),
        ),
        case(
            "session_apart",
            lambda: (lambda f: apart(copy.copy(f), f))(filled_session()),
            Gives(["me", "other"]),
        ),
        case("run_copy", lambda: run_facts(copy.copy(filled_run())), Gives(["me", True, "c"])),
        case(
            "run_deep_copy",
            lambda: run_facts(copy.deepcopy(filled_run())),
            Gives(["me", True, "c"]),
        ),
        case(
            "run_pickle",
            lambda: run_facts(pickle.loads(pickle.dumps(filled_run()))),
            Gives(["me", True, "c"]),
        ),
        case(
            "run_apart",
            lambda: (lambda f: apart(copy.copy(f), f))(filled_run()),
            Gives(["me", "other"]),
        ),
    ],
)
def test_copies(act: Callable[[], Any], expected: Any) -> None:
    """Copies and pickles carry every value and entry."""
    check(expected, act)


@table(
    "read, expected",
    [
        case("training_mode", lambda: ort.RunOptions().training_mode, Gives(False)),
        case("enable_fp16", lambda: ort.SessionOptions().enable_fp16, Gives(False)),
        case(
            "enable_fp16_set",
            lambda: set_and_get("SessionOptions", "enable_fp16", True),
            Gives(True),
        ),
        case(
            "memory_limit_set",
            lambda: set_and_get("SessionOptions", "memory_limit", 1 << 30),
            Gives(1 << 30),
        ),
    ],
)
def test_more_properties(read: Callable[[], Any], expected: Any) -> None:
    """Properties that ours adds."""
    check(expected, read)


# Entries.

ENTRIES = {
    "SessionOptions": ("add_session_config_entry", "get_session_config_entry"),
    "RunOptions": ("add_run_config_entry", "get_run_config_entry"),
}
LENGTH = "Config key is empty or longer than maximum length 1024"


def entry(kind: str, key: Any, value: Any) -> Any:
    held = new(kind)
    add, get = ENTRIES[kind]
    assert getattr(held, add)(key, value) is None
    return getattr(held, get)(key)


def entry_twice(kind: str) -> Any:
    held = new(kind)
    add, get = ENTRIES[kind]
    getattr(held, add)("k", "1")
    getattr(held, add)("k", "2")
    return getattr(held, get)("k")


@table(
    "kind, act, expected",
    [
        case(f"{kind}-{label}", kind, act, expected)
        for kind in ENTRIES
        for label, act, expected in [
            ("text", lambda k: entry(k, "a.b", "1"), Gives("1")),
            ("empty_value", lambda k: entry(k, "k", ""), Gives("")),
            ("unicode", lambda k: entry(k, "é", "猫"), Gives("猫")),
            ("unknown_key", lambda k: entry(k, "no.such.key", "x"), Gives("x")),
            ("key_of_1024", lambda k: entry(k, "k" * 1024, "v"), Gives("v")),
            ("value_of_5000", lambda k: len(entry(k, "k", "v" * 5000)), Gives(5000)),
            ("later_wins", entry_twice, Gives("2")),
            ("empty_key", lambda k: entry(k, "", "1"), Raises("RuntimeError", LENGTH)),
            ("key_of_1025", lambda k: entry(k, "k" * 1025, "1"), Raises("RuntimeError", LENGTH)),
            ("unset", lambda k: getattr(new(k), ENTRIES[k][1])("zz"), Raises("RuntimeError", "Options does not have configuration with key: zz")),
            ("int_key", lambda k: entry(k, 1, "1"), Raises("TypeError")),
            ("int_value", lambda k: entry(k, "k", 1), Raises("TypeError")),
            ("bool_value", lambda k: entry(k, "k", True), Raises("TypeError")),
            ("one_argument", lambda k: getattr(new(k), ENTRIES[k][0])("k"), Raises("TypeError")),
        ]
    ],
)
def test_entry(kind: str, act: Callable[[str], Any], expected: Any) -> None:
    """Configuration entries: strings under strings."""
    check(expected, lambda: act(kind))


NONE = """
try:
    ort.{}().{}("k", None)
except TypeError:
    print("TypeError")
"""


@table(
    "kind, expected",
    [case(kind, kind, Gives("TypeError")) for kind in ENTRIES],
)
def test_none_entry(kind: str, expected: Any) -> None:
    """None as a value."""
    check_script(expected, NONE.format(kind, ENTRIES[kind][0]))


# Effects.


def result(*entries: tuple[str, str], **values: Any) -> Any:
    held = options(**values)
    for key, value in entries:
        held.add_session_config_entry(key, value)
    return ort.InferenceSession(models.path("add_one"), held).run(None, {"x": X})


PROPERTIES: dict[str, dict[str, Any]] = {
    "one_thread": {"intra_op_num_threads": 1},
    "three_threads": {"intra_op_num_threads": 3},
    "parallel": {"execution_mode": MODE.ORT_PARALLEL, "inter_op_num_threads": 2},
    "priority": {"execution_order": ORDER.PRIORITY_BASED},
    "no_pattern": {"enable_mem_pattern": False},
    "no_reuse": {"enable_mem_reuse": False},
    "no_arena": {"enable_cpu_mem_arena": False},
    "deterministic": {"use_deterministic_compute": True},
    "no_severity": {"log_severity_level": -1},
    "fatal_only": {"log_severity_level": 4},
    "verbosity": {"log_verbosity_level": 1},
    "log_id": {"logid": "me"},
    **{f"level_{n}": {"graph_optimization_level": getattr(LEVEL, n)} for n in MEMBERS["GraphOptimizationLevel"]},
}
KEYS = {
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
    "session.force_spinning_stop": "1",
    "session.set_denormal_as_zero": "1",
    "session.disable_prepacking": "1",
    "session.use_env_allocators": "1",
    "session.use_device_allocator_for_initializers": "1",
    "session.use_ort_model_bytes_directly": "1",
    "session.disable_quant_qdq": "1",
    "session.disable_aot_function_inlining": "1",
    "session.dynamic_block_base": "4",
    "session.graph_optimizations_loop_level": "2",
    "session.strict_shape_type_inference": "1",
    "session.allow_released_opsets_only": "0",
    "session.enable_quant_qdq_cleanup": "1",
    "optimization.disable_specified_optimizers": "ConstantFolding",
    "optimization.enable_gelu_approximation": "1",
    "optimization.constant_folding_max_output_size_in_bytes": "1024",
    "optimization.minimal_build_optimizations": "",
    "no.such.key": "1",
}


@table(
    "act, expected",
    [case(n, lambda v=v: result(**v), Gives([TWO])) for n, v in PROPERTIES.items()]
    + [case(k, lambda k=k, v=v: result((k, v)), Gives([TWO])) for k, v in KEYS.items()]
    + [
        case("shared_threads", lambda: result(use_per_session_threads=False), Gives([TWO])),
        case("negative_intra", lambda: result(intra_op_num_threads=-1), Gives([TWO])),
        case("negative_inter", lambda: result(inter_op_num_threads=-1), Gives([TWO])),
        case("severity_9", lambda: result(log_severity_level=9), Raises("RuntimeError")),
        case(
            "affinities",
            lambda: result(("session.intra_op_thread_affinities", "bad")),
            Raises("RuntimeError"),
        ),
        case(
            "optimized_nowhere",
            lambda: result(optimized_model_filepath="/nonexistent/x.onnx"),
            Raises("InvalidArgument"),
        ),
        case("twice", lambda: [result()[0], result()[0]], Gives([TWO, TWO])),
    ],
)
def test_effect(act: Callable[[], Any], expected: Any) -> None:
    """Sessions with each option and key: none changes the result."""
    check(expected, act)


def optimized_file(level: Any) -> bool:
    """Whether a session of this level writes its model."""
    file = os.path.join(models.folder(), f"level-{int(level)}.onnx")
    held = options(graph_optimization_level=level, optimized_model_filepath=file)
    made = ort.InferenceSession(models.path("no_inputs"), held)
    assert made.run(None, {})[0].tolist() == [2, 4]
    return os.path.exists(file)


@table(
    "level, expected",
    [case(n, n, Gives(True)) for n in MEMBERS["GraphOptimizationLevel"]],
)
def test_optimized_file(level: str, expected: Any) -> None:
    """The optimized model is written at every level."""
    check(expected, lambda: optimized_file(getattr(LEVEL, level)))


@table(
    "act, expected",
    [
        case(
            "missing",
            lambda: ort.SessionOptions().register_custom_ops_library("/nofile.so"),
            Raises("Fail", "Failed to load library /nofile.so"),
        ),
        case(
            "no_symbol",
            lambda: ort.SessionOptions().register_custom_ops_library("libm.so.6"),
            Raises("Fail", "Failed to get symbol RegisterCustomOps with error: "),
        ),
        case(
            "number",
            lambda: ort.SessionOptions().register_custom_ops_library(3),
            Raises("TypeError"),
        ),
        case(
            "path",
            lambda: ort.SessionOptions().register_custom_ops_library(pathlib.Path("/nofile.so")),
            Raises("Fail", "Failed to load library /nofile.so"),
        ),
        case(
            "default_options",
            lambda: type(C.get_default_session_options()) is ort.SessionOptions,
            Gives(True),
        ),
        case(
            "default_options_fresh",
            lambda: C.get_default_session_options() is C.get_default_session_options(),
            Gives(False),
        ),
        case("severity", lambda: ort.set_default_logger_severity(4), Gives(None)),
        case(
            "severity_out_of_range",
            lambda: ort.set_default_logger_severity(5),
            Raises("RuntimeError"),
        ),
        case(
            "severity_negative",
            lambda: ort.set_default_logger_severity(-1),
            Raises("RuntimeError"),
        ),
        case("verbosity", lambda: ort.set_default_logger_verbosity(0), Gives(None)),
        case(
            "policy_number",
            lambda: ort.SessionOptions().set_provider_selection_policy("x"),
            Raises("TypeError"),
        ),
        case(
            "external_initializer",
            lambda: (lambda i: [i.filepath, i.file_offset, i.byte_size])(ort.OrtExternalInitializerInfo("f.bin", 8, 16)),
            Gives(["f.bin", 8, 16]),
        ),
    ],
)
def test_rest(act: Callable[[], Any], expected: Any) -> None:
    """Libraries, defaults and logging."""
    check(expected, act)
