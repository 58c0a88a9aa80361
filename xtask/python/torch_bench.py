"""Times and weighs training steps in PyTorch and in our backend of it, each in a process of its own.

usage: python torch_bench.py [MODEL ...] [--threads N] [--seconds S] [--rounds R] [--limits L] [--size SIZE]

The models are those of `bench --train`, with dropout 0.1; a step is the forward and the backward pass. The ways are eager torch,
`aot_eager`, eager torch with torch.utils.checkpoint around each layer, torch's own partitioner with an activation memory budget of a
half, and ours at three levels of recomputation. "Second process" is ours with the capture cache, which another process filled.

Prints a row for each model and way: seconds of imports, of the first step and of the median step, and the resident memory that a step takes
at its peak over what is resident before it, in MB, gradients included. Ratios are to eager torch. With --limits, steps of each model are also planned
under that many random memory limits: a plan is within its limit, or refused with the least bytes of a step.
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
from time_reference import forget_peak, peak, status

NAMES = ("bert", "gpt", "resnet18", "mobilenet_v3")
WARM_UP, LEAST_STEPS = 2, 3


def ours(module, level):
    import torch
    from ort_runtime.torch import Backend, Recompute

    # Under a limit sessions keep no outputs for later runs.
    backend = Backend(recompute=Recompute(level), on_missing="raise", memory_limit="256 GiB")
    return torch.compile(module, backend=backend)


def checkpointed(module):
    """Wraps the forward of each layer."""
    from torch.utils.checkpoint import checkpoint
    from train_modules import BasicBlock, InvertedResidual, PostNormLayer, PreNormLayer

    for layer in module.modules():
        if isinstance(layer, (BasicBlock, InvertedResidual, PostNormLayer, PreNormLayer)):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return module


def budgeted(module):
    import torch
    from torch._functorch import config

    config.activation_memory_budget = 0.5
    return torch.compile(module, backend="aot_eager_decomp_partition")


def aot_eager(module):
    import torch

    return torch.compile(module, backend="aot_eager")


def cached(module):
    """Ours in a process after the first."""
    from ort_runtime.training.ortmodule import ORTModule

    return ORTModule(module, memory_limit="256 GiB", cache_dir=os.environ["ORT_BENCH_CACHE"])


WAYS = {
    "eager": lambda module: module,
    "aot_eager": aot_eager,
    "checkpoint": checkpointed,
    "budget 0.5": budgeted,
    "ours": lambda module: ours(module, 0),
    "ours, second process": cached,
    "ours, level 1": lambda module: ours(module, 1),
    "ours, level 2": lambda module: ours(module, 2),
}


def made(name, size):
    """The module, a batch, and the loss as a module of both."""
    from train_modules import MODELS, WithLoss, build, drawn

    (batch,) = drawn(name, size, 1)
    return WithLoss(build(name, size), MODELS[name]), batch


def settle():
    """Gives freed memory back, so that the next peak is of what follows."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak()


def measure(given):
    import torch

    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    module, batch = made(given.models[0], given.size)
    began = time.perf_counter()
    call = WAYS[given.way](module)
    report, losses = {"imports": time.perf_counter() - began}, []

    def step():
        start = time.perf_counter()
        loss = call(batch)
        loss.backward()
        losses.append(loss.item())
        return time.perf_counter() - start

    report["first"] = step()
    for _ in range(WARM_UP):
        module.zero_grad(set_to_none=True)
        step()
    taken = []
    for _ in range(LEAST_STEPS):
        module.zero_grad(set_to_none=True)
        settle()
        before = status("VmRSS")
        step()
        taken.append(peak() - before)
    times, end = [], time.perf_counter() + given.seconds
    while len(times) < LEAST_STEPS or time.perf_counter() < end:
        module.zero_grad(set_to_none=True)
        times.append(step())
    return report | {"median": float(np.median(times)), "bytes": int(np.median(taken)), "losses": losses[:3]}


def limits(given):
    """Plans steps under random limits. Each is kept, to the byte, or refused with the least that a step needs."""
    import torch
    from ort_runtime.torch import NotEnoughMemory, Recompute
    from ort_runtime.torch._capture import Example, StepPlanner

    torch.set_num_threads(given.threads)
    module, batch = made(given.models[0], given.size)
    planned = StepPlanner(module, Example.of({"batch": batch}), [Recompute(level) for level in range(3)]).plan

    most = planned(1 << 50).peak_bytes
    try:
        planned(1)
    except NotEnoughMemory as problem:
        least = problem.minimum
    chosen, outcome = random.Random(1), {"kept": 0, "refused": 0}
    for count in range(given.limits):
        limit = chosen.randint(int(0.8 * least), int(1.1 * most))
        # The edges are decided by one byte.
        limit = {0: least, 1: least - 1, 2: most}.get(count, limit)
        try:
            plan = planned(limit)
        except NotEnoughMemory as problem:
            assert limit < least == problem.minimum, (limit, least, problem)
            outcome["refused"] += 1
            continue
        assert least <= plan.peak_bytes <= limit, (limit, plan)
        outcome["kept"] += 1
    return outcome | {"least": least, "most": most}


def inside(given, model, **more):
    """What a process of its own printed."""
    command = [sys.executable, "-B", "-W", "ignore", __file__, model, "--inside", "--size", given.size]
    command += ["--threads", str(given.threads), "--seconds", str(given.seconds)]
    for key, value in more.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][-300:]}
    return json.loads(done.stdout.splitlines()[-1])


def best(given, model, way):
    """The round of the least median."""
    if way == "ours, second process":
        inside(given, model, way=way)
    rounds = [inside(given, model, way=way) for _ in range(given.rounds)]
    failed = [one for one in rounds if "error" in one]
    return failed[0] if failed else min(rounds, key=lambda one: one["median"])


def row(name, way, found, eager):
    if "error" in found:
        return f"| {name} | {way} | {found['error']} | | |"
    cells = [f"{found['imports']:.1f} + {found['first']:.1f}", f"{found['median']:.3f}", f"{found['bytes'] / 1e6:.1f}"]
    for place, key in ((1, "median"), (2, "bytes")):
        cells[place] += f" ({found[key] / eager[key]:.2f})"
    apart = max(abs(a - b) for a, b in zip(found["losses"], eager["losses"]))
    return f"| {name} | {way} | " + " | ".join(cells) + f" | {apart:.1e} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", choices=[*NAMES, []])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limits", type=int, default=0)
    parser.add_argument("--size", default="bench")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--inside", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(limits(given) if given.limits else measure(given)))
        return
    print("| model | way | imports + first step, s | step, s | memory of a step, MB | losses apart by |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    folder = tempfile.TemporaryDirectory()
    os.environ["ORT_BENCH_CACHE"] = folder.name
    for name in given.models or NAMES:
        eager = best(given, name, "eager")
        if "error" in eager:
            sys.exit(eager["error"])
        for way in WAYS:
            found = eager if way == "eager" else best(given, name, way)
            print(row(name, way, found, eager), flush=True)
    for name in (given.models or NAMES) if given.limits else ():
        print(f"{name}: {json.dumps(inside(given, name, limits=given.limits))}", flush=True)


if __name__ == "__main__":
    main()
