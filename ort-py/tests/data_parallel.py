"""One process of a data-parallel training run, started by `test_data_parallel.py`.

usage: data_parallel.py SETTINGS

SETTINGS is JSON with the fields of `Settings`. The rank and the number of processes are in the
environment, as torchrun sets them. Prints JSON: losses, events and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ort_runtime.torch import optim
from ort_runtime.training.ortmodule import ORTModule
from torch_models import Language

WORDS = 50


@dataclass
class Settings:
    """What a process does.

    Attributes:
        steps: the number of the last step.
        batch: the sequences of a step, of all processes together.
        parts: the parts of which a step accumulates the gradients.
        size, layers: of the model.
        bucket: the most MB of a bucket of gradients, torch's default without one.
        view: whether gradients lie in the buckets.
        saved: the folder of a checkpoint.
        save_after: the step after which it is written.
        resumes: whether training begins with it.
        killed: the rank that kills itself before the last step.
        optimizer: "SGD", or an optimizer of `ort_runtime.torch.optim`.
        shards: "state" shards the state of the optimizer (ZeRO-1), "parameters" everything (FSDP2,
            whose parameters an optimizer of torch updates).
    """

    steps: int = 4
    batch: int = 4
    parts: int = 1
    size: int = 32
    layers: int = 2
    bucket: float | None = None
    view: bool = False
    saved: str = ""
    save_after: int | None = None
    resumes: bool = False
    killed: int | None = None
    optimizer: str = "SGD"
    shards: str = ""


class Process:
    """A model, its optimizer, and its place among the processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        inside = Language(causal=True, size=settings.size, layers=settings.layers, words=WORDS)
        self.events: list[str] = []
        if settings.shards == "parameters":
            for part in (*inside.layers, inside):
                fully_shard(part)
        self.model: Any = ORTModule(inside)
        self.wrapped: nn.Module = self.model
        if self.world > 1 and settings.shards != "parameters":
            more: dict[str, Any] = {"gradient_as_bucket_view": settings.view}
            if settings.bucket is not None:
                more["bucket_cap_mb"] = settings.bucket
            self.wrapped = DistributedDataParallel(self.model, **more)
            # The hook's annotations would have to be objects, not texts.
            self.wrapped.register_comm_hook(None, lambda state, bucket: self.exchange(bucket))
        self.optimizer = self.make_optimizer(inside)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer of the settings."""
        name, shards = self.settings.optimizer, self.settings.shards
        if name == "SGD":
            return torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
        kind = getattr(torch.optim if shards == "parameters" else optim, name)
        if shards == "state":
            return ZeroRedundancyOptimizer(module.parameters(), optimizer_class=kind, lr=0.01)
        return kind(module.parameters(), lr=0.01)

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state in this process."""
        own = getattr(self.optimizer, "optim", self.optimizer).state
        values = [value for state in own.values() for value in state.values()]
        local = [value.to_local() if hasattr(value, "to_local") else value for value in values]
        return sum(value.nbytes for value in local if torch.is_tensor(value) and value.dim())

    def exchange(self, bucket: Any) -> Any:
        """Averages a bucket of gradients, and notes when it is ready."""
        self.events.append("bucket")
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda done: done.value()[0].div_(self.world))

    def note_runs(self) -> None:
        """Notes when a backward graph has run."""
        from ort_runtime.torch import _compiled

        run = _compiled.CompiledGraph._run

        def noted(graph: Any, *arguments: Any) -> Any:
            self.events.append("run")
            return run(graph, *arguments)

        _compiled.CompiledGraph._run = noted  # type: ignore[method-assign]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, number: int) -> float:
        """Does a step, and returns its loss over all processes."""
        random = torch.Generator().manual_seed(number)
        shape = (self.settings.parts, self.world, -1, 12)
        given, expected = (
            torch.randint(0, WORDS, (self.settings.batch, 12), generator=random).view(shape)
            for _ in range(2)
        )
        total = torch.zeros(())
        for part in range(self.settings.parts):
            waits = part + 1 < self.settings.parts and self.world > 1
            with self.wrapped.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                loss = self.wrapped(given[part, self.rank], expected[part, self.rank])
                loss = loss / self.settings.parts
                self.events.append("backward")
                loss.backward()
                self.events.append("end")
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total) / self.world

    def train(self) -> dict[str, Any]:
        """Does all steps."""
        settings, first = self.settings, 0
        # State of the optimizer exists after a step; a step of zeros changes nothing.
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if settings.resumes:
            state = self.state()
            checkpoints.load(state, checkpoint_id=settings.saved)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            first = (settings.save_after or 0) + 1
        losses = []
        for number in range(first, settings.steps):
            if number + 1 == settings.steps:
                self.note_runs()
                self.events.clear()
                if settings.killed == self.rank:
                    os.kill(os.getpid(), signal.SIGKILL)
            losses.append(self.step(number))
            if settings.saved and not settings.resumes and number == settings.save_after:
                checkpoints.save(self.state(), checkpoint_id=settings.saved)
        slopes = sum(value.nbytes for value in self.model.parameters())
        return {
            "losses": losses,
            "events": self.events,
            "peak": peak(),
            "slopes": slopes,
            "state": self.state_bytes(),
        }


def peak() -> int:
    """Returns the most bytes of memory that the process has had."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    """Trains with the settings of the command line."""
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[1]))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    print(json.dumps(Process(settings).train()), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
