"""Preparation of models for quantization, and errors of quantized ones."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import CPU, IS_ORIGINAL, PACKAGE, Raises, case, check, ort, table

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

debug = importlib.import_module(f"{PACKAGE}.quantization.qdq_loss_debug")
shapes = importlib.import_module(f"{PACKAGE}.quantization.shape_inference")
ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="ours alone, or a comparison with the original")
MARK = ("onnx.quant.pre_process", "onnxruntime.quant")


def weight(name: str, *shape: int) -> Any:
    """Returns a weight of both signs; a variance, `v`, has one."""
    numbers = np.random.default_rng(len(name)).uniform(0.5, 1.5, shape)
    signed = numbers if name == "v" else numbers - 0.9
    return numpy_helper.from_array(signed.astype(np.float32), name)


def model(nodes: list[Any], weights: list[Any], outputs: dict[str, Any], opset: int = 13) -> Any:
    """Returns a model of images."""
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
    results = [helper.make_tensor_value_info(*(n, TensorProto.FLOAT, s)) for n, s in outputs.items()]
    graph = helper.make_graph(nodes, "g", [given], results, weights)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def normalized() -> Any:
    """A convolution whose normalization folds, and a constant that is computed."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Add", ["k", "k"], ["t"]),
        helper.make_node("Mul", ["r", "t"], ["y"], name="scale"),
    ]
    weights = [weight("w", 4, 3, 3, 3), *(weight(name, 4) for name in "sbmv"), weight("k", 1)]
    return model(nodes, weights, {"y": ["n", 4, 6, 6]})


def upsampled() -> Any:
    """An operator that later opsets do not have."""
    nodes = [helper.make_node("Upsample", ["x", "f"], ["y"], mode="nearest")]
    factors = numpy_helper.from_array(np.float32([1, 1, 2, 2]), "f")
    return model(nodes, [factors], {"y": ["n", 3, 16, 16]}, 9)


