"""Calibration: ranges of values, their caches and tables, and what it takes of memory.

Models of small whole numbers have the same values in every engine, so that ranges are compared
bit by bit with onnxruntime's.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import IS_ORIGINAL, PACKAGE, Gives, Raises, case, check, table

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

calibrate = importlib.import_module(f"{PACKAGE}.quantization.calibrate")
ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="ours alone, or a comparison with the original")
RNG = np.random.default_rng(0)


def original() -> Any:
    """Returns the module of onnxruntime."""
    return pytest.importorskip("onnxruntime.quantization.calibrate")


# Models, and their samples.


def whole(name: str, *shape: int, dtype: str = "float32") -> Any:
    """Returns a weight of small whole numbers."""
    return numpy_helper.from_array(RNG.integers(-2, 3, shape).astype(dtype), name)


def model(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], *weights: Any) -> Any:
    """Returns a model; values have a shape, or a type and a shape."""

    def info(name: str, form: Any) -> Any:
        kind, shape = form if isinstance(form, tuple) else (TensorProto.FLOAT, form)
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()],
        weights,
    )
    opsets = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def convnet() -> Any:
    """Conv, Relu, MaxPool, Flatten, Gemm."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "m"], ["y"]),
    ]
    weights = whole("w", 4, 3, 3, 3), whole("b", 4), whole("m", 64, 5)
    return model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, *weights)


def products() -> Any:
    """MatMul, Add, Sub of sequences, and a value of integers."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Sub", ["a", "x"], ["y"]),
        helper.make_node("Shape", ["y"], ["s"]),
    ]
    forms = {"y": ["n", "t", 6], "s": (TensorProto.INT64, [3])}
    return model(nodes, {"x": ["n", "t", 6]}, forms, whole("w", 6, 6), whole("b", 6))


def halves() -> Any:
    """Float16 behind float32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["h", "f"], ["y"]),
    ]
    forms = {"y": (TensorProto.FLOAT16, ["n", 4])}
    return model(nodes, {"x": ["n", 4]}, forms, whole("f", 4, dtype="float16"))


def constants() -> Any:
    """A node Constant, which no run computes."""
    value = whole("k", 1, 4)
    nodes = [
        helper.make_node("Constant", [], ["k"], value=value),
        helper.make_node("Add", ["x", "k"], ["y"]),
    ]
    return model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]})


def vectors() -> Any:
    """Values of rank 1, in a graph whose ranks are not declared."""
    return model([helper.make_node("Neg", ["x"], ["y"])], {"x": None}, {"y": None})


