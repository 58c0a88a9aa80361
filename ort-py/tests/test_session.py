"""Making a session: sources, arguments, attributes, identity, weights from outside."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import onnx
from harness import (
    CPU,
    NATIVE,
    PACKAGE,
    C,
    Gives,
    Raises,
    case,
    check,
    check_script,
    f32,
    options,
    ort,
    table,
)

X = np.zeros((1, 3), np.float32)
ONE = np.ones((1, 3), np.float32)
COLLECTION = PACKAGE + ".capi.onnxruntime_inference_collection"


def content() -> bytes:
    return models.data("add_one")


def place() -> str:
    return models.path("add_one")


class PathLike:
    """Has `__fspath__` and nothing else."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


class Text(str):
    """A subclass of str."""


class Content(bytes):
    """A subclass of bytes."""


def relative() -> str:
    return os.path.relpath(place())


def ort_file() -> str:
    file = os.path.join(models.folder(), "flat.ort")
    with open(file, "wb") as out:
        out.write(b"\x18\x00\x00\x00ORTM" + bytes(64))
    return file


UNABLE = "Unable to load from type '<class '{}'>'"


@table(
    "source, expected",
    [
        case("str", place, Gives([ONE])),
        case("path", lambda: pathlib.Path(place()), Gives([ONE])),
        case("fspath", lambda: PathLike(place()), Gives([ONE])),
        case("fspath_of_bytes", lambda: PathLike(place().encode()), Gives([ONE])),
        case("str_subclass", lambda: Text(place()), Gives([ONE])),
        case("relative", relative, Gives([ONE])),
        case("bytes", content, Gives([ONE])),
        case("bytes_subclass", lambda: Content(content()), Gives([ONE])),
        case("none", lambda: None, Raises("TypeError", UNABLE.format("NoneType"))),
        case("int", lambda: 3, Raises("TypeError", UNABLE.format("int"))),
        case("list", lambda: [1], Raises("TypeError", UNABLE.format("list"))),
        case(
            "open_file",
            lambda: io.StringIO("x"),
            Raises("TypeError", UNABLE.format("_io.StringIO")),
        ),
        case("bytearray", lambda: bytearray(content()), Gives([ONE])),
        case("memory_view", lambda: memoryview(content()), Gives([ONE])),
        case("model_proto", lambda: onnx.load(place()), Gives([ONE])),
        case("empty_str", lambda: "", Raises("InvalidArgument")),
        case("ort_format", ort_file, Raises("Fail", "Invalid ORT format model")),
    ],
)
def test_source(source: Callable[[], Any], expected: Any) -> None:
    """What a session can be made of."""
    given = source()
    check(expected, lambda: ort.InferenceSession(given, providers=[CPU]).run(None, {"x": X}))


ORT_FORMAT = pathlib.Path(__file__).parents[2] / "ort-core/tests/data/ort_format/maps.ort"


def in_file(name: str, data: bytes) -> str:
    file = os.path.join(models.folder(), name)
    with open(file, "wb") as out:
        out.write(data)
    return file


def scores(source: Any, form: str = "") -> Any:
    """What a classifier returns that is loaded as a format."""
    given = ort.SessionOptions()
    given.add_session_config_entry("session.load_model_format", form)
    made = ort.InferenceSession(source, given, providers=[CPU])
    types = [value.type for value in (*made.get_inputs(), *made.get_outputs())]
    return [*types, *made.run(None, {"x": np.array([[0.25, 0.75]], np.float32)})]


def saved_as_ort() -> Any:
    """What is saved by a session, loaded."""
    file = os.path.join(models.folder(), "saved.ort")
    ort.InferenceSession(place(), options(optimized_model_filepath=file), providers=[CPU])
    return ort.InferenceSession(file, providers=[CPU]).run(None, {"x": X})


SCORES = Gives(["tensor(float)", "seq(map(string,tensor(float)))", [{"cat": 0.25, "dog": 0.75}]])
NO_PROTOBUF = Raises("InvalidProtobuf", "rotobuf parsing failed")


