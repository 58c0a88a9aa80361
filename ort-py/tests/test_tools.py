"""The tools over models, as functions and as command lines.

With `ORT_PACKAGE=onnxruntime` the tests of behaviour that both share run against the original.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

PACKAGE = os.environ.get("ORT_PACKAGE", "ort_runtime")
OURS = PACKAGE == "ort_runtime"
ours_only = pytest.mark.skipif(not OURS, reason="ours alone, or source that is not opened")
ort = importlib.import_module(PACKAGE)
utils = importlib.import_module(f"{PACKAGE}.tools.onnx_model_utils")


def tool(name: str) -> Any:
    """Returns the module of a tool."""
    if not OURS and name == "symbolic_shape_infer":
        pytest.importorskip("sympy")
    return importlib.import_module(f"{PACKAGE}.tools.{name}")


def command(name: str, *arguments: str) -> int:
    """Runs a tool as `python -m` does, in this process; returns the exit code."""
    module = f"{PACKAGE}.tools.{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        # pytest's loader takes onnxruntime_test.py for a file of tests; runpy cannot use it.
        patch.setattr(sys, "meta_path", [f for f in sys.meta_path if "pytest" not in str(type(f))])
        patch.delitem(sys.modules, module, raising=False)
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def value(name: str, shape: list[Any] | None, kind: int = TensorProto.FLOAT) -> Any:
    """Returns a tensor's name and type."""
    return helper.make_tensor_value_info(name, kind, shape)


def model(graph: Any, opset: int = 15) -> Any:
    """Returns a model of a graph."""
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def branching(opset: int = 15) -> Any:
    """Returns If(c, x, -x) and a Relu, float [batch, 3]; the branches have shapes too."""
    branches = {
        name: helper.make_graph(
            [helper.make_node(kind, ["x"], [out])], name, [], [value(out, ["batch", 3])]
        )
        for name, kind, out in (("then_branch", "Identity", "t"), ("else_branch", "Neg", "e"))
    }
    graph = helper.make_graph(
        [
            helper.make_node("If", ["c"], ["b"], **branches),
            helper.make_node("Relu", ["b"], ["y"]),
        ],
        "branching",
        [value("x", ["batch", 3]), value("c", [], TensorProto.BOOL)],
        [value("y", ["batch", 3])],
    )
    made = model(graph, opset)
    del made.opset_import[1:]
    return made


def shape(info: Any) -> list[Any] | None:
    """Returns numbers, names and None for unknown dimensions; None if there is no shape."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in tensor.shape.dim
    ]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the branching model, in the current folder."""
    monkeypatch.chdir(tmp_path)
    onnx.save(branching(), "in.onnx")
    return tmp_path / "in.onnx"


# Fixed shapes.


def test_make_dim_param_fixed_reaches_subgraphs():
    graph = branching().graph
    utils.make_dim_param_fixed(graph, "batch", 4)
    branches = [attribute.g.output[0] for attribute in graph.node[0].attribute]
    for info in [graph.input[0], graph.output[0], *branches]:
        assert shape(info) == [4, 3]


def test_make_dim_param_fixed_of_another_name_changes_nothing():
    changed = branching()
    utils.make_dim_param_fixed(changed.graph, "seq", 4)
    assert changed == branching()


def test_make_input_shape_fixed_follows_the_name():
    graph = branching().graph
    utils.make_input_shape_fixed(graph, "x", [2, 3])
    assert shape(graph.input[0]) == shape(graph.output[0]) == [2, 3]


def test_make_input_shape_fixed_of_an_unnamed_dimension():
    graph = branching().graph
    graph.input[0].type.tensor_type.shape.dim[0].Clear()
    utils.make_input_shape_fixed(graph, "x", [2, 3])
    assert (shape(graph.input[0]), shape(graph.output[0])) == ([2, 3], ["batch", 3])


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("x", [2], "Rank mismatch. Existing:2 Replacement:1"),
        ("x", [2, 5], "Can't replace existing fixed size of 3 with 5 for dimension 2"),
        ("q", [2, 3], "Input q was not found in graph inputs. Valid input names are: x,c"),
    ],
)
def test_make_input_shape_fixed_errors(name: str, sizes: list[int], message: str):
    with pytest.raises(ValueError) as caught:
        utils.make_input_shape_fixed(branching().graph, name, sizes)
    assert str(caught.value) == message


