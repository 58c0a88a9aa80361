"""Fits scikit-learn's ensembles of trees and writes them as ONNX models, with rows to ask them about.

usage: python make_trees.py TABLE.json OUT [NAME...]

Writes OUT/NAME.onnx for each model of the table, and for each batch size N OUT/same_N.npz with that many rows and OUT/rows_N.npz
with many more where N is small, so that runs can take N other rows each time. A model without an estimator is one Identity, which shows
what a run costs that computes nothing. A model that is there and whose description is unchanged is left alone.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import sklearn.ensemble
from onnx import TensorProto, helper
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType

OPSETS = {"": 19, "ai.onnx.ml": 3}


def samples(rows: int, features: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, features)).astype(np.float32)


def target(x: np.ndarray) -> np.ndarray:
    """Products, waves and kinks of several features, and noise: what trees need many levels for."""
    noise = np.random.default_rng(2).standard_normal(len(x))
    smooth = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.5 * x[:, 3] ** 2
    return smooth - np.abs(x[:, 4]) + 0.3 * x[:, 5:12].sum(axis=1) + 0.5 * noise


def identity(features: int) -> onnx.ModelProto:
    shape = [None, features]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["X"], ["Y"])],
        "identity",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, shape)],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def fitted(model: dict, table: dict) -> onnx.ModelProto:
    features = table["features"]
    x = samples(table["rows_to_fit"], features, seed=1)
    y = target(x)
    estimator = getattr(sklearn.ensemble, model["estimator"])(random_state=0, **model["arguments"])
    is_classifier = sklearn.base.is_classifier(estimator)
    estimator.fit(x, (y > np.median(y)).astype(np.int64) if is_classifier else y)
    options = {"zipmap": False} if is_classifier else None
    inputs = [("X", FloatTensorType([None, features]))]
    return to_onnx(estimator, initial_types=inputs, options=options, target_opset=OPSETS)


def main() -> None:
    table = json.loads(Path(sys.argv[1]).read_text())
    out, names = Path(sys.argv[2]), sys.argv[3:]
    out.mkdir(parents=True, exist_ok=True)
    for model in table["models"]:
        if names and model["name"] not in names:
            continue
        path, stamp = out / f"{model['name']}.onnx", out / f"{model['name']}.json"
        description = json.dumps([model, table["features"], table["rows_to_fit"], onnx.__version__])
        if path.exists() and stamp.exists() and stamp.read_text() == description:
            continue
        made = fitted(model, table) if "estimator" in model else identity(table["features"])
        onnx.save(made, path)
        stamp.write_text(description)
        print(f"made {path.name}", flush=True)
    for batch in table["batches"]:
        rows = samples(max(batch, table["most_rows"]), table["features"], seed=3)
        np.savez(out / f"rows_{batch}.npz", X=rows)
        np.savez(out / f"same_{batch}.npz", X=rows[:batch])


if __name__ == "__main__":
    main()