@table(
    "act, expected",
    [
        case("path", lambda: scores(ORT_FORMAT), SCORES),
        case("bytes", lambda: scores(ORT_FORMAT.read_bytes()), SCORES),
        case("path_as_ort", lambda: scores(ORT_FORMAT, "ORT"), SCORES),
        case("bytes_as_ort", lambda: scores(ORT_FORMAT.read_bytes(), "ORT"), SCORES),
        case("upper_case", lambda: scores(in_file("m.ORT", ORT_FORMAT.read_bytes())), SCORES),
        case("other_name", lambda: scores(in_file("m.bin", ORT_FORMAT.read_bytes())), SCORES),
        case("path_as_onnx", lambda: scores(ORT_FORMAT, "ONNX"), NO_PROTOBUF),
        case("bytes_as_onnx", lambda: scores(ORT_FORMAT.read_bytes(), "ONNX"), NO_PROTOBUF),
        case(
            "onnx_of_that_name",
            lambda: scores(in_file("onnx.ort", content())),
            Raises("Fail", "ORT model verification failed"),
        ),
        case("saved", saved_as_ort, Raises("NotImplemented", "not saved in ORT format")),
    ],
)
def test_ort_format(act: Callable[[], Any], expected: Any) -> None:
    """Models that the original saved in its own format."""
    check(expected, act)


def made(*args: Any, **keywords: Any) -> list[str]:
    """The providers of a session made with these arguments."""
    return ort.InferenceSession(place(), *args, **keywords).get_providers()


@table(
    "make, expected",
    [
        case("nothing", lambda: made(), Gives([CPU])),
        case("positions", lambda: made(ort.SessionOptions(), [CPU], [{}]), Gives([CPU])),
        case(
            "keyword_path",
            lambda: ort.InferenceSession(path_or_bytes=place()).get_providers(),
            Gives([CPU]),
        ),
        case("options_none", lambda: made(sess_options=None), Gives([CPU])),
        case("options", lambda: made(sess_options=ort.SessionOptions()), Gives([CPU])),
        case(
            "options_subclass",
            lambda: made(type("Mine", (ort.SessionOptions,), {})()),
            Gives([CPU]),
        ),
        case("options_int", lambda: made(3), Raises("TypeError")),
        case("options_dict", lambda: made({"intra_op_num_threads": 1}), Raises("TypeError")),
        case("options_class", lambda: made(ort.SessionOptions), Raises("TypeError")),
        case("options_of_run", lambda: made(ort.RunOptions()), Raises("TypeError")),
        case("fallback_off", lambda: made(enable_fallback=0), Gives([CPU])),
        case("fallback_bool", lambda: made(enable_fallback=True), Gives([CPU])),
        case("fallback_text", lambda: made(enable_fallback="0"), Gives([CPU])),
        case("fallback_none", lambda: made(enable_fallback=None), Raises("TypeError")),
        case("fallback_word", lambda: made(enable_fallback="x"), Raises("ValueError")),
        case(
            "optimizers_list",
            lambda: made(disabled_optimizers=["ConstantFolding"]),
            Gives([CPU]),
        ),
        case("optimizers_set", lambda: made(disabled_optimizers={"ConstantFolding"}), Gives([CPU])),
        case(
            "optimizers_tuple",
            lambda: made(disabled_optimizers=("NoSuchOptimizer",)),
            Gives([CPU]),
        ),
        case(
            "optimizers_generator",
            lambda: made(disabled_optimizers=(n for n in ["A"])),
            Gives([CPU]),
        ),
        case("optimizers_none", lambda: made(disabled_optimizers=None), Gives([CPU])),
        case("optimizers_int", lambda: made(disabled_optimizers=[3]), Raises("TypeError")),
        case("config_flag", lambda: made(read_config_from_model=1), Gives([CPU])),
        case("config_flag_text", lambda: made(read_config_from_model="1"), Gives([CPU])),
        case("no_model", lambda: ort.InferenceSession(), Raises("TypeError", "path_or_bytes")),
        case("five_positions", lambda: made(None, None, None, None), Raises("TypeError")),
        case(
            "unknown_keyword",
            lambda: made(no_such_argument=1),
            Gives([CPU], warns=["no_such_argument"]),
        ),
    ],
)
def test_arguments(make: Callable[[], Any], expected: Any) -> None:
    """Arguments besides the model."""
    check(expected, make)


def of_path() -> Any:
    return ort.InferenceSession(place(), providers=[CPU])


def of_bytes() -> Any:
    return ort.InferenceSession(content(), providers=[CPU])


def keeps_bytes() -> bool:
    given = content()
    return ort.InferenceSession(given)._model_bytes is given


