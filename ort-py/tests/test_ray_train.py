"""`ORTModule` on Ray Train: two workers train as one process does, in the memory that Ray is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
ray = pytest.importorskip("ray", reason="ray is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("the original's ORTModule is a package of its own", allow_module_level=True)

from ort_runtime.ray_train import worker_resources  # noqa: E402
from ort_runtime.torch import NotEnoughMemory  # noqa: E402
from ort_runtime.training.ortmodule import ORTModule  # noqa: E402
from torch_models import Language  # noqa: E402

WORDS, SIZE, BATCH, LENGTH, STEPS = 500, 256, 8, 64, 4


def model() -> Any:
    """Returns the module that every run starts from."""
    torch.manual_seed(0)
    return Language(causal=True, size=SIZE, layers=4, words=WORDS)


def batch(step: int, part: slice) -> list[Any]:
    """Returns a part of the words of a step, and as many to predict."""
    random = torch.Generator().manual_seed(step)
    shape = (BATCH, LENGTH)
    return [torch.randint(0, WORDS, shape, generator=random)[part] for _ in range(2)]


def losses(wrapped: Any, part: slice) -> list[float]:
    """Trains a module, and returns the losses."""
    from ort_runtime.torch.optim import AdamW

    optimizer = AdamW(wrapped.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        loss = wrapped(*batch(step, part))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loop(config: dict[str, Any]) -> None:
    """Trains on the worker's half of each batch."""
    from ray import train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    rank, half = train.get_context().get_world_rank(), BATCH // 2
    wrapped = prepare_model(ORTModule(model()))
    found = losses(wrapped, slice(rank * half, (rank + 1) * half))
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    torch.save(
        {"losses": found, "peak": int(line.split()[1]) << 10, "state": wrapped.module.state_dict()},
        Path(config["folder"]) / f"{rank}.pt",
    )
    train.report({"loss": found[-1]})


def test_two_workers_train_as_one_process_does(tmp_path: Path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    resources = worker_resources(ORTModule(model()), batch(0, slice(None)), batch=BATCH // 2)
    paths = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])}
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths}
    )
    try:
        TorchTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker=resources),
            run_config=RunConfig(storage_path=str(tmp_path / "runs")),
        ).fit()
    finally:
        ray.shutdown()
    workers = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected = losses(ORTModule(model()), slice(None))
    for step, loss in enumerate(expected):
        mean = sum(worker["losses"][step] for worker in workers) / 2
        assert mean == pytest.approx(loss, abs=1e-4)
    for name, value in workers[0]["state"].items():
        assert torch.equal(workers[1]["state"][name], value), name
    told = resources["memory"]
    assert all(worker["peak"] <= told for worker in workers), (told, workers[0]["peak"])
    # Most of it is the step: what a worker takes anyway is a constant.
    assert max(worker["peak"] for worker in workers) >= 0.6 * told


def test_a_step_that_does_not_fit_is_refused():
    module = ORTModule(model(), memory_limit="1 MiB")
    with pytest.raises(NotEnoughMemory, match="a training step needs at least"):
        worker_resources(module, batch(0, slice(None)), batch=2)
