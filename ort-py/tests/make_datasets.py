"""Makes the models of `ort_runtime.datasets`.

`python tests/make_datasets.py [folder]` writes them, to the package if no folder is given.
`test_datasets.py` checks that the committed files are these.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).parent.parent / "python" / "ort_runtime" / "datasets"

#: One logistic regression for each class on sepal length and width of the iris data (150 flowers,
#: three classes). The probabilities at (1, 2), (3, 4) and (5, 6) are those of onnxruntime's example,
#: which programs compare with; the rest is fitted to the data. Accuracy 0.71.
IRIS_COEFFICIENTS = [-4.296638, 4.143362, -2.302331, -0.922331, -2.58466, 1.37534]
IRIS_INTERCEPTS = [-4.258991, -0.207681, -4.778729]


def _model(graph: onnx.GraphProto, *opsets: tuple[str, int]) -> onnx.ModelProto:
    """Returns a checked model of `graph` that imports `opsets`."""
    model = helper.make_model(
        graph,
        producer_name="ort-runtime",
        ir_version=7,
        opset_imports=[helper.make_opsetid(*opset) for opset in opsets],
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def sigmoid() -> onnx.ModelProto:
    """Returns `y = Sigmoid(x)`, float [3, 4, 5]."""
    graph = helper.make_graph(
        [helper.make_node("Sigmoid", ["x"], ["y"])],
        "sigmoid",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4, 5])],
    )
    return _model(graph, ("", 13))


def mul_1() -> onnx.ModelProto:
    """Returns `Y = X * [[1, 2], [3, 4], [5, 6]]`, float [3, 2]."""
    factors = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["X", "W"], ["Y"])],
        "mul",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [3, 2])],
        [numpy_helper.from_array(factors, "W")],
    )
    return _model(graph, ("", 13))


def logreg_iris() -> onnx.ModelProto:
    """Returns a classifier of irises with labels and a dictionary of probabilities per row."""
    classes = [0, 1, 2]
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["float_input"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            classlabels_ints=classes,
            coefficients=IRIS_COEFFICIENTS,
            intercepts=IRIS_INTERCEPTS,
            multi_class=1,
            post_transform="LOGISTIC",
        ),
        helper.make_node("Normalizer", ["scores"], ["shares"], domain="ai.onnx.ml", norm="L1"),
        helper.make_node(
            "ZipMap",
            ["shares"],
            ["probabilities"],
            domain="ai.onnx.ml",
            classlabels_int64s=classes,
        ),
    ]
    probabilities = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    graph = helper.make_graph(
        nodes,
        "logreg_iris",
        [helper.make_tensor_value_info("float_input", TensorProto.FLOAT, [3, 2])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [3]),
            helper.make_value_info("probabilities", helper.make_sequence_type_proto(probabilities)),
        ],
    )
    return _model(graph, ("", 13), ("ai.onnx.ml", 1))


MODELS = {"sigmoid.onnx": sigmoid, "mul_1.onnx": mul_1, "logreg_iris.onnx": logreg_iris}


def main(folder: Path) -> None:
    """Writes every model to `folder`."""
    for name, build in MODELS.items():
        (folder / name).write_bytes(build().SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