@table(
    "read, expected",
    [
        case("path", lambda: of_path()._model_path == place(), Gives(True)),
        case(
            "path_is_str",
            lambda: type(ort.InferenceSession(pathlib.Path(place()))._model_path) is str,
            Gives(True),
        ),
        case("path_of_bytes", lambda: of_bytes()._model_path, Gives(None)),
        case("bytes", keeps_bytes, Gives(True)),
        case("bytes_of_path", lambda: of_path()._model_bytes, Gives(None)),
        case("native", lambda: type(of_path()._sess) is C.InferenceSession, Gives(True)),
        case("options", lambda: type(of_path()._sess_options) is ort.SessionOptions, Gives(True)),
        case("providers", lambda: of_path()._providers, Gives([CPU])),
        case("provider_options", lambda: of_path()._provider_options, Gives({CPU: {}})),
        case("inputs", lambda: [i.name for i in of_path()._inputs_meta], Gives(["x"])),
        case("outputs", lambda: [o.name for o in of_path()._outputs_meta], Gives(["y"])),
        case("overridable", lambda: of_path()._overridable_initializers, Gives([])),
        case("metadata", lambda: of_path()._model_meta.graph_name, Gives("graph")),
        case("fallback", lambda: of_path()._enable_fallback, Gives(True)),
        case("fallback_providers", lambda: of_path()._fallback_providers, Gives([CPU])),
        case(
            "profiling_start",
            lambda: type(of_path()._profiling_start_time_ns) is int,
            Gives(True),
        ),
    ],
)
def test_attributes(read: Callable[[], Any], expected: Any) -> None:
    """Attributes that other packages read."""
    check(expected, read)


def changed_after() -> list[int]:
    """The session has a copy of its options; two sessions of one object differ."""
    given = options(intra_op_num_threads=1)
    first = ort.InferenceSession(place(), given)
    given.intra_op_num_threads = 2
    second = ort.InferenceSession(place(), given)
    return [s.get_session_options().intra_op_num_threads for s in (first, second)]


def rebuilt() -> int:
    """`set_providers` starts from the object first given."""
    given = options(intra_op_num_threads=1)
    held = ort.InferenceSession(place(), given)
    held.set_providers([CPU])
    return held.get_session_options().intra_op_num_threads


def own_copy() -> bool:
    given = ort.SessionOptions()
    return ort.InferenceSession(place(), given).get_session_options() is given


def entries_copied() -> str:
    given = ort.SessionOptions()
    given.add_session_config_entry("my.key", "1")
    return ort.InferenceSession(place(), given).get_session_options().get_session_config_entry("my.key")


@table(
    "read, expected",
    [
        case("changed_after", changed_after, Gives([1, 2])),
        case("rebuilt", rebuilt, Gives(1)),
        case("own_copy", own_copy, Gives(False)),
        case(
            "kind",
            lambda: type(of_path().get_session_options()) is ort.SessionOptions,
            Gives(True),
        ),
        case("default", lambda: of_path().get_session_options().intra_op_num_threads, Gives(0)),
        case("entries", entries_copied, Gives("1")),
        case(
            "log_id",
            lambda: ort.InferenceSession(place(), options(logid="me")).get_session_options().logid,
            Gives("me"),
        ),
    ],
)
def test_session_options(read: Callable[[], Any], expected: Any) -> None:
    """The options of a session."""
    check(expected, read)


COUNT = "print({}.get_session_options().intra_op_num_threads)"


@table(
    "code, flag, expected",
    [
        case(
            "no_flag",
            COUNT.format("ort.InferenceSession(models.path('configured'))"),
            "0",
            Gives("0"),
        ),
        case(
            "variable",
            COUNT.format("ort.InferenceSession(models.path('configured'))"),
            "1",
            Gives("3"),
        ),
        case(
            "variable_bytes",
            COUNT.format("ort.InferenceSession(models.data('configured'))"),
            "1",
            Gives("3"),
        ),
        case(
            "variable_and_argument",
            COUNT.format("ort.InferenceSession(models.path('configured'), read_config_from_model=1)"),
            "1",
            Gives("3"),
        ),
        case(
            "variable_other_model",
            COUNT.format("ort.InferenceSession(models.path('add_one'))"),
            "1",
            Gives("0"),
        ),
        case(
            "argument",
            COUNT.format("ort.InferenceSession(models.path('configured'), read_config_from_model=1)"),
            "0",
            Gives("3"),
        ),
        case(
            "argument_off",
            COUNT.format("ort.InferenceSession(models.path('configured'), read_config_from_model=0)"),
            "1",
            Gives("0"),
        ),
        case(
            "native",
            "print(C.InferenceSession(ort.SessionOptions(), models.path('configured'), True, True).session_options.intra_op_num_threads)",
            "1",
            Gives("3"),
        ),
    ],
)
def test_config_in_model(code: str, flag: str, expected: Any) -> None:
    """Session options in the metadata entry `ort_config`, behind a flag."""
    check_script(expected, code, ORT_LOAD_CONFIG_FROM_MODEL=flag)


