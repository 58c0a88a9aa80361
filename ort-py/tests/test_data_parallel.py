"""`ORTModule` inside `DistributedDataParallel`: processes on one machine, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("the original's ORTModule is a package of its own", allow_module_level=True)
if not torch.distributed.is_available() or sys.platform != "linux":
    pytest.skip("needs gloo, and /proc", allow_module_level=True)

PROGRAM = Path(__file__).parent / "data_parallel.py"


def free_port() -> int:
    """Returns a port that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(count: int, **settings: Any) -> list[subprocess.Popen[str]]:
    """Starts that many processes of one training run."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
            },
        )
        for rank in range(count)
    ]


def trained(count: int, **settings: Any) -> list[dict[str, Any]]:
    """Runs that many processes to their end. Returns what each printed."""
    processes = started(count, **settings)
    found = []
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
            found.append(json.loads(printed.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def near(found: list[float], expected: list[float]) -> None:
    """Compares losses of as many steps."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert abs(one - other) <= 1e-5 * max(1, abs(other)), (found, expected)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 processes": (2, {}),
    "4 processes": (4, {}),
    "2 processes, no_sync": (2, {"parts": 2}),
    "2 processes, small buckets": (2, {"bucket": 1, "size": 256}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(name: str):
    count, settings = CASES[name]
    (expected,) = trained(1, **settings)
    for found in trained(count, **settings):
        near(found["losses"], expected["losses"])


SHARDED: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"shards": "state", "optimizer": "AdamW"},
    "ZeRO-1, 8 bits": {"shards": "state", "optimizer": "AdamW8bit"},
    "FSDP2": {"shards": "parameters", "optimizer": "AdamW"},
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_training_is_that_of_one_process(name: str):
    settings = SHARDED[name]
    (expected,) = trained(1, optimizer=settings["optimizer"])
    found = trained(2, **settings)
    for one in found:
        near(one["losses"], expected["losses"])
        # Whole parameters are shared out, so that parts differ in size.
        assert 0.4 * expected["state"] <= one["state"] <= 0.6 * expected["state"]
    assert sum(one["state"] for one in found) == pytest.approx(expected["state"], rel=0.01)


def test_buckets_are_sent_before_the_backward_pass_ends():
    for found in trained(2, bucket=1, size=256):
        events = found["events"]
        during = events[events.index("backward") + 1 : events.index("end")]
        assert during.count("run") > 1 and during.count("bucket") > 1
        # The first buckets are ready before the last part of the backward pass begins.
        last = len(during) - 1 - during[::-1].index("run")
        assert "bucket" in during[:last], during


def test_a_killed_process_ends_the_others():
    processes = started(2, killed=1)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert processes[1].returncode == -9
    assert processes[0].returncode == 1
    last = errors[0].strip().splitlines()[-1]
    assert "RuntimeError" in errors[0] and "onnection" in errors[0], last


def test_resumes_from_a_distributed_checkpoint(tmp_path: Path):
    saved = {"saved": str(tmp_path / "saved"), "save_after": 1}
    whole = trained(2, **saved)
    for count in (1, 2):
        for found in trained(count, resumes=True, **saved):
            near(found["losses"], whole[0]["losses"][2:])


# Where gradients are apart from the buckets, a graph that is cut keeps up to one bucket longer.
@pytest.mark.parametrize("settings", [{"size": 256}, {"size": 640, "view": True}], ids=str)
def test_memory_is_that_of_one_process_and_buckets(settings: dict[str, Any]):
    settings = {**settings, "layers": 4, "batch": 32, "steps": 3}
    (alone,) = trained(1, **{**settings, "batch": 16})
    for found in trained(2, **settings):
        assert found["peak"] <= 1.02 * alone["peak"] + found["slopes"], (found, alone)
