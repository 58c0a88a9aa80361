"""Small models for the tests of quantization, each of what one kind of network has.

`MODELS` maps names to functions that return a model. Weights and samples are random with a fixed
seed. Symbolic dimensions are `n`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {}
Shape = Sequence[int | str]
#: The extent of symbolic dimensions in samples.
EXTENT = 3


class Net:
    """A graph that grows node by node; every node has a name, and one output of that name."""

    def __init__(self, name: str, opset: int = 17, dtype: Any = np.float32) -> None:
        self.graph = onnx.GraphProto(name=name)
        self.opset, self.dtype = opset, np.dtype(dtype)
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def input(self, name: str, shape: Shape, dtype: Any = None) -> str:
        """Adds an input."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def weight(self, name: str, shape: Sequence[int], scale: float = 0.3) -> str:
        """Adds a random weight."""
        return self.constant(name, self.random.standard_normal(shape) * scale)

    def constant(self, name: str, values: Any, dtype: Any = None) -> str:
        """Adds a weight of these values."""
        array = np.asarray(values).astype(dtype or self.dtype)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, name: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a node. Returns its output, or its outputs if there are more."""
        names = [name] if outputs == 1 else [f"{name}_{place}" for place in range(outputs)]
        made = helper.make_node(op, inputs, names, "node_" + name, **attributes)
        self.graph.node.append(made)
        return name if outputs == 1 else names

    def model(self, *outputs: str, **more: int) -> onnx.ModelProto:
        """Returns the model with these outputs, whose types and shapes are inferred."""
        opsets = {"": self.opset} | more
        imports = [helper.make_opsetid(domain.replace("_", "."), v) for domain, v in opsets.items()]
        made = helper.make_model(self.graph, opset_imports=imports, ir_version=8)
        for name in outputs:
            made.graph.output.append(onnx.ValueInfoProto(name=name))
        inferred = onnx.shape_inference.infer_shapes(made)
        for value in inferred.graph.output:
            if not value.type.HasField("tensor_type"):
                kind = helper.np_dtype_to_tensor_dtype(self.dtype)
                value.CopyFrom(helper.make_tensor_value_info(value.name, kind, ["n", 4, 8]))
        made.graph.ClearField("output")
        made.graph.output.extend(inferred.graph.output)
        return made


def _model(make: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    """Lists a model under its function's name."""
    MODELS[make.__name__] = make
    return make


