"""Writes scikit-learn's handwritten digits and a small convolutional network for them, not yet trained.

usage: python digits.py OUT

OUT/digits.npz, 1,437 digits to train on, and OUT/digits_held_out.npz, 360 others: `image` [n, 1, 8, 8] in float32 from 0 to 1, and
`labels` [n] in int64. OUT/digits.onnx: from `image` [batch, 1, 8, 8] to `logits` [batch, 10], with seeded random weights.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

SEED = 20
HELD_OUT = 360
OPSET = 17
# Old enough for each runtime that reads this opset.
IR_VERSION = 8
# Name, kind, shape of the weight: output channels or features first.
LAYERS = (
    ("conv1", "Conv", (16, 1, 3, 3)),
    ("conv2", "Conv", (32, 16, 3, 3)),
    ("hidden", "Gemm", (64, 128)),
    ("classifier", "Gemm", (10, 64)),
)


def weights(rng: np.random.Generator) -> list[onnx.TensorProto]:
    """Normal with the variance that keeps that of what a ReLU lets through (He); biases of zero."""
    tensors = []
    for name, _, shape in LAYERS:
        deviation = np.sqrt(2.0 / np.prod(shape[1:]))
        drawn = (rng.standard_normal(shape) * deviation).astype(np.float32)
        tensors.append(numpy_helper.from_array(drawn, f"{name}.weight"))
        tensors.append(numpy_helper.from_array(np.zeros(shape[0], np.float32), f"{name}.bias"))
    return tensors


def network(rng: np.random.Generator) -> onnx.ModelProto:
    nodes, value = [], "image"

    def add(op: str, inputs: list[str], output: str, **attributes) -> str:
        nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    for name, kind, _ in LAYERS:
        parameters = [f"{name}.weight", f"{name}.bias"]
        if kind == "Conv":
            value = add("Conv", [value, *parameters], f"{name}.conv", pads=[1, 1, 1, 1])
            value = add("Relu", [value], f"{name}.relu")
            value = add("MaxPool", [value], f"{name}.pool", kernel_shape=[2, 2], strides=[2, 2])
        elif name == "hidden":
            value = add("Flatten", [value], "flat")
            value = add("Gemm", [value, *parameters], f"{name}.gemm", transB=1)
            value = add("Relu", [value], f"{name}.relu")
        else:
            value = add("Gemm", [value, *parameters], "logits", transB=1)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "digits", [image], [logits], weights(rng))
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="digits.py")
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    digits = load_digits()
    # 0 to 16, which float32 holds exactly as sixteenths.
    images = (digits.images / 16).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    order = rng.permutation(len(labels))
    for name, chosen in (("digits", order[HELD_OUT:]), ("digits_held_out", order[:HELD_OUT])):
        partial = out / f"{name}.partial.npz"
        np.savez_compressed(partial, image=images[chosen], labels=labels[chosen])
        partial.replace(out / f"{name}.npz")
        print(f"{name}: {len(chosen)} digits, {(out / f'{name}.npz').stat().st_size:,} bytes")
    partial = out / "digits.partial"
    partial.write_bytes(network(rng).SerializeToString())
    partial.replace(out / "digits.onnx")


if __name__ == "__main__":
    main()
