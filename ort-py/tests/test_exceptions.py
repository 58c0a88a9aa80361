"""Exception classes: names, codes, bases, texts."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import pickle
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from harness import CPU, NATIVE, C, Gives, Raises, case, check, f32, options, ort, session, table

#: Class -> code and name in its texts, for classes that are raised in practice.
CODES: dict[str, tuple[int, str]] = {
    "Fail": (1, "FAIL"),
    "InvalidArgument": (2, "INVALID_ARGUMENT"),
    "NoSuchFile": (3, "NO_SUCHFILE"),
    "NoModel": (4, "NO_MODEL"),
    "EngineError": (5, "ENGINE_ERROR"),
    "RuntimeException": (6, "RUNTIME_EXCEPTION"),
    "InvalidProtobuf": (7, "INVALID_PROTOBUF"),
    "ModelLoaded": (8, "MODEL_LOADED"),
    "NotImplemented": (9, "NOT_IMPLEMENTED"),
    "InvalidGraph": (10, "INVALID_GRAPH"),
    "EPFail": (11, "EP_FAIL"),
    "ModelLoadCanceled": (12, "MODEL_LOAD_CANCELED"),
}
CLASSES = [*CODES, "ModelRequiresCompilation", "NotFound", "DeviceReset"]


def facts(name: str) -> list[Any]:
    """Place and kind of a class."""
    found = getattr(C, name)
    module = importlib.import_module(NATIVE)
    return [
        found.__name__,
        found.__qualname__,
        found.__module__,
        issubclass(found, Exception),
        getattr(module, name) is found,
        hasattr(ort, name),
    ]


@table("name, expected", [case(n, n, Gives([n, n, NATIVE, True, True, False])) for n in CLASSES])
def test_class(name: str, expected: Any) -> None:
    """Where each class lives: `_pybind_state` and the native module, not the package itself."""
    check(expected, lambda: facts(name))


def raise_it(name: str, *args: Any) -> None:
    raise getattr(C, name)(*args)


@table("name, expected", [case(n, n, Raises(n, "^what happened$")) for n in CLASSES])
def test_raised_by_hand(name: str, expected: Any) -> None:
    """Programs raise these classes in their own tests."""
    check(expected, lambda: raise_it(name, "what happened"))


@table("name, expected", [case(n, n, Raises("RuntimeError", "^what$")) for n in CLASSES])
def test_is_a_runtime_error(name: str, expected: Any) -> None:
    """`except RuntimeError` catches every class."""
    check(expected, lambda: raise_it(name, "what"))


@table(
    "name, base, expected",
    [
        case("invalid_argument", "InvalidArgument", ValueError, Gives(True)),
        case("no_such_file", "NoSuchFile", FileNotFoundError, Gives(True)),
        case("not_fail_value", "Fail", ValueError, Gives(False)),
        case("not_fail_file", "Fail", OSError, Gives(False)),
        case("not_fail_memory", "Fail", MemoryError, Gives(False)),
        case("not_one_another", "InvalidGraph", "Fail", Gives(False)),
        case("not_invalid_protobuf", "InvalidProtobuf", ValueError, Gives(False)),
        case("not_builtin", "NotImplemented", NotImplementedError, Gives(False)),
    ],
)
def test_other_bases(name: str, base: Any, expected: Any) -> None:
    """Further bases, and those that a class must not have."""
    wanted = getattr(C, base) if isinstance(base, str) else base
    check(expected, lambda: issubclass(getattr(C, name), wanted))


@table(
    "read, expected",
    [
        case("args", lambda: C.Fail("a", 3).args, Gives(("a", 3))),
        case("str", lambda: str(C.Fail("a")), Gives("a")),
        case("repr", lambda: repr(C.InvalidArgument("a")), Gives("InvalidArgument('a')")),
        case("no_arguments", lambda: C.Fail().args, Gives(())),
        case(
            "pickle",
            lambda: type(pickle.loads(pickle.dumps(C.InvalidArgument("a")))) is C.InvalidArgument,
            Gives(True),
        ),
        case(
            "pickle_args",
            lambda: pickle.loads(pickle.dumps(C.Fail("a", 3))).args,
            Gives(("a", 3)),
        ),
        case(
            "pickle_no_such_file",
            lambda: str(pickle.loads(pickle.dumps(C.NoSuchFile("a")))),
            Gives("a"),
        ),
        case("copy", lambda: copy.copy(C.EPFail("a")).args, Gives(("a",))),
        case("subclass", lambda: issubclass(type("Mine", (C.Fail,), {}), C.Fail), Gives(True)),
        case(
            "attribute",
            lambda: (lambda e: (setattr(e, "extra", 1), e.extra)[1])(C.Fail("a")),
            Gives(1),
        ),
        case(
            "traceback",
            lambda: traceback.format_exception_only(C.Fail("a"))[-1],
            Gives(f"{NATIVE}.Fail: a\n"),
        ),
    ],
)
def test_object(read: Callable[[], Any], expected: Any) -> None:
    """Exception objects behave as Python's do."""
    check(expected, read)


