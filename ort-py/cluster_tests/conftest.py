"""The model of the tests, what one process computes with it, and a cluster of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import ort_runtime as ort
import pytest
from onnx import helper, numpy_helper

F = np.float32
ROWS, WIDTH, CLASSES = 10_000, 256, 10


def pixels(ids: np.ndarray) -> np.ndarray:
    """Returns the row of each id."""
    return np.sin(np.arange(WIDTH, dtype=F)[None] * (1 + ids[:, None] % 97).astype(F) / F(50))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a classifier: pixels [batch, 256] to scores [batch, 10]."""
    rng = np.random.default_rng(7)
    shapes = {"w1": (WIDTH, 512), "b1": (512,), "w2": (512, CLASSES)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(F) / 16, name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["pixels", "w1", "b1"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "w2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=-1),
    ]
    info = helper.make_tensor_value_info
    inputs, outputs = [info("pixels", 1, ["batch", WIDTH])], [info("scores", 1, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "classifier", inputs, outputs, weights)
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    path = tmp_path_factory.mktemp("model") / "classifier.onnx"
    onnx.save(made, path)
    return path


@pytest.fixture(scope="session")
def expected(model: Path) -> np.ndarray:
    """Returns the scores of all rows, from one process."""
    session = ort.InferenceSession(model)
    (scores,) = session.run(None, {"pixels": pixels(np.arange(ROWS))})
    return scores


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts two nodes that have what `NODE` of the test module says."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=request.module.NODE)
    cluster.add_node(**request.module.NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
