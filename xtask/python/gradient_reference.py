"""Records gradients of PyTorch's autograd in double precision: ort-runtime/tests/data/torch_gradients.json.

    python xtask/python/gradient_reference.py

needs PyTorch 2. Each case is one ONNX node, its inputs, a weight for each element of its first output, and the
gradients of the weighted sum by the inputs of floats. `ort-runtime/tests/integration/gradient_reference.rs` holds ours against them.
"""

import json
import pathlib

import torch
import torch.nn.functional as F

torch.manual_seed(20)
torch.set_default_dtype(torch.float64)
PATH = pathlib.Path(__file__).parents[2] / "ort-runtime/tests/data/torch_gradients.json"
CASES = []


def floats(*shape):
    """Random numbers that single precision holds, so that both precisions compute the same."""
    return torch.randn(*shape).mul(64).round().div(64).requires_grad_()


def between(*shape):
    """The same with none at a pixel or a border, where slopes have two sides."""
    return (floats(*shape).detach() + 1 / 128).requires_grad_()


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def tensor(value):
    if value is None:
        return None
    kind = {torch.float64: "float", torch.int64: "int64", torch.bool: "bool"}[value.dtype]
    return {"type": kind, "shape": list(value.shape), "values": value.detach().flatten().tolist()}


def case(name, op, inputs, function, **attributes):
    """One node; the function computes its first output from the inputs that are given."""
    output = function(*[value for value in inputs if value is not None])
    weights = torch.randn_like(output).mul(64).round().div(64)
    wanted = [index for index, value in enumerate(inputs) if value is not None and value.requires_grad]
    gradients = torch.autograd.grad((output * weights).sum(), [inputs[index] for index in wanted])
    CASES.append(
        {
            "name": name,
            "op": op,
            "attributes": attributes,
            "inputs": [tensor(value) for value in inputs],
            "output": tensor(output),
            "weights": tensor(weights),
            "wanted": wanted,
            "gradients": [tensor(gradient) for gradient in gradients],
        }
    )


def convolutions():
    x, w, b = floats(2, 4, 7, 6), floats(6, 2, 3, 2), floats(6)
    case("groups, strides, dilations, pads", "Conv", [x, w, b],
         lambda x, w, b: F.conv2d(F.pad(x, (0, 1, 2, 1)), w, b, (2, 1), 0, (1, 2), 2),
         group=2, strides=[2, 1], dilations=[1, 2], pads=[2, 0, 1, 1])
    case("one axis", "Conv", [floats(2, 3, 9), floats(4, 3, 3)],
         lambda x, w: F.conv1d(x, w, None, 2, 1), strides=[2], pads=[1, 1])
    case("volumes", "Conv", [floats(1, 2, 4, 3, 4), floats(2, 2, 2, 2, 2), floats(2)], F.conv3d)
    case("same size, upper", "Conv", [floats(1, 2, 5, 6), floats(3, 2, 3, 2)],
         lambda x, w: F.conv2d(F.pad(x, (0, 0, 1, 1)), w, None, 2), auto_pad="SAME_UPPER", strides=[2, 2])
    case("transposed", "ConvTranspose", [floats(2, 4, 3, 4), floats(4, 3, 3, 2), floats(6)],
         lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 3), 1, (1, 0), 2, (1, 2)),
         strides=[2, 3], pads=[1, 1, 1, 1], output_padding=[1, 0], group=2, dilations=[1, 2])


def reorder(weights, order):
    """Gates of ONNX's order, along the first axis, in PyTorch's."""
    parts = weights.chunk(len(order))
    return torch.cat([parts[index] for index in order])


def recurrent(name, module, order, x, w, r, b, states, **attributes):
    directions = w.shape[0]

    def run(x, w, r, b, *states):
        parameters = {}
        for index, suffix in enumerate(["", "_reverse"][:directions]):
            input_bias, state_bias = b[index].chunk(2)
            parts = {"weight_ih": w[index], "weight_hh": r[index], "bias_ih": input_bias, "bias_hh": state_bias}
            parameters |= {f"{key}_l0{suffix}": reorder(part, order) for key, part in parts.items()}
        given = states if len(states) > 1 else states[0]
        y, _ = torch.func.functional_call(module, parameters, (x, given))
        return y.unflatten(2, (directions, -1)).transpose(1, 2)

    case(name, type(module).__name__, [x, w, r, b, None, *states], run, hidden_size=3, **attributes)


