"""Loads, runs and drops a model in ONNX Runtime the way `ort soak` does in ours, and measures what stays.

usage: python soak_reference.py MODEL [--inputs FILE.npz] [--cycles N] [--runs N] [--random-dim NAME=LOW..HIGH]...
       [--dim NAME=N]... [--sessions N] [--callers N]

Inputs that are not given are made up: floats from the standard normal distribution, integers 0 or 1. Memory is counted
from after the imports. There is no trim: the arena's shrinkage is asked for with the last run instead.

Prints one JSON object as `ort soak --json` does.
"""

import argparse
import gc
import json
import threading
from pathlib import Path

import numpy as np
import onnxruntime
from reference import DTYPES, open_session
from time_reference import forget_peak, peak, status


def ranged(text: str) -> tuple[str, int, int]:
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition("..")
    return name, int(low), int(high or low)


def feeds_of(session, given: dict | None, dims: list[tuple[str, int, int]], rng: np.random.Generator) -> dict:
    if given is not None:
        return given
    sizes = {name: int(rng.integers(low, high + 1)) for name, low, high in dims}
    feeds = {}
    for info in session.get_inputs():
        shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in info.shape]
        dtype = np.dtype(DTYPES[info.type])
        drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        feeds[info.name] = drawn.astype(dtype)
    return feeds


def one_cycle(given: argparse.Namespace, feeds: dict | None) -> tuple[dict, int]:
    sessions = [open_session(given.model, 1) for _ in range(given.sessions)]
    cycle = {"loaded": status("RssAnon"), "sessions": status("RssAnon"), "ran": []}
    session = sessions[-1]
    rng = np.random.default_rng(0)
    dims = given.dim + given.random_dim
    first = feeds_of(session, feeds, dims, rng)
    session.run(None, first)

    def runs(count: int) -> None:
        for _ in range(count):
            session.run(None, feeds_of(session, feeds, dims, rng))

    parts = min(given.runs, 10)
    for part in range(parts):
        count = given.runs * (part + 1) // parts - given.runs * part // parts
        callers = [threading.Thread(target=runs, args=(count,)) for _ in range(given.callers)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        cycle["ran"].append(status("RssAnon"))
    most = peak()
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session.run(None, first, options)
    cycle["trimmed"] = status("RssAnon")
    return cycle, most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--inputs", type=Path)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--dim", type=ranged, action="append", default=[])
    parser.add_argument("--random-dim", type=ranged, action="append", default=[])
    given = parser.parse_args()
    feeds = dict(np.load(given.inputs)) if given.inputs else None
    forget_peak()
    report = {"baseline": status("RssAnon"), "baseline_rss": status("VmRSS"), "same_bits": True, "cycles": []}
    for _ in range(given.cycles):
        cycle, report["peak_rss"] = one_cycle(given, feeds)
        gc.collect()
        cycle["dropped"] = status("RssAnon")
        report["cycles"].append(cycle)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
