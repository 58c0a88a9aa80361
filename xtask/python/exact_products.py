"""Exact references of the operators that multiply 8-bit integers: matrix products and convolutions in 64 bits, over NumPy.

ONNX Runtime is no reference of these: where a processor has AVX2 or AVX-512 without VNNI, it adds pairs of products of uint8 and
int8 in 16 bits, which saturate, so that its results depend on the machine. `check` runs it nevertheless, on the same case
with weights of 7 bits, of which no pair saturates: there it must agree with what is computed here.

Quantization of floats, requantization and dequantization follow ONNX Runtime in float32: ties to even, the zero point added
after rounding.
"""

import itertools
from collections.abc import Callable

import numpy as np
from onnx import NodeProto, helper

# Runs a model of one node in ONNX Runtime: the node and its inputs, null for those left out.
RunNode = Callable[[NodeProto, list], list]


def integers(codes: np.ndarray, zero=None) -> np.ndarray:
    """Quantized values less their zero point."""
    codes = codes.astype(np.int64)
    return codes if zero is None else codes - zero.astype(np.int64)


def quantized(values: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Values in units of the scale, as elements of the zero point's type."""
    limits = np.iinfo(zero.dtype)
    rounded = np.rint(values.astype(np.float32)) + integers(zero)
    return np.clip(rounded, limits.min, limits.max).astype(zero.dtype)


def dynamic(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Floats quantized to uint8 by their own range, less the zero point, and the scale."""
    low, high = min(values.min(), np.float32(0)), max(values.max(), np.float32(0))
    scale = np.float32(1) if low == high else (high - low) / np.float32(255)
    zero = np.rint(np.clip(-low / scale, 0, 255)).astype(np.uint8)
    return integers(quantized(values / scale, zero), zero), scale


def convolved(x: np.ndarray, weights: np.ndarray, attributes: dict) -> np.ndarray:
    """The convolution of integers [N, C, ...] with weights [M, C / group, ...]."""
    rank = x.ndim - 2
    kernel, group = weights.shape[2:], attributes.get("group", 1)
    strides, dilations = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations)]
    pads = attributes.get("pads", [0] * (2 * rank))
    padding = list(zip(pads[:rank], pads[rank:]))
    auto_pad = attributes.get("auto_pad", b"NOTSET").decode()
    if auto_pad.startswith("SAME"):
        needed = [max(0, (-(-size // stride) - 1) * stride + span - size) for size, stride, span in zip(x.shape[2:], strides, spans)]
        padding = [(all_ - all_ // 2, all_ // 2) if auto_pad == "SAME_LOWER" else (all_ // 2, all_ - all_ // 2) for all_ in needed]
    x = np.pad(x, [(0, 0), (0, 0), *padding])
    sizes = [(size - span) // stride + 1 for size, span, stride in zip(x.shape[2:], spans, strides)]
    result = np.zeros((x.shape[0], weights.shape[0], *sizes), np.int64)
    for place in itertools.product(*map(range, kernel)):
        starts = [index * dilation for index, dilation in zip(place, dilations)]
        window = tuple(slice(start, start + (size - 1) * stride + 1, stride) for start, size, stride in zip(starts, sizes, strides))
        part, taps = x[(..., *window)], weights[(..., *place)]
        of_groups = zip(np.split(part, group, axis=1), np.split(taps, group, axis=0))
        result += np.concatenate([np.einsum("nc...,mc->nm...", image, tap) for image, tap in of_groups], axis=1)
    return result


def by_channel(values: np.ndarray, rank: int) -> np.ndarray:
    """A number for each output channel, or one for all, along axis 1."""
    return values.reshape(-1, *[1] * (rank - 2))


def conv_integer(attributes: dict, x: list, _) -> list:
    image, weights, image_zero, weights_zero = x
    weights_zero = None if weights_zero is None else weights_zero.reshape(-1, *[1] * (weights.ndim - 1))
    return [convolved(integers(image, image_zero), integers(weights, weights_zero), attributes).astype(np.int32)]


def qlinear_conv(attributes: dict, x: list, _) -> list:
    image, image_scale, image_zero, weights, weights_scale, weights_zero, scale, zero, bias = x
    is_last = attributes.get("channels_last", 0)
    image = np.moveaxis(image, -1, 1) if is_last else image
    weights_zero = weights_zero.reshape(-1, *[1] * (weights.ndim - 1))
    sums = convolved(integers(image, image_zero), integers(weights, weights_zero), attributes)
    if bias is not None:
        sums = sums + by_channel(integers(bias), sums.ndim)
    factor = by_channel(image_scale * weights_scale / scale, sums.ndim)
    result = quantized(sums.astype(np.float32) * factor, zero)
    return [np.moveaxis(result, 1, -1) if is_last else result]


def matmul_integer(_, x: list, __) -> list:
    a, b, a_zero, b_zero = x
    # A list of zero points has one for each row of A.
    a_zero = a_zero[:, None] if a_zero is not None and a_zero.ndim == 1 else a_zero
    return [(integers(a, a_zero) @ integers(b, b_zero)).astype(np.int32)]


def qlinear_matmul(_, x: list, __) -> list:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = x
    sums = integers(a, a_zero) @ integers(b, b_zero)
    return [quantized(sums.astype(np.float32) * (a_scale * b_scale / scale), zero)]


def matmul_integer_to_float(_, x: list, __) -> list:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = x
    sums = (integers(a, a_zero) @ integers(b, b_zero)).astype(np.float32)
    result = sums * a_scale.astype(np.float32) * b_scale.astype(np.float32)
    return [(result if bias is None else result + bias).astype(a_scale.dtype)]


def dynamic_quantize_matmul(_, x: list, __) -> list:
    a, b, b_scale, b_zero, bias = x
    codes, scale = dynamic(a)
    sums = (codes @ integers(b, b_zero)).astype(np.float32)
    result = sums * (scale * b_scale)
    result = result.reshape(sums.shape) if b_scale.size == 1 else result
    return [result if bias is None else result + bias]


def qgemm(attributes: dict, x: list, _) -> list:
    a, a_scale, a_zero, b, b_scale, b_zero, c, scale, zero = x
    a, b = a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b
    sums = integers(a, a_zero) @ integers(b, b_zero) + (0 if c is None else integers(c))
    factor = np.float32(attributes.get("alpha", 1.0)) * a_scale * b_scale
    result = sums.astype(np.float32) * (factor if scale is None else factor / scale)
    # What is quantized is told by the zero point alone.
    return [result if zero is None else quantized(result, zero)]


def qattention(attributes: dict, x: list, run: RunNode) -> list:
    """The projection in integers; all that follows is ONNX Runtime's attention of floats, whose own projection is the identity."""
    a, weights, bias, a_scale, weights_scale, mask, a_zero, weights_zero, past = x
    projected = (integers(a, a_zero) @ integers(weights, weights_zero)).astype(np.float32) * (a_scale * weights_scale)
    given = [projected, np.eye(projected.shape[-1], dtype=np.float32), bias, mask, past]
    names = ["" if value is None else f"x{index}" for index, value in enumerate(given)]
    node = helper.make_node("Attention", names, ["y0", "y1"], domain="com.microsoft", **attributes)
    return run(node, given)


def activation(name: str, alpha: float, beta: float) -> Callable[[np.ndarray], np.ndarray]:
    return {
        "Sigmoid": lambda v: 1 / (1 + np.exp(-v)),
        "Tanh": np.tanh,
        "Relu": lambda v: np.maximum(v, 0),
        "HardSigmoid": lambda v: np.clip(alpha * v + beta, 0, 1),
        "Softsign": lambda v: v / (1 + np.abs(v)),
    }[name]


def activations(attributes: dict, count: int) -> list:
    """The functions f, g and h of each direction. Those that take alpha and beta take the next of the list."""
    names = [name.decode() for name in attributes.get("activations", [b"Sigmoid", b"Tanh", b"Tanh"] * count)]
    alphas, betas = (iter(attributes.get(f"activation_{name}", [])) for name in ("alpha", "beta"))
    taken = [activation(name, *((next(alphas, 0.2), next(betas, 0.5)) if name == "HardSigmoid" else (0, 0))) for name in names]
    return [taken[start : start + 3] for start in range(0, len(taken), 3)]


def lstm_direction(x: np.ndarray, lengths: list, state: tuple, multiply: tuple, cell: Callable) -> tuple:
    """The states of all steps, and the last ones. A state is let go of one step after its sequence's last: until then it
    counts in the range that the states are quantized by."""
    steps, batch, _ = x.shape
    longest = max(lengths)
    of_input, of_state = multiply
    gates = of_input(x[:longest].reshape(longest * batch, -1)).reshape(longest, batch, -1)
    hidden, memory = state
    all_hidden = np.zeros((steps, batch, hidden.shape[-1]), np.float32)
    for step in range(longest):
        gone = np.array([step > length for length in lengths])[:, None]
        is_active = np.array([step < length for length in lengths])[:, None]
        sums = gates[step] + of_state(np.where(gone, np.float32(0), hidden))
        new_hidden, new_memory = cell(sums, memory)
        hidden, memory = np.where(is_active, new_hidden, hidden), np.where(is_active, new_memory, memory)
        all_hidden[step] = np.where(is_active, hidden, 0)
    return all_hidden, hidden, memory


def backwards(x: np.ndarray, lengths: list) -> np.ndarray:
    """Each sequence [steps, batch, ...] from its end to its beginning; what follows it stays."""
    result = x.copy()
    for sequence, length in enumerate(lengths):
        result[:length, sequence] = x[:length, sequence][::-1]
    return result


def lstm_cell(attributes: dict, functions: list, peepholes: np.ndarray | None) -> Callable:
    f, g, h = functions
    clip = attributes.get("clip", np.inf)

    def cell(sums: np.ndarray, memory: np.ndarray) -> tuple:
        i, o, forget, c = np.split(sums, 4, axis=-1)
        p_i, p_o, p_f = (0, 0, 0) if peepholes is None else np.split(peepholes, 3)
        i = f(np.clip(i + p_i * memory, -clip, clip))
        coupled = attributes.get("input_forget", 0)
        forget = 1 - i if coupled else f(np.clip(forget + p_f * memory, -clip, clip))
        memory = forget * memory + i * g(np.clip(c, -clip, clip))
        o = f(np.clip(o + p_o * memory, -clip, clip))
        return (o * h(memory)).astype(np.float32), memory.astype(np.float32)

    return cell


def dynamic_quantize_lstm(attributes: dict, x: list, _) -> list:
    x, w, r, bias, lengths, hidden, memory, peepholes, w_scale, w_zero, r_scale, r_zero = x
    steps, batch, _ = x.shape
    size, count = attributes["hidden_size"], w.shape[0]
    lengths = [steps] * batch if lengths is None else lengths.tolist()
    empty = np.zeros((count, batch, size), np.float32)
    functions = activations(attributes, count)
    direction = attributes.get("direction", b"forward")
    made = []
    for index in range(count):

        def multiply(values, weights, zero, scale, index=index):
            codes, own_scale = dynamic(values)
            sums = codes @ integers(weights[index], zero[index])
            return sums.astype(np.float32) * (own_scale * scale[index])

        of_both = 0 if bias is None else sum(np.split(bias[index], 2))
        of_input = lambda v: multiply(v, w, w_zero, w_scale) + of_both  # noqa: E731, B023
        of_state = lambda v: multiply(v, r, r_zero, r_scale)  # noqa: E731, B023
        is_reverse = direction == b"reverse" or index == 1
        state = tuple((empty if given is None else given)[index] for given in (hidden, memory))
        cell = lstm_cell(attributes, functions[index], None if peepholes is None else peepholes[index])
        run = lstm_direction(backwards(x, lengths) if is_reverse else x, lengths, state, (of_input, of_state), cell)
        made.append((backwards(run[0], lengths) if is_reverse else run[0], *run[1:]))
    return [np.stack([run[0] for run in made], axis=1), *(np.stack([run[part] for run in made]) for part in (1, 2))]


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of which several share a byte, the first in its low bits, along the last axis."""
    parts = [codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*codes.shape[:-1], -1).astype(np.float64)


def dequantized(codes: np.ndarray, scales: np.ndarray, zeros, bits: int) -> np.ndarray:
    """Weights [experts, outputs, inputs] with a scale for each output, or for blocks of its inputs."""
    codes, has_blocks = unpacked(codes, bits), scales.ndim == 3
    scales = scales.astype(np.float64).reshape(*codes.shape[:2], -1)
    middle = np.float64(1 << bits - 1)
    if zeros is None:
        zeros = np.full(scales.shape, middle)
    else:
        zeros = unpacked(zeros, bits)[..., : scales.shape[2 if has_blocks else 1]].reshape(scales.shape)
    block = codes.shape[2] // scales.shape[2]
    return (codes - zeros.repeat(block, 2)) * scales.repeat(block, 2)


def expert_activation(attributes: dict, first: np.ndarray, third) -> np.ndarray:
    """What is between the layers of an expert."""
    name, fusion = attributes.get("activation_type", b"relu").decode(), attributes.get("swiglu_fusion", 0)
    if name != "swiglu":
        functions = {
            "relu": lambda v: np.maximum(v, 0),
            "gelu": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
            "silu": lambda v: v / (1 + np.exp(-v)),
            "identity": lambda v: v,
        }
        return functions[name](first) * (1 if third is None else third)
    gate, linear = np.split(first, 2) if fusion == 2 else (first[0::2], first[1::2]) if fusion == 1 else (first, third)
    limit = attributes.get("swiglu_limit", np.inf)
    gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    return gate / (1 + np.exp(-attributes.get("activation_alpha", 1.0) * gate)) * (linear + attributes.get("activation_beta", 0.0))


def quantized_experts(attributes: dict, x: list, _) -> list:
    """`QMoE` in float64, with exact weights."""
    all_bits = attributes.get("expert_weight_bits", 4)
    layers = []
    for index, (weights, zeros) in enumerate(((2, 11), (5, 12), (8, 13))):
        bits = attributes.get(f"fc{index + 1}_expert_weight_bits", all_bits)
        scales, bias = x[weights + 1], x[weights + 2]
        given = None if x[weights] is None else dequantized(x[weights], scales, x[zeros], bits)
        count = 0 if given is None else given.shape[1]
        layers.append((given, np.zeros((len(x[2]), count)) if bias is None else bias.astype(np.float64)))
    tokens, logits = x[0].reshape(-1, x[0].shape[-1]).astype(np.float64), x[1].astype(np.float64)
    result = np.zeros_like(tokens)
    for token, row in enumerate(logits):
        chosen = np.argsort(-row)[: attributes.get("k", 1)]
        # As in ONNX Runtime, the softmax is over the chosen experts with and without the attribute.
        shares = np.exp(row[chosen] - row.max()) if x[14] is None else x[14][token, chosen].astype(np.float64)
        if x[14] is None or attributes.get("normalize_routing_weights", 0):
            shares /= shares.sum()
        for expert, share in zip(chosen, shares):
            apply = lambda layer, v: layers[layer][0][expert] @ v + layers[layer][1][expert]  # noqa: E731, B023
            third = None if layers[2][0] is None else apply(2, tokens[token])
            inner = expert_activation(attributes, apply(0, tokens[token]), third)
            result[token] += share * apply(1, inner)
    return [result.reshape(x[0].shape).astype(x[0].dtype)]


# By domain and operator: the function, how many inputs it takes, and which of them are weights. Without weights ONNX Runtime
# is not asked: on some processors it rounds the rows that it multiplies to 8 bits.
OPERATORS = {
    ("", "ConvInteger"): (conv_integer, 4, [1]),
    ("", "MatMulInteger"): (matmul_integer, 4, [1]),
    ("", "QLinearConv"): (qlinear_conv, 9, [3]),
    ("", "QLinearMatMul"): (qlinear_matmul, 8, [3]),
    ("com.microsoft", "DynamicQuantizeLSTM"): (dynamic_quantize_lstm, 12, [1, 2]),
    ("com.microsoft", "DynamicQuantizeMatMul"): (dynamic_quantize_matmul, 5, [1]),
    ("com.microsoft", "MatMulIntegerToFloat"): (matmul_integer_to_float, 7, [1]),
    ("com.microsoft", "QAttention"): (qattention, 9, [1]),
    ("com.microsoft", "QGemm"): (qgemm, 9, [3]),
    ("com.microsoft", "QLinearConv"): (qlinear_conv, 9, [3]),
    ("com.microsoft", "QMoE"): (quantized_experts, 21, None),
}


def evaluate(node: NodeProto, values: list, run: RunNode) -> list:
    """The outputs of a node of one of the operators above, those without a name left out."""
    function, count, _ = OPERATORS[node.domain, node.op_type]
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    outputs = function(attributes, [*values, *[None] * (count - len(values))], run)
    return [output for name, output in zip(node.output, outputs) if name]


def check(node: NodeProto, values: list, tolerance: list, run: RunNode) -> None:
    """Fails unless ONNX Runtime agrees where nothing can saturate: with half of each int8 weight."""
    weights = OPERATORS[node.domain, node.op_type][2]
    if weights is None:
        return
    tame = [value // 2 if index in weights and value.dtype == np.int8 else value for index, value in enumerate(values)]
    for name, ours, theirs in zip(filter(None, node.output), evaluate(node, tame, run), run(node, tame), strict=True):
        assert ours.dtype == theirs.dtype, f"{name} is {ours.dtype}, in ONNX Runtime {theirs.dtype}"
        np.testing.assert_allclose(ours, theirs, *tolerance, err_msg=f"{name} and ONNX Runtime's", strict=True)