# Identity of classes.


def module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


PUBLIC = ["InferenceSession", "OrtValue", "IOBinding", "SparseTensor", "OrtDevice", "ModelCompiler"]
BOUND = [
    "SessionOptions",
    "RunOptions",
    "NodeArg",
    "ModelMetadata",
    "GraphOptimizationLevel",
    "ExecutionMode",
    "ExecutionOrder",
    "OrtMemoryInfo",
    "OrtArenaCfg",
    "OrtAllocatorType",
    "OrtMemType",
    "OrtDeviceMemoryType",
    "OrtEpDevice",
    "OrtHardwareDevice",
    "OrtHardwareDeviceType",
    "SessionIOBinding",
    "LoraAdapter",
    "OrtSparseFormat",
    "OrtExternalInitializerInfo",
]


@table("name, expected", [case(n, n, Gives([True, COLLECTION, n])) for n in PUBLIC])
def test_public_class(name: str, expected: Any) -> None:
    """Python classes are one object under every name."""
    found = getattr(ort, name)
    where = module("capi.onnxruntime_inference_collection")
    check(expected, lambda: [getattr(where, name) is found, found.__module__, found.__qualname__])


@table("name, expected", [case(n, n, Gives([True, True, NATIVE, n])) for n in BOUND])
def test_bound_class(name: str, expected: Any) -> None:
    """Native classes are one object under every name."""
    found = getattr(ort, name)
    check(
        expected,
        lambda: [
            getattr(C, name) is found,
            getattr(module("capi.onnxruntime_pybind11_state"), name) is found,
            found.__module__,
            found.__qualname__,
        ],
    )


class Wrapped(ort.InferenceSession):
    """A user's subclass with an `__init__` of its own."""

    def __init__(self, path: str, tag: str) -> None:
        super().__init__(path, providers=[CPU])
        self.tag = tag

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> list[Any]:
        return [self.tag, *super().run(output_names, input_feed, run_options)]


class Picklable(ort.InferenceSession):
    """The wrapper that users write to get sessions into other processes."""

    def __init__(self, path: str) -> None:
        super().__init__(path, providers=[CPU])
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])


def dies_with_its_last_reference() -> bool:
    held = of_path()
    gone = weakref.ref(held)
    del held
    gc.collect()
    return gone() is None


def extra_attribute() -> Any:
    held = of_path()
    held.mine = [1]
    return held.mine


def outlives_binding() -> Any:
    held = of_path()
    binding = held.io_binding()
    del held
    gc.collect()
    return type(binding) is ort.IOBinding


def replaced_method() -> Any:
    """Tests of other packages patch `run` on one object."""
    held = of_path()
    held.run = lambda *a: "patched"
    return held.run(None, {})


