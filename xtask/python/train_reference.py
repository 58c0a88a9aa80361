"""Trains the test models in PyTorch and writes what a trainer of the same must come to.

usage: python train_reference.py OUT

Writes for each model of train_modules.py, in size `test`:
- OUT/NAME/model.onnx: the inference model with the first weights.
- OUT/NAME/data.npz: the inputs and labels of BATCHES batches, stacked; step k takes batch k % BATCHES. And
  `gradient.PARAMETER`, the gradients of the first step in the layout of the model's initializers.
- OUT/NAME/reference.json: loss and optimizer with all their numbers, the losses of STEPS steps before each update, in float32
  (`losses`) and in float64 (`float64_losses`); the norm of each parameter's gradient at the first step and of its last value;
  the running statistics after the last step. `self_difference` is the largest relative difference between the two curves,
  `noise_difference` that of float64 to itself with NOISE on all gradients, as other orders of summing make: with both small
  the curve can be held to.
- OUT/NAME/mixed.json: the same curve under autocast in bfloat16 and float16 (train_mixed.py).

A parameter whose gradient is zero but for rounding (a bias of keys: softmax does not see it) has `rounding: true`: no two
implementations agree on what AdamW makes of it. ONNX's BatchNormalization keeps the variance of the batch, PyTorch's the unbiased
one: the running statistics are given as ONNX has them.

And OUT/losses.json, loss functions with their gradients, and OUT/schedules.json, learning rates over steps.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from train_losses import loss_cases
from train_mixed import mixed_records
from train_models import export, in_layout, inputs_of, write
from train_modules import IGNORED, MODELS, SEED, build, drawn, optimizer
from train_schedules import schedule_cases

STEPS = 50
BATCHES = 4
# What the curves may differ by: with more, nothing could be held to them.
MOST_DIFFERENCE = 5e-5
# Noise of gradients as a share of their root mean square, some roundings of float32, and how many curves with it are made.
NOISE = 1e-6
NOISY_CURVES = 8
# The share of the largest gradient below which a gradient is rounding.
ROUNDING = 1e-6


def norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def count_items(module: nn.Module) -> dict[str, int]:
    """Filled by a forward pass: how many elements each BatchNormalization's statistics are of."""
    counts = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.BatchNorm2d):

            def hook(_, inputs, __, name=name):
                counts[name] = inputs[0].numel() // inputs[0].shape[1]

            part.register_forward_hook(hook)
    return counts


