"""Times another runtime on one model, the way `ort bench` times ours.

usage: python time_reference.py RUNTIME MODEL INPUTS.npz THREADS SECONDS [--rows N] [--rate N] [--precision P] [--warmup N]

RUNTIME is onnxruntime or openvino. With --rows each run takes the next N rows of all inputs; with --rate runs begin N times a second.
A run is one call from Python, so that what Python adds is in the times: about five microseconds for ONNX Runtime, which a model of one
Identity shows. Memory is counted from after the imports, so that what is left is the model's and the inputs'.

Prints one JSON object: load_ms, first_ms, median_ms, min_ms, cpu_ms (of all threads, a run), runs, runs_per_second, baseline_rss,
peak_rss (bytes).
"""

import argparse
import json
import os
import resource
import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np


def status(field: str) -> int | None:
    """Bytes of a field of this process's status, where /proc tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """The most that was resident is counted anew: imports are over."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak() -> int:
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class OnnxRuntime:
    def __init__(self, precision: str):
        if precision != "f32":
            raise SystemExit("error: ONNX Runtime's CPU provider multiplies in f32 only")
        if os.environ.get("ORT_ISA") == "avx2":
            from limited_onnxruntime import import_limited

            import_limited()
        from reference import open_session

        self.open = open_session

    def load(self, model: Path, feeds: dict, threads: int):
        session = self.open(model, threads)
        return lambda feeds: session.run(None, feeds)


class OpenVino:
    def __init__(self, precision: str):
        import openvino

        self.core = openvino.Core()
        self.precision = precision

    def load(self, model: Path, feeds: dict, threads: int):
        """The model with the shapes of the inputs, which suits OpenVINO best, on one stream of `threads` threads."""
        graph = self.core.read_model(model)
        graph.reshape({name: list(value.shape) for name, value in feeds.items()})
        # On a CPU with AVX512-BF16 the default is what the hint bf16 is: the compiled model reports bfloat16, and takes as long.
        config = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self.precision,
        }
        request = self.core.compile_model(graph, "CPU", config).create_infer_request()
        return lambda feeds: request.infer(feeds, share_inputs=True, share_outputs=True)


RUNTIMES = {"onnxruntime": OnnxRuntime, "openvino": OpenVino}


def batches_of(inputs: Path, rows: int | None) -> list[dict]:
    whole = dict(np.load(inputs))
    if rows is None:
        return [whole]
    count = len(next(iter(whole.values()))) // rows
    return [{k: v[i * rows : (i + 1) * rows] for k, v in whole.items()} for i in range(count)]


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(run, batches: list[dict], seconds: float, rate: float | None) -> dict:
    times = []
    begin, busy = time.perf_counter(), time.process_time()
    for index, feeds in enumerate(cycle(batches)):
        if rate:
            time.sleep(max(0.0, begin + index / rate - time.perf_counter()))
        times.append(timed(lambda feeds=feeds: run(feeds)))
        if time.perf_counter() >= begin + seconds:
            break
    busy, elapsed = time.process_time() - busy, time.perf_counter() - begin
    return {
        "median_ms": float(np.median(times)),
        "min_ms": min(times),
        "cpu_ms": busy * 1e3 / len(times),
        "runs": len(times),
        "runs_per_second": len(times) / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("model", type=Path)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--precision", default="f32")
    parser.add_argument("--warmup", type=int, default=3)
    given = parser.parse_args()
    runtime = RUNTIMES[given.runtime](given.precision)
    forget_peak()
    baseline = status("VmRSS")
    batches = batches_of(given.inputs, given.rows)
    start = time.perf_counter()
    run = runtime.load(given.model, batches[0], given.threads)
    report = {"load_ms": (time.perf_counter() - start) * 1e3}
    report["first_ms"] = timed(lambda: run(batches[0]))
    for _ in range(given.warmup):
        run(batches[0])
    report |= measure(run, batches, given.seconds, given.rate)
    report |= {"baseline_rss": baseline, "peak_rss": peak()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