@table(
    "act, expected",
    [
        case(
            "base",
            lambda: [k.__name__ for k in ort.InferenceSession.__mro__],
            Gives(["InferenceSession", "Session", "object"]),
        ),
        case(
            "session_class",
            lambda: module("capi.onnxruntime_inference_collection").Session in ort.InferenceSession.__mro__,
            Gives(True),
        ),
        case("is_instance", lambda: isinstance(of_path(), ort.InferenceSession), Gives(True)),
        case("subclass", lambda: Wrapped(place(), "t").run(None, {"x": X}), Gives(["t", ONE])),
        case("subclass_attribute", lambda: Wrapped(place(), "t").tag, Gives("t")),
        case(
            "subclass_pickle",
            lambda: pickle.loads(pickle.dumps(Picklable(place()))).run(None, {"x": X}),
            Gives([ONE]),
        ),
        case("extra_attribute", extra_attribute, Gives([1])),
        case("replaced_method", replaced_method, Gives("patched")),
        case("weak_reference", lambda: (lambda s: weakref.ref(s)() is s)(of_path()), Gives(True)),
        case("freed", dies_with_its_last_reference, Gives(True)),
        case("kept_by_binding", outlives_binding, Gives(True)),
        case("equal_to_itself", lambda: (lambda s: s == s)(of_path()), Gives(True)),
        case("not_equal", lambda: of_path() == of_path(), Gives(False)),
        case("hashable", lambda: (lambda s: {s: 1}[s])(of_path()), Gives(1)),
        case(
            "repr",
            lambda: repr(of_path()).startswith(f"<{COLLECTION}.InferenceSession object at 0x"),
            Gives(True),
        ),
        case("not_callable", lambda: of_path()(), Raises("TypeError", "not callable")),
        case("no_length", lambda: len(of_path()), Raises("TypeError")),
        case(
            "two_of_one_path",
            lambda: [s.run(None, {"x": X})[0] for s in (of_path(), of_path())],
            Gives([ONE, ONE]),
        ),
    ],
)
def test_object(act: Callable[[], Any], expected: Any) -> None:
    """A session is an ordinary Python object."""
    check(expected, act)


def through_pickle(held: Any) -> Any:
    return pickle.loads(pickle.dumps(held))


def with_options() -> int:
    held = ort.InferenceSession(place(), options(intra_op_num_threads=2), providers=[CPU])
    return through_pickle(held).get_session_options().intra_op_num_threads


@table(
    "act, expected",
    [
        case("copy", lambda: copy.copy(of_path()).run(None, {"x": X}), Gives([ONE])),
        case("pickle_path", lambda: through_pickle(of_path()).run(None, {"x": X}), Gives([ONE])),
        case("pickle_bytes", lambda: through_pickle(of_bytes()).run(None, {"x": X}), Gives([ONE])),
        case("pickle_options", with_options, Gives(2)),
        case("pickle_providers", lambda: through_pickle(of_path()).get_providers(), Gives([CPU])),
        case(
            "pickle_class",
            lambda: type(through_pickle(of_path())) is ort.InferenceSession,
            Gives(True),
        ),
        case("deep_copy", lambda: copy.deepcopy(of_path()).run(None, {"x": X}), Gives([ONE])),
        case(
            "deep_copy_in_list",
            lambda: copy.deepcopy([of_bytes()])[0].run(None, {"x": X}),
            Gives([ONE]),
        ),
    ],
)
def test_copies(act: Callable[[], Any], expected: Any) -> None:
    """Copies and pickles of sessions are sessions of the same model."""
    check(expected, act)


# The native session.


def native(source: Any, is_path: bool, sess_options: Any = None) -> Any:
    held = C.InferenceSession(sess_options or ort.SessionOptions(), source, is_path, False)
    held.initialize_session([], [], set())
    return held


def native_values() -> np.ndarray:
    feed = {"x": ort.OrtValue.ortvalue_from_numpy(X)._ortvalue}
    return native(place(), True).run_with_ort_values(feed, ["y"], None)[0].numpy()


