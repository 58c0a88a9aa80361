"""`transformers`: models in half precision, the model class, fusions.

With `ORT_PACKAGE=onnxruntime` what both do is compared; the original needs sympy and torch for more.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import CPU, IS_ORIGINAL, PACKAGE, Gives, Raises, case, check, ort, table

onnx = pytest.importorskip("onnx")
import onnx.parser  # noqa: E402
from onnx import TensorProto, numpy_helper  # noqa: E402

ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="the original needs sympy or torch")
HALF, FLOAT, BFLOAT16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16


def module(name: str) -> Any:
    """A module of `transformers`."""
    return importlib.import_module(f"{PACKAGE}.transformers.{name}")


float16, model_class = module("float16"), module("onnx_model").OnnxModel
options_class = module("fusion_options").FusionOptions


def model(graph: str, opset: int = 17) -> Any:
    """A model of ONNX's textual syntax, with nodes n0, n1 and so on."""
    head = f'<ir_version: 9, opset_import: ["" : {opset}]> g '
    made = onnx.parser.parse_model(head + graph)
    for place, node in enumerate(made.graph.node):
        node.name = f"n{place}"
    return made


# Half precision.

MLP = """(float[n,3] x) => (float[n,2] y) <float[3,2] w = {1,2,3,4,5,1e-9}, float[2] b = {100000,-1}>
    { m = MatMul(x, w)\n y = Add(m, b) }"""
BLOCKED = """(float[n,3] x) => (float[n,3] y) <float[3] w = {1,2,3}> { m = Min(x, w)\n y = Relu(m) }"""
SHARED = """(float[n,3] x) => (float[n,3] y) <float[3] w = {1,2,3}> { m = Min(x, w)\n y = Add(m, w) }"""
TWICE = """(float[n,3] x, float[3] w) => (float[n,3] y)
    { a = Min(x, w)\n b = Max(a, w)\n y = Relu(b) }"""
BRANCHES = """(float[n] x, bool c) => (float[n] y) <float[1] w = {3}>
    { y = If(c)<then_branch = t () => (float[n] q) { q = Mul(x, w) },
                else_branch = e () => (float[n] r) <float[1] z = {2}> { r = Add(x, z) }> }"""
RESIZE = """(float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] s = {1,1,2,2}>
    { y = Resize<mode = "nearest">(x, , s) }"""
CAST = """(int64[n] x) => (float[n] y) { m = Cast<to = 1>(x)
    c = Constant<value = float[1] {2.0}>()\n y = Add(m, c) }"""
SHAPED = "(int64[1] x) => (float[n] y) { y = ConstantOfShape(x) }"
RANDOM = "() => (float[2] y) { y = RandomNormal<dtype = 1, shape = [2]>() }"
CLASSES = """(float[n,4] x) => (float[n,2] y, int64[n,2] i) <int64[1] k = {2}>
    { e = Exp(x)\n y, i = TopK(e, k) }"""


def types(made: Any) -> list[int]:
    """The element types of inputs, outputs and weights."""
    graph = made.graph
    values = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    return values + [tensor.data_type for tensor in graph.initializer]


def casts(made: Any) -> list[str]:
    """The names of Cast nodes in alphabetical order, each once."""
    return sorted({node.name for node in made.graph.node if node.op_type == "Cast"})