def layers():
    steps, batch, size, hidden = 4, 2, 5, 3
    for op, gates, order in [("LSTM", 4, [0, 2, 3, 1]), ("GRU", 3, [1, 0, 2]), ("RNN", 1, [0])]:
        for directions in [1, 2]:
            module = getattr(torch.nn, op)(size, hidden, bidirectional=directions == 2)
            attributes = {"direction": ["forward", "bidirectional"][directions - 1]}
            if op == "GRU":
                attributes["linear_before_reset"] = 1
            states = [floats(directions, batch, hidden) for _ in range(2 if op == "LSTM" else 1)]
            recurrent(f"{directions} directions", module, order, floats(steps, batch, size),
                      floats(directions, gates * hidden, size), floats(directions, gates * hidden, hidden),
                      floats(directions, 2 * gates * hidden), states, **attributes)


def normalizations():
    case("two axes", "LayerNormalization", [floats(2, 3, 4, 2), floats(4, 2), floats(4, 2)],
         lambda x, s, b: F.layer_norm(x, (4, 2), s, b), axis=2)
    case("groups", "GroupNormalization", [floats(2, 6, 3), floats(6), floats(6)],
         lambda x, s, b: F.group_norm(x, 3, s, b), num_groups=3)
    case("images", "InstanceNormalization", [floats(2, 3, 4), floats(3), floats(3)],
         lambda x, s, b: F.instance_norm(x, weight=s, bias=b))
    mean, variance = floats(3), floats(3).detach().abs().add(0.5).requires_grad_()
    case("inference", "BatchNormalization", [floats(2, 3, 4), floats(3), floats(3), mean, variance],
         lambda x, s, b, m, v: (x - m[:, None]) / (v[:, None] + 1e-5).sqrt() * s[:, None] + b[:, None])
    case("channels", "LRN", [floats(2, 5, 3)], lambda x: F.local_response_norm(x, 3, 0.5, 0.75, 1.0),
         size=3, alpha=0.5)


def attentions():
    shape = (2, 4, 3, 4)
    case("causal", "Attention", [floats(*shape), floats(*shape), floats(*shape)],
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), is_causal=1)
    case("a mask", "Attention", [floats(*shape), floats(2, 4, 5, 4), floats(2, 4, 5, 2), floats(2, 1, 3, 5)],
         lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    case("groups of heads", "Attention", [floats(*shape), floats(2, 2, 5, 4), floats(2, 2, 5, 4)],
         lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))


