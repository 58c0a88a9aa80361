"""Times a model on random data.

`python -m ort_runtime.tools.onnxruntime_test --symbolic_dims batch=8,seq=128 model.onnx 100`
"""

from __future__ import annotations

import argparse
import os
import re
import time
from typing import Any

import numpy as np

from .. import InferenceSession, SessionOptions

#: numpy's type for each type string that random data can be made for.
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(int32)": np.int32,
    "tensor(uint32)": np.uint32,
    "tensor(int64)": np.int64,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
}


def generate_feeds(
    sess: InferenceSession, symbolic_dims: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Returns random values for the inputs of a session, the same in every process.

    Args:
        sess: the session.
        symbolic_dims: sizes of symbolic dimensions; 1 for those that are not named.

    Raises:
        ValueError: an input has a type that random data cannot be made for.
    """
    sizes = symbolic_dims or {}
    generator = np.random.default_rng(0)
    feeds = {}
    for value in sess.get_inputs():
        if value.type not in _TYPES:
            raise ValueError(f"Cannot make data of type {value.type} for the input {value.name!r}")
        shape = [dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in value.shape]
        kind = np.dtype(_TYPES[value.type])
        # Integers are often indices: 0 and 1 are valid for most tables.
        data = generator.random(shape) if kind.kind == "f" else generator.integers(0, 2, shape)
        feeds[value.name] = np.asarray(data).astype(str if kind.kind == "O" else kind)
    return feeds


def run_model(
    model_path: str | os.PathLike[str],
    num_iters: int = 1,
    debug: bool | None = None,
    profile: bool | None = None,
    symbolic_dims: dict[str, int] | None = None,
    feeds: dict[str, Any] | None = None,
    override_initializers: bool = True,
) -> tuple[int, dict[str, Any], list[Any]]:
    """Runs a model `num_iters` times and prints its name, version and mean latency.

    Args:
        model_path: the model.
        num_iters: the number of timed runs.
        debug: waits for Enter first, so that a debugger can attach.
        profile: writes a trace, whose name is printed.
        symbolic_dims: sizes of symbolic dimensions for random data.
        feeds: the inputs; random data if None.
        override_initializers: unused; initializers keep their values.

    Returns:
        0, the inputs, and the outputs of the last run.
    """
    if debug:
        input(f"Attach a debugger to process {os.getpid()}, then press Enter")
    options = SessionOptions()
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.basename(model_path)
    session = InferenceSession(os.fspath(model_path), options)
    meta = session.get_modelmeta()
    feeds = feeds or generate_feeds(session, symbolic_dims)
    outputs: list[Any] = []
    start = time.perf_counter()
    for _ in range(num_iters):
        outputs = session.run(None, feeds)
    seconds = time.perf_counter() - start
    print(f"model: {meta.graph_name}")
    print(f"version: {meta.version}")
    print(f"iterations: {num_iters}")
    print(f"avg latency: {seconds / max(num_iters, 1) * 1000} ms")
    if profile:
        print(f"trace file written to: {session.end_profiling()}")
    return 0, feeds, outputs


def _symbolic_dims(text: str) -> dict[str, int]:
    """Parses `name=value,name=value`."""
    pairs = [re.fullmatch(r"([^=]+)=(\d+)", part.strip()) for part in text.split(",")]
    if None in pairs:
        raise argparse.ArgumentTypeError(f"expected name=value[,name=value], got {text!r}")
    return {pair[1]: int(pair[2]) for pair in pairs}


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool on `arguments`, the command line if None, and returns the exit code."""
    parser = argparse.ArgumentParser(
        "onnxruntime_test", description="Times a model on random data."
    )
    parser.add_argument("model_path", help="model path")
    parser.add_argument("num_iters", nargs="?", type=int, default=1000, help="runs, default 1000")
    parser.add_argument("--debug", action="store_true", help="wait for a debugger first")
    parser.add_argument("--profile", action="store_true", help="write a trace")
    parser.add_argument(
        "--symbolic_dims",
        type=_symbolic_dims,
        default={},
        help="sizes of symbolic dimensions, batch=1,seqlen=5; 1 where not given",
    )
    args = parser.parse_args(arguments)
    status, _, _ = run_model(
        args.model_path, args.num_iters, args.debug, args.profile, args.symbolic_dims
    )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
