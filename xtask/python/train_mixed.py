"""Curves of trainings under PyTorch's autocast, for train_reference.py.

Forward and backward passes are partly in bfloat16 or float16, parameters and states in float32. In float16 the loss has a scale, PyTorch's `GradScaler`, which begins
so high that the first steps overflow (`FIRST_SCALE`): a trainer must leave the same steps out.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from train_models import inputs_of
from train_modules import MODELS, optimizer

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**20
# No curve is so long: whether a step overflows at twice the scale is a matter of roundings.
GROWTH_INTERVAL = 2000


def recurrent_in_float32(module: nn.Module) -> None:
    """Has recurrent layers compute in float32, as PyTorch's of 16 bits are not there on all CPUs."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):

            def forward(inputs, *others, layer=part, whole=part.forward):
                with torch.autocast("cpu", enabled=False):
                    return whole(inputs.float(), *others)

            part.forward = forward


def float32_curve(name: str, module: nn.Module, batches: list[dict[str, Tensor]], left_out: list[bool]) -> list[float]:
    """Losses in float32 with the same updates left out."""
    model = MODELS[name]
    stepper = optimizer(name, module)
    losses = []
    for step, skips in enumerate(left_out):
        batch = batches[step % len(batches)]
        stepper.zero_grad()
        loss = model.loss(module(**inputs_of(name, batch)), batch[model.label])
        loss.backward()
        if not skips:
            stepper.step()
        losses.append(loss.item())
    return losses


def curve(name: str, module: nn.Module, batches: list[dict[str, Tensor]], steps: int, precision: str) -> dict:
    """Losses of all steps before each update; with a loss scale also that of each step, and that after the last."""
    recurrent_in_float32(module)
    model = MODELS[name]
    stepper = optimizer(name, module)
    has_scale = precision == "fp16"
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL, enabled=has_scale
    )
    losses, scales = [], []
    for step in range(steps):
        batch = batches[step % len(batches)]
        stepper.zero_grad()
        with torch.autocast("cpu", dtype=TYPES[precision]):
            output = module(**inputs_of(name, batch))
            loss = model.loss(output.float(), batch[model.label])
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(stepper)
        scaler.update()
        losses.append(loss.item())
    if not has_scale:
        return {"losses": losses}
    return {
        "losses": losses,
        "first_scale": FIRST_SCALE,
        "growth_interval": GROWTH_INTERVAL,
        "scales": [*scales, scaler.get_scale()],
    }


def mixed_records(
    name: str, build: Callable[[], nn.Module], batches: list[dict[str, Tensor]], steps: int
) -> dict:
    """The curve in each precision, that in float32 with the same updates left out, and how far they are apart at most, relative to the loss."""
    records = {}
    for precision in TYPES:
        record = curve(name, build(), batches, steps, precision)
        scales = record.get("scales", [1.0] * (steps + 1))
        left_out = [later < now for now, later in pairwise(scales)]
        exact = float32_curve(name, build(), batches, left_out)
        off = [abs(one - other) / abs(other) for one, other in zip(record["losses"], exact, strict=True)]
        records[precision] = {**record, "float32_losses": exact, "float32_difference": max(off)}
    return records