def resized():
    # ONNX's scales are of single precision: twice as large is exact.
    x = floats(1, 2, 4, 5)
    for name, mode, options, attributes in [
        ("nearest", "nearest", {}, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        ("linear", "bilinear", {"align_corners": False}, {"mode": "linear"}),
        ("linear at corners", "bilinear", {"align_corners": True},
         {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        ("cubic", "bicubic", {"align_corners": False}, {"mode": "cubic"}),
    ]:
        # At corners the steps are exact where one pixel less is half of the other.
        sizes = [1, 2, 7, 9] if name == "linear at corners" else [1, 2, 8, 10]
        case(name, "Resize", [x, None, None, ints(sizes)],
             lambda x, sizes: F.interpolate(x, sizes.tolist()[2:], mode=mode, **options), **attributes)


def sampled():
    for mode, torch_mode in [("linear", "bilinear"), ("nearest", "nearest"), ("cubic", "bicubic")]:
        for padding in ["zeros", "border", "reflection"]:
            for aligned in [0, 1]:
                case(f"{mode}, {padding}, {aligned}", "GridSample", [floats(2, 2, 4, 5), between(2, 2, 3, 2)],
                     lambda x, grid: F.grid_sample(x, grid, torch_mode, padding, bool(aligned)),
                     mode=mode, padding_mode=padding, align_corners=aligned)
    case("volumes", "GridSample", [floats(1, 2, 3, 4, 3), between(1, 2, 2, 2, 3)],
         lambda x, grid: F.grid_sample(x, grid, "bilinear", "border", False), mode="linear", padding_mode="border")
    size = ints([2, 1, 3, 4])
    case("grid", "AffineGrid", [floats(2, 2, 3), size],
         lambda theta, size: F.affine_grid(theta, size.tolist(), align_corners=False))


def pools():
    x = floats(2, 2, 6, 5)
    case("padded", "MaxPool", [x], lambda x: F.max_pool2d(x, (3, 2), 2, 1), kernel_shape=[3, 2],
         strides=[2, 2], pads=[1, 1, 1, 1])
    case("dilated", "MaxPool", [x], lambda x: F.max_pool2d(x, 2, 1, 0, 2), kernel_shape=[2, 2], dilations=[2, 2])
    for counted in [0, 1]:
        case(f"padding counts {counted}", "AveragePool", [x],
             lambda x: F.avg_pool2d(x, 3, 2, 1, False, bool(counted)), kernel_shape=[3, 3], strides=[2, 2],
             pads=[1, 1, 1, 1], count_include_pad=counted)
    columns = floats(2, 8, 6)
    case("windows", "Col2Im", [columns, ints([3, 4]), ints([2, 2])], lambda x, *_: F.fold(x, (3, 4), 2))


def scattered():
    indices = ints([[0, 1, 2], [0, 3, 2], [1, 3, 1]])
    for reduction, torch_reduction in [("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")]:
        data, updates = floats(4, 3), floats(3, 3)
        with torch.no_grad():
            updates[1, 1], updates[2, 1], data[1, 0] = 0.0, 0.0, 0.0
            # Equal ones share the gradient.
            updates[0, 2], updates[1, 2] = data[2, 2], data[2, 2]
        case(reduction, "ScatterElements", [data, indices, updates],
             lambda x, i, u: x.scatter_reduce(0, i, u, torch_reduction), reduction=reduction)
    case("rows", "Gather", [floats(5, 2, 3), ints([[1, 1], [4, -2]])],
         lambda x, i: x[i % 5])


def losses():
    labels, weights = ints([2, 0, -1, 1]), torch.tensor([0.5, 2.0, 1.5])
    for reduction in ["mean", "sum", "none"]:
        case(reduction, "SoftmaxCrossEntropyLoss", [floats(4, 3), labels, weights],
             lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=-1, reduction=reduction),
             reduction=reduction, ignore_index=-1)
        case(reduction, "NegativeLogLikelihoodLoss", [floats(4, 3, 2), ints([[0, 2]] * 4), weights],
             lambda x, y, w: F.nll_loss(x, y, w, reduction=reduction), reduction=reduction)


def others():
    x = floats(3, 4)
    case("a zero", "CumProd", [x.detach().round().requires_grad_(), ints(1)], lambda x, axis: x.cumprod(1))
    case("square", "Det", [floats(2, 3, 3)], torch.det)
    case("two axes", "ReduceLogSumExp", [x, ints([0, 1])], lambda x, axes: x.logsumexp((0, 1)), keepdims=0)
    case("a row", "ReduceL2", [x, ints([1])], lambda x, axes: x.norm(dim=1), keepdims=0)
    case("ties", "ReduceMax", [x.detach().round().requires_grad_(), ints([1])], lambda x, axes: x.amax(1), keepdims=0)
    case("ties", "Max", [x.detach().round().requires_grad_(), floats(4).detach().round().requires_grad_()],
         torch.maximum)
    case("reflected", "Pad", [floats(2, 3, 5), ints([0, 0, 2, 0, 0, 3])],
         lambda x, pads: F.pad(x, (2, 3), mode="reflect"), mode="reflect")
    case("tanh", "Gelu", [x], lambda x: F.gelu(x, approximate="tanh"), approximate="tanh")
    case("rows", "LogSoftmax", [x], lambda x: F.log_softmax(x, 0), axis=0)
    case("complex", "DFT", [floats(2, 5, 2)], lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x))))
    case("one side", "DFT", [floats(2, 6, 1)], lambda x: torch.view_as_real(torch.fft.rfft(x[..., 0])), onesided=1)


def main():
    for family in [convolutions, layers, normalizations, attentions, resized, sampled, pools, scattered, losses, others]:
        family()
    PATH.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in CASES)
    PATH.write_text(f"[\n{lines}\n]\n")
    print(f"wrote {PATH.name}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
