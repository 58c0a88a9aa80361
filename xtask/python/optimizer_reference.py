"""Writes the trajectories of optimizers that our operators are held against.

usage: python optimizer_reference.py ort-runtime/tests/data/optimizer_trajectories.json

Needs torch; written with 2.4.1. SGD, Adam and AdamW are torch's own. The other three are written down here from their
papers, step by step in torch's tensors: AdamW as transformers had it, LAMB (You et al. 2020, algorithm 2), Adafactor
(Shazeer & Stern 2018, in the form that torch.optim has from 2.5 on).

The file has

  rates      the learning rate of each step
  tensors    by name: shape, the initial elements, the gradients of each step
  cases      name, op, attrs, dtype, tensor, parameters (after each step), states (by name, after the last step)

All numbers of rates and tensors are floats, so that float and double begin alike.
"""

import json
import math
import sys
from pathlib import Path

import torch

STEPS = 10


def rounded(tensor):
    return tensor.to(torch.float32).to(torch.float64)


RATES = rounded(torch.tensor([0.01 * (1 + step % 3) / 2 for step in range(STEPS)], dtype=torch.float64)).tolist()


def tensors():
    """A matrix, a vector and a stack of matrices, with gradients from tiny to large, and some that are always 0."""
    made = {}
    for name, shape in [("matrix", [4, 5]), ("vector", [7]), ("stack", [2, 3, 4]), ("scalar", [])]:
        generator = torch.Generator().manual_seed(len(name))
        draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)
        sizes = torch.pow(10.0, torch.randint(-3, 2, shape, generator=generator).to(torch.float64))
        gradients = [rounded(draw() * sizes) for _ in range(STEPS)]
        if shape:
            for gradient in gradients:
                gradient.view(-1)[2] = 0.0
        made[name] = (rounded(draw()), gradients)
    return made


def of_torch(make, names):
    """The steps of an optimizer of torch; `names` are those of its states, ours by torch's."""

    def run(initial, gradients, dtype):
        parameter = torch.nn.Parameter(initial.to(dtype).clone())
        optimizer = make([parameter])
        seen = []
        for rate, gradient in zip(RATES, gradients):
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = gradient.to(dtype)
            optimizer.step()
            seen.append(parameter.detach().clone())
        states = optimizer.state[parameter]
        return seen, {ours: states[theirs] for ours, theirs in names.items()}

    return run


def written(step, states_of):
    """The steps of a function that changes a parameter and its states in place."""

    def run(initial, gradients, dtype):
        parameter = initial.to(dtype).clone()
        states = states_of(parameter)
        seen = []
        for number, (rate, gradient) in enumerate(zip(RATES, gradients), 1):
            step(parameter, gradient.to(dtype), rate, number, states)
            seen.append(parameter.clone())
        return seen, states

    return run


def moments(parameter):
    return {"first_moment": torch.zeros_like(parameter), "second_moment": torch.zeros_like(parameter)}