def branches() -> Any:
    """If: values of the main graph alone are observed."""
    bodies = {
        name: helper.make_graph(
            [helper.make_node(kind, ["x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4])],
        )
        for name, kind in (("then_branch", "Identity"), ("else_branch", "Neg"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["t"], keepdims=0),
        helper.make_node("Greater", ["t", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["i"], **bodies),
        helper.make_node("Relu", ["i"], ["y"]),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    return model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, zero)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "convnet": (convnet, (2, 3, 8, 8)),
    "products": (products, (2, 5, 6)),
    "halves": (halves, (3, 4)),
    "constants": (constants, (2, 4)),
    "vectors": (vectors, (7,)),
    "branches": (branches, (3, 4)),
}
#: The option sets of min-max, and the operators that are observed.
OPTIONS: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    "plain": ({}, None),
    "symmetric": ({"symmetric": True}, None),
    "average": ({"moving_average": True}, None),
    "average_half": ({"moving_average": True, "averaging_constant": 0.5}, None),
    "channels": ({"per_channel": True}, None),
    "symmetric_channels": ({"per_channel": True, "symmetric": True}, None),
    "average_channels": ({"per_channel": True, "moving_average": True}, None),
    "some": ({}, ["Conv", "MatMul", "Neg", "Mul", "Add", "If"]),
}
#: The original does not merge the channels of two collections, and reduces values of rank 0 over
#: axes that they do not have.
DIFFERENCES = {
    f"{name}-{options}"
    for name in MODELS
    for options in ("channels", "symmetric_channels")
    # A value of rank 1 has one channel, which merges.
    if name != "vectors"
} | {"branches-average_channels"}


class Reader:
    """Samples of whole numbers, or those given."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = iter(samples)

    def get_next(self) -> Any:
        return next(self.samples, None)


def reader(shape: tuple[int, ...], count: int, seed: int = 1) -> Reader:
    """Returns a reader of samples for the input `x`."""
    rng = np.random.default_rng(seed)
    return Reader({"x": rng.integers(-9, 10, shape).astype(np.float32)} for _ in range(count))


def path_of(made: Any, folder: Path) -> str:
    """Saves a model."""
    onnx.save(made, str(folder / "model.onnx"))
    return str(folder / "model.onnx")


def calibrated(package: Any, path: str, method: str, readers: Iterable[Any], **options: Any) -> Any:
    """Returns what a calibration finds. The original writes a model and prints."""
    kinds = options.pop("kinds", None)
    augmented = str(Path(path).parent / "augmented.onnx")
    chosen = package.CalibrationMethod[method]
    with contextlib.redirect_stdout(io.StringIO()):
        calibrator = package.create_calibrator(path, kinds, augmented, chosen, extra_options=options)
        for each in readers:
            calibrator.collect_data(each)
        return calibrator.compute_data()


def ranges(found: Any) -> dict[str, list[Any]]:
    """Returns types, shapes and bits of all ranges."""
    return {
        name: [(end.dtype.str, end.shape, end.tobytes()) for end in data.range_value]
        for name, data in sorted(found.items())
    }


# Min-max.


@ours_only
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_min_max_is_the_originals(name: str, options: str, tmp_path: Path):
    make, shape = MODELS[name]
    path = path_of(make(), tmp_path)
    extra, kinds = OPTIONS[options]

    def found(package: Any, parts: int) -> Any:
        readers = [reader(shape, 5), reader(shape, 3, 2)]
        if parts == 1:
            readers = [Reader(sample for each in readers for sample in each.samples)]
        return ranges(calibrated(package, path, "MinMax", readers, kinds=kinds, **extra))

    parts = 2
    if f"{name}-{options}" in DIFFERENCES:
        with pytest.raises(Exception, match="ambiguous|axis|Axis"):
            found(original(), parts)
        if name == "branches":
            assert found(calibrate, parts)
            return
        parts = 1
    assert found(calibrate, parts) == found(original(), parts)


@ours_only
def test_collections_are_merged(tmp_path: Path):
    path = path_of(convnet(), tmp_path)

    def readers() -> list[Reader]:
        return [reader((2, 3, 8, 8), 5), reader((2, 3, 8, 8), 3, 2)]

    for method, options in (
        ("MinMax", {"per_channel": True}),
        ("Percentile", {"percentile": 99}),
        ("Entropy", {}),
    ):
        one = Reader(sample for each in readers() for sample in each.samples)
        together = calibrated(calibrate, path, method, [one], **options)
        assert ranges(together) == ranges(calibrated(calibrate, path, method, readers(), **options))


@table(
    "shapes",
    [
        case("lengths", [(2, 5, 6), (1, 9, 6), (4, 1, 6)]),
        case("batches", [(1, 5, 6), (7, 5, 6)]),
    ],
)
@pytest.mark.parametrize("method", ["MinMax", "Percentile", "Entropy", "Distribution"])
@ours_only
def test_samples_of_different_shapes(method: str, shapes: list[tuple[int, ...]], tmp_path: Path):
    path = path_of(products(), tmp_path)
    samples = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    found = calibrated(calibrate, path, method, [Reader({"x": x} for x in samples)])
    everything = np.concatenate([x.ravel() for x in samples])
    data = found["x"]
    if method == "Distribution":
        np.testing.assert_allclose(data.avg, everything.mean(dtype=np.float64), rtol=1e-6)
    elif method == "MinMax":
        assert (data.lowest[0], data.highest[0]) == (everything.min(), everything.max())
    else:
        assert everything.min() <= data.lowest < 0 < data.highest <= everything.max()


@ours_only
def test_elements_that_are_not_finite_have_no_place(tmp_path: Path, caplog: Any):
    path = path_of(vectors(), tmp_path)
    samples = [np.float32([1, np.nan, -2]), np.float32([]), np.float32([np.inf, 3])]
    found = calibrated(calibrate, path, "MinMax", [Reader({"x": x} for x in samples)])
    assert [end[0] for end in found["x"].range_value] == [-2, 3]
    assert "'x' has 1 elements that are NaN and 1 infinite ones" in caplog.text
    never = calibrated(calibrate, path, "MinMax", [Reader([{"x": np.float32([np.nan])}])])
    assert [end[0] for end in never["x"].range_value] == [0, 0]


@ours_only
def test_nothing_is_written(tmp_path: Path, monkeypatch: Any):
    path = path_of(convnet(), tmp_path)
    monkeypatch.chdir(tmp_path)
    calibrator = calibrate.create_calibrator(path)
    calibrator.collect_data(reader((2, 3, 8, 8), 2))
    assert os.listdir(tmp_path) == ["model.onnx"]
    given = calibrate.create_calibrator(onnx.load(path))
    given.collect_data(reader((2, 3, 8, 8), 2))
    assert ranges(given.compute_data()) == ranges(calibrator.compute_data())


# Histograms.

VALUES: dict[str, np.ndarray] = {
    "normal": RNG.standard_normal(200_000),
    "relu": np.maximum(RNG.standard_normal(200_000), 0),
    "shifted": RNG.standard_normal(200_000) + 20,
    "negative": -RNG.exponential(1, 200_000),
    "tails": RNG.standard_t(2, 200_000),
    "lopsided": np.concatenate([RNG.uniform(-9, 0, 100_000), RNG.uniform(0, 1, 100_000)]),
}


def histogram_of(values: np.ndarray, method: str, folder: Path, **options: Any) -> Any:
    """Calibrates a model on values in 10 runs."""
    path = path_of(vectors(), folder)
    parts = np.array_split(values.astype(np.float32), 10)
    found = calibrated(calibrate, path, method, [Reader({"x": part} for part in parts)], **options)
    return found["x"]


@ours_only
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("percentile", [90, 99, 99.9, 100])
@pytest.mark.parametrize("name", VALUES)
def test_percentiles_are_those_of_numpy(
    name: str, percentile: float, symmetric: bool, tmp_path: Path
):
    values = VALUES[name].astype(np.float32)
    options = {"percentile": percentile, "symmetric": symmetric}
    found = histogram_of(values, "Percentile", tmp_path, **options)
    outside = (1 - percentile / 100) / 2
    if symmetric:
        most = np.quantile(np.abs(values), percentile / 100)
        low, high = max(-most, values.min()), min(most, values.max())
    else:
        # Zero is in every range; a range of values of one sign ends at the value next to it.
        low, high = np.quantile(values, [outside, 1 - outside])
        low = max(min(low, 0), values.min())
        high = min(max(high, 0), values.max())
    # A bin, of 2048 over a power of two.
    width = 2.0 ** (np.floor(np.log2(np.abs(values).max())) + 1) / 2048
    np.testing.assert_allclose(found.range_value, (low, high), rtol=0, atol=2 * width)


def divergence(counts: np.ndarray, kept: int, levels: int) -> float:
    """Returns the divergence of bins merged into levels from bins clipped behind `kept`."""
    clipped = counts[:kept].astype(np.float64)
    inside = clipped.copy()
    clipped[-1] += counts[kept:].sum()
    edges = np.arange(levels + 1) * (kept / levels)
    places = np.arange(kept)
    merged = np.zeros(kept)
    for start, end in zip(edges, edges[1:]):
        share = np.clip(np.minimum(end, places + 1) - np.maximum(start, places), 0, None)
        share *= inside > 0
        if share.sum():
            merged += (share @ inside) / share.sum() * share
    for array in (clipped, merged):
        empty = array == 0
        array[empty] = 1e-4
        array[~empty] -= 1e-4 * empty.sum() / max((~empty).sum(), 1)
        if (array <= 0).any():
            return np.inf
    p, q = clipped / clipped.sum(), merged / merged.sum()
    return float(p @ np.log(p / q))


@ours_only
@pytest.mark.parametrize("name", ["relu", "tails", "negative"])
def test_entropy_is_least(name: str, tmp_path: Path):
    values = np.abs(VALUES[name][:20_000]).astype(np.float32)
    found = histogram_of(values, "Entropy", tmp_path)
    width = 2.0 ** (np.floor(np.log2(values.max())) + 1) / 2048
    counts = np.bincount((values[values > 0] / width).astype(int), minlength=1)
    kept = round(float(found.highest) / width)
    if kept >= len(counts):
        kept = len(counts)
    least = divergence(counts, kept, 255)
    others = [divergence(counts, other, 255) for other in range(255, len(counts) + 1, 7)]
    assert least <= min(others) + 1e-9
    if name == "tails":
        assert found.highest < 0.5 * values.max(), "the ends of long tails are clipped"


@ours_only
@pytest.mark.parametrize("scenario", ["same", "p3"])
@pytest.mark.parametrize("name", VALUES)
def test_distribution_is_that_of_numpy(name: str, scenario: str, tmp_path: Path):
    values = VALUES[name].astype(np.float32).astype(np.float64)
    found = histogram_of(values, "Distribution", tmp_path, scenario=scenario, num_bins=600)
    powers = np.cbrt(values) if scenario == "p3" else values
    near = 2e-2 if scenario == "p3" else 1e-5
    np.testing.assert_allclose(found.avg, powers.mean(), rtol=near, atol=near)
    np.testing.assert_allclose(found.std, powers.std(), rtol=near)
    assert (found.hist.shape, found.hist_edges.shape) == ((600,), (601,))
    assert found.hist.sum() == values.size and found.hist.min() >= 0


@ours_only
def test_collector_takes_arrays():
    collector = calibrate.HistogramCollector("percentile", False, 2048, 128, 90, "same")
    collector.collect({"a": [np.float32([[0, 1], [2, 3]]), np.float32([4] * 16)]})
    collector.collect({"a": np.float16([9, 10]), "b": np.float32([-1])})
    counts, edges, least, largest, magnitude = collector.get_histogram_dict()["a"]
    assert (counts.sum(), least, largest, magnitude) == (22, 0, 10, 10)
    assert (edges[0], edges[-1]) == (0, edges[-2] + edges[1])
    low, high = collector.compute_collection_result()["a"]
    assert low == 0 and 9 <= high <= 10


# Caches and tables.


def both_ways() -> list[Any]:
    return [case(f"{first}_{second}", first, second) for first in "OW" for second in "OW"]


@ours_only
@table("writer, taker", both_ways())
@pytest.mark.parametrize("method", ["MinMax", "Entropy", "Percentile", "Distribution"])
def test_cache_is_exchanged(method: str, writer: str, taker: str, tmp_path: Path):
    packages = {"O": calibrate, "W": original()}
    path = path_of(convnet(), tmp_path)
    found = calibrated(packages[writer], path, method, [reader((2, 3, 8, 8), 3)])
    packages[writer].save_tensors_data(found, tmp_path / "cache.json", smooth_quant=True)
    read = packages[taker].load_tensors_data(tmp_path / "cache.json")
    assert read.calibration_method.name == method
    assert list(read.keys()) == list(found.keys())
    for name, data in found.items():
        for key in ("lowest", "highest", "avg", "std"):
            if hasattr(data, key):
                np.testing.assert_array_equal(getattr(read[name], key), getattr(data, key))
    assert json.loads((tmp_path / "cache.json").read_text())["smooth_quant"] is True
    if taker == "O":
        assert read.smooth_quant is True


@ours_only
def test_table_is_the_originals(tmp_path: Path):
    ours = importlib.import_module(f"{PACKAGE}.quantization._calibration_table")
    theirs = pytest.importorskip("onnxruntime.quantization")
    tables = pytest.importorskip("onnxruntime.quantization.CalTableFlatBuffers.TrtTable")
    ends = {"a": (-3, 2), "weight/long.name:0": (0, 0.1), "": (-1, -0.5), "bcd": (1, 2.5)}
    results = []
    for package, write in ((calibrate, ours), (original(), theirs)):
        data = {
            name: package.TensorData(lowest=np.float32([low]), highest=np.float32([high]))
            for name, (low, high) in ends.items()
        }
        whole_data = package.TensorsData(package.CalibrationMethod.MinMax, data)
        write.write_calibration_table(whole_data, str(tmp_path))
        root = tables.TrtTable.GetRootAsTrtTable(
            (tmp_path / "calibration.flatbuffers").read_bytes(), 0
        )
        entries = [root.Dict(place) for place in range(root.DictLength())]
        results.append(
            (
                sorted((entry.Key(), entry.Value()) for entry in entries),
                json.loads((tmp_path / "calibration.json").read_text()),
                sorted((tmp_path / "calibration.cache").read_text().splitlines()),
            )
        )
    assert results[0] == results[1]


# What is refused.


def empty(**options: Any) -> Any:
    """Collects from a reader without samples."""
    path = convnet_path()
    calibrator = calibrate.create_calibrator(path, None, f"{path}.out", extra_options=options)
    calibrator.collect_data(Reader([]))


def convnet_path() -> str:
    """Returns the path of a saved model."""
    import models

    path = os.path.join(models.folder(), "calibrated.onnx")
    if not os.path.exists(path):
        onnx.save(convnet(), path)
    return path


def create(method: str = "MinMax", **options: Any) -> Any:
    """Makes a calibrater; only the exception counts."""
    path, chosen = convnet_path(), calibrate.CalibrationMethod[method]
    calibrate.create_calibrator(path, None, f"{path}.out", chosen, extra_options=options)


TENSOR = {"lowest": np.float32(-1), "highest": np.float32(2)}


@table(
    "expected, action",
    [
        case("no_sample", Raises("ValueError", "No data is collected"), empty),
        case("limit", Raises("ValueError", "No data"), lambda: empty(max_intermediate_outputs=1)),
        case("option", Raises("ValueError", "did you mean 'symmetric'"), lambda: create(simmetric=1)),
        case("constant", Raises("ValueError", "averaging constant"), lambda: create(
            moving_average=True, averaging_constant=2)),
        case("percentile", Raises("ValueError", "percentile 101"), lambda: create(
            "Percentile", percentile=101)),
        case("bins", Raises("ValueError", "at least 512"), lambda: create(
            "Distribution", num_bins=128)),
        case("scenario", Raises("ValueError", "scenario 'p4'"), lambda: create(
            "Distribution", scenario="p4")),
        case("levels", Raises("ValueError", "at least 1"), lambda: create(
            "Entropy", num_quantized_bins=0)),
        case("method", Raises("ValueError", "Unsupported calibration method 7"), lambda: (
            calibrate.create_calibrator(convnet_path(), calibrate_method=7))),
        case("model", Raises("ValueError", "should be model path"), lambda: (
            calibrate.create_calibrator(7))),
        case("name", Raises("ValueError", "'least'"), lambda: calibrate.TensorData(least=1)),
        case("number", Raises("ValueError", "float"), lambda: calibrate.TensorData(lowest=1.0)),
        case("double", Raises("ValueError", "float64"), lambda: (
            calibrate.TensorData(lowest=np.float64(1)))),
        case("half_known", Raises("AttributeError", "highest"), lambda: (
            calibrate.TensorData(lowest=np.float32(1)).range_value)),
        case("tuple", Raises("TypeError", "tuple of 3"), lambda: (
            calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, {"a": (1, 2, 3)}))),
        case("value", Raises("TypeError", "must be TensorData"), lambda: (
            calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, {"a": 3}))),
        case("new_name", Raises("RuntimeError", "existing tensor"), lambda: (
            calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, {}).__setitem__("a", 1))),
        case("no_file", Raises("FileNotFoundError", "nowhere.json"), lambda: (
            calibrate.load_tensors_data("nowhere.json"))),
        case("range", Gives((np.float32(-1), np.float32(2))), lambda: (
            calibrate.TensorData(**TENSOR).range_value)),
    ],
)  # fmt: skip
def test_refused(expected: Any, action: Callable[[], Any]):
    check(expected, action)


@ours_only
@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"CLS": "TensorsData", "data": {}}'])
def test_what_is_no_cache_is_refused(text: str, tmp_path: Path):
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(ValueError, match="no calibration"):
        calibrate.load_tensors_data(tmp_path / "cache.json")


def test_readers_need_no_base_class():
    assert issubclass(Reader, calibrate.CalibrationDataReader)
    assert not issubclass(dict, calibrate.CalibrationDataReader)

    class Own(calibrate.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": 1}, {"x": 2}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    assert [sample["x"] for sample in Own()] == [2, 1]
    for action in (lambda: len(Own()), lambda: Own().set_range(0, 1)):
        with pytest.raises(NotImplementedError):
            action()


# Names.

MODULES = (
    "calibrate",
    "matmul_nbits_quantizer",
    "matmul_bnb4_quantizer",
    "shape_inference",
    "qdq_loss_debug",
)


def callables(module: Any) -> dict[str, Any]:
    """Returns functions and classes that a module defines, with public methods."""
    found = {}
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__
        if not is_own or name.startswith("_") or not callable(value):
            continue
        found[name] = value
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isfunction)
            found |= {f"{name}.{m}": f for m, f in methods if not m.startswith("_")}
    return found


#: Parts of the original's own making: loops over slices, and helpers of its command lines.
OTHERS = (
    r"entropy|rel_entr|smooth_distribution|apply_plot|parse_.*|get_initializer|is_divisible|"
    r"ort_convert_str_to_bool|transpose_packed_int4_matrix|(Default|HQQ|NVAWQ)WeightOnlyQuantizer"
    r".*|NVAWQ.*|HistogramCollector\.(collect_|compute_[dep]|get_entropy|merge).*|"
    r".*Calibrater\.merge_range|get_.*str.*"
)


@ours_only
@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_the_originals(name: str):
    theirs = callables(pytest.importorskip(f"onnxruntime.quantization.{name}"))
    ours = importlib.import_module(f"{PACKAGE}.quantization.{name}")
    import re

    for path, value in theirs.items():
        if re.fullmatch(OTHERS, path):
            continue
        own: Any = ours
        for part in path.split("."):
            own = getattr(own, part)
        if inspect.isclass(value) and issubclass(value, (Exception, json.JSONEncoder)):
            continue
        wanted, found = (list(inspect.signature(each).parameters) for each in (value, own))
        assert found[: len(wanted)] == wanted, path


# Memory.

_PROGRAM = """
import sys
import numpy as np
from {package}.quantization.calibrate import CalibrationMethod, create_calibrator

class Reader:
    def __init__(self, count):
        self.left = count
    def get_next(self):
        self.left -= 1
        if self.left < 0:
            return None
        rng = np.random.default_rng(self.left)
        return {{"x": rng.standard_normal((1, 8, 96, 96)).astype("float32")}}

method = CalibrationMethod[sys.argv[2]]
calibrator = create_calibrator(sys.argv[1], calibrate_method=method)
calibrator.collect_data(Reader(int(sys.argv[3])))
calibrator.compute_data()
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


@ours_only
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="it reads /proc")
@pytest.mark.parametrize("method", ["MinMax", "Percentile"])
def test_memory_does_not_grow_with_the_samples(method: str, tmp_path: Path):
    nodes, weights, last = [], [], "x"
    for layer in range(12):
        nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        weights.append(whole(f"w{layer}", 8, 8, 3, 3))
        last = f"r{layer}"
    # A run computes 7 MB of values.
    path = path_of(model(nodes, {"x": ["n", 8, 96, 96]}, {last: ["n", 8, 96, 96]}, *weights), tmp_path)
    peaks = []
    for count in (4, 40):
        arguments = ["-c", _PROGRAM.format(package=PACKAGE), path, method, str(count)]
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True, env=os.environ
        )
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 6, peaks
