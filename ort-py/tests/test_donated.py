"""Runs that take over the memory of inputs."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from harness import IS_ORIGINAL, ort
from onnx import helper, numpy_helper

if IS_ORIGINAL:
    pytest.skip("onnxruntime has no such runs", allow_module_level=True)

ROWS, WIDTH = 500, 8


@pytest.fixture(scope="module")
def session() -> Any:
    """Returns a session of four products and as many Softmax."""
    rng = np.random.default_rng(3)
    nodes, weights, last = [], [], "x"
    for place in range(4):
        weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{place}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{place}"], [f"p{place}"]))
        last = "y" if place == 3 else f"s{place}"
        nodes.append(helper.make_node("Softmax", [f"p{place}"], [last]))
    info = helper.make_tensor_value_info
    inputs, outputs = [info("x", 1, ["n", WIDTH])], [info("y", 1, ["n", WIDTH])]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, weights)
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    return ort.InferenceSession(made.SerializeToString())


def rows() -> np.ndarray:
    """Returns an input whose memory is aligned, as that of torch is."""
    memory = np.empty(ROWS * WIDTH + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    x = memory[start : start + ROWS * WIDTH].reshape(ROWS, WIDTH)
    x[:] = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    return x


def unaligned() -> np.ndarray:
    """Returns an input that begins between two cache lines."""
    memory = np.empty(ROWS * WIDTH + 32, np.float32)
    start = -memory.ctypes.data % 64 // 4 + 1
    x = memory[start : start + ROWS * WIDTH].reshape(ROWS, WIDTH)
    x[:] = rows()
    return x


def read_only() -> np.ndarray:
    """Returns an input that cannot be written."""
    x = rows()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("make", [rows, unaligned, read_only])
def test_computes_what_a_run_does(session: Any, make: Any):
    (expected,) = session.run(None, {"x": rows()})
    donated = {"x": make()}
    (found,) = session.run_donating(None, {}, donated)
    assert np.array_equal(found.numpy(), expected)
    assert not donated


def test_the_memory_is_freed(session: Any):
    donated = {"x": rows()}
    memory = weakref.ref(donated["x"].base)
    found = session.run_donating(["y"], {}, donated)
    assert memory() is None and found


def test_the_memory_holds_later_values(session: Any):
    lent, donated = (session._sess.plan({"n": ROWS}, names) for names in ([], ["x"]))
    assert donated.peak_bytes <= lent.peak_bytes - ROWS * WIDTH * 4


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "twice": ({"x": rows()}, {"x": rows()}, "input 'x' is given twice"),
    "unknown": ({}, {"z": rows()}, "Invalid input name: z"),
    "none": ({}, {}, "input 'x'"),
    "shape": ({}, {"x": np.zeros((3, 5), np.float32)}, "expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(session: Any, name: str):
    feed, donated, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=text):
        session.run_donating(None, feed, dict(donated))
