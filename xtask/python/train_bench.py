"""Times training steps of one model in another runtime, the way `ort train` times ours, each in a process of its own.

usage: python train_bench.py RUNTIME MODEL THREADS SECONDS [--level N]
       python train_bench.py all SECONDS

RUNTIME is torch (eager), ortmodule (ONNX Runtime's ORTModule at a level of its memory optimizer) or ortapi (its training API,
which has neither levels nor labels to leave out). A step is the forward pass, the loss, the backward pass and AdamW, dropout 0.1.
Memory is counted from after the imports, a first step of a tiny model and the making of the data. All processors but THREADS are left
to others.

Prints one JSON object: runtime, model, level, threads, first_ms, median_ms, min_ms, cpu_ms (of all threads, a step), steps,
baseline_rss, peak_rss (bytes), losses (of the first steps); or `error` instead of all numbers. `all` prints one a line.

ORTModule wants its extensions built once: `cargo xtask bench --train` does it (python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import numpy as np
from time_reference import forget_peak, peak, status, timed

NAMES = ("bert", "gpt", "resnet18", "mobilenet_v3")
RUNS = (("torch", 0), ("ortmodule", 0), ("ortmodule", 1), ("ortmodule", 2), ("ortapi", 0))
WARM_UP = 2
LEAST_STEPS = 5


def torch_stepper(module, model, batch: dict):
    """One step of any module that PyTorch's optimizers train; returns the loss."""
    import torch

    inputs = {key: tensor for key, tensor in batch.items() if key != model.label}
    stepper = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> float:
        stepper.zero_grad(set_to_none=True)
        loss = model.loss(module(**inputs), batch[model.label])
        loss.backward()
        stepper.step()
        return loss.item()

    return step


def open_torch(name: str, given: argparse.Namespace, batch: dict):
    from train_modules import MODELS, build

    return torch_stepper(build(name, given.size), MODELS[name], batch)


def open_ortmodule(name: str, given: argparse.Namespace, batch: dict):
    from onnxruntime.training.ortmodule import ORTModule
    from train_modules import MODELS, build

    return torch_stepper(ORTModule(build(name, given.size)), MODELS[name], batch)


def make_artifacts(name: str, size: str, folder: Path) -> None:
    """What the training API opens; in a process of its own, so that none of it is in the measured memory."""
    from onnxruntime.training import artifacts
    from torch import nn
    from train_models import in_training_form, inputs_of
    from train_modules import MODELS, build, drawn

    class Flat(nn.Module):
        """Its loss takes classes in the second dimension only."""

        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            return self.module(*inputs).flatten(0, -2)

    (batch,) = drawn(name, size, 1)
    module = Flat(build(name, size)) if name == "gpt" else build(name, size)
    model = in_training_form(module, name, inputs_of(name, batch))
    if name == "gpt":
        del model.graph.output[0].type.tensor_type.shape.dim[1]
        model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = MODELS[name].sizes[size]["vocabulary"]
    for node in model.graph.node:
        # Its gradient wants the outputs that may be left out.
        if node.op_type == "LayerNormalization":
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_deviation"])
    artifacts.generate_artifacts(
        model,
        requires_grad=[key for key, _ in module.named_parameters()],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def open_ortapi(name: str, given: argparse.Namespace, batch: dict):
    from onnxruntime import SessionOptions
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = SessionOptions()
    # Transformers of the size `bench` otherwise overwrite their heap: "free(): corrupted unsorted chunks".
    options.enable_mem_pattern = False
    folder = given.artifacts
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, session_options=options)
    stepper = Optimizer(str(folder / "optimizer_model.onnx"), module)
    stepper.set_learning_rate(1e-3)
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    # It computes with ids below zero what it finds: all labels count.
    arrays["labels"] = np.maximum(arrays["labels"].reshape(-1), 0)
    feeds = [arrays[key] for key in module.input_names()]
    module.train()

    def step() -> float:
        loss = module(*feeds)
        stepper.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


OPEN = {"torch": open_torch, "ortmodule": open_ortmodule, "ortapi": open_ortapi}


def use(given: argparse.Namespace) -> None:
    """Before the imports: runtimes count processors when they are loaded."""
    processors = sorted(os.sched_getaffinity(0))[: given.threads]
    os.sched_setaffinity(0, processors)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = str(given.level)
    # What it cannot train is an error, instead of PyTorch's time under its name.
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"


def import_all(given: argparse.Namespace) -> dict:
    """The imports, a step of a tiny model in PyTorch, and the data."""
    import torch
    from train_modules import MODELS, build, drawn

    if given.runtime == "ortmodule":
        import onnxruntime.training.ortmodule  # noqa: F401
    elif given.runtime == "ortapi":
        import onnxruntime.training.api  # noqa: F401
    torch.set_num_threads(given.threads)
    (tiny,) = drawn(given.model, "test", 1)
    torch_stepper(build(given.model, "test"), MODELS[given.model], tiny)()
    (batch,) = drawn(given.model, given.size, 1)
    return batch


def measure(given: argparse.Namespace) -> dict:
    use(given)
    batch = import_all(given)
    forget_peak()
    report = {"baseline_rss": status("VmRSS")}
    step = OPEN[given.runtime](given.model, given, batch)
    losses, times = [], []

    def run() -> None:
        losses.append(step())

    report["first_ms"] = timed(run)
    for _ in range(WARM_UP):
        run()
    begin, busy = time.perf_counter(), time.process_time()
    for done in count():
        if done >= LEAST_STEPS and time.perf_counter() >= begin + given.seconds:
            break
        times.append(timed(run))
    report["cpu_ms"] = (time.process_time() - busy) * 1e3 / len(times)
    report |= {"median_ms": float(np.median(times)), "min_ms": min(times), "steps": len(times)}
    return report | {"peak_rss": peak(), "losses": losses[: 1 + WARM_UP]}


def call(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", "-W", "ignore", __file__, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def one(runtime: str, name: str, threads: int, seconds: float, level: int, size: str) -> dict:
    """What a process of its own printed; where it failed, what it said last."""
    report = {"runtime": runtime, "model": name, "level": level, "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        done = None
        if runtime == "ortapi":
            done = call("artifacts", name, 1, 0, "--size", size, "--artifacts", folder)
        if done is None or done.returncode == 0:
            options = ("--level", level, "--size", size, "--artifacts", folder, "--inside")
            done = call(runtime, name, threads, seconds, *options)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "rror:" in line or "what():" in line]
        lines = lines or [f"exit status {done.returncode}"]
        return report | {"error": lines[-1].strip()[-300:]}
    return report | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    if sys.argv[1:2] == ["all"]:
        seconds = float(sys.argv[2])
        for name in NAMES:
            for threads in (2, 1):
                for runtime, level in RUNS:
                    print(json.dumps(one(runtime, name, threads, seconds, level, "bench")), flush=True)
        return
    parser.add_argument("runtime", choices=[*OPEN, "artifacts"])
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("threads", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--size", default="bench")
    parser.add_argument("--artifacts", type=Path)
    parser.add_argument("--inside", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if given.runtime == "artifacts":
        make_artifacts(given.model, given.size, given.artifacts)
    elif given.inside:
        print(json.dumps(measure(given)))
    else:
        print(json.dumps(one(given.runtime, given.model, given.threads, given.seconds, given.level, given.size)))


if __name__ == "__main__":
    main()
