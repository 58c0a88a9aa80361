"""Writes `ort_format/*`: models in ORT format, inputs, and the outputs that ONNX Runtime computes.

    pip install onnxruntime==1.31.1 onnx numpy
    python ort_format.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, parser

FOLDER = Path(__file__).parent / "ort_format"
LEVELS = ort.GraphOptimizationLevel
BASIC, EXTENDED, DISABLED = LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED, LEVELS.ORT_DISABLE_ALL
HEADER = '<ir_version: {}, opset_import: ["" : {}{}]>\n'
RNG = np.random.default_rng(7)

CASES: dict[str, Callable[[], tuple[onnx.ModelProto, list[Any]]]] = {}
"""The models with their inputs, by name."""


def case(make: Callable[[], tuple[onnx.ModelProto, list[Any]]]) -> None:
    CASES[make.__name__] = make


def parsed(
    text: str, weights: dict[str, np.ndarray] | None = None, opset: int = 21, others: str = ""
) -> onnx.ModelProto:
    """A model from its text, with further initializers."""
    model = parser.parse_model(HEADER.format(10, opset, others) + text)
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    model.graph.initializer.extend(initializers)
    return model


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


@case
def loop() -> tuple[onnx.ModelProto, list[Any]]:
    """A loop that stops early, with an outer value, a scan output and a branch inside."""
    model = parsed("""loop (int64 most, float[n] x, float limit) => (float[n] y, float[t, n] all) {
        go = Constant <value = bool {1}> ()
        y, all = Loop (most, go, x) <body = step (int64 i, bool on, float[n] state)
            => (bool again, float[n] next, float[n] seen) {
            doubled = Add (state, x)
            total = ReduceSum <keepdims = 0> (doubled)
            again = Less (total, limit)
            next = If (again) <then_branch = more () => (float[n] a) { a = Mul (doubled, scale) },
                               else_branch = rest () => (float[n] b) { b = Sub (doubled, x) }>
            seen = Neg (next)
        }>
    }""", {"scale": np.array(1.5, np.float32)})
    return model, [np.array(9, np.int64), np.array([1, 2, 3], np.float32), np.array(80, np.float32)]


@case
def scan() -> tuple[onnx.ModelProto, list[Any]]:
    model = parsed("""scan (float[2] start, float[t, 2] x) => (float[2] last, float[t, 2] sums) {
        last, sums = Scan <num_scan_inputs = 1, body = step (float[2] sum, float[2] row)
            => (float[2] next, float[2] out) {
            next = Add (sum, row)
            out = Identity (next)
        }> (start, x)
    }""")
    return model, [floats(2), floats(5, 2)]


@case
def recurrent() -> tuple[onnx.ModelProto, list[Any]]:
    """A bidirectional LSTM, and a GRU with sequence lengths."""
    text = """recurrent (float[t, b, 4] x, int32[b] lengths)
            => (float[t, 2, b, 3] y, float[2, b, 3] c, float[1, b, 3] h) {
        y, yh, c = LSTM <hidden_size = 3, direction = "bidirectional"> (x, W, R, B)
        g, h = GRU <hidden_size = 3, linear_before_reset = 1, activations = ["Sigmoid", "Tanh"]>
            (x, GW, GR, , lengths)
    }"""
    shapes = {"W": (2, 12, 4), "R": (2, 12, 3), "B": (2, 24), "GW": (1, 9, 4), "GR": (1, 9, 3)}
    weights = {name: floats(*shape) for name, shape in shapes.items()}
    return parsed(text, weights), [floats(5, 2, 4), np.array([5, 3], np.int32)]


@case
def quantized() -> tuple[onnx.ModelProto, list[Any]]:
    """Quantized weights and activations as pairs, and a dynamically quantized product."""
    text = """quantized (float[n, 3, 6, 6] x) => (float[n, 4, 4, 4] y, float[n, 5] z) {
        q = QuantizeLinear (x, xs, xz)
        d = DequantizeLinear (q, xs, xz)
        wd = DequantizeLinear <axis = 0> (w, ws, wz)
        c = Conv (d, wd)
        r = Relu (c)
        cq = QuantizeLinear (r, ys, yz)
        y = DequantizeLinear (cq, ys, yz)
        f = Flatten (y)
        fq, fs, fz = DynamicQuantizeLinear (f)
        p = MatMulInteger (fq, m, fz)
        pf = Cast <to = 1> (p)
        z = Mul (pf, fs)
    }"""
    weights = {
        "xs": np.array(0.05, np.float32),
        "xz": np.array(120, np.uint8),
        "w": RNG.integers(-127, 127, (4, 3, 3, 3), np.int8),
        "ws": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
        "wz": np.zeros(4, np.int8),
        "ys": np.array(0.2, np.float32),
        "yz": np.array(0, np.uint8),
        "m": RNG.integers(-127, 127, (64, 5), np.int8),
    }
    return parsed(text, weights), [floats(2, 3, 6, 6)]


@case
def sequence() -> tuple[onnx.ModelProto, list[Any]]:
    model = parsed("""sequence (seq(float[k]) list, float[m] x)
            => (seq(float[k]) longer, float[j] joined, int64 count) {
        one = Constant <value = int64 {1}> ()
        longer = SequenceInsert (list, x, one)
        joined = ConcatFromSequence <axis = 0> (longer)
        count = SequenceLength (longer)
    }""")
    return model, [[floats(2), floats(3)], floats(4)]


@case
def strings() -> tuple[onnx.ModelProto, list[Any]]:
    text = """strings (string[n] x)
            => (string[n] joined, string[m] normal, string[n, k] parts, bool[n] same) {
        joined = StringConcat (x, suffix)
        normal = StringNormalizer <case_change_action = "UPPER", locale = "C",
            stopwords = ["stop", "halt"]> (x)
        parts, counts = StringSplit <delimiter = " "> (joined)
        same = Equal (x, word)
    }"""
    model = parsed(text)
    suffix = helper.make_tensor("suffix", TensorProto.STRING, [1], [" été".encode()])
    model.graph.initializer.extend([suffix, helper.make_tensor("word", TensorProto.STRING, [], [b"go"])])
    return model, [np.array(["go", "stop", "", "walk on"], object)]


@case
def classical() -> tuple[onnx.ModelProto, list[Any]]:
    """Operators of `ai.onnx.ml`: maps, trees, text labels."""
    text = """classical (float[n, 2] x)
            => (string[n] label, seq(map(string, float)) scores, float[n, 1] tree) {
        scaled = ai.onnx.ml.Scaler <offset = [0.5, -0.5], scale = [2.0, 0.5]> (x)
        label, raw = ai.onnx.ml.LinearClassifier <classlabels_strings = ["cat", "dog"],
            multi_class = 0, coefficients = [1.0, -1.0, 0.5, 2.0], intercepts = [0.25, -0.25],
            post_transform = "SOFTMAX"> (scaled)
        scores = ai.onnx.ml.ZipMap <classlabels_strings = ["cat", "dog"]> (raw)
        tree = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 1, nodes_treeids = [0, 0, 0],
            nodes_nodeids = [0, 1, 2], nodes_featureids = [1, 0, 0], nodes_values = [0.1, 0.0, 0.0],
            nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids = [1, 0, 0],
            nodes_falsenodeids = [2, 0, 0], target_treeids = [0, 0], target_nodeids = [1, 2],
            target_ids = [0, 0], target_weights = [3.5, -1.25]> (x)
    }"""
    return parsed(text, others=', "ai.onnx.ml" : 3'), [floats(3, 2)]


@case
def convolution() -> tuple[onnx.ModelProto, list[Any]]:
    """A small network. `extended` fuses its activations."""
    text = """convolution (float[n, 3, 8, 8] x) => (float[n, 10] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
        n = BatchNormalization (c, scale, bias, mean, variance)
        r = Relu (n)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        f = Flatten (p)
        g = Gemm <transB = 1> (f, fc, fb)
        y = Softmax (g)
    }"""
    weights = {
        "w": floats(8, 3, 3, 3), "b": floats(8), "scale": floats(8), "bias": floats(8), "mean": floats(8),
        "variance": np.abs(floats(8)) + 1, "fc": floats(10, 128), "fb": floats(10),
    }
    return parsed(text, weights), [floats(2, 3, 8, 8)]


@case
def external() -> tuple[onnx.ModelProto, list[Any]]:
    """Weights from a data file, which ORT format has inside. They are large enough to be mapped."""
    text = """external (float[n, 64] x) => (float[n, 32] y, double[n, 64] z) {
        y = MatMul (x, w)
        wide = Cast <to = 11> (x)
        z = Mul (wide, doubles)
    }"""
    weights = {"w": floats(64, 32), "doubles": RNG.standard_normal(64)}
    return parsed(text, weights), [floats(3, 64)]


@case
def half() -> tuple[onnx.ModelProto, list[Any]]:
    text = """half (float16[n, 4] x) => (float16[n, 4] y, float[n, 4] z) {
        p = MatMul (x, w)
        y = LayerNormalization (p, scale)
        wide = Cast <to = 1> (y)
        z = Sigmoid (wide)
    }"""
    weights = {"w": floats(4, 4).astype(np.float16), "scale": np.array([1, 2, 3, 4], np.float16)}
    return parsed(text, weights), [floats(3, 4).astype(np.float16)]


@case
def narrow() -> tuple[onnx.ModelProto, list[Any]]:
    """Weights of 4 bits in bytes, and of types that NumPy lacks. The format has no 4-bit types."""
    text = """narrow (float[n, 32] x) => (float[n, 3] y, float[4] a, float[2] b) {
        y = com.microsoft.MatMulNBits <K = 32, N = 3, bits = 4, block_size = 16> (x, packed, scales)
        a = Cast <to = 1> (f8)
        b = Cast <to = 1> (bf16)
    }"""
    packed = RNG.integers(0, 256, (3, 2, 8), np.uint8)
    model = parsed(text, {"packed": packed, "scales": floats(6)}, others=', "com.microsoft" : 1')
    model.graph.initializer.extend([
        helper.make_tensor("f8", TensorProto.FLOAT8E4M3FN, [4], [0.5, -1.75, 448, 0]),
        helper.make_tensor("bf16", TensorProto.BFLOAT16, [2], [1.5, -256]),
    ])
    return model, [floats(2, 32)]


@case
def function() -> tuple[onnx.ModelProto, list[Any]]:
    """Functions of the model, which ONNX Runtime inlines."""
    model = parsed("""function (float[n] x) => (float[n] y) {
        a = local.scaled <factor = 3.0> (x)
        y = local.scaled <factor = -0.5> (a)
    }
    <domain: "local", opset_import: ["" : 21]>
    scaled <factor> (x) => (y) {
        f = Constant <value_float: float = @factor> ()
        p = Mul (x, f)
        y = LeakyRelu <alpha = 0.1> (p)
    }""", others=', "local" : 1')
    return model, [floats(4)]


@case
def initializers() -> tuple[onnx.ModelProto, list[Any]]:
    """Sparse, scalar and empty weights of several types, and an input with a default."""
    text = """initializers (float[n, 3] x, float[3] added)
            => (float[n, 3] y, int64[m] i, double d, bool[2] f, uint8[1] u) {
        s = Add (x, sparse)
        p = Add (s, added)
        y = Clip (p, , most)
        i = Concat <axis = 0> (none, some)
        d = Neg (double)
        f = Not (flags)
        u = Identity (byte)
    }"""
    weights = {
        "added": np.array([1, 2, 3], np.float32),
        "most": np.array(2.5, np.float32),
        "none": np.array([], np.int64),
        "some": np.array([-1, 1 << 40], np.int64),
        "double": np.array(0.1),
        "flags": np.array([True, False]),
        "byte": np.array([200], np.uint8),
    }
    model = parsed(text, weights)
    values = numpy_helper.from_array(np.array([5, -6], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([0, 2], np.int64))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3]))
    return model, [floats(2, 3)]


@case
def attention() -> tuple[onnx.ModelProto, list[Any]]:
    """Operators of `com.microsoft`."""
    text = """attention (float[1, s, 8] x) => (float[1, s, 8] y) {
        q = com.microsoft.FusedMatMul <alpha = 0.5> (x, wq)
        a = com.microsoft.MultiHeadAttention <num_heads = 2> (q, x, x)
        g = com.microsoft.Gelu (a)
        n = com.microsoft.SkipLayerNormalization (g, x, scale)
        m = MatMul (n, wq)
        b = Add (m, bias)
        y = Relu (b)
    }"""
    weights = {"wq": floats(8, 8), "scale": floats(8), "bias": floats(8)}
    return parsed(text, weights, others=', "com.microsoft" : 1'), [floats(1, 4, 8)]


def settings(name: str) -> ort.SessionOptions:
    """How a model is saved."""
    options = ort.SessionOptions()
    levels = {"convolution": EXTENDED, "quantized": EXTENDED, "initializers": DISABLED, "narrow": DISABLED}
    options.graph_optimization_level = levels.get(name, BASIC)
    options.add_session_config_entry("session.save_model_format", "ORT")
    if name == "quantized":
        # Fusions are not applied, but saved beside the graph.
        options.add_session_config_entry("optimization.minimal_build_optimizations", "save")
    return options


def message(value: Any, name: str) -> Any:
    """A value as a message of ONNX's test data."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        maps = []
        for entry in value:
            scores = [numpy_helper.from_array(np.array(score, np.float32)) for score in entry.values()]
            made = onnx.MapProto(key_type=TensorProto.STRING, string_keys=[key.encode() for key in entry])
            made.values.elem_type = onnx.SequenceProto.TENSOR
            made.values.tensor_values.extend(scores)
            maps.append(made)
        return onnx.SequenceProto(name=name, elem_type=onnx.SequenceProto.MAP, map_values=maps)
    if isinstance(value, list):
        return numpy_helper.from_list(value, name)
    return numpy_helper.from_array(np.asarray(value), name)


def write(name: str) -> None:
    """Writes the model, its inputs and outputs as a case of ONNX's node tests."""
    model, inputs = CASES[name]()
    folder = FOLDER / name
    data = folder / "test_data_set_0"
    data.mkdir(parents=True)
    options = settings(name)
    options.optimized_model_filepath = str(folder / "model.ort")
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/model.onnx"
        onnx.save(model, path, save_as_external_data=name == "external", size_threshold=0)
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session = ort.InferenceSession(str(folder / "model.ort"), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, inputs)))
    for kind, values in (("input", inputs), ("output", outputs)):
        for index, value in enumerate(values):
            (data / f"{kind}_{index}.pb").write_bytes(message(value, "").SerializeToString())


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in CASES:
        write(name)
