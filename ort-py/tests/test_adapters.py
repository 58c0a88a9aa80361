"""LoRA adapters: the file and its use."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import DTYPES, Raises, native, row, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)

F = np.float32
IS_ORIGINAL = os.environ.get("ORT_PACKAGE") == "onnxruntime"
W = np.arange(6, dtype=F).reshape(2, 3)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def adapter(ort: ModuleType, parameters: dict[str, np.ndarray], version: int = 1) -> Any:
    """Returns an AdapterFormat with these parameters."""
    made = ort.AdapterFormat()
    made.set_adapter_version(version)
    made.set_model_version(7)
    made.set_parameters({name: value(ort, array) for name, array in parameters.items()})
    return made


def exported(ort: ModuleType, parameters: dict[str, np.ndarray], path: str = "a.ort") -> str:
    """Writes an adapter file. Returns its path."""
    adapter(ort, parameters).export_adapter(path)
    return path


def loaded(ort: ModuleType, parameters: dict[str, np.ndarray], path: str = "a.ort") -> Any:
    """Returns a LoraAdapter with these parameters."""
    made = ort.LoraAdapter()
    made.Load(exported(ort, parameters, path))
    return made


def round_trip(array: np.ndarray) -> Any:
    """Returns a call: a parameter after it was written and read."""

    def call(ort: ModuleType) -> Any:
        read = ort.AdapterFormat.read_adapter(exported(ort, {"w": array})).get_parameters()["w"]
        assert type(read) is ort.OrtValue
        return read.data_type(), read.shape(), read.numpy().tolist()

    return call


PARAMETERS = [
    *(
        row(dtype, round_trip(np.ones((2, 3), dtype)), (name, [2, 3], [[1] * 3] * 2))
        for dtype, name, _, _ in DTYPES
        if dtype != "bool"
    ),
    row("values", round_trip(W), ("tensor(float)", [2, 3], W.tolist())),
    row("one", round_trip(np.ones(1, F)), ("tensor(float)", [1], [1])),
    row("empty", round_trip(np.ones((0, 3), F)), ("tensor(float)", [0, 3], [])),
    row("bool", round_trip(np.array([True])), Raises("RuntimeError")),
    row("scalar", round_trip(np.array(3, F)), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), PARAMETERS)
def test_parameter(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_bfloat16(ort: ModuleType):
    made = ort.AdapterFormat()
    given = np.arange(4, dtype=np.uint16)
    made.set_parameters({"w": ort.OrtValue.ortvalue_from_numpy_with_onnx_type(given, 16)})
    made.export_adapter("a.ort")
    read = ort.AdapterFormat.read_adapter("a.ort").get_parameters()["w"]
    assert (read.data_type(), read.tensor_size_in_bytes()) == ("tensor(bfloat16)", 8)


def versions(made: Any) -> Any:
    return made.get_format_version(), made.get_adapter_version(), made.get_model_version()


def read_again(ort: ModuleType) -> Any:
    made = ort.AdapterFormat.read_adapter(exported(ort, {"b": W, "a": W}))
    return versions(made), sorted(made.get_parameters())


def with_set(use: Any) -> Any:
    """Returns a call: `use` of a new AdapterFormat."""
    return lambda ort: use(ort.AdapterFormat())


def path_object(ort: ModuleType) -> Any:
    adapter(ort, {"w": W}).export_adapter(Path("p.ort"))
    return versions(ort.AdapterFormat.read_adapter(Path("p.ort")))


def of_bytes(content: bytes) -> Any:
    """Returns a call: reads a file of these bytes."""

    def call(ort: ModuleType) -> Any:
        Path("file").write_bytes(content)
        return ort.AdapterFormat.read_adapter("file")

    return call


def cut(ort: ModuleType) -> Any:
    content = Path(exported(ort, {"w": W})).read_bytes()
    return of_bytes(content[: len(content) // 2])(ort)


FILES = [
    row("new", with_set(lambda a: (versions(a), a.get_parameters())), ((1, 0, 0), {})),
    row("read", read_again, ((1, 1, 7), ["a", "b"])),
    row("no_parameters",
        lambda o: o.AdapterFormat.read_adapter(exported(o, {})).get_parameters(), {}),
    row("negative_version",
        with_set(lambda a: (a.set_model_version(-2), a.get_model_version())[1]), -2),
    row("str_version", with_set(lambda a: a.set_adapter_version("a")), Raises("TypeError")),
    row("array_parameter", with_set(lambda a: a.set_parameters({"w": W})),
        Raises("AttributeError")),
    row("no_dict", with_set(lambda a: a.set_parameters(None)), Raises("AttributeError")),
    row("path_object", path_object, (1, 1, 7)),
    row("missing", lambda o: o.AdapterFormat.read_adapter("zz"), Raises("RuntimeError")),
    row("junk", of_bytes(b"junk" * 16), Raises("RuntimeError")),
    row("empty", of_bytes(b""), Raises("RuntimeError")),
    row("cut", cut, Raises("RuntimeError")),
    row("no_folder", lambda o: exported(o, {"w": W}, "none/a.ort"), Raises("RuntimeError")),
    row("load_missing", lambda o: o.LoraAdapter().Load("zz"), Raises("RuntimeError")),
]


@pytest.mark.parametrize(("call", "expected"), FILES)
def test_file(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_bytes(ort: ModuleType):
    content = Path(exported(ort, {"w": W})).read_bytes()
    assert content[4:8] == b"TORT" and len(content) % 4 == 0
    at = content.index(W.tobytes())
    assert at % 4 == 0
    assert struct.unpack_from("<I", content, at - 4) == (W.nbytes,)


X = np.ones((1, 2), F)


def used(*adapters: dict[str, np.ndarray], feed: Any = None, ort_values: bool = False) -> Any:
    """Returns a call: the output of `scaled` in a run with these adapters."""

    def call(ort: ModuleType) -> Any:
        opened, options = session(ort, "scaled"), ort.RunOptions()
        kept = [loaded(ort, a, f"{i}.ort") for i, a in enumerate(adapters)]
        for one in kept:
            options.add_active_adapter(one)
        given = {"x": X} if feed is None else feed
        if ort_values:
            values = {name: value(ort, array) for name, array in given.items()}
            return opened.run_with_ort_values(None, values, options)[0].numpy().tolist()
        out = opened.run(None, given, options)[0].tolist()
        assert opened.run(None, given or {"x": X})[0].shape == (1, 2)
        return out

    return call


def of(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, F)}


USES = [
    row("none", used(), [[1, 2]]),
    row("one", used(of(10, 20)), [[10, 20]]),
    row("two", used(of(10, 20), of(5, 6)), [[10, 20]]),
    row("no_parameters", used({}), [[1, 2]]),
    row("fed", used(feed={"x": X, **of(7, 8)}), [[7, 8]]),
    row("ort_values", used(of(3, 4), ort_values=True), [[3, 4]]),
    row("unknown_name", used({"q": np.ones(2, F)}),
        Raises("InvalidArgument", "Invalid input name: q")),
    row("shape", used(of(10)), Raises("InvalidArgument", "Got invalid dimensions for input: w")),
    row("dtype", used({"w": np.array([1, 2])}),
        Raises("InvalidArgument", "Unexpected input data type")),
    row("input_by_adapter", used({"x": X}, feed={}), Raises("ValueError", "Required inputs")),
]


@pytest.mark.parametrize(("call", "expected"), USES)
def test_use(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def native_run(ort: ModuleType, opened: Any, options: Any) -> Any:
    return opened._sess.run(["y"], {"x": X}, options)


def native_run_on_values(ort: ModuleType, opened: Any, options: Any) -> Any:
    feed = {"x": value(ort, X)._ortvalue}
    return [y.numpy() for y in opened._sess.run_with_ort_values(feed, ["y"], options)]


def native_run_on_vector(ort: ModuleType, opened: Any, options: Any) -> Any:
    feeds, fetches = native(ort).OrtValueVector(), native(ort).OrtValueVector()
    feeds.push_back(value(ort, X)._ortvalue)
    device = ort.OrtDevice.make("cpu", 0)._get_c_device()
    opened._sess.run_with_ortvaluevector(options, ["x"], feeds, ["y"], fetches, [device])
    return [y.numpy() for y in fetches]


@pytest.mark.parametrize(
    ("run", "is_read_by_original"),
    [
        row("run", native_run, True),
        row("ort_values", native_run_on_values, True),
        row("vector", native_run_on_vector, False),
    ],
)
def test_native_run(ort: ModuleType, run: Any, is_read_by_original: bool):
    """Runs of the session behind `_sess`."""
    opened, options = session(ort, "scaled"), ort.RunOptions()
    kept = loaded(ort, of(10, 20))
    options.add_active_adapter(kept)
    is_read = is_read_by_original or not IS_ORIGINAL
    for given, expected in [(options, [10, 20] if is_read else [1, 2]), (ort.RunOptions(), [1, 2])]:
        assert run(ort, opened, given)[0].tolist() == [expected]


def test_native_binding(ort: ModuleType):
    opened, options = session(ort, "scaled"), ort.RunOptions()
    kept = loaded(ort, of(10, 20))
    options.add_active_adapter(kept)
    binding = opened.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    opened._sess.run_with_iobinding(binding._iobinding, options)
    expected = [1, 2] if IS_ORIGINAL else [10, 20]
    assert binding.copy_outputs_to_cpu()[0].tolist() == [expected]


def test_native_run_refuses_other_options(ort: ModuleType):
    with pytest.raises(TypeError):
        session(ort, "scaled")._sess.run(["y"], {"x": X}, 3)


def test_only_for_that_run(ort: ModuleType):
    opened, options = session(ort, "scaled"), ort.RunOptions()
    kept = loaded(ort, of(10, 20))
    options.add_active_adapter(kept)
    for _ in range(2):
        assert opened.run(None, {"x": X}, options)[0].tolist() == [[10, 20]]
        assert opened.run(None, {"x": X})[0].tolist() == [[1, 2]]


def test_two_adapters_in_turn(ort: ModuleType):
    opened = session(ort, "scaled")
    kept = [loaded(ort, of(10, 20), "1.ort"), loaded(ort, of(5, 6), "2.ort")]
    for one, expected in zip(kept, [[10, 20], [5, 6]], strict=True):
        options = ort.RunOptions()
        options.add_active_adapter(one)
        assert opened.run(None, {"x": X}, options)[0].tolist() == [expected]
    gc.collect()


def bound_run(*bound: float, adapters: Any = (10, 20)) -> Any:
    """Returns a call: outputs of a binding with an adapter, and without it afterwards."""

    def call(ort: ModuleType) -> Any:
        opened, options = session(ort, "scaled"), ort.RunOptions()
        kept = loaded(ort, adapters if isinstance(adapters, dict) else of(*adapters))
        options.add_active_adapter(kept)
        binding = opened.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y")
        if bound:
            binding.bind_cpu_input("w", np.array(bound, F))
        outputs = []
        for given in (options, None, options):
            opened.run_with_iobinding(binding, given)
            outputs.append(binding.copy_outputs_to_cpu()[0][0].tolist())
        return outputs

    return call


BOUND = [
    row("adapter", bound_run(), [[10, 20], [1, 2], [10, 20]]),
    row("bound", bound_run(7, 8), [[7, 8], [7, 8], [7, 8]]),
    row("unknown_name", bound_run(adapters={"q": np.ones(2, F)}),
        Raises("InvalidArgument", "Invalid input name: q")),
    row("shape", bound_run(adapters=(10,)), Raises("InvalidArgument", "invalid dimensions")),
]


@pytest.mark.skipif(IS_ORIGINAL, reason="the original ignores adapters in runs of a binding")
@pytest.mark.parametrize(("call", "expected"), BOUND)
def test_binding(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)
