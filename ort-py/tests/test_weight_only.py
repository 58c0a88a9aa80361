"""Weight-only quantization: names, scales and codes of onnxruntime's, and what the models compute."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import CPU, IS_ORIGINAL, PACKAGE, Raises, case, check, ort, table

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

nbits = importlib.import_module(f"{PACKAGE}.quantization.matmul_nbits_quantizer")
bnb4 = importlib.import_module(f"{PACKAGE}.quantization.matmul_bnb4_quantizer")
ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="ours alone, or a comparison with the original")
pytestmark = pytest.mark.filterwarnings("ignore")


# Models.


def weight(name: str, *shape: int, dtype: str = "float32") -> Any:
    """Returns a weight of normal numbers."""
    rng = np.random.default_rng(len(shape) * 100 + shape[-1])
    return numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name)


def model(nodes: list[Any], inputs: list[Any], weights: list[Any], opset: int = 13) -> Any:
    """Returns a model whose outputs are those of nodes that none reads."""
    read = {value for node in nodes for value in node.input}
    kind = inputs[0].type.tensor_type.elem_type
    kind = TensorProto.FLOAT16 if weights[0].data_type == TensorProto.FLOAT16 else kind
    kind = TensorProto.FLOAT if kind == TensorProto.INT64 else kind
    outputs = [
        helper.make_tensor_value_info(value, kind, None)
        for node in nodes
        for value in node.output
        if value not in read
    ]
    opsets = [helper.make_opsetid("", opset)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    made = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    # The checker wants the shapes of outputs.
    inferred = onnx.shape_inference.infer_shapes(made)
    del made.graph.output[:]
    made.graph.output.extend(inferred.graph.output)
    return made


def product(*shape: int, x: Any = ("n",), dtype: str = "float32", name: str = "mm") -> Any:
    """MatMul with a weight of this shape; `x` are the leading sizes of the input."""
    kind = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
    given = helper.make_tensor_value_info("x", kind, None if x is None else [*x, shape[-2]])
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name=name)
    return model([node], [given], [weight("w", *shape, dtype=dtype)])


def rows(*shape: int, axis: int = 0, dtype: str = "float32") -> Any:
    """Gather from a table of this shape."""
    node = helper.make_node("Gather", ["e", "i"], ["y"], name="ga", axis=axis)
    given = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    return model([node], [given], [weight("e", *shape, dtype=dtype)])


def transformer() -> Any:
    """An embedding, a product without a name, and one that reads the same weight as another."""
    nodes = [
        helper.make_node("Gather", ["e", "i"], ["x"], name="embed"),
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("MatMul", ["x", "v"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"], name="second"),
    ]
    given = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    weights = [weight("e", 40, 64), weight("w", 64, 64), weight("v", 64, 64)]
    return model(nodes, [given], weights)


def branches(shares_names: bool = False) -> Any:
    """If, whose bodies read a weight of the main graph and one of their own, or two of one name."""

    def body(name: str, constant: str, *own: Any) -> Any:
        node = helper.make_node("MatMul", ["x", constant], [name], name=f"in_{name}")
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 8])
        return helper.make_graph([node], name, [], [result], own)

    bodies = {
        "then_branch": body("then", "v", weight("v", 64, 8)) if shares_names else body("then", "w"),
        "else_branch": body("else", "v", weight("v", 64, 8)),
    }
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 64]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    node = helper.make_node("If", ["c"], ["y"], name="if", **bodies)
    weights = [weight("unread" if shares_names else "w", 64, 8)]
    return model([node], given, weights)


MODELS: dict[str, Callable[[], Any]] = {
    "product": lambda: product(64, 8),
    "odd_blocks": lambda: product(96, 7),
    "short_block": lambda: product(100, 7),
    "half": lambda: product(64, 8, dtype="float16"),
    "nameless": lambda: product(64, 8, name=""),
    "rank_3": lambda: product(1, 64, 8, x=("a", "b")),
    "batches": lambda: product(2, 64, 8, x=(2, 3)),
    "vector_input": lambda: product(64, 8, x=()),
    "rows": lambda: rows(40, 64),
    "short_rows": lambda: rows(40, 70),
    "columns": lambda: rows(40, 64, axis=1),
    "rank_3_rows": lambda: rows(4, 5, 64),
    "transformer": transformer,
    "branches": branches,
    "same_names": lambda: branches(shares_names=True),
}


def config(name: str, **options: Any) -> Callable[[Any], Any]:
    """Returns what makes a configuration of a package."""
    return lambda package: getattr(package, f"{name}WeightOnlyQuantConfig")(**options)


#: Keywords of the quantizer; configurations and formats are made by the package.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "block_32": {"block_size": 32},
    "symmetric": {"block_size": 32, "is_symmetric": True, "accuracy_level": 1},
    "bits_8": {"bits": 8, "block_size": 32},
    "bits_2": {"bits": 2, "block_size": 16},
    "symmetric_8": {"bits": 8, "block_size": 64, "is_symmetric": True},
    "qdq": {"block_size": 32, "quant_format": "QDQ"},
    "qdq_symmetric": {"block_size": 32, "quant_format": "QDQ", "is_symmetric": True},
    "qdq_columns": {"block_size": 32, "quant_format": "QDQ", "channel_wised_quantize": True},
    "tables": {"block_size": 16, "op_types_to_quantize": ("MatMul", "Gather")},
    "tables_symmetric": {"block_size": 32, "op_types_to_quantize": ("Gather",), "is_symmetric": True},
    "tables_down": {
        "block_size": 16,
        "op_types_to_quantize": ("Gather",),
        "quant_axes": (("MatMul", 0), ("Gather", 0)),
    },
    "excluded": {"block_size": 32, "nodes_to_exclude": ["mm", "first", "in_then"]},
    "included": {"op_types_to_quantize": ("Gather",), "block_size": 32, "nodes_to_include": ["mm"]},
    "config": {"algo_config": config("Default", block_size=32, is_symmetric=True, bits=8)},
    "rtn": {"block_size": 32, "algo_config": config("RTN")},
    "rtn_symmetric": {"block_size": 32, "is_symmetric": True, "algo_config": config("RTN")},
    "rtn_custom": {
        "block_size": 32,
        "algo_config": config(
            "RTN", customized_weight_config={"mm": {"bits": 8, "group_size": 16, "scheme": "sym"}}
        ),
    },
}  # fmt: skip

FAILS = "the original cannot pack zero points of an odd number of blocks"
BODIES = "the original looks for the weights of bodies in the main graph"
RANK = "the original leaves weights [1, K, N] to this method"
HALF = "the original computes scales of float16 in float16"
UNIQUE = "the original gives two nodes an output of the same name"
#: What differs, and why. A pair that is not here is equal, and one that is differs.
DIFFERENCES: dict[str, str] = {
    "odd_blocks-rtn": FAILS,
    "branches-rtn": BODIES,
    "branches-rtn_symmetric": BODIES,
    "branches-rtn_custom": BODIES,
    "same_names-qdq": UNIQUE,
    "same_names-qdq_symmetric": UNIQUE,
    "same_names-qdq_columns": UNIQUE,
    "same_names-rtn": BODIES,
    "same_names-rtn_symmetric": BODIES,
    "same_names-rtn_custom": BODIES,
    "rank_3-rtn": RANK,
    "rank_3-rtn_symmetric": RANK,
    "rank_3-rtn_custom": RANK,
    "half-rtn": HALF,
    "half-rtn_symmetric": HALF,
    "half-rtn_custom": HALF,
    "transformer-qdq": UNIQUE,
    "transformer-qdq_symmetric": UNIQUE,
    "transformer-qdq_columns": UNIQUE,
}


def quantized(package: Any, given: Any, options: dict[str, Any]) -> Any:
    """Returns a quantized copy of a model."""
    copy = onnx.ModelProto()
    copy.CopyFrom(given)
    keywords = dict(options)
    if "quant_format" in keywords:
        keywords["quant_format"] = package.QuantFormat[keywords["quant_format"]]
    if "algo_config" in keywords:
        keywords["algo_config"] = keywords["algo_config"](package)
    # The original logs and prints its progress.
    logging.disable(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        quantizer = package.MatMulNBitsQuantizer(copy, **keywords)
        quantizer.process()
    logging.disable(logging.NOTSET)
    return quantizer.model.model


@pytest.fixture(autouse=True)
def log_again() -> Any:
    yield
    logging.disable(logging.NOTSET)


def graphs(graph: Any) -> Any:
    """Yields a graph and its bodies."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def content(given: Any) -> tuple[Any, Any, Any]:
    """Returns nodes, weights that are read, and the main version of a model."""
    nodes, weights = [], {}
    read = {v for graph in graphs(given.graph) for node in graph.node for v in node.input}
    for graph in graphs(given.graph):
        for node in graph.node:
            plain = [a for a in node.attribute if not a.HasField("g")]
            attributes = sorted((a.name, str(helper.get_attribute_value(a))) for a in plain)
            names = node.name, tuple(node.input), tuple(node.output)
            nodes.append((node.op_type, node.domain, *names, tuple(attributes)))
        for tensor in graph.initializer:
            if tensor.name in read:
                array = numpy_helper.to_array(tensor)
                weights[tensor.name] = tensor.data_type, array.shape, array.tobytes()
    version = next(o.version for o in given.opset_import if o.domain == "")
    return sorted(nodes), weights, (version, given.ir_version)