@table(
    "act, expected",
    [
        case("path", lambda: native(place(), True).run(["y"], {"x": X}, None), Gives([ONE])),
        case("bytes", lambda: native(content(), False).run(["y"], {"x": X}, None), Gives([ONE])),
        case(
            "run_options",
            lambda: native(place(), True).run(["y"], {"x": X}, ort.RunOptions()),
            Gives([ONE]),
        ),
        case(
            "default_options",
            lambda: native(place(), True, C.get_default_session_options()).run(["y"], {"x": X}, None),
            Gives([ONE]),
        ),
        case("values", native_values, Gives(ONE)),
        case("inputs", lambda: [i.name for i in native(place(), True).inputs_meta], Gives(["x"])),
        case("outputs", lambda: [o.name for o in native(place(), True).outputs_meta], Gives(["y"])),
        case("overridable", lambda: native(place(), True).overridable_initializers, Gives([])),
        case("metadata", lambda: native(place(), True).model_meta.graph_name, Gives("graph")),
        case(
            "session_options",
            lambda: type(native(place(), True).session_options) is ort.SessionOptions,
            Gives(True),
        ),
        case(
            "memory_infos",
            lambda: [len(native(place(), True).input_meminfos), len(native(place(), True).output_meminfos)],
            Gives([1, 1]),
        ),
        case(
            "profiling_start",
            lambda: type(native(place(), True).get_profiling_start_time_ns) is int,
            Gives(True),
        ),
        case("providers", lambda: native(place(), True).get_providers(), Gives([CPU])),
        case("end_profiling", lambda: native(place(), True).end_profiling(), Gives("")),
        case(
            "no_names",
            lambda: native(place(), True).run([], {"x": X}, None),
            Raises("InvalidArgument", "At least one output should be requested"),
        ),
        case(
            "names_none",
            lambda: native(place(), True).run(None, {"x": X}, None),
            Raises("TypeError"),
        ),
        case(
            "options_none",
            lambda: C.InferenceSession(None, content(), False, False),
            Raises("TypeError"),
        ),
        case(
            "missing_file",
            lambda: C.InferenceSession(ort.SessionOptions(), "/nofile", True, False),
            Raises("NoSuchFile", "/nofile"),
        ),
        case(
            "not_initialized",
            lambda: C.InferenceSession(ort.SessionOptions(), place(), True, False).run(["y"], {"x": X}, None),
            Raises("Fail", "Session not initialized"),
        ),
        case(
            "metadata_before",
            lambda: [i.name for i in C.InferenceSession(ort.SessionOptions(), place(), True, False).inputs_meta],
            Gives(["x"]),
        ),
    ],
)
def test_native(act: Callable[[], Any], expected: Any) -> None:
    """The native session, as packages use it directly."""
    check(expected, act)


# Weights from outside.

W = models.EXTERNAL_WEIGHTS
Z = np.zeros(4, np.float32)


def value(array: np.ndarray) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array)


def external_beside() -> Any:
    models.external_file()
    return ort.InferenceSession(models.path("external")).run(None, {"x": Z})


def external_folder() -> Any:
    models.external_file()
    given = ort.SessionOptions()
    given.add_session_config_entry("session.model_external_initializers_file_folder_path", models.folder())
    return ort.InferenceSession(models.data("external"), given).run(None, {"x": Z})


def external_memory(buffer: Any, size: int) -> Any:
    given = ort.SessionOptions()
    given.add_external_initializers_from_files_in_memory(["weights.bin"], [buffer], [size])
    return ort.InferenceSession(models.data("external"), given).run(None, {"x": Z})


def external_values(names: list[str], values: list[Any]) -> Any:
    given = ort.SessionOptions()
    given.add_external_initializers(names, values)
    return ort.InferenceSession(models.data("external"), given).run(None, {"x": Z})


def replaced(name: str, held: Any) -> Any:
    given = ort.SessionOptions()
    given.add_initializer(name, held)
    return ort.InferenceSession(content(), given).run(None, {"x": X})


def twice(add: Callable[[Any], None]) -> None:
    given = ort.SessionOptions()
    add(given)
    add(given)


SEVEN = np.array([[7, 8, 9]], np.float32)
BUFFER = W.tobytes()


@table(
    "act, expected",
    [
        case("beside_the_file", external_beside, Gives([W])),
        case("folder_by_key", external_folder, Gives([W])),
        case("files_in_memory", lambda: external_memory(BUFFER, 16), Gives([W])),
        case("files_in_memory_array", lambda: external_memory(W, 16), Gives([W])),
        case("values", lambda: external_values(["w"], [value(W)]), Gives([W])),
        case(
            "values_empty",
            lambda: ort.SessionOptions().add_external_initializers([], []),
            Gives(None),
        ),
        case(
            "lengths_differ",
            lambda: external_values(["w", "q"], [value(W)]),
            Raises("RuntimeError"),
        ),
        case(
            "memory_lengths_differ",
            lambda: ort.SessionOptions().add_external_initializers_from_files_in_memory(["a", "b"], [b"x"], [1]),
            Raises("RuntimeError"),
        ),
        case(
            "values_twice",
            lambda: twice(lambda o: o.add_external_initializers(["w"], [value(W)])),
            Raises("RuntimeError"),
        ),
        case(
            "replaced",
            lambda: (lambda v: replaced("one", v))(value(f32(7, 8, 9))),
            Gives([SEVEN]),
        ),
        case(
            "replaced_unknown",
            lambda: (lambda v: replaced("zzz", v))(value(f32(7, 8, 9))),
            Gives([ONE]),
        ),
        case(
            "replaced_twice",
            lambda: (lambda v: twice(lambda o: o.add_initializer("one", v)))(value(f32(1, 1, 1))),
            Raises("RuntimeError"),
        ),
        case(
            "replaced_by_native",
            lambda: (lambda v: replaced("one", v._ortvalue))(value(f32(7, 8, 9))),
            Gives([SEVEN]),
        ),
        case("replaced_by_array", lambda: replaced("one", f32(7, 8, 9)), Gives([SEVEN])),
        case(
            "no_file",
            lambda: ort.InferenceSession(models.data("external", "gone.bin")),
            Raises("Fail"),
        ),
    ],
)
def test_weights(act: Callable[[], Any], expected: Any) -> None:
    """Weights that come from files, buffers and values beside the model."""
    check(expected, act)


