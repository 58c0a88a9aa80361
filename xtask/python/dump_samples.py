"""Writes a sample node of each standard operator: what the types that a provider takes are asked with.

usage: python dump_samples.py OUT.json

The file is an array of objects, one operator a line, sorted:

  domain, op
  inputs    list of null (left out) or {kind?, type, shape, values?}; `kind` is "sequence" or "optional"
            where the value is not a tensor, `values` the elements where they matter: integers, few floats
  outputs   how many outputs the node has
  attrs     object from name to value; a tensor is {type, shape, values}

The samples are node cases of the onnx package: of those with one node, the one with the most inputs and the
fewest elements. OTHERS has the operators without a case.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

# So many elements of a tensor of floats, or of another tensor, are written; more do not matter.
FEW_FLOATS, FEW = 8, 64


def tensor(dtype, shape, values=None, kind=None):
    entry = {"kind": kind} if kind else {}
    entry |= {"type": dtype, "shape": list(shape)}
    if values is not None:
        entry["values"] = values
    return entry


FLOATS = tensor("float", [2, 3])
SEQUENCE = tensor("float", [2, 3], kind="sequence")
INDEX = tensor("int64", [], [0])

IMAGE = tensor("float", [1, 2, 3, 3])

OTHERS = [
    ("", "Affine", [FLOATS], {"alpha": 2.0, "beta": 0.5}),
    ("", "ConcatFromSequence", [SEQUENCE], {"axis": 0}),
    ("", "Crop", [IMAGE], {"border": [1, 0, 0, 1]}),
    ("", "GlobalLpPool", [tensor("float", [1, 2, 3, 3])], {}),
    ("", "ImageScaler", [IMAGE], {"bias": [0.5, -1.0], "scale": 2.0}),
    ("", "If", [tensor("bool", [], [1])], {}),
    ("", "Loop", [tensor("int64", [], [2]), tensor("bool", [], [1]), FLOATS], {}),
    ("", "MaxRoiPool", [tensor("float", [1, 1, 4, 4]), tensor("float", [1, 5], [0, 0, 0, 3, 3])], {"pooled_shape": [2, 2]}),
    ("", "Multinomial", [FLOATS], {"sample_size": 2, "seed": 1.0}),
    ("", "Optional", [FLOATS], {}),
    ("", "ParametricSoftplus", [FLOATS], {"alpha": 2.0, "beta": 0.5}),
    ("", "RandomNormal", [], {"shape": [2, 3], "seed": 1.0}),
    ("", "RandomNormalLike", [FLOATS], {"seed": 1.0}),
    ("", "RandomUniform", [], {"shape": [2, 3], "seed": 1.0}),
    ("", "RandomUniformLike", [FLOATS], {"seed": 1.0}),
    ("", "Scale", [FLOATS], {"scale": 2.0}),
    ("", "ScaledTanh", [FLOATS], {"alpha": 2.0, "beta": 0.5}),
    ("", "Scan", [FLOATS], {"num_scan_inputs": 1}),
    ("", "SequenceAt", [SEQUENCE, INDEX], {}),
    ("", "SequenceConstruct", [FLOATS, FLOATS], {}),
    ("", "SequenceEmpty", [], {}),
    ("", "SequenceErase", [SEQUENCE, INDEX], {}),
    ("", "SequenceInsert", [SEQUENCE, FLOATS, INDEX], {}),
    ("", "SequenceMap", [SEQUENCE], {}),
    ("", "SequenceLength", [SEQUENCE], {}),
    ("", "SimplifiedLayerNormalization", [FLOATS, tensor("float", [3])], {}),
    ("ai.onnx.ml", "Imputer", [FLOATS], {"imputed_value_floats": [1.0], "replaced_value_float": 0.0}),
    ("ai.onnx.ml", "FeatureVectorizer", [FLOATS, FLOATS], {"inputdimensions": [3, 3]}),
    ("ai.onnx.ml", "LinearRegressor", [FLOATS], {"coefficients": [1.0, 2.0, 3.0], "intercepts": [0.5]}),
    ("ai.onnx.ml", "LinearClassifier", [FLOATS], {"coefficients": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "classlabels_ints": [0, 1]}),
    ("ai.onnx.ml", "Normalizer", [FLOATS], {"norm": "L2"}),
    ("ai.onnx.ml", "OneHotEncoder", [tensor("int64", [2, 1], [0, 1])], {"cats_int64s": [0, 1, 2]}),
    ("ai.onnx.ml", "Scaler", [FLOATS], {"offset": [1.0], "scale": [2.0]}),
    ("ai.onnx.ml", "CategoryMapper", [tensor("int64", [2], [0, 1])], {"cats_int64s": [0, 1], "cats_strings": ["a", "b"]}),
    ("ai.onnx.ml", "SVMRegressor", [FLOATS], {"coefficients": [1.0, -1.0], "kernel_type": "LINEAR", "n_supports": 2,
                                              "rho": [0.5], "support_vectors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}),
    ("ai.onnx.ml", "SVMClassifier", [FLOATS], {"classlabels_ints": [0, 1], "coefficients": [1.0, -1.0], "kernel_type": "LINEAR",
                                               "rho": [0.5], "support_vectors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
                                               "vectors_per_class": [1, 1]}),
]


def type_name(code: int) -> str:
    return TensorProto.DataType.Name(code).lower()


def elements(array: np.ndarray, dtype: str):
    """The elements to write down, or None where any will do."""
    flat = array.reshape(-1)
    if dtype == "string":
        return [str(x.decode() if isinstance(x, bytes) else x) for x in flat] if flat.size <= FEW else None
    is_float = dtype.startswith(("float", "bfloat", "double"))
    if flat.size > (FEW_FLOATS if is_float else FEW) or dtype.startswith("complex"):
        return None
    numbers = [float(x) for x in flat.astype(np.float64)] if is_float else [int(x) for x in flat]
    return numbers if np.isfinite(numbers).all() else None


def dense(value, code: int, kind=None) -> dict:
    array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    name = {"double": "double"}.get(type_name(code), type_name(code))
    return tensor(name, array.shape, elements(array, name), kind)


def operand(value, proto: onnx.TypeProto):
    if proto.HasField("tensor_type"):
        return dense(value, proto.tensor_type.elem_type)
    if proto.HasField("sequence_type") and value:
        inner = proto.sequence_type.elem_type
        return dense(value[0], inner.tensor_type.elem_type, "sequence") if inner.HasField("tensor_type") else None
    if proto.HasField("optional_type") and value is not None:
        inner = proto.optional_type.elem_type
        return dense(value, inner.tensor_type.elem_type, "optional") if inner.HasField("tensor_type") else None
    return None


def attribute(given: onnx.AttributeProto):
    value = helper.get_attribute_value(given)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, TensorProto):
        return dense(value, value.data_type)
    if isinstance(value, (list, tuple)):
        return [x.decode() if isinstance(x, bytes) else x for x in value]
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value


def sample(case):
    """The one node of a case as a sample; None where it cannot be one."""
    graph = case.model.graph
    if len(graph.node) != 1 or not case.data_sets:
        return None
    node = graph.node[0]
    kinds = {a.type for a in node.attribute}
    if kinds & {onnx.AttributeProto.GRAPH, onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.TYPE_PROTO}:
        return None
    operands = {}
    for info, value in zip(graph.input, case.data_sets[0][0]):
        operands[info.name] = operand(value, info.type)
        if operands[info.name] is None:
            return None
    inputs = [operands[name] if name else None for name in node.input]
    attrs = {a.name: attribute(a) for a in node.attribute}
    return {"domain": node.domain, "op": node.op_type, "inputs": inputs, "outputs": len(node.output), "attrs": attrs}


def size(entry: dict) -> tuple:
    given = [x for x in entry["inputs"] if x]
    return -len(given), sum(int(np.prod(x["shape"])) for x in given)


def main() -> None:
    warnings.filterwarnings("ignore")
    best = {}
    for case in load_model_tests(kind="node"):
        entry = sample(case)
        if entry is None:
            continue
        key = (entry["domain"], entry["op"])
        if key not in best or size(entry) < size(best[key]):
            best[key] = entry
    for domain, op, inputs, attrs in OTHERS:
        best.setdefault((domain, op), {"domain": domain, "op": op, "inputs": inputs, "outputs": 1, "attrs": attrs})
    lines = [json.dumps(best[key], separators=(",", ":")) for key in sorted(best)]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "samples")


if __name__ == "__main__":
    main()