def test_fix_output_shapes():
    fixed = branching()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    utils.fix_output_shapes(fixed)
    assert shape(fixed.graph.output[0]) == [5, 3]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [value("x", [5, 3])],
        [value("y", ["rows", "columns"])],
        [numpy_helper.from_array(np.zeros((3, 7), np.float32), "w")],
    )
    fixed = model(graph)
    utils.fix_output_shapes(fixed)
    assert shape(fixed.graph.output[0]) == [5, 7]


@ours_only
def test_fix_output_shapes_without_a_shape():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [value("x", [5, 3])], [value("y", None)]
    )
    fixed = model(graph)
    utils.fix_output_shapes(fixed)
    assert shape(fixed.graph.output[0]) == [5, 3]


def test_remove_invalid_dim_values():
    graph = branching().graph
    graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    graph.output[0].type.tensor_type.shape.dim[0].dim_value = 0
    utils.remove_invalid_dim_values(graph)
    assert shape(graph.input[0]) == shape(graph.output[0]) == [None, 3]


@pytest.mark.parametrize(
    ("sizes", "fixed"), [([2, 3], True), ([], True), (["batch", 3], False), ([None, 3], False)]
)
def test_is_fixed_size_tensor(sizes: list[Any], fixed: bool):
    assert utils.is_fixed_size_tensor(value("x", sizes)) is fixed


@ours_only
def test_tensor_without_shape_is_not_fixed():
    assert utils.is_fixed_size_tensor(value("x", None)) is False


@pytest.mark.parametrize(
    "arguments",
    [("--dim_param", "batch", "--dim_value", "6"), ("--input_name", "x", "--input_shape", "6,3")],
)
def test_make_dynamic_shape_fixed(saved: Path, arguments: tuple[str, ...]):
    assert command("make_dynamic_shape_fixed", *arguments, str(saved), "out.onnx") == 0
    graph = onnx.load("out.onnx").graph
    assert shape(graph.input[0]) == shape(graph.output[0]) == [6, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--dim_param", "batch"),
        ("--dim_value", "3"),
        ("--dim_param", "batch", "--dim_value", "0"),
        ("--input_name", "x"),
        ("--input_name", "x", "--input_shape", "0,3"),
    ],
)
def test_make_dynamic_shape_fixed_needs_a_pair(saved: Path, arguments: tuple[str, ...]):
    assert command("make_dynamic_shape_fixed", *arguments, str(saved), "out.onnx") != 0
    assert not Path("out.onnx").exists()


def test_make_dynamic_shape_fixed_of_a_missing_file(saved: Path):
    with pytest.raises(FileNotFoundError):
        command(
            "make_dynamic_shape_fixed", "--dim_param", "a", "--dim_value", "1", "no.onnx", "o.onnx"
        )


# Opsets and optimized models.


def test_get_opsets_imported():
    imported = model(branching().graph)
    assert utils.get_opsets_imported(imported) == {"ai.onnx": 15, "com.microsoft": 1}


def test_update_onnx_opset(saved: Path):
    updated = utils.update_onnx_opset(saved, 17, Path("out.onnx"), logging.getLogger("test"))
    assert utils.get_opsets_imported(updated)["ai.onnx"] == 17
    assert onnx.load("out.onnx") == updated
    assert onnx.load(saved) == branching()


def test_update_onnx_opset_command(saved: Path):
    onnx.save(branching(14), "old.onnx")
    assert command("update_onnx_opset", "old.onnx", "out.onnx") == 0
    assert utils.get_opsets_imported(onnx.load("out.onnx"))["ai.onnx"] == 15
    assert command("update_onnx_opset", "--opset", "18", "old.onnx", "out.onnx") == 0
    assert utils.get_opsets_imported(onnx.load("out.onnx"))["ai.onnx"] == 18


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("disable", "ORT_DISABLE_ALL"),
        ("basic", "ORT_ENABLE_BASIC"),
        ("extended", "ORT_ENABLE_EXTENDED"),
        ("layout", "ORT_ENABLE_LAYOUT"),
        ("all", "ORT_ENABLE_ALL"),
    ],
)
def test_get_optimization_level(name: str, level: str):
    assert utils.get_optimization_level(name) == getattr(ort.GraphOptimizationLevel, level)