KEEP = """
import gc
options = ort.SessionOptions()
options.add_initializer("one", ort.OrtValue.ortvalue_from_numpy(np.array([7, 8, 9], np.float32)))
gc.collect()
other = [np.full(3, 5, np.float32) for _ in range(100)]
made = ort.InferenceSession(models.data("add_one"), options)
print(made.run(None, {"x": np.zeros((1, 3), np.float32)})[0].tolist() == [[7, 8, 9]])
"""
OTHER_SHAPE = """
options = ort.SessionOptions()
weight = ort.OrtValue.ortvalue_from_numpy(np.ones(4, np.float32))
options.add_initializer("one", weight)
print(
    ort.InferenceSession(models.data("add_one"), options).run(None, {"x": np.zeros((1, 3), np.float32)}),
)
"""
OTHER_TYPE = """
options = ort.SessionOptions()
weight = ort.OrtValue.ortvalue_from_numpy(np.ones(3))
options.add_initializer("one", weight)
made = ort.InferenceSession(models.data("add_one"), options)
print(made.run(None, {"x": np.zeros((1, 3), np.float32)})[0].tolist() == [[1, 1, 1]])
"""


@table(
    "code, expected",
    [
        case("kept_alive", KEEP, Gives("True")),
        case("other_shape", OTHER_SHAPE, Raises("ScriptError", "InvalidArgument: .*one")),
        case("other_type", OTHER_TYPE, Raises("ScriptError", "InvalidArgument: .*one")),
    ],
)
def test_weight_faults(code: str, expected: Any) -> None:
    """Weights that are wrong or gone, each in a process of its own."""
    check_script(expected, code)


def optimized() -> list[Any]:
    file = os.path.join(models.folder(), "optimized.onnx")
    ort.InferenceSession(place(), options(optimized_model_filepath=file))
    again = ort.InferenceSession(file).run(None, {"x": X})
    return [[n.op_type for n in onnx.load(file).graph.node], *again]


def canceled() -> None:
    given = ort.SessionOptions()
    given.set_load_cancellation_flag(True)
    ort.InferenceSession(place(), given)


def canceled_and_not() -> Any:
    given = ort.SessionOptions()
    given.set_load_cancellation_flag(True)
    given.set_load_cancellation_flag(False)
    return ort.InferenceSession(place(), given).run(None, {"x": X})


def as_format(name: str) -> Any:
    given = ort.SessionOptions()
    given.add_session_config_entry("session.load_model_format", name)
    return ort.InferenceSession(place(), given).run(None, {"x": X})


def deleted_after() -> Any:
    """The file may go once the session is made."""
    file = os.path.join(models.folder(), "deleted.onnx")
    with open(file, "wb") as out:
        out.write(content())
    held = ort.InferenceSession(file)
    os.remove(file)
    return held.run(None, {"x": X})


@table(
    "act, expected",
    [
        case("optimized_model", optimized, Gives([["Add"], ONE])),
        case(
            "canceled",
            canceled,
            Raises("ModelLoadCanceled", r"^\[ONNXRuntimeError\] : 12 : MODEL_LOAD_CANCELED : "),
        ),
        case("canceled_and_not", canceled_and_not, Gives([ONE])),
        case("format_onnx", lambda: as_format("ONNX"), Gives([ONE])),
        case("format_ort", lambda: as_format("ORT"), Raises("Fail", "ORT model verification failed")),
        case("format_of_another_name", lambda: as_format("XX"), Gives([ONE])),
        case("file_deleted", deleted_after, Gives([ONE])),
    ],
)
def test_loading(act: Callable[[], Any], expected: Any) -> None:
    """Loading and what it leaves behind."""
    check(expected, act)
