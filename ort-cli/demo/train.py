"""Trains the demo's classifier of handwritten digits and writes what the binary embeds.

usage: python train.py [OUT_FOLDER]      (needs what requirements.txt beside this file pins)

Data: scikit-learn's `load_digits`, 1,797 images of 8x8 pixels: the test part of the UCI data set
"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak (1998),
https://doi.org/10.24432/C50P49, licence CC BY 4.0. Pixels 0 to 16 are divided by 16.

Writes
  digits.onnx   input `image` float32 [batch,1,8,8] in 0..1, output `probabilities` float32 [batch,10]
  digits.npz    `image` float32 [10,1,8,8] and `label` int64 [10]: of the images kept out of training,
                the first of each digit
The network is Conv-Relu-MaxPool twice, then two Gemm and a Softmax, trained here with Adam in numpy on
four fifths of the images, each moved by up to one pixel; the last fifth gives the printed accuracy.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

SEED = 7
EPOCHS = 80
BATCH = 32
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-4
CHANNELS = (16, 32)
HIDDEN = 64
CLASSES = 10
KERNEL = 3


def initial_parameters(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """He's initialisation: normal with variance 2 / fan-in; biases zero."""
    first, second = CHANNELS
    flat = second * 2 * 2
    shapes = {
        "conv1": (first, 1, KERNEL, KERNEL),
        "conv2": (second, first, KERNEL, KERNEL),
        "hidden": (flat, HIDDEN),
        "output": (HIDDEN, CLASSES),
    }
    parameters = {}
    for name, shape in shapes.items():
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        units = shape[0] if len(shape) == 4 else shape[1]
        parameters[f"{name}.weight"] = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)
        parameters[f"{name}.bias"] = np.zeros(units, np.float32)
    return parameters