def test_get_optimization_level_of_another_name():
    with pytest.raises(ValueError, match="Invalid optimization level of most"):
        utils.get_optimization_level("most")


def foldable() -> Any:
    """Returns y = Relu(x) * (2 * 3), whose product is a constant."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["two", "three"], ["six"]),
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Mul", ["r", "six"], ["y"]),
        ],
        "foldable",
        [value("x", ["batch", 3])],
        [value("y", ["batch", 3])],
        [
            numpy_helper.from_array(np.array(number, np.float32), name)
            for name, number in (("two", 2), ("three", 3))
        ],
    )
    return model(graph)


def same_results(*paths: str) -> None:
    """Checks that models compute what `foldable` says."""
    x = np.array([[-1, 0.5, 2]], np.float32)
    for path in paths:
        (y,) = ort.InferenceSession(path).run(None, {"x": x})
        np.testing.assert_allclose(y, [[0, 3, 12]])


def test_optimize_model(saved: Path):
    onnx.save(foldable(), "in.onnx")
    utils.optimize_model(saved, Path("out.onnx"))
    assert len(onnx.load("out.onnx").graph.node) < 3
    same_results("in.onnx", "out.onnx")


@pytest.mark.parametrize("level", ["disable", "basic", "extended", "layout", "all"])
def test_optimize_onnx_model_command(saved: Path, level: str):
    onnx.save(foldable(), "in.onnx")
    options = ("--opt_level", level, "--log_level", "error")
    assert command("optimize_onnx_model", *options, "in.onnx", "o.onnx") == 0
    same_results("o.onnx")


def test_optimize_model_of_a_missing_file(saved: Path):
    with pytest.raises(FileNotFoundError):
        utils.optimize_model(Path("no.onnx"), Path("out.onnx"))


def test_walks_over_graphs():
    nodes: list[str] = []
    utils.iterate_graph_per_node_func(
        branching().graph, lambda node, mark: nodes.append(mark + node.op_type), mark="-"
    )
    assert sorted(nodes) == ["-Identity", "-If", "-Neg", "-Relu"]
    graphs: list[str] = []
    utils.iterate_graph_per_graph_func(branching().graph, lambda graph: graphs.append(graph.name))
    assert sorted(graphs) == ["branching", "else_branch", "then_branch"]


def test_model_proto_with_shape_info(saved: Path):
    info = utils.ModelProtoWithShapeInfo(saved)
    (b,) = info.model_with_shape_info.graph.value_info
    assert (b.name, shape(b)) == ("b", ["batch", 3])


# Initializers.


def with_weight_as_input(ir_version: int = 8) -> Any:
    """Returns a model whose initializer is an input too."""
    made = branching()
    made.ir_version = ir_version
    made.graph.input.append(value("w", [3]))
    made.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "w"))
    return made


def test_remove_initializer_from_input(saved: Path):
    module = tool("remove_initializer_from_input")
    changed = with_weight_as_input()
    assert module.remove_initializer_from_input(changed) is True
    assert [info.name for info in changed.graph.input] == ["x", "c"]
    assert module.remove_initializer_from_input(changed) is False
    onnx.save(with_weight_as_input(), "in.onnx")
    arguments = ("--input", "in.onnx", "--output", "out.onnx")
    assert command("remove_initializer_from_input", *arguments) == 0
    assert onnx.load("out.onnx") == changed


def test_old_models_keep_their_initializers(capsys: pytest.CaptureFixture[str]):
    module = tool("remove_initializer_from_input")
    old = with_weight_as_input(3)
    assert module.remove_initializer_from_input(old) is False
    assert len(old.graph.input) == 3
    assert "ir_version below 4" in capsys.readouterr().out


# Timing.


def test_onnxruntime_test(saved: Path, capsys: pytest.CaptureFixture[str]):
    assert command("onnxruntime_test", "--symbolic_dims", "batch=2", "in.onnx", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model: branching" and lines[2] == "iterations: 3"
    assert lines[3].startswith("avg latency: ") and lines[3].endswith(" ms")


def test_run_model_returns_feeds_and_outputs(saved: Path):
    run_model = tool("onnxruntime_test").run_model
    status, feeds, outputs = run_model("in.onnx", symbolic_dims={"batch": 5})
    assert status == 0
    assert feeds["x"].shape == (5, 3) and feeds["x"].dtype == np.float32
    assert outputs[0].shape == (5, 3)


def test_run_model_with_a_profile(saved: Path, capsys: pytest.CaptureFixture[str]):
    tool("onnxruntime_test").run_model("in.onnx", 2, profile=True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert Path(last.removeprefix("trace file written to: ")).is_file()


@ours_only
@pytest.mark.parametrize("name", ["float", "double", "float16", "int8", "uint16", "int64", "bool"])
def test_feeds_of_each_type(saved: Path, name: str):
    kind = getattr(TensorProto, name.upper())
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [value("x", ["n", 2], kind)],
        [value("y", ["n", 2], kind)],
    )
    onnx.save(model(graph), "in.onnx")
    _, feeds, outputs = tool("onnxruntime_test").run_model("in.onnx", symbolic_dims={"n": 4})
    np.testing.assert_array_equal(outputs[0], feeds["x"])


@ours_only
@pytest.mark.parametrize("text", ["batch", "batch=x", "=2", ""])
def test_symbolic_dims_that_are_no_pairs(saved: Path, text: str):
    assert command("onnxruntime_test", "--symbolic_dims", text, "in.onnx") == 2


# The ORT format.


@ours_only
def test_convert_onnx_models_to_ort_says_what_to_do():
    module = tool("convert_onnx_models_to_ort")
    with pytest.raises(NotImplementedError, match="cache_dir"):
        module.convert_onnx_models_to_ort(Path("in.onnx"))
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert "optimize_onnx_model" in str(caught.value.code)
    assert module.OptimizationStyle["Fixed"] is module.OptimizationStyle.Fixed


# Symbolic shapes.


def infer(graph: Any, **options: Any) -> dict[str, list[Any] | None]:
    """Returns the shapes that inference writes into a model of `graph`."""
    made = model(graph, 17)
    before = made.SerializeToString(deterministic=True)
    inferred = tool("symbolic_shape_infer").SymbolicShapeInference.infer_shapes(made, **options)
    assert made.SerializeToString(deterministic=True) == before
    values = [*inferred.graph.value_info, *inferred.graph.output]
    return {info.name: shape(info) for info in values}


@ours_only
def test_names_of_inputs_stay(monkeypatch: pytest.MonkeyPatch):
    index = numpy_helper.from_array(np.array(0), "zero")
    axis = numpy_helper.from_array(np.array([0]), "axis")
    rest = numpy_helper.from_array(np.array([-1]), "rest")
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "zero"], ["rows"]),
            helper.make_node("Unsqueeze", ["rows", "axis"], ["rows1"]),
            helper.make_node("Concat", ["rows1", "rest"], ["target"], axis=0),
            helper.make_node("Reshape", ["x", "target"], ["flat"]),
            helper.make_node("NonZero", ["x"], ["places"]),
            helper.make_node("Relu", ["flat"], ["y"]),
        ],
        "names",
        [value("x", ["batch", "seq", 4])],
        [value("y", None)],
        [index, axis, rest],
    )
    with monkeypatch.context() as patch:
        # Without sympy.
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        found = infer(graph)
    assert found["y"][0] == "batch" and found["y"] == found["flat"]
    assert found["places"][0] == 3
    assert {found["y"][1][:5], found["places"][1][:5]} == {"unk__"}
    assert found["y"][1] != found["places"][1]
    pytest.importorskip("sympy")
    assert infer(graph)["y"] == ["batch", "4*seq"]


@ours_only
def test_auto_merge():
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "z"], ["s"]), helper.make_node("Relu", ["s"], ["y"])],
        "merge",
        [value("x", ["batch", "seq", 4]), value("z", ["another", "seq", 4])],
        [value("y", None)],
    )
    assert infer(graph)["y"][1:] == ["seq", 4]
    assert infer(graph)["y"][0].startswith("unk__")
    merged = infer(graph, auto_merge=True)
    assert merged["s"] == merged["y"] == ["batch", "seq", 4]


#: Operator, inputs, attributes, and the output's shape.
CONTRIB: dict[str, tuple[str, dict[str, list[Any]], dict[str, Any], list[Any]]] = {
    "gelu": ("FastGelu", {"x": ["b", 3]}, {}, ["b", 3]),
    "skip": (
        "SkipLayerNormalization",
        {"x": ["b", "s", 8], "k": ["b", "s", 8], "g": [8]},
        {},
        ["b", "s", 8],
    ),
    "product": (
        "FusedMatMul",
        {"a": ["b", 5, 3], "c": ["b", 5, 7]},
        {"transA": 1},
        ["b", 3, 7],
    ),
    "packed": (
        "MatMulNBits",
        {"a": ["b", 64], "q": [10, 2, 16], "s": [20]},
        {"K": 64, "N": 10, "bits": 4, "block_size": 32},
        ["b", 10],
    ),
    "conv": (
        "FusedConv",
        {"x": ["b", 3, 8, 8], "w": [4, 3, 3, 3]},
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
        ["b", 4, 8, 8],
    ),
    "gemm": (
        "FusedGemm",
        {"a": ["b", 3], "w": [5, 3]},
        {"transB": 1, "activation": "Relu"},
        ["b", 5],
    ),
    "attention": (
        "Attention",
        {"x": ["b", "s", 8], "w": [8, 24], "i": [24]},
        {"num_heads": 2},
        ["b", "s", 8],
    ),
    "heads": (
        "MultiHeadAttention",
        {"q": ["b", "s", 8], "k": ["b", "t", 8], "v": ["b", "t", 12]},
        {"num_heads": 2},
        ["b", "s", 12],
    ),
    "group": (
        "GroupQueryAttention",
        {"q": ["b", "s", 8], "k": ["b", "s", 4], "v": ["b", "s", 4]},
        {"num_heads": 4, "kv_num_heads": 2},
        ["b", "s", 8],
    ),
    "broadcast": (
        "QLinearAdd",
        {"a": ["b", 1, 4], "as": [], "az": [], "c": [3, 4], "cs": [], "cz": []},
        {},
        ["b", 3, 4],
    ),
}


@ours_only
@pytest.mark.parametrize("name", CONTRIB)
def test_contrib_operators(name: str):
    kind, inputs, attributes, expected = CONTRIB[name]
    graph = helper.make_graph(
        [
            helper.make_node(kind, list(inputs), ["m"], domain="com.microsoft", **attributes),
            helper.make_node("Relu", ["m"], ["y"]),
        ],
        "contrib",
        [value(key, sizes) for key, sizes in inputs.items()],
        [value("y", None)],
    )
    found = infer(graph)
    assert found["m"] == found["y"] == expected


@ours_only
def test_unknown_operators(caplog: pytest.LogCaptureFixture):
    graph = helper.make_graph(
        [
            helper.make_node("Mystery", ["x"], ["m"], domain="com.microsoft"),
            helper.make_node("Relu", ["m"], ["y"]),
        ],
        "unknown",
        [value("x", ["b", 3])],
        [value("y", None)],
    )
    assert infer(graph)["y"] is None
    assert "incomplete: 2 values, m, y" in caplog.text
    guessed = infer(graph, guess_output_rank=True)
    assert len(guessed["y"]) == 2 and all(dim.startswith("unk__") for dim in guessed["y"])


def test_declared_output_names_give_way():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [value("x", ["b", 3])],
        [value("y", ["n", 3])],
    )
    assert infer(graph, auto_merge=True)["y"] == ["b", 3]


@ours_only
def test_declared_output_names_stay_for_unknown_sizes():
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"])],
        "places",
        [value("x", ["b", 3])],
        [value("y", [2, "n"], TensorProto.INT64)],
    )
    assert infer(graph)["y"] == [2, "n"]


def test_outputs_are_among_the_values():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "relu", [value("x", ["b"])], [value("y", None)]
    )
    inferred = tool("symbolic_shape_infer").SymbolicShapeInference.infer_shapes(model(graph, 17))
    assert [(info.name, shape(info)) for info in inferred.graph.value_info] == [("y", ["b"])]


def test_contrib_domain_need_not_be_imported():
    made = helper.make_node("QuantizeLinear", ["x", "scale"], ["y"], domain="com.microsoft")
    graph = helper.make_graph(
        [made],
        "quantize",
        [value("x", ["b", 3])],
        [helper.make_tensor_value_info("y", 0, None)],
        [helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0])],
    )
    made = model(graph, 17)
    inferred = tool("symbolic_shape_infer").SymbolicShapeInference.infer_shapes(made)
    (y,) = inferred.graph.output
    assert (y.type.tensor_type.elem_type, shape(y)) == (TensorProto.UINT8, ["b", 3])


def test_branches_of_different_types():
    def branch(name: str, kind: int) -> Any:
        one = helper.make_tensor("c", kind, [], [1])
        made = helper.make_node("Constant", [], [name], value=one)
        return helper.make_graph([made], name, [], [value(name, [], kind)])

    branches = {
        "then_branch": branch("t", TensorProto.FLOAT),
        "else_branch": branch("e", TensorProto.DOUBLE),
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], name="choice", **branches)],
        "branches",
        [value("c", [], TensorProto.BOOL)],
        [value("y", [])],
    )
    infer_shapes = tool("symbolic_shape_infer").SymbolicShapeInference.infer_shapes
    with pytest.raises(ValueError, match="choice.*FLOAT.*DOUBLE"):
        infer_shapes(model(graph, 17))


def ints(name: str, *numbers: int) -> Any:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


ZERO, ONE, TWO, FAR = ints("zero", 0), ints("one", 1), ints("two", 2), ints("far", 2**32)
BACK, BACK_TEN, BACK_FAR = ints("back", -1), ints("back_ten", -10), ints("back_far", -(2**32))

#: Name, start, end, step, size of the slice of an axis of size n.
SLICES = [
    ("to_end", "one", "far", "one", "n - 1"),
    ("last", "back", "far", "one", 1),
    ("numbers", "back_ten", "back", "one", 9),
    ("backwards", "back", "back_ten", "back", 9),
    ("flip", "back", "back_far", "back", "n"),
    ("step", "zero", "far", "two", "floor(n/2 + 1/2)"),
    ("number", "zero", "two", "one", "Min(2, n)"),
    ("whole", "zero", "n", "one", "n"),
    ("minus_size", "-n", "far", "one", "n"),
]


@pytest.mark.parametrize(
    ("start", "end", "step", "expected"),
    [row[1:] for row in SLICES],
    ids=[row[0] for row in SLICES],
)
def test_slice_by_expressions(start: str, end: str, step: str, expected: int | str):
    pytest.importorskip("sympy")
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["n"]),
            helper.make_node("Neg", ["n"], ["-n"]),
            helper.make_node("Slice", ["x", start, end, "zero", step], ["y"]),
        ],
        "slice",
        [value("x", ["n"])],
        [value("y", ["declared"])],
        [ZERO, ONE, TWO, FAR, BACK, BACK_TEN, BACK_FAR],
    )
    assert infer(graph)["y"] == [expected]


@ours_only
def test_sizes_by_expressions():
    pytest.importorskip("sympy")
    twice = numpy_helper.from_array(np.array([1, 2], np.float32), "twice")
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["x", "x", "z"], ["joined"], axis=1),
            helper.make_node("Shape", ["joined"], ["sizes"]),
            helper.make_node("ConstantOfShape", ["sizes"], ["zeros"]),
            helper.make_node("Reshape", ["joined", "back"], ["flat"]),
            helper.make_node("Resize", ["x", "", "twice"], ["larger"], mode="nearest"),
            helper.make_node("Tile", ["x", "repeats"], ["tiled"]),
            helper.make_node("Unsqueeze", ["x", "zero"], ["rows"]),
            helper.make_node("MaxPool", ["rows"], ["y"], kernel_shape=[3], strides=[2]),
        ],
        "sizes",
        [value("x", ["b", "n"]), value("z", ["b", "m"])],
        [value("y", None), value("zeros", None)],
        [ints("back", -1), ints("repeats", 3, 1), ZERO, twice],
    )
    found = infer(graph)
    assert found["joined"] == found["zeros"] == ["b", "m + 2*n"]
    assert found["flat"] == ["b*m + 2*b*n"]
    assert found["larger"] == ["b", "2*n"]
    assert found["tiled"] == ["3*b", "n"]
    assert found["y"] == [1, "b", "floor(n/2 - 3/2) + 1"]


@ours_only
def test_weights_are_kept_in_the_result():
    weight = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "weights",
        [value("x", ["b", 3])],
        [value("y", None)],
        [numpy_helper.from_array(weight, "w")],
    )
    inferred = tool("symbolic_shape_infer").SymbolicShapeInference.infer_shapes(model(graph))
    np.testing.assert_array_equal(numpy_helper.to_array(inferred.graph.initializer[0]), weight)
    assert shape(inferred.graph.output[0]) == ["b", 1000]


@ours_only
def test_symbolic_shape_infer_command(saved: Path):
    options = ("--auto_merge", "--int_max", "100", "--verbose", "1")
    files = ("--input", "in.onnx", "--output", "out.onnx")
    assert command("symbolic_shape_infer", *files, *options) == 0
    b, _ = onnx.load("out.onnx").graph.value_info
    assert (b.name, shape(b)) == ("b", ["batch", 3])


# torch's exporter.


@ours_only
def test_pytorch_export_contrib_ops(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for torch that records what is registered."""
    registered: dict[str, Callable[..., Any]] = {}
    exporter = types.ModuleType("torch.onnx")
    exporter.symbolic_helper = types.SimpleNamespace(_maybe_get_const=lambda value, kind: value)
    exporter.register_custom_op_symbolic = lambda name, symbolic, opset: registered.update(
        {name: symbolic}
    )
    exporter.unregister_custom_op_symbolic = lambda name, opset: registered.pop(name)
    torch = types.ModuleType("torch")
    torch.onnx = exporter
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.onnx", exporter)

    class Node:
        def type(self) -> str:
            return "float"

        def setType(self, kind: str) -> Node:
            assert kind == "float"
            return self

    class Graph:
        written: list[tuple[str, dict[str, Any]]] = []

        def op(self, name: str, *inputs: Any, **attributes: Any) -> Node:
            self.written.append((name, attributes))
            return Node()

    module = tool("pytorch_export_contrib_ops")
    module.register()
    assert sorted(registered) == ["::gelu", "::grid_sampler", "::inverse", "::tril", "::triu"]
    graph, node = Graph(), Node()
    registered["::gelu"](graph, node)
    registered["::gelu"](graph, node, "tanh")
    registered["::inverse"](graph, node)
    registered["::tril"](graph, node, 0)
    registered["::triu"](graph, node, 1)
    registered["::grid_sampler"](graph, node, node, 1, 2, True)
    grid = {"mode_s": "nearest", "padding_mode_s": "reflection", "align_corners_i": 1}
    assert graph.written == [
        ("com.microsoft::Gelu", {}),
        ("com.microsoft::FastGelu", {}),
        ("com.microsoft::Inverse", {}),
        ("com.microsoft::Trilu", {"upper_i": 0}),
        ("com.microsoft::Trilu", {"upper_i": 1}),
        ("com.microsoft::GridSample", grid),
    ]
    module.unregister()
    assert not registered


@ours_only
def test_pytorch_export_contrib_ops_needs_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError):
        tool("pytorch_export_contrib_ops").register()
