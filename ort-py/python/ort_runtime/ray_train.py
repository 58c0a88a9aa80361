"""Distributed training on Ray Train: the resources of a worker that trains an `ORTModule`.

Needs `ray[train]` and torch. Example::

    from ort_runtime.ray_train import worker_resources
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    def loop(config):
        model = prepare_model(ORTModule(make_model()))     # DistributedDataParallel around it
        ...

    resources = worker_resources(ORTModule(make_model()), inputs=example, batch=32)
    scaling = ScalingConfig(num_workers=8, resources_per_worker=resources)
    TorchTrainer(loop, scaling_config=scaling).fit()
"""

from __future__ import annotations

from typing import Any

from .training.ortmodule import ORTModule

__all__ = ["worker_resources"]

#: What a worker takes with torch, its libraries, Dynamo's traces and Ray. Most depends on the
#: installation: 0.9 GB were measured with the libraries of CUDA.
TORCH_BYTES = 1 << 30


def worker_resources(
    module: ORTModule,
    inputs: Any = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    state_bytes: int | None = None,
    base_bytes: int = TORCH_BYTES,
    threads: int = 1,
) -> dict[str, float]:
    """Returns `resources_per_worker` of a `ScalingConfig`: cores, and the bytes of a worker.

    `inputs`, `batch` and `seq` are those of `ORTModule.plan`, for the batch of one worker. The bytes
    are those of parameters, of a planned step, of gradients twice (buckets of
    `DistributedDataParallel`, and what gloo receives), of the optimizer (`state_bytes`, by default the
    two moments of AdamW), and of a process without a model (`base_bytes`).

    Raises:
        NotEnoughMemory: the memory limit of the module is too small for the step.
    """
    plan = module.plan(inputs, batch=batch, seq=seq)
    held = sum(value.nbytes for value in [*module.parameters(), *module.buffers()])
    trained = sum(value.nbytes for value in module.parameters() if value.requires_grad)
    state = 2 * trained if state_bytes is None else state_bytes
    memory = base_bytes + held + plan.peak_bytes + 2 * trained + state
    return {"CPU": threads, "memory": memory}
