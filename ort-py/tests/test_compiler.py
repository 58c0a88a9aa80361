"""ModelCompiler."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from more_deviations import check
from more_models import Raises, row
from more_models import package  # noqa: F401  (the fixture `ort`)

F = np.float32
WEIGHTS = np.arange(1000, dtype=F)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with `m.onnx`: x times 1000 weights of 4000 bytes."""
    monkeypatch.chdir(tmp_path)
    helper = onnx.helper
    shape = ["n", 1000]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"], name="m")],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(WEIGHTS, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, "m.onnx")


def compiler(ort: ModuleType, model: Any = "m.onnx", **options: Any) -> Any:
    return ort.ModelCompiler(ort.SessionOptions(), model, **options)


def first(ort: ModuleType, model: Any) -> list[float]:
    """Returns the first outputs of a compiled model: its first weights."""
    opened = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return opened.run(None, {"x": np.ones((1, 1000), F)})[0][0, :3].tolist()


def to_bytes(model: Any = "m.onnx", **options: Any) -> Any:
    """Returns a call: what a model compiled to bytes gives."""

    def call(ort: ModuleType) -> Any:
        given = model() if callable(model) else model
        made = compiler(ort, given, **options).compile_to_bytes()
        assert type(made) is bytes
        return first(ort, made)

    return call


def content() -> bytes:
    return Path("m.onnx").read_bytes()


def to_file(path: Any, **options: Any) -> Any:
    """Returns a call: what a model compiled to a file gives."""

    def call(ort: ModuleType) -> Any:
        assert compiler(ort, **options).compile_to_file(path) is None
        return first(ort, str(path))

    return call


def twice(flag: str) -> Any:
    """Returns a call: compiles to one file twice, the second time with the flag."""

    def call(ort: ModuleType) -> Any:
        compiler(ort).compile_to_file("o.onnx")
        flags = getattr(ort.OrtCompileApiFlags, flag)
        compiler(ort, flags=flags).compile_to_file("o.onnx")
        return first(ort, "o.onnx")

    return call


def no_path(ort: ModuleType) -> Any:
    compiler(ort).compile_to_file()
    return first(ort, "m_ctx.onnx")


def stream(ort: ModuleType) -> Any:
    parts: list[bytes] = []
    assert compiler(ort).compile_to_stream(lambda part: parts.append(bytes(part))) is None
    return first(ort, b"".join(parts))


def operators(ort: ModuleType) -> Any:
    return [n.op_type for n in onnx.load_from_string(compiler(ort).compile_to_bytes()).graph.node]


def same_twice(ort: ModuleType) -> Any:
    made = compiler(ort)
    return made.compile_to_bytes() == made.compile_to_bytes()


def all_levels(ort: ModuleType) -> Any:
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    return first(ort, compiler(ort, graph_optimization_level=level).compile_to_bytes())


FIRST = [0, 1, 2]
FAIL_DIVISION = Raises("Fail", "ZeroDivisionError: division by zero")


def divide(*_: Any) -> None:
    1 / 0  # noqa: B018


COMPILED = [
    row("path", to_bytes(), FIRST),
    row("path_object", to_bytes(lambda: Path("m.onnx")), FIRST),
    row("bytes", to_bytes(content), FIRST),
    row("embedded", to_bytes(embed_compiled_data_into_model=True), FIRST),
    row("level", all_levels, FIRST),
    row("operators", operators, ["Mul"]),
    row("twice", same_twice, True),
    row("file", to_file("o.onnx"), FIRST),
    row("file_path_object", to_file(Path("o.onnx")), FIRST),
    row("file_without_path", no_path, FIRST),
    row("file_again", twice("NONE"), FIRST),
    row("stream", stream, FIRST),
    row("file_exists", twice("ERROR_IF_OUTPUT_FILE_EXISTS"), Raises("Fail", "exists already")),
    row("nothing_compiled",
        lambda o: compiler(o, flags=o.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED)
        .compile_to_bytes(), Raises("Fail", "Unable to compile any nodes")),
    row("flag_number", to_bytes(flags=1), Raises("Fail", "Unable to compile any nodes")),
    row("flags_together", lambda o: int(o.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED)
        | int(o.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS), 3),
    row("missing", to_bytes("zz.onnx"), Raises("InvalidArgument", "does not exist")),
    row("junk", to_bytes(b"junk"), Raises("InvalidProtobuf")),
    row("no_bytes", to_bytes(b""), Raises("ValueError", "Input model bytes array is empty")),
    row("number", to_bytes(3), Raises("TypeError", "Unable to load from type '<class 'int'>'")),
    row("no_options", lambda o: o.ModelCompiler(None, "m.onnx"), Raises("TypeError")),
    row("no_folder", to_file("none/o.onnx"),
        Raises("InvalidArgument", "No such file or directory")),
    row("stream_raises", lambda o: compiler(o).compile_to_stream(divide), FAIL_DIVISION),
    row("location_raises", to_bytes(get_initializer_location_func=divide), FAIL_DIVISION),
    row("both_places",
        lambda o: compiler(o, external_initializers_file_path="w.bin",
                           get_initializer_location_func=divide),
        Raises("ValueError", "Cannot initialize ModelCompiler with both")),
    row("clear_write", lambda o: compiler(o).clear_ep_context_data_write_func(), None),
    row("set_write", lambda o: compiler(o).set_ep_context_data_write_func(divide), None),
]


@pytest.mark.parametrize(("call", "expected"), COMPILED)
def test_compile(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize(
    ("threshold", "size"), [row("outside", 1024, 4000), row("inside", 100_000, None)]
)
def test_external_file(ort: ModuleType, threshold: int, size: int | None):
    options = {
        "external_initializers_file_path": "w.bin",
        "external_initializers_size_threshold": threshold,
    }
    assert to_file("o.onnx", **options)(ort) == FIRST
    assert Path("o.onnx").stat().st_size < 4000 or size is None
    assert Path("w.bin").exists() == (size is not None)
    assert size is None or Path("w.bin").stat().st_size == size


def test_location_callback(ort: ModuleType):
    seen: list[Any] = []

    def locate(name: str, given: Any, info: Any) -> Any:
        seen.append((name, type(given) is ort.OrtValue, info))
        Path("c.bin").write_bytes(given.numpy().tobytes())
        return ort.OrtExternalInitializerInfo("c.bin", 0, 4000)

    assert to_file("o.onnx", get_initializer_location_func=locate)(ort) == FIRST
    assert seen == [("w", True, None)] and Path("o.onnx").stat().st_size < 4000


def test_location_callback_keeps_inside(ort: ModuleType):
    seen: list[str] = []

    def locate(name: str, *_: Any) -> None:
        seen.append(name)

    assert to_bytes(get_initializer_location_func=locate)(ort) == FIRST
    assert seen == ["w"]


def test_location_callback_keeps_files(ort: ModuleType):
    """A weight that is in a data file already can stay there."""
    options = {"external_initializers_file_path": "w.bin"}
    assert to_file("o.onnx", **options)(ort) == FIRST
    seen: list[Any] = []

    def locate(name: str, given: Any, info: Any) -> Any:
        seen.append((name, info.filepath, info.file_offset, info.byte_size))
        return info

    compiler(ort, "o.onnx", get_initializer_location_func=locate).compile_to_file("p.onnx")
    assert seen == [("w", "w.bin", 0, 4000)] and Path("p.onnx").stat().st_size < 4000
    assert first(ort, "p.onnx") == FIRST
