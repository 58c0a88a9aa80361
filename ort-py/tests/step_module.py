"""A module whose text `test_step_cache.py` edits, and the program that a second process runs.

usage: step_module.py FOLDER

Trains `Model` for two steps with a capture cache in FOLDER. Prints JSON: losses, gradients' sum, and
the frames that Dynamo traced.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

FACTOR = 2.0
TABLE = {"scale": 0.5}
SIZES = [1, 2]


def made(number: float) -> Any:
    """Returns a function with a number in its closure."""

    def scaled(x: Any) -> Any:
        return x * number

    return scaled


scaled = made(3.0)


def helper(x: Any, power: int = 2) -> Any:
    """Has a default."""
    return x**power


def decorated(function: Any) -> Any:
    """Adds to what a function returns."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) + 1.0

    return wrapper


@dataclasses.dataclass
class Pair:
    """Two values."""

    left: Any
    right: Any


class Double(torch.autograd.Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Doubles."""
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        """Gives a gradient that is not that of doubling."""
        (x,) = ctx.saved_tensors
        return slope * 5 + 0 * x


class Inner(nn.Module):
    """A layer."""

    GAIN = 1.5

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.drop = nn.Dropout(0.25)
        self.act = F.gelu
        self.shift = 0.25

    def forward(self, x: Any) -> Any:
        """Uses a function, a number and a class's number."""
        return self.act(self.drop(self.linear(x))) * self.GAIN + self.shift


class Model(nn.Module):
    """Reads globals, closures, defaults and a dataclass."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first, self.second = Inner(size), Inner(size)
        self.norm = nn.LayerNorm(size)
        self.register_buffer("calls", torch.zeros(()))

    @decorated
    def forward(self, x: Any, weight: float = 0.5) -> Any:
        """Returns a number."""
        self.calls += 1
        pair = Pair(self.first(x), self.second(x))
        x = pair.left - pair.right.sum()
        x = Double.apply(helper(scaled(x)) * FACTOR * TABLE["scale"])
        return (self.norm(x) * x * weight).sum() + SIZES[1]


def losses(called: Any, inputs: Any = None, **kwargs: Any) -> list[float]:
    """Does two steps. Returns losses, what gradients are, and the buffer."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        called.zero_grad()
        x = torch.randn(3, 8) if inputs is None else inputs
        loss = called(x, **kwargs)
        if loss.requires_grad:
            loss.backward()
        slopes = [p.grad.abs().sum().item() for p in called.parameters() if p.grad is not None]
        found += [loss.item(), *slopes, called.calls.item()]
    return found


def main() -> None:
    """Trains with the folder of the command line."""
    from ort_runtime.training.ortmodule import ORTModule
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    found = losses(ORTModule(Model(), cache_dir=sys.argv[1]))
    print(json.dumps({"losses": found, "frames": counters["frames"]["total"]}))


if __name__ == "__main__":
    main()