def samples(model: onnx.ModelProto, count: int = 3) -> list[dict[str, np.ndarray]]:
    """Returns random inputs, the same for the same model."""
    random = np.random.default_rng(zlib.crc32(model.graph.name.encode()) ^ 1)
    weights = {weight.name for weight in model.graph.initializer}
    feeds = []
    for _ in range(count):
        feed = {}
        for value in model.graph.input:
            if value.name in weights:
                continue
            tensor = value.type.tensor_type
            shape = [d.dim_value or EXTENT for d in tensor.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            if dtype.kind == "f":
                feed[value.name] = random.standard_normal(shape).astype(dtype)
            elif dtype.kind == "b":
                feed[value.name] = np.asarray(random.random(shape) < 0.5)
            else:
                feed[value.name] = random.integers(0, 4, shape).astype(dtype)
        feeds.append(feed)
    return feeds


def _conv_net(opset: int, dtype: Any = np.float32, name: str = "") -> onnx.ModelProto:
    """Convolutions with and without bias and ReLU, pools, and a Gemm."""
    net = Net(name or f"conv_{opset}", opset, dtype)
    x = net.input("x", ["n", 3, 8, 8])
    w0, b0 = net.weight("conv0.w", [4, 3, 3, 3]), net.weight("conv0.b", [4])
    x = net.node("Conv", "conv0", x, w0, b0, pads=[1, 1, 1, 1])
    x = net.node("Relu", "relu0", x)
    x = net.node("MaxPool", "pool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.node("Conv", "conv1", x, net.weight("conv1.w", [6, 4, 1, 1]))
    x = net.node("Relu", "relu1", x)
    x = net.node("GlobalAveragePool", "mean", x)
    x = net.node("Flatten", "flat", x)
    w, b = net.weight("fc.w", [5, 6]), net.weight("fc.b", [5])
    return net.model(net.node("Gemm", "fc", x, w, b, transB=1))


@_model
def conv_13() -> onnx.ModelProto:
    return _conv_net(13)


@_model
def conv_12() -> onnx.ModelProto:
    return _conv_net(12)


@_model
def conv_11() -> onnx.ModelProto:
    return _conv_net(11)


@_model
def conv_10() -> onnx.ModelProto:
    return _conv_net(10)


@_model
def conv_float16() -> onnx.ModelProto:
    return _conv_net(19, np.float16, "conv_float16")


@_model
def mobile() -> onnx.ModelProto:
    """Depthwise convolutions, ReLU6, an average pool, a product and a bias of their own."""
    net = Net("mobile")
    x = net.input("x", ["n", 2, 8, 8])
    low, high = net.constant("low", 0.0), net.constant("high", 6.0)
    x = net.node("Conv", "expand", x, net.weight("expand.w", [4, 2, 1, 1]), net.weight("b0", [4]))
    x = net.node("Clip", "clip0", x, low, high)
    w = net.weight("depth.w", [4, 1, 3, 3])
    x = net.node("Conv", "depth", x, w, net.weight("b1", [4]), group=4)
    x = net.node("Clip", "clip1", x, low, high)
    x = net.node("AveragePool", "pool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.node("Reshape", "flat", x, net.constant("shape", [-1, 36], np.int64))
    x = net.node("MatMul", "fc", x, net.weight("fc.w", [36, 5]))
    return net.model(net.node("Add", "logits", x, net.weight("fc.b", [5])))


@_model
def residual() -> onnx.ModelProto:
    """Batch normalization, a residual sum, ReLU after it, and a large bias."""
    net = Net("residual")
    x = net.input("x", ["n", 3, 6, 6])
    y = net.node("Conv", "conv0", x, net.weight("w0", [3, 3, 3, 3]), pads=[1, 1, 1, 1])
    parts = [net.weight(f"bn.{part}", [3]) for part in ("scale", "bias", "mean")]
    variance = net.constant("bn.var", np.abs(net.random.standard_normal(3)) + 0.5)
    y = net.node("BatchNormalization", "bn", y, *parts, variance)
    y = net.node("Relu", "relu0", y)
    large = net.constant("b1", [3e7, -1.0, 2.0])
    small = net.constant("w1", net.random.standard_normal((3, 3, 1, 1)) * 1e-3)
    y = net.node("Conv", "conv1", y, small, large)
    y = net.node("Add", "sum", y, x)
    return net.model(net.node("Relu", "out", y))


@_model
def branches() -> onnx.ModelProto:
    """Concatenation, resizing, a gate, and one bias of two convolutions."""
    net = Net("branches")
    x = net.input("x", [1, 2, 4, 4])
    bias = net.weight("b", [3])
    left = net.node("Conv", "left", x, net.weight("left.w", [3, 2, 1, 1]), bias)
    right = net.node("Conv", "right", x, net.weight("right.w", [3, 2, 1, 1]), bias)
    gate = net.node("Sigmoid", "gate", left)
    gated = net.node("Mul", "gated", left, gate)
    both = net.node("Concat", "both", gated, right, axis=1)
    scales = net.constant("scales", [1, 1, 2, 2], np.float32)
    large = net.node("Resize", "large", both, "", scales, mode="nearest")
    return net.model(net.node("LeakyRelu", "out", large, alpha=0.1), right)


@_model
def mlp() -> onnx.ModelProto:
    """Gemm nodes in all forms, and activations."""
    net = Net("mlp")
    x = net.input("x", ["n", 6])
    x = net.node("Gemm", "fc0", x, net.weight("w0", [8, 6]), net.weight("b0", [8]), transB=1)
    x = net.node("Relu", "relu0", x)
    x = net.node("Gemm", "fc1", x, net.weight("w1", [8, 7]), net.weight("b1", [7]))
    x = net.node("LeakyRelu", "leaky", x, alpha=0.2)
    x = net.node("Gemm", "fc2", x, net.weight("w2", [7, 5]), alpha=2.0)
    x = net.node("Sigmoid", "gate", x)
    x = net.node("Gemm", "fc3", x, net.weight("w3", [5, 4]), net.weight("b3", [4]))
    return net.model(net.node("Softmax", "out", x, axis=-1))


@_model
def gemm_beta() -> onnx.ModelProto:
    """A Gemm that adds half of its bias."""
    net = Net("gemm_beta")
    x = net.input("x", ["n", 6])
    x = net.node("Gemm", "fc", x, net.weight("w", [6, 4]), net.weight("b", [4], 3.0), beta=0.5)
    return net.model(net.node("Sigmoid", "out", x))


@_model
def gemm_row() -> onnx.ModelProto:
    """A Gemm whose bias is a row of a matrix."""
    net = Net("gemm_row")
    x = net.input("x", ["n", 6])
    x = net.node("Gemm", "fc", x, net.weight("w", [6, 4]), net.weight("b", [1, 4]))
    return net.model(net.node("Relu", "out", x))


@_model
def transformer() -> onnx.ModelProto:
    """A layer with attention under a mask, layer normalization and a tanh GELU."""
    net = Net("transformer")
    x, mask = net.input("x", ["n", 4, 8]), net.input("mask", ["n", 1, 4, 4], np.bool_)
    heads = net.constant("heads", [0, 4, 2, 4], np.int64)
    parts = {}
    for part, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        y = net.node("MatMul", f"{part}_mm", x, net.weight(f"{part}.w", [8, 8]))
        y = net.node("Add", f"{part}_add", net.weight(f"{part}.b", [8]), y)
        y = net.node("Reshape", f"{part}_heads", y, heads)
        parts[part] = net.node("Transpose", part, y, perm=axes)
    y = net.node("MatMul", "scores", parts["q"], parts["k"])
    y = net.node("Div", "scaled", y, net.constant("root", 2.0))
    y = net.node("Where", "masked", mask, y, net.constant("least", -20.0))
    y = net.node("Softmax", "probabilities", y, axis=-1)
    y = net.node("MatMul", "context", y, parts["v"])
    y = net.node("Transpose", "turned", y, perm=[0, 2, 1, 3])
    y = net.node("Reshape", "joined", y, net.constant("whole", [0, 4, 8], np.int64))
    y = net.node("MatMul", "o", y, net.weight("o.w", [8, 8]))
    x = net.node("Add", "sum", x, y)
    ones = net.constant("norm.w", 1 + 0.1 * net.random.standard_normal(8))
    x = net.node("LayerNormalization", "norm", x, ones, net.weight("norm.b", [8]))
    y = net.node("MatMul", "up", x, net.weight("up.w", [8, 16]))
    y = net.node("Tanh", "tanh", y)
    y = net.node("MatMul", "down", y, net.weight("down.w", [16, 8]))
    return net.model(net.node("Add", "out", x, y))


@_model
def deconv() -> onnx.ModelProto:
    """Transposed convolutions."""
    net = Net("deconv")
    x = net.input("x", [1, 3, 4, 4])
    x = net.node("ConvTranspose", "up0", x, net.weight("w0", [3, 4, 2, 2]), net.weight("b0", [4]))
    x = net.node("Relu", "relu", x)
    return net.model(net.node("ConvTranspose", "up1", x, net.weight("w1", [4, 2, 2, 2])))


@_model
def deconv_groups() -> onnx.ModelProto:
    """A transposed convolution with groups and a bias."""
    net = Net("deconv_groups")
    x = net.input("x", [1, 4, 4, 4])
    w, b = net.weight("w", [4, 3, 2, 2]), net.weight("b", [6])
    return net.model(net.node("ConvTranspose", "up", x, w, b, group=2))


def _lstm(name: str, layout: int) -> onnx.ModelProto:
    net = Net(name)
    x = net.input("x", [5, 2, 3])
    weights = net.weight("w", [1, 16, 3]), net.weight("r", [1, 16, 4]), net.weight("b", [1, 32])
    keywords = {"layout": 1} if layout else {}
    y = net.node("LSTM", "lstm", x, *weights, outputs=3, hidden_size=4, **keywords)
    flat = net.node("Reshape", "flat", y[1], net.constant("shape", [-1, 4], np.int64))
    return net.model(net.node("MatMul", "out", flat, net.weight("fc.w", [4, 3])), y[0])


@_model
def lstm() -> onnx.ModelProto:
    return _lstm("lstm", 0)


@_model
def lstm_batch_first() -> onnx.ModelProto:
    return _lstm("lstm_batch_first", 1)


@_model
def embedding() -> onnx.ModelProto:
    """A table, and a product with a vector for each row of it."""
    net = Net("embedding")
    ids = net.input("ids", ["n", 3], np.int64)
    x = net.node("Gather", "rows", net.weight("table", [7, 4]), ids)
    x = net.node("ReduceMean", "mean", x, axes=[1], keepdims=0)
    return net.model(net.node("MatMul", "out", x, net.weight("w", [4, 5])))


@_model
def tied() -> onnx.ModelProto:
    """One table at both ends, turned for the product."""
    net = Net("tied")
    ids = net.input("ids", ["n", 3], np.int64)
    table = net.weight("table", [7, 4])
    x = net.node("Gather", "rows", table, ids)
    x = net.node("Add", "sum", x, net.weight("positions", [3, 4]))
    turned = net.node("Transpose", "turned", table, perm=[1, 0])
    return net.model(net.node("MatMul", "logits", x, turned))


@_model
def tied_gemm() -> onnx.ModelProto:
    """One weight of two Gemm nodes, turned in one of them."""
    net = Net("tied_gemm")
    x, w = net.input("x", ["n", 4]), net.weight("w", [4, 4])
    x = net.node("Gemm", "fc0", x, w, net.weight("b0", [4]), transB=1)
    x = net.node("Relu", "relu", x)
    return net.model(net.node("Gemm", "fc1", x, w, net.weight("b1", [4])))


@_model
def subgraphs() -> onnx.ModelProto:
    """Branches with a product each, one with a weight of the outer graph."""
    net = Net("subgraphs")
    x, choice = net.input("x", ["n", 4]), net.input("choice", [], np.bool_)
    shared = net.weight("shared", [4, 4])
    x = net.node("MatMul", "first", x, net.weight("w", [4, 4]))
    arms = {}
    for arm in ("then", "else"):
        inner = Net(f"{arm}_branch")
        weight = shared if arm == "then" else inner.weight(f"{arm}.w", [4, 4])
        inner.node("MatMul", f"{arm}_mm", x, weight)
        inner.node("Relu", f"{arm}_out", f"{arm}_mm")
        kind = helper.make_tensor_value_info(f"{arm}_out", TensorProto.FLOAT, ["n", 4])
        inner.graph.output.append(kind)
        arms[f"{arm}_branch"] = inner.graph
    return net.model(net.node("If", "out", choice, **arms))


@_model
def movers() -> onnx.ModelProto:
    """Operators that only move values, between two products."""
    net = Net("movers", 13)
    x = net.input("x", [2, 4])
    x = net.node("MatMul", "first", x, net.weight("w0", [4, 8]))
    left, right = net.node("Split", "halves", x, axis=1, outputs=2)
    left = net.node("Unsqueeze", "three", left, net.constant("axis", [0], np.int64))
    pads = net.constant("pads", [0, 0, 0, 0, 0, 2], np.int64)
    left = net.node("Pad", "padded", left, pads, net.constant("fill", 0.0))
    left = net.node("Squeeze", "two", left, "axis")
    ends = [net.constant(f"end{i}", [i + 1], np.int64) for i in range(2)]
    left = net.node("Slice", "cut", left, *ends, "axis")
    places = net.constant("places", [1, 0], np.int64)
    right = net.node("Gather", "picked", right, places, axis=1)
    values, _ = net.node("TopK", "top", right, net.constant("k", [2], np.int64), outputs=2)
    y = net.node("MatMul", "second", values, net.weight("w1", [2, 3]))
    index = net.node("ArgMax", "index", y, axis=1)
    return net.model(y, index, left)


@_model
def norms() -> onnx.ModelProto:
    """Normalizations, each with weights of its own."""
    net = Net("norms")
    x = net.input("x", [2, 3, 4, 4])
    weights = net.weight("i.w", [3]), net.weight("i.b", [3])
    x = net.node("InstanceNormalization", "instance", x, *weights)
    x = net.node("Flatten", "flat", x)
    x = net.node("LayerNormalization", "layer", x, net.weight("l.w", [48]), net.weight("l.b", [48]))
    x = net.node("LayerNormalization", "bare", x, net.weight("m.w", [48]))
    return net.model(net.node("CumSum", "out", x, net.constant("axis", 1, np.int64)))


@_model
def outputs() -> onnx.ModelProto:
    """Outputs that other nodes read, an output that is an activation, and an unused weight."""
    net = Net("outputs")
    x = net.input("x", ["n", 4])
    y = net.node("MatMul", "first", x, net.weight("w0", [4, 4]))
    relu = net.node("Relu", "relu", y)
    z = net.node("MatMul", "second", relu, net.weight("w1", [4, 4]))
    net.weight("unused", [3])
    return net.model(net.node("Add", "out", z, y), y, relu)


@_model
def weight_inputs() -> onnx.ModelProto:
    """A weight that is an input too, one made by a Constant node, a scalar, a product of inputs."""
    net = Net("weight_inputs")
    x, other = net.input("x", [2, 4]), net.input("other", [4, 3])
    net.input("w", [4, 4])
    net.weight("w", [4, 4])
    x = net.node("MatMul", "first", x, "w")
    made = numpy_helper.from_array(net.random.standard_normal((4, 4)).astype(np.float32))
    x = net.node("MatMul", "second", x, net.node("Constant", "made", value=made))
    x = net.node("Mul", "scaled", x, net.constant("factor", 0.5))
    return net.model(net.node("MatMul", "out", x, other))


@_model
def batched() -> onnx.ModelProto:
    """A product with a matrix for each item of the batch, and one with a vector."""
    net = Net("batched")
    x = net.input("x", [2, 3, 4])
    x = net.node("MatMul", "each", x, net.weight("w", [2, 4, 5]))
    return net.model(net.node("MatMul", "vector", x, net.weight("v", [5])))


@_model
def constant_fill() -> onnx.ModelProto:
    """Weights without extent: zeros, one value, and a range of one sign."""
    net = Net("constant_fill")
    x = net.input("x", ["n", 4])
    x = net.node("MatMul", "zeros", x, net.constant("w0", np.zeros((4, 4))))
    x = net.node("Add", "shifted", x, net.constant("b0", np.full(4, 3.0)))
    x = net.node("MatMul", "ones", x, net.constant("w1", np.ones((4, 3))))
    return net.model(net.node("Sigmoid", "out", x))


@_model
def where() -> onnx.ModelProto:
    """A choice between values that are quantized anyway."""
    net = Net("where")
    x, choice = net.input("x", ["n", 4]), net.input("choice", ["n", 4], np.bool_)
    left = net.node("MatMul", "left", x, net.weight("w0", [4, 4]))
    right = net.node("MatMul", "right", x, net.weight("w1", [4, 4]))
    x = net.node("Where", "chosen", choice, left, right)
    pads = net.constant("pads", [0, 1, 0, 1], np.int64)
    x = net.node("Pad", "padded", x, pads, mode="reflect")
    places = net.constant("i", [[1, 0]] * 3, np.int64)
    return net.model(net.node("GatherElements", "out", x, places, axis=1))


@_model
def bert_operators() -> onnx.ModelProto:
    """Operators of `com.microsoft`: the embedding of BERT, and attention."""
    net = Net("bert_operators")
    ids = net.input("ids", ["n", 4], np.int32)
    segments = net.input("segments", ["n", 4], np.int32)
    tables = [net.weight(f"table{i}", [size, 8]) for i, size in enumerate((6, 4, 4))]
    norm = net.weight("norm.w", [8]), net.weight("norm.b", [8])
    x, index = net.node(
        "EmbedLayerNormalization", "embed", ids, segments, *tables, *norm,
        outputs=2, domain="com.microsoft",
    )  # fmt: skip
    weights = net.weight("qkv.w", [8, 24]), net.weight("qkv.b", [24])
    x = net.node("Attention", "attention", x, *weights, num_heads=2, domain="com.microsoft")
    x = net.node("MatMul", "out", x, net.weight("w", [8, 8]))
    return net.model(x, com_microsoft=1)


@_model
def loose() -> onnx.ModelProto:
    """Operators whose inputs nothing else quantizes."""
    net = Net("loose")
    x, y = net.input("x", [1, 2, 4, 4]), net.input("y", [1, 2, 4, 4])
    moved = net.node("Transpose", "moved", x, perm=[0, 1, 3, 2])
    relu = net.node("Relu", "relu", moved)
    gate = net.node("Sigmoid", "gate", y)
    leaky = net.node("LeakyRelu", "leaky", relu, alpha=0.2)
    both = net.node("Concat", "both", gate, leaky, axis=1)
    mean = net.node("AveragePool", "pool", both, kernel_shape=[2, 2])
    return net.model(net.node("GlobalAveragePool", "out", mean), net.node("Softmax", "soft", x))


@_model
def pads() -> onnx.ModelProto:
    """Padding of all kinds between convolutions."""
    net = Net("pads")
    x = net.input("x", [1, 2, 4, 4])
    edges = net.constant("edges", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    w = net.weight("w", [2, 2, 1, 1])
    x = net.node("Conv", "conv0", x, w)
    x = net.node("Pad", "bare", x, edges)
    x = net.node("Conv", "conv1", x, w)
    x = net.node("Pad", "filled", x, edges, net.constant("fill", 0.7))
    x = net.node("Conv", "conv2", x, w)
    return net.model(net.node("Pad", "out", x, edges, mode="edge"))


@_model
def relus() -> onnx.ModelProto:
    """Clips with one bound, attributes of old opsets, an activation of an input."""
    net = Net("relus", 10)
    x = net.input("x", [1, 2, 4, 4])
    x = net.node("Relu", "relu", x)
    x = net.node("Conv", "conv0", x, net.weight("w0", [3, 2, 3, 3]), net.weight("b0", [3]))
    x = net.node("Clip", "clip", x, min=0.1, max=2.0)
    x = net.node("Conv", "conv1", x, net.weight("w1", [3, 3, 1, 1]))
    x = net.node("Pad", "padded", x, pads=[0, 0, 1, 1, 0, 0, 1, 1])
    x = net.node("Relu", "second", x)
    return net.model(net.node("Unsqueeze", "out", x, axes=[0]))


@_model
def pools() -> onnx.ModelProto:
    """Pools, sums, a split and a choice of inputs that nothing else quantizes."""
    net = Net("pools")
    x, y, z = (net.input(name, [1, 2, 4, 4]) for name in "xyz")
    mean = net.node("AveragePool", "mean", net.node("Tanh", "a", x), kernel_shape=[2, 2])
    whole = net.node("GlobalAveragePool", "whole", net.node("Tanh", "b", y))
    both = net.node("Concat", "both", net.node("Tanh", "c", z), net.node("Exp", "d", z), axis=1)
    summed = net.node("Add", "summed", net.node("Tanh", "e", x), net.weight("w", [4]))
    left, right = net.node("Split", "parts", net.node("Tanh", "f", y), axis=1, outputs=2)
    index = net.node("ArgMax", "index", net.node("Tanh", "g", z), axis=1)
    return net.model(mean, whole, both, summed, left, right, index)