def huggingface(beta1=0.9, beta2=0.999, eps=1e-6, decay=0.0, correct=True):
    def step(x, g, rate, number, states):
        m, v = states["first_moment"], states["second_moment"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        size = rate * math.sqrt(1 - beta2**number) / (1 - beta1**number) if correct else rate
        x.addcdiv_(m, v.sqrt().add_(eps), value=-size)
        if decay > 0:
            x.add_(x, alpha=-rate * decay)

    return written(step, moments)


def lamb(beta1=0.9, beta2=0.999, eps=1e-6, decay=0.0, most=10.0, correct=True):
    def step(x, g, rate, number, states):
        m, v = states["first_moment"], states["second_moment"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        bias1, bias2 = (1 - beta1**number, 1 - beta2**number) if correct else (1.0, 1.0)
        update = (m / bias1) / ((v / bias2).sqrt() + eps) + decay * x
        norm, update_norm = x.double().norm().item(), update.double().norm().item()
        ratio = min(norm / update_norm, most) if norm > 0 and update_norm > 0 else 1.0
        x.add_(update, alpha=-rate * ratio)

    return written(step, moments)


def adafactor(beta2_decay=-0.8, eps1=None, eps2=1e-3, threshold=1.0, decay=0.0):
    def states_of(x):
        if x.dim() < 2:
            return {"second_moment": torch.zeros_like(x)}
        row, column = list(x.shape), list(x.shape)
        row[-1], column[-2] = 1, 1
        return {"row_moment": x.new_zeros(row), "column_moment": x.new_zeros(column)}

    def step(x, g, rate, number, states):
        least = torch.finfo(x.dtype).eps if eps1 is None else eps1
        weight = number**beta2_decay
        size = max(eps2, x.norm().item() / math.sqrt(x.numel())) * min(rate, 1 / math.sqrt(number))
        if decay != 0:
            x.mul_(1 - rate * decay)
        if x.dim() < 2:
            estimate = states["second_moment"].lerp_(g * g, weight).clone()
        else:
            row, column = states["row_moment"], states["column_moment"]
            row.lerp_((g * g).mean(dim=-1, keepdim=True), weight)
            column.lerp_((g * g).mean(dim=-2, keepdim=True), weight)
            estimate = (row @ column) / row.mean(dim=-2, keepdim=True).clamp(min=least)
        update = estimate.clamp_(min=least * least).rsqrt_() * g
        denominator = max(1.0, update.norm().item() / (math.sqrt(update.numel()) * threshold))
        x.add_(update, alpha=-size / denominator)

    return written(step, states_of)


def sgd(**options):
    names = {"velocity": "momentum_buffer"} if options.get("momentum") else {}
    return of_torch(lambda parameters: torch.optim.SGD(parameters, lr=1.0, **options), names)


def adam(kind, **options):
    names = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
    return of_torch(lambda parameters: kind(parameters, lr=1.0, **options), names)


def cases():
    adamw, plain = torch.optim.AdamW, torch.optim.Adam
    yield "plain", "SGD", {}, "matrix", sgd()
    yield "decay", "SGD", {"weight_decay": 0.1}, "matrix", sgd(weight_decay=0.1)
    yield "momentum", "SGD", {"momentum": 0.9}, "vector", sgd(momentum=0.9)
    options = {"momentum": 0.8, "weight_decay": 0.05}
    yield "Nesterov", "SGD", options | {"nesterov": 1}, "stack", sgd(nesterov=True, **options)
    yield "defaults", "AdamW", {}, "matrix", adam(adamw)
    options = {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-4, "weight_decay": 0.3}
    given = {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.3}
    yield "others", "AdamW", options, "stack", adam(adamw, **given)
    yield "short memory", "AdamW", {"beta1": 0.25, "beta2": 0.5}, "vector", adam(adamw, betas=(0.25, 0.5))
    yield "a scalar", "AdamW", {}, "scalar", adam(adamw)
    yield "Adam", "AdamW", {"mode": "adam", "weight_decay": 0.0}, "matrix", adam(plain)
    yield "Adam, others", "AdamW", options | {"mode": "adam"}, "vector", adam(plain, **given)
    options = {"mode": "huggingface", "epsilon": 1e-6, "weight_decay": 0.0}
    yield "Hugging Face", "AdamW", options, "matrix", huggingface()
    options = {"mode": "huggingface", "epsilon": 1e-5, "weight_decay": 0.2, "correct_bias": 0}
    yield "Hugging Face, others", "AdamW", options, "vector", huggingface(eps=1e-5, decay=0.2, correct=False)
    yield "defaults", "LAMB", {}, "matrix", lamb()
    options = {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-4, "weight_decay": 0.3, "max_trust_ratio": 0.5, "correct_bias": 0}
    yield "others", "LAMB", options, "vector", lamb(0.8, 0.99, 1e-4, 0.3, 0.5, False)
    yield "defaults", "Adafactor", {}, "matrix", adafactor()
    yield "a stack", "Adafactor", {"weight_decay": 0.1}, "stack", adafactor(decay=0.1)
    yield "a vector", "Adafactor", {}, "vector", adafactor()
    options = {"beta2_decay": -0.5, "epsilon1": 0.001, "epsilon2": 0.5, "clip_threshold": 0.25}
    yield "others", "Adafactor", options, "matrix", adafactor(-0.5, 0.001, 0.5, 0.25)
    yield "a scalar", "Adafactor", {}, "scalar", adafactor()


def flat(tensor):
    return tensor.detach().reshape(-1).tolist()


def main():
    made = tensors()
    lines = []
    for name, op, attrs, tensor, run in cases():
        initial, gradients = made[tensor]
        for dtype in [torch.float32, torch.float64]:
            seen, states = run(initial, gradients, dtype)
            case = {"name": name, "op": op, "attrs": attrs, "dtype": str(dtype).split(".")[1], "tensor": tensor}
            case["parameters"] = [flat(parameter) for parameter in seen]
            case["states"] = {name: {"shape": list(state.shape), "values": flat(state)} for name, state in states.items()}
            lines.append(json.dumps(case))
    given = {
        name: {"shape": list(initial.shape), "initial": flat(initial), "gradients": [flat(g) for g in gradients]}
        for name, (initial, gradients) in made.items()
    }
    head = f'{{"rates": {json.dumps(RATES)},\n"tensors": {json.dumps(given)},\n"cases": [\n'
    Path(sys.argv[1]).write_text(head + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
