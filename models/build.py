"""Builds well-known architectures as ONNX models with reproducible random weights.

usage: python build.py NAME OUT.onnx      (needs numpy and onnx)

The graphs are those that exporters write: layer norms are operators, GELU and RMS norm are spelled
out, a group norm is an InstanceNormalization of groups. Weights are normal with a deviation of
1 / sqrt(inputs), which keeps activations near 1.
"""

import math
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class Graph:
    """A graph in the making. Operators and weights return the names of values."""

    def __init__(self, name: str):
        self.name = name
        self.random = np.random.default_rng(sum(name.encode()))
        self.nodes, self.initializers, self.inputs, self.outputs = [], [], [], []

    def input(self, name: str, shape: list, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, shape: list) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"to_{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def node(self, op: str, *inputs: str, **attributes) -> str:
        return self.node_of(op, inputs, 1, attributes)[0]

    def node_of(self, op: str, inputs, outputs: int, attributes: dict) -> list[str]:
        name = f"{op}_{len(self.nodes)}"
        results = [f"{name}_output_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), results, name=name, **attributes))
        return results

    def constant(self, array: np.ndarray, name: str = "constant") -> str:
        name = f"{name}_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self.constant(np.float32(value))

    def weight(self, *shape: int, inputs: int = 0) -> str:
        """Normal numbers; `inputs` is how many of them a result sums (default: all but one axis)."""
        deviation = 1 / math.sqrt(inputs or max(1, math.prod(shape[1:])))
        values = self.random.standard_normal(shape, dtype=np.float32)
        return self.constant(values * np.float32(deviation), "weight")

    def vector(self, count: int, mean: float = 0.0) -> str:
        values = self.random.standard_normal(count, dtype=np.float32)
        return self.constant(values * np.float32(0.02) + np.float32(mean), "weight")

    def linear(self, x: str, inputs: int, outputs: int, bias: bool = True) -> str:
        y = self.node("MatMul", x, self.weight(inputs, outputs, inputs=inputs))
        return self.node("Add", self.vector(outputs), y) if bias else y

    def conv(self, x: str, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> str:
        pad = kernel // 2
        weights = self.weight(outputs, inputs, kernel, kernel), self.vector(outputs)
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        return self.node("Conv", x, *weights, **sizes)

    def layer_norm(self, x: str, count: int) -> str:
        return self.node("LayerNormalization", x, self.vector(count, 1), self.vector(count), axis=-1)

    def gelu(self, x: str) -> str:
        erf = self.node("Erf", self.node("Div", x, self.number(math.sqrt(2))))
        product = self.node("Mul", x, self.node("Add", erf, self.number(1)))
        return self.node("Mul", product, self.number(0.5))

    def silu(self, x: str) -> str:
        return self.node("Mul", x, self.node("Sigmoid", x))

    def reshape(self, x: str, *shape: int) -> str:
        return self.node("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("Transpose", x, perm=list(perm))

    def split(self, x: str, parts: int, axis: int, size: int) -> list[str]:
        return self.node_of("Split", [x, self.ints(*[size] * parts)], parts, {"axis": axis})

    def heads(self, x: str, count: int, size: int, perm=(0, 2, 1, 3)) -> str:
        """[batch, tokens, count * size] -> [batch, count, tokens, size]."""
        return self.transpose(self.reshape(x, 0, -1, count, size), *perm)

    def attention(self, q: str, k_transposed: str, v: str, size: int, bias: str = "") -> str:
        """Attention of heads; the result is [batch, tokens, heads * size]."""
        scores = self.node("Mul", self.node("MatMul", q, k_transposed), self.number(size**-0.5))
        scores = self.node("Add", scores, bias) if bias else scores
        mixed = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        return self.node("Reshape", self.transpose(mixed, 0, 2, 1, 3), self.ints(0, 0, -1))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def speech_blstm(g: Graph) -> None:
    """Three bidirectional LSTMs of 512 and a projection, as speech recognizers have them."""
    width, hidden, targets = 80, 512, 600
    x = g.input("features", ["batch", "frames", width])
    x = g.transpose(x, 1, 0, 2)
    for _ in range(3):
        weights = [
            g.weight(2, 4 * hidden, width, inputs=width),
            g.weight(2, 4 * hidden, hidden, inputs=hidden),
            g.weight(2, 8 * hidden),
        ]
        attributes = {"hidden_size": hidden, "direction": "bidirectional"}
        y = g.node_of("LSTM", [x, *weights], 3, attributes)[0]
        x = g.reshape(g.transpose(y, 0, 2, 1, 3), 0, 0, -1)
        width = 2 * hidden
    g.output(g.linear(g.transpose(x, 1, 0, 2), width, targets), "scores", ["batch", "frames", targets])


def vit_small(g: Graph) -> None:
    """ViT-S/16 of pictures of 224 (Dosovitskiy et al. 2021): 12 layers of 384, 6 heads."""
    width, count, size = 384, 6, 64
    x = g.input("image", ["batch", 3, 224, 224])
    weights = g.weight(width, 3, 16, 16), g.vector(width)
    x = g.node("Conv", x, *weights, kernel_shape=[16, 16], strides=[16, 16])
    x = g.transpose(g.reshape(x, 0, width, -1), 0, 2, 1)
    rows = g.node("Concat", g.node("Slice", g.node("Shape", x), g.ints(0), g.ints(1)), g.ints(1, width), axis=0)
    first = g.node("Expand", g.weight(1, 1, width), rows)
    x = g.node("Add", g.node("Concat", first, x, axis=1), g.weight(1, 197, width))
    for _ in range(12):
        y = g.linear(g.layer_norm(x, width), width, 3 * width)
        y = g.transpose(g.reshape(y, 0, -1, 3, count, size), 2, 0, 3, 1, 4)
        q, k, v = (g.node("Gather", y, g.constant(np.int64(index)), axis=0) for index in range(3))
        y = g.attention(q, g.transpose(k, 0, 1, 3, 2), v, size)
        x = g.node("Add", x, g.linear(y, width, width))
        y = g.gelu(g.linear(g.layer_norm(x, width), width, 4 * width))
        x = g.node("Add", x, g.linear(y, 4 * width, width))
    x = g.node("Gather", g.layer_norm(x, width), g.constant(np.int64(0)), axis=1)
    g.output(g.linear(x, width, 1000), "logits", ["batch", 1000])


def yolo_nano(g: Graph) -> None:
    """A YOLOv8-like detector of pictures of 320, its smallest size: SiLU convolutions, C2f blocks."""

    def unit(x, inputs, outputs, kernel=1, stride=1):
        return g.silu(g.conv(x, inputs, outputs, kernel, stride))

    def c2f(x, inputs, outputs, depth, shortcut):
        half = outputs // 2
        parts = g.split(unit(x, inputs, outputs), 2, 1, half)
        for _ in range(depth):
            y = unit(unit(parts[-1], half, half, 3), half, half, 3)
            parts.append(g.node("Add", parts[-1], y) if shortcut else y)
        return unit(g.node("Concat", *parts, axis=1), half * len(parts), outputs)

    def larger(x):
        scales = g.constant(np.array([1, 1, 2, 2], np.float32))
        attributes = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        return g.node("Resize", x, "", scales, **attributes)

    x = g.input("images", ["batch", 3, 320, 320])
    x = unit(unit(x, 3, 16, 3, 2), 16, 32, 3, 2)
    x = unit(c2f(x, 32, 32, 1, True), 32, 64, 3, 2)
    at8 = c2f(x, 64, 64, 2, True)
    at16 = c2f(unit(at8, 64, 128, 3, 2), 128, 128, 2, True)
    x = c2f(unit(at16, 128, 256, 3, 2), 256, 256, 1, True)
    pools = [unit(x, 256, 128)]
    for _ in range(3):
        pools.append(g.node("MaxPool", pools[-1], kernel_shape=[5, 5], strides=[1, 1], pads=[2] * 4))
    at32 = unit(g.node("Concat", *pools, axis=1), 512, 256)
    up16 = c2f(g.node("Concat", larger(at32), at16, axis=1), 384, 128, 1, False)
    out8 = c2f(g.node("Concat", larger(up16), at8, axis=1), 192, 64, 1, False)
    out16 = c2f(g.node("Concat", unit(out8, 64, 64, 3, 2), up16, axis=1), 192, 128, 1, False)
    out32 = c2f(g.node("Concat", unit(out16, 128, 128, 3, 2), at32, axis=1), 384, 256, 1, False)
    boxes, classes = [], []
    for x, width in ((out8, 64), (out16, 128), (out32, 256)):
        box = g.conv(unit(unit(x, width, 64, 3), 64, 64, 3), 64, 64)
        kind = g.conv(unit(unit(x, width, 80, 3), 80, 80, 3), 80, 80)
        boxes.append(g.reshape(box, 0, 64, -1))
        classes.append(g.reshape(kind, 0, 80, -1))
    # The distance of each side is a mean over 16 bins.
    bins = g.transpose(g.reshape(g.node("Concat", *boxes, axis=2), 0, 4, 16, 2100), 0, 2, 1, 3)
    means = g.constant(np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))
    sides = g.node("Conv", g.node("Softmax", bins, axis=1), means, kernel_shape=[1, 1])
    least, most = g.split(g.reshape(sides, 0, 4, 2100), 2, 1, 2)
    cells = [np.stack(np.meshgrid(*[np.arange(n) + 0.5] * 2)).reshape(2, -1) for n in (40, 20, 10)]
    strides = [np.full((1, n * n), 320 / n) for n in (40, 20, 10)]
    anchors = g.constant(np.concatenate(cells, axis=1).astype(np.float32)[None])
    least, most = g.node("Sub", anchors, least), g.node("Add", anchors, most)
    middle = g.node("Div", g.node("Add", least, most), g.number(2))
    box = g.node("Concat", middle, g.node("Sub", most, least), axis=1)
    box = g.node("Mul", box, g.constant(np.concatenate(strides, axis=1).astype(np.float32)[None]))
    scores = g.node("Sigmoid", g.node("Concat", *classes, axis=2))
    g.output(g.node("Concat", box, scores, axis=1), "output0", ["batch", 84, 2100])


def t5_small_step(g: Graph) -> None:
    """A step of T5-small's decoder (Raffel et al. 2020) with caches: 6 layers of 512, 8 heads."""
    width, count, size, inner, words = 512, 8, 64, 2048, 32128

    def norm(x):
        square = g.node("ReduceMean", g.node("Pow", x, g.number(2)), axes=[-1], keepdims=1)
        root = g.node("Sqrt", g.node("Add", square, g.number(1e-6)))
        scaled = g.node("Mul", x, g.node("Div", g.number(1), root))
        return g.node("Mul", g.vector(width, 1), scaled)

    def position_bias(total):
        """Buckets of the distance to each key: exact up to 16, then logarithmic up to 128."""
        zero, one = (g.constant(np.int64(value)) for value in (0, 1))
        last = g.node("Sub", total, one)
        distance = g.node("Sub", last, g.node("Range", zero, total, one))
        ratio = g.node("Div", g.node("Cast", distance, to=TensorProto.FLOAT), g.number(16))
        logarithm = g.node("Div", g.node("Log", ratio), g.number(math.log(8)))
        far = g.node("Cast", g.node("Mul", logarithm, g.number(16)), to=TensorProto.INT64)
        far = g.node("Min", g.node("Add", far, g.constant(np.int64(16))), g.constant(np.int64(31)))
        bucket = g.node("Where", g.node("Less", distance, g.constant(np.int64(16))), distance, far)
        bias = g.node("Gather", g.weight(32, count), bucket)
        return g.node("Unsqueeze", g.transpose(bias, 1, 0), g.ints(0, 2))

    tokens = g.input("input_ids", ["batch", 1], TensorProto.INT64)
    table = g.weight(words, width)
    x = g.node("Gather", table, tokens)
    bias = ""
    for layer in range(6):
        past = [g.input(f"past.{layer}.{kind}", ["batch", count, "past", size]) for kind in ("key", "value")]
        cross = [g.input(f"cross.{layer}.{kind}", ["batch", count, "source", size]) for kind in ("key", "value")]
        y = norm(x)
        q, k, v = (g.heads(g.linear(y, width, width, False), count, size) for _ in range(3))
        k, v = (g.node("Concat", old, new, axis=2) for old, new in zip(past, (k, v)))
        for kind, value in (("key", k), ("value", v)):
            g.output(value, f"present.{layer}.{kind}", ["batch", count, "total", size])
        if not bias:
            bias = position_bias(g.node("Gather", g.node("Shape", k), g.constant(np.int64(2))))
        scores = g.node("Add", g.node("MatMul", q, g.transpose(k, 0, 1, 3, 2)), bias)
        mixed = g.node("MatMul", g.node("Softmax", scores, axis=-1), v)
        y = g.reshape(g.transpose(mixed, 0, 2, 1, 3), 0, -1, width)
        x = g.node("Add", x, g.linear(y, width, width, False))
        q = g.heads(g.linear(norm(x), width, width, False), count, size)
        scores = g.node("MatMul", q, g.transpose(cross[0], 0, 1, 3, 2))
        mixed = g.node("MatMul", g.node("Softmax", scores, axis=-1), cross[1])
        y = g.reshape(g.transpose(mixed, 0, 2, 1, 3), 0, -1, width)
        x = g.node("Add", x, g.linear(y, width, width, False))
        y = g.node("Relu", g.linear(norm(x), width, inner, False))
        x = g.node("Add", x, g.linear(y, inner, width, False))
    x = g.node("Mul", norm(x), g.number(width**-0.5))
    # The head shares the table of words.
    logits = g.node("MatMul", x, g.transpose(table, 1, 0))
    g.output(logits, "logits", ["batch", 1, words])


def sam_blocks(g: Graph) -> None:
    """Two blocks of SAM's ViT-B encoder (Kirillov et al. 2023) at 32x32: windows of 14, then all."""
    width, count, size, side = 768, 12, 64, 32

    def attend(x, span):
        """Attention over a map [n, span, span, width] with relative positions of both axes."""
        area = span * span
        y = g.reshape(g.linear(x, width, 3 * width), -1, area, 3, count, size)
        y = g.reshape(g.transpose(y, 2, 0, 3, 1, 4), 3, -1, area, size)
        q, k, v = (g.node("Gather", y, g.constant(np.int64(index)), axis=0) for index in range(3))
        scores = g.node("MatMul", g.node("Mul", q, g.number(size**-0.5)), g.transpose(k, 0, 2, 1))
        places = g.reshape(q, -1, span, span, size)
        index = np.arange(span)[:, None] - np.arange(span)[None] + span - 1
        tables = [g.node("Gather", g.weight(2 * span - 1, size), g.constant(index)) for _ in range(2)]
        rows = g.node("Einsum", places, tables[0], equation="bhwc,hkc->bhwk")
        columns = g.node("Einsum", places, tables[1], equation="bhwc,wkc->bhwk")
        scores = g.reshape(scores, -1, span, span, span, span)
        scores = g.node("Add", scores, g.node("Unsqueeze", rows, g.ints(4)))
        scores = g.node("Add", scores, g.node("Unsqueeze", columns, g.ints(3)))
        weights = g.node("Softmax", g.reshape(scores, -1, area, area), axis=-1)
        y = g.reshape(g.node("MatMul", weights, v), -1, count, span, span, size)
        return g.linear(g.reshape(g.transpose(y, 0, 2, 3, 1, 4), -1, span, span, width), width, width)

    x = g.input("embeddings", [1, side, side, width])
    for span in (14, 0):
        y = g.layer_norm(x, width)
        if span:
            rows = -(-side // span)
            pads = g.ints(0, 0, 0, 0, 0, rows * span - side, rows * span - side, 0)
            y = g.reshape(g.node("Pad", y, pads), 1, rows, span, rows, span, width)
            y = attend(g.reshape(g.transpose(y, 0, 1, 3, 2, 4, 5), -1, span, span, width), span)
            y = g.transpose(g.reshape(y, 1, rows, rows, span, span, width), 0, 1, 3, 2, 4, 5)
            y = g.reshape(y, 1, rows * span, rows * span, width)
            y = g.node("Slice", y, g.ints(0, 0), g.ints(side, side), g.ints(1, 2))
        else:
            y = attend(y, side)
        x = g.node("Add", x, y)
        y = g.gelu(g.linear(g.layer_norm(x, width), width, 4 * width))
        x = g.node("Add", x, g.linear(y, 4 * width, width))
    g.output(x, "features", [1, side, side, width])


def vae_decoder(g: Graph) -> None:
    """The decoder of Stable Diffusion's autoencoder (Rombach et al. 2022) for latents of 16x16."""

    def group_norm(x, channels):
        flat = g.reshape(x, 0, 32, -1)
        unit = g.constant(np.ones(32, np.float32)), g.constant(np.zeros(32, np.float32))
        y = g.node("InstanceNormalization", flat, *unit, epsilon=1e-6)
        y = g.node("Reshape", y, g.node("Shape", x))
        scale, shift = (g.reshape(g.vector(channels, mean), channels, 1, 1) for mean in (1, 0))
        return g.node("Add", g.node("Mul", y, scale), shift)

    def residual(x, inputs, outputs):
        y = g.conv(g.silu(group_norm(x, inputs)), inputs, outputs, 3)
        y = g.conv(g.silu(group_norm(y, outputs)), outputs, outputs, 3)
        return g.node("Add", x if inputs == outputs else g.conv(x, inputs, outputs), y)

    def attention(x, width, area):
        y = g.transpose(g.reshape(group_norm(x, width), 0, width, area), 0, 2, 1)
        q, k, v = (g.linear(y, width, width) for _ in range(3))
        scores = g.node("Mul", g.node("MatMul", q, g.transpose(k, 0, 2, 1)), g.number(width**-0.5))
        y = g.linear(g.node("MatMul", g.node("Softmax", scores, axis=-1), v), width, width)
        return g.node("Add", x, g.node("Reshape", g.transpose(y, 0, 2, 1), g.node("Shape", x)))

    side = 16
    x = g.conv(g.input("latents", ["batch", 4, side, side]), 4, 512, 3)
    x = residual(attention(residual(x, 512, 512), 512, side * side), 512, 512)
    inputs = 512
    for level, outputs in enumerate((512, 512, 256, 128)):
        for _ in range(3):
            x = residual(x, inputs, outputs)
            inputs = outputs
        if level < 3:
            scales = g.constant(np.array([1, 1, 2, 2], np.float32))
            attributes = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
            x = g.conv(g.node("Resize", x, "", scales, mode="nearest", **attributes), outputs, outputs, 3)
    x = g.conv(g.silu(group_norm(x, 128)), 128, 3, 3)
    g.output(x, "image", ["batch", 3, 8 * side, 8 * side])


ARCHITECTURES = (speech_blstm, vit_small, yolo_nano, t5_small_step, sam_blocks, vae_decoder)


def build(name: str) -> onnx.ModelProto:
    (architecture,) = (each for each in ARCHITECTURES if each.__name__ == name)
    graph = Graph(name)
    architecture(graph)
    return graph.model()


if __name__ == "__main__":
    onnx.save(build(sys.argv[1]), sys.argv[2])