def running_statistics(module: nn.Module, counts: dict[str, int], first: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the variances as ONNX keeps them: all that was added to the first one is scaled."""
    statistics = {}
    for name, items in counts.items():
        part = module.get_submodule(name)
        mean, variance = f"{name}.running_mean", f"{name}.running_var"
        statistics[mean] = part.running_mean
        left = (1 - part.momentum) ** int(part.num_batches_tracked) * first[variance]
        statistics[variance] = left + (part.running_var - left) * (items - 1) / items
    return statistics


def add_noise(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        # What is no sum of anything, as the gradient of a word that is not there, has no noise.
        drawn *= parameter.grad != 0
        parameter.grad.add_(drawn * parameter.grad.square().mean().sqrt() * NOISE)


def train(name: str, module: nn.Module, batches: list[dict[str, Tensor]], noise: int | None = None) -> dict:
    """Losses of all steps, gradients of the first, and what is there after the last. `noise` seeds that of the gradients."""
    model = MODELS[name]
    first = {key: tensor.clone() for key, tensor in module.named_buffers()}
    counts = count_items(module)
    stepper = optimizer(name, module)
    losses, gradients = [], {}
    generator = torch.Generator().manual_seed(noise or 0)
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        stepper.zero_grad()
        loss = model.loss(module(**inputs_of(name, batch)), batch[model.label])
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {key: parameter.grad.clone() for key, parameter in module.named_parameters()}
        if noise is not None:
            add_noise(module, generator)
        stepper.step()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": {key: parameter.detach() for key, parameter in module.named_parameters()},
        "running": running_statistics(module, counts, first),
    }


def in_float64(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}


def optimizer_record(name: str, module: nn.Module) -> dict:
    (group,) = optimizer(name, module).param_groups
    if MODELS[name].adamw:
        return {
            "kind": "adamw",
            "learning_rate": group["lr"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "epsilon": group["eps"],
            "weight_decay": group["weight_decay"],
        }
    return {
        "kind": "sgd",
        "learning_rate": group["lr"],
        "momentum": group["momentum"],
        "dampening": group["dampening"],
        "weight_decay": group["weight_decay"],
    }


def parameter_records(single: dict, double: dict, laid_out) -> dict[str, dict]:
    gradients, finals = laid_out(single["gradients"]), laid_out(single["parameters"])
    exact_gradients, exact_finals = laid_out(double["gradients"]), laid_out(double["parameters"])
    largest = max(norm(gradient) for gradient in exact_gradients.values())
    records = {}
    for name, gradient in gradients.items():
        exact = exact_gradients[name]
        records[name] = {
            "shape": list(gradient.shape),
            "gradient_norm": norm(exact),
            "final_norm": norm(finals[name]),
            "float64_final_norm": norm(exact_finals[name]),
            "rounding": norm(exact) < ROUNDING * largest,
        }
    return records


def relative_difference(losses: list[float], exact: list[float]) -> float:
    return float((np.abs(np.array(losses) - exact) / np.abs(exact)).max())


def noise_difference(name: str, batches: list[dict[str, Tensor]], exact: list[float]) -> float:
    curves = [train(name, build(name, "test").double(), batches, noise)["losses"] for noise in range(NOISY_CURVES)]
    return max(relative_difference(losses, exact) for losses in curves)


def write_json(record: dict | list, path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def write_model(name: str, out: Path) -> None:
    batches = drawn(name, "test", BATCHES)
    module = build(name, "test")
    model, transposed = export(name, module, inputs_of(name, batches[0]))
    single = train(name, module, batches)
    exact_batches = [in_float64(batch) for batch in batches]
    double = train(name, build(name, "test").double(), exact_batches)
    difference = relative_difference(single["losses"], double["losses"])
    noisy = noise_difference(name, exact_batches, double["losses"])
    ends = [double["losses"][index] for index in (0, -1)]
    print(f"{name}: loss {ends[0]:.4f} to {ends[1]:.4f}, float32 {difference:.1e}, noise {noisy:.1e}", flush=True)
    if not max(difference, noisy) < MOST_DIFFERENCE:
        raise SystemExit(f"error: {name}: rounding changes the curve")

    def laid_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return in_layout(tensors, transposed)

    loss = {"kind": MODELS[name].loss_kind, "label": MODELS[name].label, "reduction": "mean"}
    if loss["kind"] == "cross_entropy":
        loss["ignore_index"] = IGNORED
    record = {
        "model": name,
        "made_by": {"torch": torch.__version__, "numpy": np.__version__, "seed": SEED},
        "inputs": list(inputs_of(name, batches[0])),
        "output": "logits",
        "loss": loss,
        "optimizer": optimizer_record(name, module),
        "steps": STEPS,
        "batches": BATCHES,
        "self_difference": difference,
        "noise_difference": noisy,
        "losses": single["losses"],
        "float64_losses": double["losses"],
        "parameters": parameter_records(single, double, laid_out),
        "running": {
            key: {"norm": norm(tensor), "first": tensor[:8].tolist()}
            for key, tensor in double["running"].items()
        },
    }
    write(model, out / name / "model.onnx")
    write_json(record, out / name / "reference.json")
    mixed = mixed_records(name, lambda: build(name, "test"), batches, STEPS)
    write_json(mixed, out / name / "mixed.json")
    print({precision: f"{found['float32_difference']:.1e}" for precision, found in mixed.items()}, flush=True)
    arrays = {key: torch.stack([batch[key] for batch in batches]).numpy() for key in batches[0]}
    gradients = laid_out(double["gradients"])
    arrays.update({f"gradient.{key}": gradient.float().numpy() for key, gradient in gradients.items()})
    partial = out / name / "data.partial.npz"
    np.savez_compressed(partial, **arrays)
    partial.replace(out / name / "data.npz")


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in MODELS:
        write_model(name, out)
    write_json(loss_cases(), out / "losses.json")
    write_json(schedule_cases(), out / "schedules.json")


if __name__ == "__main__":
    main()
