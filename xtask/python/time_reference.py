"""Times ONNX Runtime on one model, the way `ort bench` times ours.

usage: python time_reference.py MODEL INPUTS.npz THREADS SECONDS [ROWS]

With ROWS each run takes the next ROWS rows of all inputs. A run is one call of `InferenceSession.run`, so that what Python adds is
in the times: about five microseconds, which a model of one Identity shows.

Prints one JSON object: load_ms, first_ms, median_ms, min_ms, runs, baseline_rss, peak_rss (bytes).
"""

import json
import resource
import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np

from reference import open_session

WARMUP = 3


def resident() -> int | None:
    """Bytes of this process in memory, where /proc tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


def peak() -> int:
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    model, inputs, threads, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    whole = dict(np.load(inputs))
    batches = [whole]
    if len(sys.argv) > 5:
        rows = int(sys.argv[5])
        count = len(next(iter(whole.values()))) // rows
        batches = [{k: v[i * rows : (i + 1) * rows] for k, v in whole.items()} for i in range(count)]
    feeds = batches[0]
    baseline = resident()

    def timed(call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    start = time.perf_counter()
    session = open_session(Path(model), threads)
    load = (time.perf_counter() - start) * 1e3
    first = timed(lambda: session.run(None, feeds))
    for _ in range(WARMUP):
        session.run(None, feeds)
    times = []
    end = time.perf_counter() + seconds
    for feeds in cycle(batches):
        start = time.perf_counter()
        session.run(None, feeds)
        stop = time.perf_counter()
        times.append((stop - start) * 1e3)
        if stop >= end:
            break
    report = {
        "load_ms": load,
        "first_ms": first,
        "median_ms": float(np.median(times)),
        "min_ms": min(times),
        "runs": len(times),
        "baseline_rss": baseline,
        "peak_rss": peak(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