def classifier() -> Any:
    """Conv with a bias, Relu, pooling, MatMul."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "bias"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "m"], ["y"], name="product"),
    ]
    weights = [weight("w", 4, 3, 3, 3), weight("bias", 4), weight("m", 4, 5)]
    return model(nodes, weights, {"y": ["n", 5]})


class Reader:
    """Samples of images."""

    def __init__(self, count: int = 3) -> None:
        rng = np.random.default_rng(3)
        self.left = [{"x": rng.standard_normal((2, 3, 8, 8)).astype("f")} for _ in range(count)]

    def get_next(self) -> Any:
        return self.left.pop() if self.left else None

    def __iter__(self) -> Any:
        return iter(self.get_next, None)


def run(path: Path, package: Any = ort) -> list[np.ndarray]:
    """Runs a saved model."""
    session = package.InferenceSession(str(path), providers=[CPU])
    return session.run(None, Reader(1).left[0])


# Preparation.


@ours_only
@pytest.mark.parametrize("source", ["path", "model"])
@table(
    "options, operators, known",
    [
        case("all", {}, ["Conv", "Relu", "Mul"], {"n", "r"}),
        case("skip_symbolic", {"skip_symbolic_shape": True}, ["Conv", "Relu", "Mul"], {"n", "r"}),
        case("skip_onnx", {"skip_onnx_shape": True}, ["Conv", "Relu", "Mul"], {"n", "r"}),
        case(
            "skip_optimization",
            {"skip_optimization": True},
            ["Conv", "BatchNormalization", "Relu", "Add", "Mul"],
            {"c", "n", "r", "t"},
        ),
        case("external", {"save_as_external_data": True}, ["Conv", "Relu", "Mul"], {"n", "r"}),
    ],
)
def test_prepared_model(
    options: dict[str, Any], operators: list[str], known: set[str], source: str, tmp_path: Path
):
    given = normalized()
    onnx.save(given, str(tmp_path / "in.onnx"))
    out = tmp_path / "out.onnx"
    kept = given.SerializeToString()
    if "save_as_external_data" in options:
        options = options | {"all_tensors_to_one_file": True, "external_data_size_threshold": 0}
    shapes.quant_pre_process(tmp_path / "in.onnx" if source == "path" else given, out, **options)
    assert given.SerializeToString() == kept, "the model of the caller stays as it is"
    assert (tmp_path / "out.onnx.data").exists() == ("save_as_external_data" in options)
    made = onnx.load(str(out))
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == operators
    assert {info.name for info in made.graph.value_info} >= known
    assert MARK in {(prop.key, prop.value) for prop in made.metadata_props}
    (exact,) = run(tmp_path / "in.onnx")
    for package in (ort, pytest.importorskip("onnxruntime")):
        np.testing.assert_allclose(run(out, package)[0], exact, rtol=1e-5, atol=1e-6)


@ours_only
def test_upsample_becomes_resize(tmp_path: Path):
    onnx.save(upsampled(), str(tmp_path / "in.onnx"))
    shapes.quant_pre_process(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert {node.op_type for node in onnx.load(str(tmp_path / "out.onnx")).graph.node} == {"Resize"}
    assert run(tmp_path / "out.onnx")[0].shape == (2, 3, 16, 16)


@ours_only
def test_failing_rewrites_are_logged(tmp_path: Path, caplog: Any):
    given = normalized()
    given.graph.node.append(helper.make_node("Unknown", ["y"], ["z"], domain="own"))
    given.opset_import.append(helper.make_opsetid("own", 1))
    with caplog.at_level(logging.ERROR):
        shapes.quant_pre_process(given, tmp_path / "out.onnx")
    assert "could not be optimized" in caplog.text
    assert len(onnx.load(str(tmp_path / "out.onnx")).graph.node) == 6


@table(
    "expected, arguments",
    [
        case("no_input", Raises("AssertionError"), {"output_model_path": "out.onnx"}),
        case("no_output", Raises("AssertionError", "required"), {"input_model_path": "in.onnx"}),
        case("unknown", Raises("AssertionError"), {"model": "in.onnx", "output_model_path": "o"}),
    ],
)
def test_refused(expected: Any, arguments: dict[str, Any]):
    check(expected, lambda: shapes.quant_pre_process(**arguments))


@pytest.mark.parametrize("flags", [[], ["--skip_symbolic_shape", "True", "--verbose", "1"]])
def test_command_line(flags: list[str], tmp_path: Path, monkeypatch: Any):
    onnx.save(normalized(), str(tmp_path / "in.onnx"))
    files = ["--input", str(tmp_path / "in.onnx"), "--output", str(tmp_path / "out.onnx")]
    module = f"{PACKAGE}.quantization.preprocess"
    monkeypatch.setattr(sys, "argv", ["preprocess", *files, *flags])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    made = onnx.load(str(tmp_path / "out.onnx"))
    assert [node.op_type for node in made.graph.node][:2] == ["Conv", "Relu"]


@ours_only
def test_flags_read_their_values():
    preprocess = importlib.import_module(f"{PACKAGE}.quantization.preprocess")
    parse = preprocess.parse_arguments
    files = ["--input", "a", "--output", "b"]
    assert not parse([*files, "--skip_optimization", "False"]).skip_optimization
    assert parse([*files, "--skip_optimization"]).skip_optimization
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        parse([*files, "--skip_optimization", "maybe"])


# Errors.

QUANTIZED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "channels": {"per_channel": True},
    "dedicated": {"extra_options": {"DedicatedQDQPair": True}},
    "unsigned": {"types": ("QUInt8", "QUInt8")},
    "wide": {"types": ("QUInt16", "QInt8")},
    "clipped": {"extra_options": {"QDQKeepRemovableActivations": True}},
}


@pytest.fixture
def pair(request: Any, tmp_path: Path) -> tuple[str, str]:
    """The float model and one that onnxruntime has quantized."""
    original = pytest.importorskip("onnxruntime.quantization")
    options = dict(QUANTIZED[request.param])
    types = options.pop("types", None)
    if types:
        activation, of_weight = (original.QuantType[name] for name in types)
        options |= {"activation_type": activation, "weight_type": of_weight}
    paths = str(tmp_path / "float.onnx"), str(tmp_path / "qdq.onnx")
    onnx.save(classifier(), paths[0])
    original.quantize_static(paths[0], paths[1], Reader(), **options)
    return paths


def errors(package: Any, paths: tuple[str, str], folder: Path) -> tuple[Any, Any]:
    """Returns the errors of values and of weights."""
    collected = []
    for path in paths:
        shown = str(folder / "shown.onnx")
        package.modify_model_output_intermediate_tensors(path, shown)
        onnx.checker.check_model(shown, full_check=package is debug)
        collected.append(package.collect_activations(shown, Reader()))
    matched = package.create_activation_matching(collected[1], collected[0])
    weights = package.create_weight_matching(*paths)
    return package.compute_activation_error(matched), package.compute_weight_error(weights)


@ours_only
@pytest.mark.parametrize("pair", QUANTIZED, indirect=True)
def test_errors_are_the_originals(pair: tuple[str, str], tmp_path: Path, request: Any):
    original = pytest.importorskip("onnxruntime.quantization.qdq_loss_debug")
    ours, theirs = (errors(package, pair, tmp_path) for package in (debug, original))
    assert ours[0].keys() == theirs[0].keys() and ours[0]
    for name, found in ours[0].items():
        for key, value in theirs[0][name].items():
            # What is equal has an error of rounding alone.
            assert found[key] == pytest.approx(value, rel=2e-3) or min(found[key], value) > 120
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, value in ours[1].items():
        if request.node.callspec.id == "unsigned":
            # The original subtracts zero points in 8 bits, where the difference does not fit.
            assert value > 40
            assert name == "bias" or theirs[1][name] < 10
        else:
            # Codes of 32 bits leave the rounding of float32.
            assert value == pytest.approx(theirs[1][name], rel=1e-4) or value > 120


@ours_only
@pytest.mark.parametrize("pair", ["defaults"], indirect=True)
def test_errors_without_the_float_model(pair: tuple[str, str], tmp_path: Path):
    shown = str(tmp_path / "shown.onnx")
    debug.modify_model_output_intermediate_tensors(pair[1], shown)
    matched = debug.create_activation_matching(debug.collect_activations(shown, Reader()))
    found = debug.compute_activation_error(matched)
    assert found and all(list(each) == ["qdq_err"] for each in found.values())


@ours_only
@table("block, axis", [case("columns", 0, 1), case("rows", 0, 0), case("blocks", 2, 0)])
def test_weights_of_channels_and_blocks(block: int, axis: int, tmp_path: Path):
    exact = np.arange(24, dtype=np.float32).reshape(4, 6) - 7
    channels = 6 if axis else 4
    shape = (2, 6) if block else (channels,)
    scales = np.arange(1, np.prod(shape) + 1).reshape(shape).astype(np.float32) / 8
    points = np.full(shape, 200, np.uint8)
    if block:
        spread = scales.repeat(2, 0)
    else:
        spread = scales.reshape((1, -1) if axis else (-1, 1))
    codes = np.clip(np.rint(exact / spread) + 200, 0, 255).astype(np.uint8)
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    node = helper.make_node(
        "DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["y"], **attributes
    )
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 6])
    paths = []
    for name, nodes, arrays in (
        ("float", [helper.make_node("Identity", ["w"], ["y"])], {"w": exact}),
        ("qdq", [node], dict(zip(node.input, (codes, scales, points)))),
    ):
        weights = [numpy_helper.from_array(array, key) for key, array in arrays.items()]
        graph = helper.make_graph(nodes, "g", [], [result], weights)
        opsets = [helper.make_opsetid("", 21)]
        onnx.save(
            helper.make_model(graph, ir_version=10, opset_imports=opsets), str(tmp_path / name)
        )
        paths.append(str(tmp_path / name))
    found = debug.create_weight_matching(*paths)["w"]
    session = pytest.importorskip("onnxruntime").InferenceSession(paths[1], providers=[CPU])
    np.testing.assert_array_equal(found["dequantized"], session.run(None, {})[0])
    np.testing.assert_array_equal(found["float"], exact)


def test_ratio_of_signal_to_noise():
    ratio = debug.compute_signal_to_quantization_noice_ratio
    ten = np.float32([10])
    assert ratio(ten, np.float32([9])) == pytest.approx(20)
    assert ratio([ten, ten], [ten, np.float32([8])]) == pytest.approx(20 * np.log10(200**0.5 / 2))
    assert ratio(ten, ten) > 300
    with pytest.raises(RuntimeError, match="Unequal number"):
        ratio([ten], [])
    with pytest.raises(ValueError):
        ratio([], [])


def test_no_samples(tmp_path: Path):
    onnx.save(classifier(), str(tmp_path / "float.onnx"))
    shown = str(tmp_path / "shown.onnx")
    debug.modify_model_output_intermediate_tensors(
        str(tmp_path / "float.onnx"), shown, op_types_for_saving=["Conv"]
    )
    names = {output.name for output in onnx.load(shown).graph.output}
    assert names == {"y", "x_ReshapedSavedOutput", "c_ReshapedSavedOutput"}
    with pytest.raises(RuntimeError, match="No data"):
        debug.collect_activations(shown, Reader(0))
    assert os.path.exists(shown)
