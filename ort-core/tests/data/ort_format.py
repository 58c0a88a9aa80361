"""Writes `ort_format/*`: models that ONNX Runtime saves as ONNX and in its ORT format.

    pip install onnxruntime==1.31.1 onnx numpy
    python ort_format.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).parent / "ort_format"
FLOAT, INT64, STRING, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL
node = helper.make_node
value = helper.make_tensor_value_info


def body(nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", [], [value(output, FLOAT, None)])


def kinds() -> onnx.ModelProto:
    """Attributes of all kinds, subgraphs, sequences, strings, a sparse weight, symbolic sizes."""
    tensor = numpy_helper.from_array(np.array([1.5], np.float32))
    nodes = [
        # Stored in this order, not in that of the run.
        node("Relu", ["sum"], ["y"], name="last", doc_string="the last node"),
        node("Add", ["x", "w"], ["wide"], name="first"),
        node("Softmax", ["wide"], ["soft"], axis=-1),
        node("Transpose", ["soft"], ["turned"], perm=[1, 0]),
        node("Transpose", ["turned"], ["back"], perm=[1, 0]),
        node("LeakyRelu", ["back"], ["leaky"], alpha=0.25),
        node("ConstantOfShape", ["shape"], ["filled"], value=tensor),
        node("Clip", ["leaky", "", "most"], ["clipped"]),
        node("Add", ["clipped", "filled"], ["added"]),
        node("Add", ["added", "sparse"], ["full"]),
        node("Sum", ["full", "chosen"], ["sum"]),
        node(
            "If",
            ["flag"],
            ["chosen"],
            then_branch=body([node("Neg", ["x"], ["a"])], "a"),
            else_branch=body([node("Add", ["x", "w"], ["b"]), node("Abs", ["b"], ["c"])], "c"),
        ),
        node("SequenceConstruct", ["x", "full"], ["list"]),
        node("Identity", ["names"], ["texts"]),
        node(
            "LabelEncoder",
            ["names"],
            ["labels"],
            domain="ai.onnx.ml",
            keys_strings=["the", "a cat"],
            values_strings=["one", "two"],
            default_string="none",
        ),
        node(
            "TfIdfVectorizer",
            ["counts"],
            ["grams"],
            max_gram_length=1,
            max_skip_count=0,
            min_gram_length=1,
            mode="TF",
            ngram_counts=[0],
            ngram_indexes=[0, 1],
            pool_int64s=[2, 3],
            weights=[0.5, 2.0],
        ),
    ]
    values = numpy_helper.from_array(np.array([3], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([1], np.int64))
    weights = [
        numpy_helper.from_array(np.array([1, -2, 3], np.float32), "w"),
        numpy_helper.from_array(np.array([1, 3], np.int64), "shape"),
        numpy_helper.from_array(np.array(0.75, np.float32), "most"),
        helper.make_tensor("names", STRING, [2], [b"the", b"a cat"]),
    ]
    graph = helper.make_graph(
        nodes,
        "kinds",
        [value("x", FLOAT, ["n", 3]), value("flag", BOOL, []), value("counts", INT64, [3])],
        [
            value("y", FLOAT, None),
            helper.make_tensor_sequence_value_info("list", FLOAT, None),
            value("texts", STRING, [2]),
            value("labels", STRING, None),
            value("grams", FLOAT, [2]),
        ],
        weights,
        doc_string="a graph",
        sparse_initializer=[helper.make_sparse_tensor(values, indices, [3])],
    )
    made = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)],
        ir_version=9,
        producer_name="ours",
        doc_string="a model",
    )
    helper.set_model_props(made, {"author": "someone", "use": ""})
    return made


def maps() -> onnx.ModelProto:
    """A sequence of maps, as classifiers return."""
    graph = helper.make_graph(
        [node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_strings=["cat", "dog"])],
        "maps",
        [value("x", FLOAT, [1, 2])],
        [onnx.ValueInfoProto(name="y")],
    )
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=sets, ir_version=8)


for make in (kinds, maps):
    model = make().SerializeToString()
    for form in ("onnx", "ort"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(FOLDER / f"{make.__name__}.{form}")
        options.add_session_config_entry("session.save_model_format", form.upper())
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
