"""What a call costs beside onnxruntime: `python call_cost.py [PACKAGE ...]`.

Each package (default: ort_runtime and onnxruntime) runs in a process of its own, in turn, five
times. The table has medians over the processes, and the ratio of the first two packages. Needs
numpy and onnx.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

TURNS = 5

ROWS = {
    "import": "import of the package after numpy, ms",
    "run": "run(['y'], feeds), one Add of 3 floats, us",
    "run_all": "run(None, feeds), us",
    "binding": "run_with_iobinding, us",
    "strings": "run over 100,000 strings, ms",
}


def best(call: Callable[[], object], count: int) -> float:
    """The least of 15 means over `count` calls, in seconds."""
    means = []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - begin) / count)
    return min(means)


def model(node: str, dtype: int, size: int | None, inputs: list[str]) -> bytes:
    """A model of one node: inputs of `size` elements -> y."""
    from onnx import helper

    values = [helper.make_tensor_value_info(name, dtype, [size]) for name in [*inputs, "y"]]
    graph = helper.make_graph([helper.make_node(node, inputs, ["y"])], "cost", values[:-1], values[-1:])
    opset = [helper.make_opsetid("", 20)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString())


def measure(package: str) -> dict[str, float]:
    """One row of seconds for each of `ROWS`."""
    import numpy as np
    from onnx import TensorProto

    begin = time.perf_counter()
    ort = importlib.import_module(package)
    imported = time.perf_counter() - begin

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    add = model("Add", TensorProto.FLOAT, 3, ["x", "z"])
    session = ort.InferenceSession(add, options, providers=providers)
    x = np.ones(3, np.float32)
    feeds = {"x": x, "z": x}
    binding = session.io_binding()
    for name in feeds:
        binding.bind_cpu_input(name, x)
    binding.bind_output("y")

    identity = model("Identity", TensorProto.STRING, None, ["x"])
    texts = ort.InferenceSession(identity, options, providers=providers)
    words = np.array([f"word {index}" for index in range(100_000)], dtype=object)
    return {
        "import": imported * 1e3,
        "run": best(lambda: session.run(["y"], feeds), 5000) * 1e6,
        "run_all": best(lambda: session.run(None, feeds), 5000) * 1e6,
        "binding": best(lambda: session.run_with_iobinding(binding), 5000) * 1e6,
        "strings": best(lambda: texts.run(None, {"x": words}), 2) * 1e3,
    }


def main(packages: list[str]) -> None:
    """Measures the packages in turn and prints the table."""
    seen: dict[str, list[dict[str, float]]] = {package: [] for package in packages}
    for _ in range(TURNS):
        for package in packages:
            command = [sys.executable, __file__, "--measure", package]
            seen[package].append(json.loads(subprocess.check_output(command)))
    print(f"{'':46}" + "".join(f"{package:>14}" for package in packages) + f"{'ratio':>8}")
    for row, title in ROWS.items():
        medians = [statistics.median(turn[row] for turn in seen[package]) for package in packages]
        ratio = f"{medians[0] / medians[1]:8.2f}" if len(medians) > 1 else ""
        print(f"{title:46}" + "".join(f"{median:14.2f}" for median in medians) + ratio)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:] or ["ort_runtime", "onnxruntime"])