@table(
    "graph, keywords, expected_types, expected_casts",
    [
        case("all", MLP, {}, [HALF] * 4, []),
        case("kept", MLP, {"keep_io_types": True}, [FLOAT, FLOAT, HALF, HALF],
             ["graph_input_cast0", "graph_output_cast0"]),
        case("kept_input", MLP, {"keep_io_types": ["x"]}, [FLOAT, HALF, HALF, HALF],
             ["graph_input_cast0"]),
        case("op_list", MLP, {"op_block_list": ["Add"]}, [HALF, HALF, HALF, FLOAT],
             ["m_cast_to_fp32_node", "y_cast_to_fp16_node"]),
        case("node_list", MLP, {"node_block_list": ["n1"]}, [HALF, HALF, HALF, FLOAT],
             ["m_cast_to_fp32_node", "y_cast_to_fp16_node"]),
        case("blocked", BLOCKED, {}, [HALF, HALF, FLOAT],
             ["m_cast_to_fp16_node", "x_cast_to_fp32_node"]),
        case("forced", BLOCKED, {"force_fp16_initializers": True}, [HALF] * 3,
             ["m_cast_to_fp16_node", "w_cast_to_fp32_node", "x_cast_to_fp32_node"]),
        case("shared", SHARED, {}, [HALF] * 3,
             ["m_cast_to_fp16_node", "w_cast_to_fp32_node", "x_cast_to_fp32_node"]),
        case("twice", TWICE, {}, [HALF] * 3,
             ["a_cast_to_fp16_node", "a_cast_to_fp32_node", "b_cast_to_fp16_node",
              "w_cast_to_fp32_node", "x_cast_to_fp32_node"]),
        case("branches", BRANCHES, {"keep_io_types": True}, [FLOAT, TensorProto.BOOL, FLOAT, HALF],
             ["graph_input_cast0", "graph_output_cast0"]),
        case("resize", RESIZE, {}, [HALF, HALF, FLOAT], []),
        case("resize_forced", RESIZE, {"force_fp16_inputs": {"Resize": [2]}}, [HALF] * 3, []),
        case("cast", CAST, {}, [TensorProto.INT64, HALF], ["n0"]),
        case("shaped", SHAPED, {}, [TensorProto.INT64, HALF], []),
        case("random", RANDOM, {}, [HALF], []),
        case("shapes_known", MLP, {"disable_shape_infer": True}, [HALF] * 4, []),
    ],
)  # fmt: skip
def test_half(graph: str, keywords: Any, expected_types: Any, expected_casts: Any) -> None:
    """Types and casts of a converted model."""
    made = float16.convert_float_to_float16(model(graph), **keywords)
    assert (types(made), casts(made)) == (expected_types, expected_casts)


def test_limits() -> None:
    """Weights are none too small and none too large."""
    made = float16.convert_float_to_float16(model(MLP), min_positive_val=1e-7, max_finite_val=100.0)
    weights = [numpy_helper.to_array(tensor).ravel().tolist() for tensor in made.graph.initializer]
    assert weights == [[1, 2, 3, 4, 5, np.float16(1e-7)], [100, -1]]
    numbers = np.array([1e-9, -1e-9, 0, 1e6, -1e6, np.nan, np.inf, 1], np.float32)
    half = float16.convert_np_to_float16(numbers)
    near = np.float16(5.96e-8)
    np.testing.assert_array_equal(half, np.array([near, -near, 0, 65504, -65504, np.nan, np.inf, 1], "f2"))


@table(
    "call, expected",
    [
        case("model", lambda: float16.convert_float_to_float16(5), Raises("ValueError", "ModelProto")),
        case("tensor", lambda: float16.convert_tensor_float_to_float16(5),
             Raises("ValueError", "TensorProto")),
        case("other_type", lambda: float16.convert_tensor_float_to_float16(
            numpy_helper.from_array(np.array([1]), "t")).data_type, Gives(TensorProto.INT64)),
        case("difference", lambda: round(float(float16.float_to_float16_max_diff(
            numpy_helper.from_array(np.array([1.0001], np.float32), "t"))), 6), Gives(0.0001)),
        case("block_list", lambda: {"TopK", "Range", "Min"} <= set(float16.DEFAULT_OP_BLOCK_LIST),
             Gives(True)),
    ],
)  # fmt: skip
def test_half_of(call: Any, expected: Any) -> None:
    """Smaller functions, and what they refuse."""
    check(expected, call)