def windows(x: np.ndarray) -> np.ndarray:
    """[n,c,h,w] to [n,h,w,c,3,3]: the neighbourhood of each pixel, zero beyond the border."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sliding_window_view(padded, (KERNEL, KERNEL), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)


def convolve(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return np.tensordot(windows(x), weight, axes=((3, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2) + bias[:, None, None]


def convolve_backward(x, weight, gradient):
    weight_gradient = np.tensordot(gradient, windows(x), axes=((0, 2, 3), (0, 1, 2)))
    flipped = weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
    x_gradient = convolve(gradient, flipped, np.zeros(weight.shape[1], np.float32))
    return x_gradient, weight_gradient, gradient.sum(axis=(0, 2, 3))


def pool(x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))


def pool_backward(x, y, gradient):
    """The gradient goes to each block's maximum, shared between equals."""
    spread = np.ones((1, 1, 2, 2), np.float32)
    is_maximum = (x == np.kron(y, spread)).astype(np.float32)
    n, c, h, w = x.shape
    count = is_maximum.reshape(n, c, h // 2, 2, w // 2, 2).sum(axis=(3, 5))
    return is_maximum * np.kron(gradient / count, spread)


def forward(p: dict[str, np.ndarray], x: np.ndarray) -> dict[str, np.ndarray]:
    a = {"x": x}
    a["conv1"] = np.maximum(convolve(x, p["conv1.weight"], p["conv1.bias"]), 0)
    a["pool1"] = pool(a["conv1"])
    a["conv2"] = np.maximum(convolve(a["pool1"], p["conv2.weight"], p["conv2.bias"]), 0)
    a["pool2"] = pool(a["conv2"])
    a["flat"] = a["pool2"].reshape(len(x), -1)
    a["hidden"] = np.maximum(a["flat"] @ p["hidden.weight"] + p["hidden.bias"], 0)
    logits = a["hidden"] @ p["output.weight"] + p["output.bias"]
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    a["probabilities"] = exponents / exponents.sum(axis=1, keepdims=True)
    return a


def backward(p, a, labels) -> dict[str, np.ndarray]:
    """Gradients of the mean cross-entropy."""
    g = {}
    delta = (a["probabilities"] - np.eye(CLASSES, dtype=np.float32)[labels]) / len(labels)
    g["output.weight"], g["output.bias"] = a["hidden"].T @ delta, delta.sum(axis=0)
    delta = (delta @ p["output.weight"].T) * (a["hidden"] > 0)
    g["hidden.weight"], g["hidden.bias"] = a["flat"].T @ delta, delta.sum(axis=0)
    delta = (delta @ p["hidden.weight"].T).reshape(a["pool2"].shape)
    delta = pool_backward(a["conv2"], a["pool2"], delta) * (a["conv2"] > 0)
    delta, g["conv2.weight"], g["conv2.bias"] = convolve_backward(a["pool1"], p["conv2.weight"], delta)
    delta = pool_backward(a["conv1"], a["pool1"], delta) * (a["conv1"] > 0)
    _, g["conv1.weight"], g["conv1.bias"] = convolve_backward(a["x"], p["conv1.weight"], delta)
    return g


def moved(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Each image moved by -1, 0 or 1 pixel along each axis, zero moving in."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    offsets = rng.integers(0, 3, (len(images), 2))
    return np.stack([image[:, dy : dy + 8, dx : dx + 8] for image, (dy, dx) in zip(padded, offsets)])


def train(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    p = initial_parameters(rng)
    mean = {name: np.zeros_like(value) for name, value in p.items()}
    square = {name: np.zeros_like(value) for name, value in p.items()}
    steps = EPOCHS * (len(images) // BATCH)
    step = 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            step += 1
            chosen = order[start : start + BATCH]
            gradients = backward(p, forward(p, moved(rng, images[chosen])), labels[chosen])
            rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
            for name, gradient in gradients.items():
                mean[name] += 0.1 * (gradient - mean[name])
                square[name] += 0.001 * (gradient**2 - square[name])
                update = (mean[name] / (1 - 0.9**step)) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
                p[name] -= (rate * (update + WEIGHT_DECAY * p[name])).astype(np.float32)
    return p


def build_model(p: dict[str, np.ndarray]) -> onnx.ModelProto:
    def node(op_type, inputs, output, **attributes):
        return helper.make_node(op_type, inputs, [output], name=output, **attributes)

    def convolution(name, source):
        parts = [source, f"{name}.weight", f"{name}.bias"]
        return [
            node("Conv", parts, name, kernel_shape=[KERNEL, KERNEL], pads=[1, 1, 1, 1]),
            node("Relu", [name], f"{name}.relu"),
            node("MaxPool", [f"{name}.relu"], f"{name}.pool", kernel_shape=[2, 2], strides=[2, 2]),
        ]

    nodes = [
        *convolution("conv1", "image"),
        *convolution("conv2", "conv1.pool"),
        node("Flatten", ["conv2.pool"], "flat"),
        node("Gemm", ["flat", "hidden.weight", "hidden.bias"], "hidden"),
        node("Relu", ["hidden"], "hidden.relu"),
        node("Gemm", ["hidden.relu", "output.weight", "output.bias"], "logits"),
        node("Softmax", ["logits"], "probabilities", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in p.items()],
        doc_string="Handwritten digits. Trained on UCI Optical Recognition of Handwritten Digits, CC BY 4.0.",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="ort-runtime")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(SEED).permutation(len(images))
    split = len(images) * 4 // 5
    learn, held_out = order[:split], order[split:]

    parameters = train(images[learn], labels[learn])
    predicted = forward(parameters, images[held_out])["probabilities"].argmax(axis=1)
    right = int((predicted == labels[held_out]).sum())
    print(f"held-out accuracy: {right} of {len(held_out)} ({100 * right / len(held_out):.2f}%)")

    model = build_model(parameters)
    onnx.save(model, out / "digits.onnx")
    shown = [held_out[np.flatnonzero(labels[held_out] == digit)[0]] for digit in range(CLASSES)]
    np.savez(out / "digits.npz", image=images[shown], label=labels[shown].astype(np.int64))


if __name__ == "__main__":
    main()