def new_file(name: str, content: bytes) -> str:
    place = os.path.join(models.folder(), name)
    with open(place, "wb") as out:
        out.write(content)
    return place


def load(source: Any, sess_options: Any = None) -> Any:
    return ort.InferenceSession(source, sess_options, providers=[CPU])


def text(name: str, rest: str = "") -> str:
    """Pattern of a text: code, name, then `rest` somewhere."""
    code, upper = CODES[name]
    return rf"^\[ONNXRuntimeError\] : {code} : {upper} : .*{rest}"


def raises(name: str, rest: str = "") -> Raises:
    return Raises(name, text(name, rest))


def loads(source: Any) -> None:
    """Loads a model, and gives nothing: sessions cannot be compared."""
    load(source)


FAULTY = {
    "cyclic": raises("Fail"),
    "dangling": raises("InvalidArgument", "nowhere"),
    "unknown_op": raises("InvalidGraph", "NoSuchOperator"),
    "unknown_domain": raises("Fail", "org.example"),
    "unknown_attribute": raises("InvalidGraph", "colour"),
    "type_clash": Gives(),
    "shape_clash": raises("Fail", "MatMul"),
    "future_opset": Gives(),
    "future_ir": Gives(),
    "duplicate_output": raises("Fail", "y"),
    "missing_output": raises("Fail", "y"),
    "bad_arity": raises("InvalidGraph", "Add"),
}


@table("name, expected", [case(n, n, e) for n, e in FAULTY.items()])
def test_faulty_file(name: str, expected: Any) -> None:
    """Faulty models in files."""
    place = models.path(name)
    check(expected, lambda: loads(place))


@table(
    "name, expected",
    [case(n, n, Gives(True)) for n, e in FAULTY.items() if isinstance(e, Raises)],
)
def test_text_names_the_file(name: str, expected: Any) -> None:
    """The path is in the text."""

    def named() -> bool:
        try:
            load(models.path(name))
        except Exception as error:
            return models.path(name) in str(error)
        return False

    check(expected, named)


@table("name, expected", [case(n, n, e) for n, e in FAULTY.items()])
def test_faulty_bytes(name: str, expected: Any) -> None:
    """The same models from memory."""
    content = models.data(name)
    check(expected, lambda: loads(content))


GARBAGE = b"\x00\xffgarbage" * 9


@table(
    "source, expected",
    [
        case(
            "missing_file",
            lambda: "/nonexistent/x.onnx",
            raises("NoSuchFile", "/nonexistent/x.onnx.*File doesn't exist"),
        ),
        case(
            "missing_relative",
            lambda: "nofile.onnx",
            raises("NoSuchFile", "nofile.onnx.*File doesn't exist"),
        ),
        case(
            "missing_unicode",
            lambda: os.path.join(models.folder(), "é.onnx"),
            raises("NoSuchFile", "é.onnx"),
        ),
        case("folder", models.folder, raises("InvalidProtobuf")),
        case(
            "garbage_file",
            lambda: new_file("garbage.onnx", GARBAGE),
            raises("InvalidProtobuf", "[Pp]rotobuf parsing failed"),
        ),
        case(
            "garbage_bytes",
            lambda: GARBAGE,
            raises("InvalidProtobuf", "[Pp]rotobuf parsing failed"),
        ),
        case(
            "truncated_file",
            lambda: new_file("truncated.onnx", models.data("add_one")[:-5]),
            raises("InvalidProtobuf"),
        ),
        case("truncated_bytes", lambda: models.data("add_one")[:-5], raises("InvalidProtobuf")),
        case("path_as_bytes", lambda: models.path("add_one").encode(), raises("InvalidProtobuf")),
        case(
            "empty_file",
            lambda: new_file("empty.onnx", b""),
            raises("InvalidArgument", "No graph was found in the protobuf"),
        ),
        case(
            "empty_bytes",
            lambda: b"",
            raises("InvalidArgument", "No graph was found in the protobuf"),
        ),
        case(
            "no_external_file",
            lambda: models.data("external", "absent.bin"),
            raises("Fail", "absent.bin|External data"),
        ),
    ],
)
def test_unreadable(source: Callable[[], Any], expected: Any) -> None:
    """Files and bytes that hold no model."""
    given = source()
    check(expected, lambda: load(given))