def feed(given: Any) -> dict[str, np.ndarray]:
    """Returns inputs of a model; unknown sizes are 3."""
    rng = np.random.default_rng(5)
    values: dict[str, np.ndarray] = {}
    for info in given.graph.input:
        kind = info.type.tensor_type
        shape = [dim.dim_value or 3 for dim in kind.shape.dim]
        if kind.elem_type == TensorProto.INT64:
            values[info.name] = np.array([0, 3, 2])
        elif kind.elem_type == TensorProto.BOOL:
            values[info.name] = np.array(True)
        else:
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            values[info.name] = rng.standard_normal(shape).astype(dtype)
    return values


def run(package: Any, given: Any) -> list[np.ndarray]:
    """Runs a model without optimizations."""
    options = package.SessionOptions()
    options.graph_optimization_level = package.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = package.InferenceSession(given.SerializeToString(), options, providers=[CPU])
    return session.run(None, feed(given))


def agree(found: list[np.ndarray], expected: list[np.ndarray], near: float) -> None:
    """Compares outputs relative to their largest element."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        one, other = one.astype(np.float64), other.astype(np.float64)
        assert np.abs(one - other).max() <= near * np.abs(other).max()


@ours_only
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_model_is_the_originals(name: str, options: str):
    original = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    given = MODELS[name]()
    ours = quantized(nbits, given, OPTIONS[options])
    try:
        theirs = content(quantized(original, given, OPTIONS[options]))
    except (KeyError, ValueError):
        theirs = None
    if f"{name}-{options}" in DIFFERENCES:
        assert content(ours) != theirs, "no difference any more"
    else:
        assert content(ours) == theirs
    runtime = pytest.importorskip("onnxruntime")
    onnx.checker.check_model(ours)
    near = 2e-2 if name == "half" else 1e-5
    agree(run(ort, ours), run(runtime, ours), near)


@ours_only
@pytest.mark.parametrize("quant_format", ["QOperator", "QDQ"])
@pytest.mark.parametrize("opset", [11, 13])
@table(
    "shape, leading",
    [
        case("matrix", (1, 64, 8), ("n",)),
        case("matrix_4", (1, 1, 64, 8), ("n",)),
        case("rank_3", (1, 1, 64, 8), ("a", "b")),
        case("vector", (1, 64, 8), ()),
        case("vector_4", (1, 1, 64, 8), ()),
    ],
)
@pytest.mark.parametrize("is_declared", [True, False])
def test_leading_dimensions_stay(
    shape: Any, leading: Any, is_declared: bool, opset: int, quant_format: str
):
    given = product(*shape, x=leading)
    given.opset_import[0].version = opset
    inputs = feed(given)
    if not is_declared:
        given.graph.input[0].type.tensor_type.ClearField("shape")
    options = {"block_size": 32, "bits": 4, "quant_format": quant_format}
    made = quantized(nbits, given, options)
    is_left = opset == 11 and not is_declared and quant_format == "QOperator"
    assert ("MatMulNBits" in {node.op_type for node in made.graph.node}) == (
        quant_format == "QOperator" and not is_left
    )
    for package in (ort, pytest.importorskip("onnxruntime")):
        sessions = [
            package.InferenceSession(each.SerializeToString(), providers=[CPU])
            for each in (given, made)
        ]
        (exact,), (found,) = (session.run(None, inputs) for session in sessions)
        assert found.shape == exact.shape
        assert np.linalg.norm(found - exact) < 0.12 * np.linalg.norm(exact)


# Methods.


def decoded(made: Any, bits: int, k: int) -> np.ndarray:
    """Returns the matrix that the parts of `MatMulNBits` stand for."""
    weights = {w.name: numpy_helper.to_array(w) for w in made.graph.initializer}
    (node,) = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    parts = [weights[name] for name in node.input[1:]]
    codes = parts[0]
    columns, blocks, _ = codes.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)

    def spread(packed: np.ndarray) -> np.ndarray:
        values = packed[..., None] >> shifts & (1 << bits) - 1
        return values.reshape(*packed.shape[:-1], -1).astype(np.float64)

    if len(parts) < 3:
        points = np.full((columns, blocks), float(1 << bits - 1))
    elif parts[2].dtype == np.uint8:
        points = spread(parts[2].reshape(columns, -1))[:, :blocks]
    else:
        points = parts[2].reshape(columns, blocks).astype(np.float64)
    scales = parts[1].reshape(columns, blocks, 1).astype(np.float64)
    return ((spread(codes) - points[..., None]) * scales).reshape(columns, -1)[:, :k].T


def losses(method: str, bits: int, matrix: np.ndarray, package: Any = nbits) -> dict[str, float]:
    """Returns errors of a method: mean squares, weighted as k-quants do, and mean magnitudes."""
    given = product(*matrix.shape)
    given.graph.initializer[0].CopyFrom(numpy_helper.from_array(matrix, "w"))
    options = {"bits": bits, "block_size": 32}
    if method == "HQQ":
        options = {"algo_config": config("HQQ", block_size=32, bits=bits)}
    elif method != "Default":
        custom = {"mm": {"bits": bits, "group_size": 32}}
        options["algo_config"] = config(method, customized_weight_config=custom)
    made = quantized(package, given, options)
    difference = decoded(made, bits, len(matrix)) - matrix
    groups = matrix.reshape(-1, 32, matrix.shape[1]).astype(np.float64)
    weights = np.sqrt((groups**2).mean(1, keepdims=True)) + np.abs(groups)
    return {
        "squares": float((difference**2).mean()),
        "weighted": float((weights * difference.reshape(groups.shape) ** 2).mean()),
        "magnitudes": float((np.abs(difference) ** 0.7).mean()),
    }


MATRICES = {
    "normal": np.random.default_rng(1).standard_normal((128, 24)),
    "tails": np.random.default_rng(2).standard_t(3, (128, 24)),
    "one_sign": np.random.default_rng(3).uniform(3, 4, (128, 24)),
}


@ours_only
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", MATRICES)
def test_k_quant_fits_at_least_as_well(name: str, bits: int):
    matrix = MATRICES[name].astype(np.float32)
    found = losses("KQuant", bits, matrix)["weighted"]
    assert found <= losses("Default", bits, matrix)["weighted"] * 1.0001
    if bits == 4:
        original = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
        theirs = losses("KQuant", bits, matrix, original)["weighted"]
        # The original clamps codes of blocks of one sign.
        assert found <= theirs * (0.1 if name == "one_sign" else 1.01)


@ours_only
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", MATRICES)
def test_half_quadratic_lowers_its_norm(name: str, bits: int):
    matrix = MATRICES[name].astype(np.float32)
    found, plain = (losses(method, bits, matrix) for method in ("HQQ", "Default"))
    assert found["magnitudes"] <= plain["magnitudes"] * 1.001


@ours_only
@pytest.mark.parametrize("name", MATRICES)
def test_rounding_includes_zero(name: str):
    matrix = MATRICES[name].astype(np.float32)
    original = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    ours, theirs = (losses("RTN", 4, matrix, package)["squares"] for package in (nbits, original))
    # The original's range of a block of one sign has no zero, so that its zero point is clamped.
    assert ours <= theirs * (0.1 if name == "one_sign" else 1.0001)


@ours_only
def test_ratios_narrow_ranges():
    given = product(64, 8)
    made = [
        quantized(nbits, given, {"block_size": 32, "algo_config": config("RTN", ratios=ratios)})
        for ratios in ({}, {"w": 0.5})
    ]
    scales = [
        next(numpy_helper.to_array(w) for w in m.graph.initializer if w.name == "w_scale") for m in made
    ]
    np.testing.assert_allclose(scales[1], scales[0] / 2, rtol=1e-6)


class Reader:
    """Samples of correlated rows, on which GPTQ gains."""

    def __init__(self, count: int = 8) -> None:
        rng = np.random.default_rng(7)
        mixed = rng.standard_normal((12, 64)) * 2
        self.samples = [
            (rng.standard_normal((40, 12)) @ mixed + 0.1 * rng.standard_normal((40, 64)))
            for _ in range(count)
        ]
        self.left = iter(self.samples)

    def get_next(self) -> Any:
        sample = next(self.left, None)
        return None if sample is None else {"x": sample.astype(np.float32)}


@ours_only
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("options", [{}, {"actorder": True}, {"mse": True}, {"percdamp": 0.1}])
@pytest.mark.parametrize("from_path", [True, False])
def test_gptq_lowers_the_error_of_outputs(
    options: dict[str, Any], symmetric: bool, from_path: bool, tmp_path: Path
):
    given = product(64, 8)
    source: Any = onnx.ModelProto()
    source.CopyFrom(given)
    if from_path:
        onnx.save(given, str(tmp_path / "model.onnx"))
        source = str(tmp_path / "model.onnx")
    settings = {"block_size": 32, "is_symmetric": symmetric}
    algorithm = nbits.GPTQWeightOnlyQuantConfig(Reader(), **options)
    quantizer = nbits.MatMulNBitsQuantizer(source, algo_config=algorithm, **settings)
    quantizer.process()
    made = quantizer.model.model
    assert {w.name for w in made.graph.initializer} >= {"w_Q4G32", "w_scale"}
    plain = quantized(nbits, given, settings)
    matrix = numpy_helper.to_array(given.graph.initializer[0])
    x = np.concatenate(Reader().samples)
    tuned, rounded = (
        np.linalg.norm(x @ (decoded(each, 4, 64) - matrix)) for each in (made, plain)
    )
    assert tuned < 0.7 * rounded


@ours_only
@pytest.mark.parametrize("kind", ["FP4", "NF4"])
@pytest.mark.parametrize("name", ["product", "short_block", "half", "transformer", "branches"])
def test_bnb4_is_the_originals(name: str, kind: str):
    original = pytest.importorskip("onnxruntime.quantization.matmul_bnb4_quantizer")
    made = []
    logging.disable(logging.ERROR)
    for package in (bnb4, original):
        quantizer = package.MatMulBnb4Quantizer(
            MODELS[name](), getattr(package.MatMulBnb4Quantizer, kind), 32, ["second"]
        )
        quantizer.process()
        made.append(content(quantizer.model.model))
    assert made[0] == made[1]


# What is refused.


def make(**options: Any) -> Any:
    """Quantizes a product; only the exception counts."""
    if callable(options.get("algo_config")):
        options["algo_config"] = options["algo_config"](nbits)
    if "quant_format" in options:
        options["quant_format"] = nbits.QuantFormat[options["quant_format"]]
    quantizer = nbits.MatMulNBitsQuantizer(options.pop("given", product(64, 8)), **options)
    quantizer.process()


@ours_only
@table(
    "expected, options",
    [
        case("bits", Raises("AssertionError", "2, 4 or 8 bits"), {"bits": 3}),
        case("bits_qdq", Raises("AssertionError", "only support"), {
            "bits": 2, "quant_format": "QDQ"}),
        case("columns", Raises("NotImplementedError", "channel_wised"), {
            "channel_wised_quantize": True}),
        case("config", Raises("TypeError", "WeightOnlyQuantConfig"), {"algo_config": 3}),
        case("block", Raises("ValueError", "block size 20, expected 16"), {"block_size": 20}),
        case("rtn_qdq", Raises("AssertionError", "RTN only supports QOperator"), {
            "algo_config": lambda m: m.RTNWeightOnlyQuantConfig(quant_format=m.QuantFormat.QDQ)}),
        case("hqq_axis", Raises("AssertionError", "axis has to be 1"), {
            "algo_config": config("HQQ", axis=0)}),
        case("custom", Raises("AssertionError", "no options .'groups'"), {
            "algo_config": config("RTN", customized_weight_config={"mm": {"groups": 3}})}),
        case("scheme", Raises("AssertionError", "'s' is not sym or asym"), {
            "algo_config": config("RTN", customized_weight_config={"mm": {"scheme": "s"}})}),
        case("awq", Raises("NotImplementedError", "nvidia-modelopt"), {
            "algo_config": config("NVAWQ", tokenizer_dir=".")}),
        case("no_samples", Raises("ValueError", "needs samples"), {"algo_config": config("GPTQ")}),
        case("empty", Raises("ValueError", "No data is collected"), {
            "algo_config": lambda m: m.GPTQWeightOnlyQuantConfig(Reader(0))}),
        case("axis", Raises("AssertionError", "Invalid quantize axis 1"), {
            "given": rows(64), "op_types_to_quantize": ("Gather",), "block_size": 16}),
        case("table_block", Raises("AssertionError", "Invalid block size 8"), {
            "given": rows(4, 64), "op_types_to_quantize": ("Gather",), "block_size": 8}),
        case("table_qdq", Raises("AssertionError", "Gather only supports QOperator"), {
            "given": rows(4, 64), "op_types_to_quantize": ("Gather",), "quant_format": "QDQ"}),
    ],
)  # fmt: skip
def test_refused(expected: Any, options: dict[str, Any]):
    check(expected, lambda: make(**options))


def test_bnb4_types_are_two():
    with pytest.raises(AssertionError):
        bnb4.MatMulBnb4Quantizer(product(64, 8), 2, 32)


# Command lines.


@table(
    "tool, arguments, operator",
    [
        case("nbits", "matmul_nbits_quantizer", ["--block_size", "16"], "MatMulNBits"),
        case("rtn", "matmul_nbits_quantizer", ["--quant_method", "rtn"], "MatMulNBits"),
        case("qdq", "matmul_nbits_quantizer", ["--quant_format", "QDQ"], "DequantizeLinear"),
        case("bnb4", "matmul_bnb4_quantizer", ["--block_size", "64"], "MatMulBnb4"),
    ],
)
def test_command_line(
    tool: str, arguments: list[str], operator: str, tmp_path: Path, monkeypatch: Any
):
    onnx.save(product(64, 8), str(tmp_path / "in.onnx"))
    files = ["--input_model", str(tmp_path / "in.onnx"), "--output_model", str(tmp_path / "out.onnx")]
    module = f"{PACKAGE}.quantization.{tool}"
    monkeypatch.setattr(sys, "argv", [tool, *files, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)
    if IS_ORIGINAL and (tool == "matmul_bnb4_quantizer" or "rtn" in arguments):
        pytest.skip("the original takes numbers as texts here, or gives the method no symmetry")
    runpy.run_module(module, run_name="__main__")
    made = onnx.load(str(tmp_path / "out.onnx"))
    assert operator in {node.op_type for node in made.graph.node}


@ours_only
def test_methods_that_need_samples_end_the_command_line(tmp_path: Path, capsys: Any):
    onnx.save(product(64, 8), str(tmp_path / "in.onnx"))
    files = ["--input_model", str(tmp_path / "in.onnx"), "--output_model", "out.onnx"]
    with pytest.raises(SystemExit) as stop:
        nbits.main([*files, "--quant_method", "gptq"])
    assert stop.value.code == 2 and "needs samples" in capsys.readouterr().err