def run(made: Any, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Runs a model on a feed, in the types of its inputs."""
    opened = ort.InferenceSession(made.SerializeToString(), providers=[CPU])
    halves = {value.name for value in opened.get_inputs() if value.type == "tensor(float16)"}
    return opened.run(None, {n: v.astype("f2") if n in halves else v for n, v in feed.items()})


LOOP = """(int64 n, float[2] x) => (float[2] y) { go = Constant<value = bool {1}>()
    y = Loop(n, go, x)<body = body (int64 i, bool before, float[2] a) => (bool after, float[2] b)
        { after = Identity(before)\n b = Add(a, a) }> }"""
NUMBER = "(float[n] x) => (float[n] y) { c = Constant<value_float = 2.0>()\n y = Mul(x, c) }"
X = np.array([[0.5, 1.25, 3], [4, 2, 7]], np.float32)


@ours_only
@table("keep", [case("half", False), case("kept", True)])
@table(
    "graph, feed",
    [
        case("shared", SHARED, {"x": X}),
        case("twice", TWICE, {"x": X, "w": X[0]}),
        case("branches", BRANCHES, {"x": X[0], "c": np.array(True)}),
        case("resize", RESIZE, {"x": X[:, :2].reshape(1, 1, 2, 2)}),
        case("cast", CAST, {"x": np.arange(3)}),
        case("shaped", SHAPED, {"x": np.array([3])}),
        case("top", CLASSES, {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}),
        case("loop", LOOP, {"n": np.array(3), "x": X[0, :2]}),
        case("number", NUMBER, {"x": X[0]}),
        case("passed", "(float[n] x) => (float[n] y) { y = Identity(x) }", {"x": X[0]}),
    ],
)
def test_half_computes(graph: str, feed: dict[str, np.ndarray], keep: bool) -> None:
    """The converted model is valid, sorted, and computes the same in half precision."""
    want = run(model(graph), feed)
    made = float16.convert_float_to_float16(model(graph), keep_io_types=keep)
    onnx.checker.check_model(made, full_check=True)
    for got, wanted in zip(run(made, feed), want, strict=True):
        assert wanted.dtype != np.float32 or got.dtype == (np.float32 if keep else np.float16)
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2e-3)


@ours_only
def test_blocked_nodes_in_bfloat16() -> None:
    """The inputs of a blocked node have one type."""
    made = float16.convert_float_to_float16(
        model(MLP), op_block_list=["Add"], use_bfloat16_as_blocked_nodes_dtype=True
    )
    onnx.checker.check_model(made, full_check=True)
    assert {v.type.tensor_type.elem_type for v in made.graph.value_info} == {HALF, BFLOAT16}


@ours_only
def test_no_half_form() -> None:
    """A node whose operator knows no float16 stays in float32."""
    graph = """(float[n] x) => (uint8[n] y) <float s = {0.5}, uint8 z = {0}>
        { r = Relu(x)\n y = QuantizeLinear(r, s, z) }"""
    made = float16.convert_float_to_float16(model(graph))
    onnx.checker.check_model(made, full_check=True)
    assert run(made, {"x": X[0]})[0].tolist() == run(model(graph), {"x": X[0]})[0].tolist()


# The model class.

CHAIN = """(float[n,3] x, float[3] u) => (float[n,2] y)
    <float[3,2] w = {1,2,3,4,5,6}, float[2] b = {1,2}, float one = {1.0}>
    { m = MatMul(x, w)\n a = Add(m, b)\n s = Mul(a, one)\n c = Constant<value_float = 2.0>()
      d = Div(s, c)\n e = Relu(d)\n y = Sigmoid(e) }"""


def names(nodes: Any) -> Any:
    """The names of nodes; None stays."""
    return None if nodes is None else [node.name for node in nodes]


def found_places(o: Any, node: Any) -> list[int]:
    places: list[int] = []
    o.match_parent_path(node, ["Mul", "Add", "MatMul"], [None] * 3, return_indice=places)
    return places


@table(
    "ask, expected",
    [
        case("statistics", lambda o, n: o.get_operator_statistics()["Add"], 1),
        case("opset", lambda o, n: o.get_opset_version(), 17),
        case("readers", lambda o, n: names(o.input_name_to_nodes()["a"]), ["n2"]),
        case("maker", lambda o, n: o.output_name_to_node()["a"].name, "n1"),
        case("weight", lambda o, n: o.get_initializer("w").name, "w"),
        case("no_weight", lambda o, n: o.get_initializer("q"), None),
        case("input", lambda o, n: o.find_graph_input("x").name, "x"),
        case("no_input", lambda o, n: o.find_graph_input("q"), None),
        case("output", lambda o, n: o.find_graph_output("y").name, "y"),
        case("parent", lambda o, n: o.get_parent(n["n1"], 0).name, "n0"),
        case("parent_of_weight", lambda o, n: o.get_parent(n["n1"], 1), None),
        case("children", lambda o, n: names(o.get_children(n["n1"])), ["n2"]),
        case("match", lambda o, n: o.match_parent(n["n2"], "Add", 0).name, "n1"),
        case("match_any", lambda o, n: o.match_parent(n["n2"], "Add").name, "n1"),
        case("no_match", lambda o, n: o.match_parent(n["n2"], "Sub", 0), None),
        case("path", lambda o, n: names(o.match_parent_path(n["n6"], ["Relu", "Div"], [0, 0])), ["n5", "n4"]),
        case("no_path", lambda o, n: o.match_parent_path(n["n6"], ["Relu", "Add"], [0, 0]), None),
        case("places", lambda o, n: found_places(o, n["n4"]), [0, 0, 0]),
        case("paths", lambda o, n: o.match_parent_paths(
            n["n6"], [(["Relu", "Add"], [0, 0]), (["Relu", "Div"], [0, 0])], o.output_name_to_node())[0], 1),
        case("no_paths", lambda o, n: o.match_parent_paths(
            n["n6"], [(["Add"], [0])], o.output_name_to_node()), (-1, None, None)),
        case("child_path", lambda o, n: names(o.match_child_path(n["n0"], ["Add", "Mul"])), ["n1", "n2"]),
        case("first_child", lambda o, n: o.find_first_child_by_type(n["n0"], "Relu").name, "n5"),
        case("no_child", lambda o, n: o.find_first_child_by_type(n["n0"], "Relu", recursive=False), None),
        case("first_parent", lambda o, n: o.find_first_parent_by_type(n["n6"], "MatMul").name, "n0"),
        case("constant", lambda o, n: float(o.get_constant_value("one")), 1.0),
        case("no_constant", lambda o, n: o.get_constant_value("m"), None),
        case("constant_input", lambda o, n: o.find_constant_input(n["n2"], 1.0), 1),
        case("no_constant_input", lambda o, n: o.find_constant_input(n["n2"], 3.0), -1),
        case("rank", lambda o, n: o.is_constant_with_specified_dimension("w", 2, "w"), True),
        case("name", lambda o, n: [o.create_node_name("Add"), o.create_node_name("Add")], ["Add_0", "Add_1"]),
        case("prefix", lambda o, n: o.create_node_name("Add", "My"), "My_0"),
        case("dtype", lambda o, n: o.get_dtype("x"), 1),
        case("shape", lambda o, n: o.get_shape("x"), ["n", 3]),
        case("attribute", lambda o, n: o.get_node_attribute(n["n3"], "value_float"), 2.0),
        case("place", lambda o, n: o.input_index("a", n["n2"]), 0),
        case("graph_inputs", lambda o, n: list(o.get_graph_inputs(n["n6"], recursive=True)), ["x"]),
        case("safe", lambda o, n: o.is_safe_to_fuse_nodes(
            [n["n1"], n["n2"]], ["s"], o.input_name_to_nodes(), o.output_name_to_node()), True),
        case("unsafe", lambda o, n: o.is_safe_to_fuse_nodes(
            [n["n1"], n["n2"]], [], o.input_name_to_nodes(), o.output_name_to_node()), False),
    ],
)  # fmt: skip
def test_model_says(ask: Any, expected: Any) -> None:
    """Questions about a graph."""
    opened = model_class(model(CHAIN))
    assert ask(opened, {node.name: node for node in opened.nodes()}) == expected


def state(o: Any) -> Any:
    """Operators with their inputs, weights and inputs of the graph."""
    graph = o.graph()
    nodes = [(node.op_type, list(node.input)) for node in o.nodes()]
    return nodes, [tensor.name for tensor in graph.initializer], [value.name for value in graph.input]


UNUSED = """(float[n] x, float[1] u) => (float[n] y) <float[1] w = {1}, float[1] spare = {5}>
    { c = Constant<value_float = 2.0>()\n a = Add(x, w)\n dead = Exp(x)\n y = Relu(a) }"""
CAST_TWICE = """(float[n] x) => (float[n] y) { a = Cast<to = 10>(x)\n b = Cast<to = 1>(a)\n y = Neg(b) }"""
UNSORTED = "(float[n] x) => (float[n] y) { y = Neg(b)\n b = Relu(a)\n a = Exp(x) }"
KEPT = [("Add", ["x", "w"]), ("Exp", ["x"]), ("Relu", ["a"])]


@table(
    "graph, change, expected",
    [
        case("update", UNUSED, lambda o: o.update_graph(), (KEPT, ["w"], ["x", "u"])),
        case("update_inputs", UNUSED, lambda o: o.update_graph(allow_remove_graph_inputs=True),
             (KEPT, ["w"], ["x"])),
        case("prune", UNUSED, lambda o: o.prune_graph(), ([KEPT[0], KEPT[2]], ["w"], ["x"])),
        case("casts", CAST_TWICE, lambda o: o.remove_cascaded_cast_nodes(),
             ([("Cast", ["x"]), ("Neg", ["b"])], [], ["x"])),
        case("sort", UNSORTED, lambda o: o.topological_sort(),
             ([("Exp", ["x"]), ("Relu", ["a"]), ("Neg", ["b"])], [], ["x"])),
        case("rename", UNSORTED, lambda o: o.replace_input_of_all_nodes("a", "x"),
             ([("Neg", ["b"]), ("Relu", ["x"]), ("Exp", ["x"])], [], ["x"])),
        case("prefix", UNSORTED, lambda o: o.add_prefix_to_names("p_"),
             ([("Neg", ["p_b"]), ("Relu", ["p_a"]), ("Exp", ["x"])], [], ["x"])),
        case("remove", UNSORTED, lambda o: o.remove_node(o.nodes()[1]),
             ([("Neg", ["b"]), ("Exp", ["x"])], [], ["x"])),
        case("input_type", UNSORTED, lambda o: o.change_graph_input_type(o.graph().input[0], 11),
             ([("Neg", ["b"]), ("Relu", ["a"]), ("Exp", ["Cast_0_x"]), ("Cast", ["x"])], [], ["x"])),
    ],
)  # fmt: skip
def test_model_changes(graph: str, change: Any, expected: Any) -> None:
    """Changes of a graph."""
    opened = model_class(model(graph))
    change(opened)
    assert state(opened) == expected


def test_cycle_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        model_class(model("(float[n] x) => (float[n] y) { y = Add(x, b)\n b = Relu(y) }")).topological_sort()


def test_saved(tmp_path: Path) -> None:
    """Weights go beside the file, and saving twice does not let that file grow."""
    path = tmp_path / "new" / "m.onnx"
    for _ in range(2):
        opened = model_class(model(MLP))
        opened.save_model_to_file(str(path), use_external_data_format=True, size_threshold=0)
    assert sorted(file.name for file in path.parent.iterdir())[0] == "m.onnx"
    assert onnx.load(str(path)).graph.initializer[0].dims == [3, 2]


@ours_only
def test_model_in_half() -> None:
    """Inputs and outputs stay float32 unless the caller says otherwise."""
    opened = model_class(model(MLP))
    opened.convert_float_to_float16()
    assert types(opened.model)[:2] == [FLOAT, FLOAT] and opened.use_float16()
    opened = model_class(model(MLP))
    opened.convert_float_to_float16(keep_io_types=False)
    assert types(opened.model)[:2] == [HALF, HALF]


# Options.


@table("kind, mask", [case(k, k, m) for k, m in {"bert": 0, "gpt2": 2, "vit": 3, "unet": 2}.items()])
def test_options(kind: str, mask: int) -> None:
    """The switches of kinds of models."""
    made = options_class(kind)
    assert made.attention_mask_format == mask and made.enable_gelu and not made.enable_gelu_approximation
    assert hasattr(made, "enable_nhwc_conv") == (kind == "unet")
    made.use_raw_attention_mask()
    assert made.attention_mask_format == 2
    made.disable_attention_mask()
    assert made.attention_mask_format == 3


@table(
    "arguments, switch, expected",
    [
        case("none", [], "enable_gelu", True),
        case("gelu", ["--disable_gelu"], "enable_gelu", False),
        case("attention", ["--disable_attention"], "enable_attention", False),
        case("approximation", ["--enable_gelu_approximation"], "enable_gelu_approximation", True),
        case("mask", ["--use_raw_attention_mask"], "attention_mask_format", 2),
        case("no_mask", ["--no_attention_mask"], "attention_mask_format", 3),
    ],
)
def test_options_of_arguments(arguments: list[str], switch: str, expected: Any) -> None:
    """Options from a command line."""
    parser = argparse.ArgumentParser()
    options_class.add_arguments(parser)
    args = parser.parse_args(arguments)
    args.model_type = "bert"
    assert getattr(options_class.parse(args), switch) == expected


# Fusions.


def layer() -> Any:
    """A MatMul with bias, a Gelu and a layer normalization, as exporters write them."""
    made = model("""(float[2,4,8] x) => (float[2,4,8] y)
        <float r = {1.4142135}, float one = {1}, float half = {0.5}, float eps = {1e-5}>
        { m = MatMul(x, w)\n a = Add(m, b)\n d = Div(a, r)\n e = Erf(d)\n f = Add(e, one)
          h = Mul(a, f)\n i = Mul(h, half)\n s = Add(i, x)\n mean = ReduceMean<axes = [-1]>(s)
          c = Sub(s, mean)\n two = Constant<value_float = 2.0>()\n q = Pow(c, two)
          v = ReduceMean<axes = [-1]>(q)\n ve = Add(v, eps)\n sd = Sqrt(ve)\n n = Div(c, sd)
          ng = Mul(n, g)\n y = Add(ng, b) }""")
    random = np.random.default_rng(0)
    for name, shape in {"w": (8, 8), "b": (8,), "g": (8,)}.items():
        weight = random.standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(weight, name))
    return made


INPUT = np.random.default_rng(1).standard_normal((2, 4, 8)).astype(np.float32)
optimizer = None if IS_ORIGINAL else module("optimizer")


@ours_only
@table(
    "keywords, fused",
    [
        case("default", {}, True),
        case("fusions_alone", {"opt_level": 0}, True),
        case("level_2", {"opt_level": 2}, True),
        case("level_99", {"opt_level": 99}, True),
        case("basic_alone", {"opt_level": 1, "only_onnxruntime": True}, False),
        case("other_kind", {"model_type": "gpt2"}, True),
        case("unknown_kind", {"model_type": "nope"}, False),
    ],
)
def test_optimize(keywords: Any, fused: bool) -> None:
    """Fused nodes, and the same numbers."""
    before, want = layer(), run(layer(), {"x": INPUT})[0]
    made = optimizer.optimize_model(before, **keywords)
    counts = made.get_operator_statistics()
    assert [counts.get(op, 0) for op in ("Gelu", "LayerNormalization")] == [int(fused)] * 2
    assert before == layer()
    onnx.checker.check_model(made.model)
    np.testing.assert_allclose(run(made.model, {"x": INPUT})[0], want, atol=2e-6)


@ours_only
@table(
    "switch, operator", [case("gelu", "enable_gelu", "Gelu"), case("norm", "enable_layer_norm", "LayerNormalization")]
)
def test_switch(switch: str, operator: str) -> None:
    """A fusion that is switched off is not made."""
    chosen = options_class("bert")
    setattr(chosen, switch, False)
    made = optimizer.optimize_model(layer(), optimization_options=chosen, opt_level=0)
    counts = made.get_fused_operator_statistics()
    assert [counts[op] for op in ("Gelu", "LayerNormalization")] == [
        int(op != operator) for op in ("Gelu", "LayerNormalization")
    ]


@ours_only
@table(
    "call, expected",
    [
        case("level", lambda: optimizer.optimize_model(layer(), opt_level=5), Raises("ValueError", "opt_level")),
        case("heads", lambda: optimizer.optimize_model(layer(), num_heads=3, hidden_size=7),
             Raises("ValueError", "multiple")),
        case("no_file", lambda: optimizer.optimize_model("nope.onnx"), Raises("NoSuchFile", "nope.onnx")),
        case("no_model", lambda: optimizer.optimize_by_onnxruntime(), Raises("TypeError", "give a model")),
    ],
)  # fmt: skip
def test_optimize_refuses(call: Any, expected: Any) -> None:
    """Arguments that make no sense."""
    check(expected, call)


@ours_only
def test_optimized_files(tmp_path: Path) -> None:
    """From files to files: by the function, and by the command line with half precision."""
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(layer(), str(source))
    assert optimizer.optimize_by_onnxruntime(str(source), opt_level=1) == str(tmp_path / "in_o1_cpu.onnx")
    assert optimizer.get_fusion_statistics(tmp_path / "in_o1_cpu.onnx")["Gelu"] == 0
    optimizer.main(["--input", str(source), "--output", str(target), "--float16", "--keep_io_types"])
    assert optimizer.get_fusion_statistics(target)["Gelu"] == 1
    want = run(layer(), {"x": INPUT})[0]
    np.testing.assert_allclose(run(onnx.load(str(target)), {"x": INPUT})[0], want, atol=0.02)


@ours_only
def test_bert_model() -> None:
    """What of a model of transformers is fused, and its inputs."""
    bert = module("onnx_model_bert").BertOnnxModel
    opened = bert(model("(int64[2,3] x) => (int64[2,3] y) { y = Neg(x) }"))
    assert not opened.is_fully_optimized()
    assert opened.is_fully_optimized({"Attention": 2, "Gelu": 1, "LayerNormalization": 4})
    opened.use_dynamic_axes()
    assert opened.get_shape("x") == ["batch_size", "max_seq_len"]
    opened.change_graph_inputs_to_int32()
    assert opened.get_dtype("x") == TensorProto.INT32
    opened = bert(layer())
    opened.optimize()
    assert opened.get_fused_operator_statistics()["LayerNormalization"] == 1


@ours_only
def test_shapes() -> None:
    """Shapes of values for sizes of dimensions."""
    helper = module("shape_infer_helper").SymbolicShapeInferenceHelper(model(CHAIN))
    assert helper.infer({"n": 4})
    assert helper.get_edge_shape("a") == [4, 2] and helper.get_edge_shape("w") == [3, 2]
    assert helper.compare_shape("a", "s") and helper.get_edge_shape("q") is None
    with pytest.raises(ValueError, match="missing"):
        helper.compare_shape("a", "q")