@table(
    "act, expected",
    [
        case(
            "input_type",
            lambda: session("scale").run(None, {"x": np.ones(2)}),
            raises("InvalidArgument", "Unexpected input data type"),
        ),
        case(
            "extra_input",
            lambda: session("scale").run(None, {"x": f32(1), "q": f32(1)}),
            raises("InvalidArgument", "Invalid input name: q"),
        ),
        case(
            "unknown_output",
            lambda: session("scale").run(["zz"], {"x": f32(1)}),
            raises("InvalidArgument", "Invalid output name: ?zz"),
        ),
        case(
            "missing_input",
            lambda: session("scale").run(None, {}),
            Raises(
                "ValueError", r"^Required inputs \(\['x'\]\) are missing from input feed \(\[\]\)\."
            ),
        ),
        case(
            "kernel",
            lambda: session("gather").run(None, {"i": np.array([9])}),
            raises("InvalidArgument", "Non-zero status code returned while running Gather node"),
        ),
        case(
            "memory",
            lambda: session("expand").run(None, {"x": f32(1), "s": np.array([1 << 45])}),
            raises("Fail", "Expand"),
        ),
        case(
            "memory_error",
            lambda: session("expand").run(None, {"x": f32(1), "s": np.array([1 << 45])}),
            Raises("MemoryError"),
        ),
        case(
            "memory_runtime_error",
            lambda: session("expand").run(None, {"x": f32(1), "s": np.array([1 << 45])}),
            Raises("RuntimeError"),
        ),
        case(
            "input_value_error",
            lambda: session("scale").run(None, {"x": np.ones(2)}),
            Raises("ValueError"),
        ),
        case("file_not_found", lambda: load("/nonexistent/x.onnx"), Raises("FileNotFoundError")),
        case(
            "no_operator_library",
            lambda: ort.SessionOptions().register_custom_ops_library("/nofile.so"),
            raises("Fail", "Failed to load library /nofile.so"),
        ),
        case(
            "no_symbol",
            lambda: ort.SessionOptions().register_custom_ops_library("libm.so.6"),
            raises("Fail", "Failed to get symbol RegisterCustomOps with error: "),
        ),
        case(
            "no_provider_library",
            lambda: ort.register_execution_provider_library("foo", "/nofile.so"),
            raises("Fail", "Failed to load library /nofile.so"),
        ),
        case(
            "unknown_provider_library",
            lambda: ort.unregister_execution_provider_library("foo"),
            raises("Fail", "foo was not registered"),
        ),
        case(
            "unset_key",
            lambda: ort.SessionOptions().get_session_config_entry("zz"),
            Raises("RuntimeError", "SessionOptions does not have configuration with key: zz"),
        ),
        case("severity", lambda: ort.set_default_logger_severity(9), Raises("RuntimeError")),
        case("severity_type", lambda: ort.set_default_logger_severity("1"), Raises("TypeError")),
        case(
            "optimized_path",
            lambda: load(
                models.data("add_one"), options(optimized_model_filepath="/nonexistent/x.onnx")
            ),
            Raises("InvalidArgument"),
        ),
        case(
            "device_name",
            lambda: ort.OrtDevice.make("foo", 0),
            Raises("Exception", "Unsupported device type: foo"),
        ),
        case(
            "other_session",
            lambda: session("two").run_with_iobinding(session("scale").io_binding()),
            Raises("ValueError", "IOBinding must be used with the session that created it"),
        ),
    ],
)
def test_situation(act: Callable[[], Any], expected: Any) -> None:
    """Which class a situation raises, and the text that programs look for."""
    check(expected, act)


def caught(act: Callable[[], Any], *kinds: Any) -> int:
    """Which of the classes an `except` chain meets first."""
    try:
        act()
    except Exception as error:
        return next(i for i, kind in enumerate(kinds) if isinstance(error, kind))
    return -1


@table(
    "act, expected",
    [
        case(
            "own_before_exception",
            lambda: caught(lambda: load(GARBAGE), C.Fail, C.InvalidProtobuf, Exception),
            Gives(1),
        ),
        case(
            "none_of_the_others",
            lambda: caught(
                lambda: load(models.data("cyclic")), C.InvalidGraph, C.InvalidArgument, C.Fail
            ),
            Gives(2),
        ),
        case(
            "exception",
            lambda: caught(lambda: load(GARBAGE), ValueError, TypeError, Exception),
            Gives(2),
        ),
    ],
)
def test_except_chain(act: Callable[[], Any], expected: Any) -> None:
    """Handlers that name several classes."""
    check(expected, act)


def no_cycle() -> bool:
    """The frames of a failed run do not keep its session alive once the error is gone."""
    made = load(models.data("scale"))
    gone = weakref.ref(made)
    try:
        made.run(None, {"x": np.ones(2)})
    except C.InvalidArgument:
        pass
    del made
    gc.collect()
    return gone() is None


@table("act, expected", [case("session_freed", no_cycle, Gives(True))])
def test_memory(act: Callable[[], Any], expected: Any) -> None:
    """Errors hold nothing for long."""
    check(expected, act)
