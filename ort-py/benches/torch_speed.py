"""Times a forward and a backward pass by eager torch, by `aot_eager` and by this runtime, in turn.

usage: torch_speed.py [model ...]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import ort_runtime.torch as backend  # noqa: E402
from torch_models import Language, Network, reals, resnet, tokens  # noqa: E402

THREADS, STEPS, WARMUP = 2, 11, 2


def language(*, causal: bool, drop: float) -> Any:
    """Returns a transformer of four layers of 256 features."""
    return Language(causal=causal, drop=drop, size=256, layers=4, words=1000)


MODELS = {
    "bert": Network(lambda: language(causal=False, drop=0.1), tokens(16, 64, words=1000)),
    "gpt": Network(lambda: language(causal=True, drop=0.0), tokens(8, 64, words=1000)),
    "resnet": Network(lambda: resnet(64), reals(8, 3, 112, 112)),
}


def ours(level: int) -> Callable[[Any], Any]:
    """Returns what compiles a module with a level of recomputation."""
    how = backend.Backend(on_missing="raise", recompute=backend.Recompute(level))
    return lambda module: torch.compile(module, backend=how)


COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "aot_eager": lambda module: torch.compile(module, backend="aot_eager"),
    "ort_runtime": ours(0),
    "level 1": ours(1),
}


def measure(network: Network) -> dict[str, float]:
    """Returns the median seconds of a step by each compiler."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = network.make()
    calls = {name: how(copy.deepcopy(module)) for name, how in COMPILERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(STEPS):
        for name, call in calls.items():
            start = time.perf_counter()
            call(*network.batch(step)).backward()
            taken = time.perf_counter() - start
            call.zero_grad()
            if step >= WARMUP:
                seconds[name].append(taken)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    """Prints a line for each model: seconds, and the ratio to eager torch."""
    torch.set_num_threads(THREADS)
    for name in sys.argv[1:] or MODELS:
        found = measure(MODELS[name])
        cells = [f"{key} {value:.3f} ({value / found['eager']:.2f})" for key, value in found.items()]
        print(f"{name}: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
