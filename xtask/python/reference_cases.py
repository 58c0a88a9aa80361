"""Makes one-node test cases from tables, with expected values from other implementations.

usage: python reference_cases.py OUT TABLE.json...

Writes OUT/STEM/NAME with `model.onnx`, `test_data_set_0/{input,output}_M.pb` and `tol`, as `ort test` reads them.
A table is a list of entries, and an entry makes one case for each of its opsets:

    {"op": "Softmax", "opsets": [1, 11], "name": "rank3", "attributes": {"axis": 1},
     "inputs": [{"type": "float32", "shape": [2, 3, 4]}], "reference": "onnxruntime"}

op, domain      the operator; the domain is "" where it is left out
opsets          versions of that domain that models import; beside another domain, `standard_opset` (21) of ""
name            what tells the entry from others of the same operator; needed where there are several
attributes      numbers, strings and lists of them (written as the schema's kind of number; without a schema 1 is an
                integer and 1.0 a float); {"list": VALUE}, its elements; {"tensor": VALUE}; {"type": TYPE};
                {"graph": "ONNX text of a graph"}
inputs          a list of VALUEs, or null for one left out; with "constant": true it is an initializer
outputs         how many there are (1), or a list of true and false, false for one left out
output_types    a TYPE for each output, where ONNX Runtime cannot tell them by the inputs' types or the values do not tell
reference       "onnxruntime" (the default), {"onnxruntime": OPSET} where it refuses the model's own opset of the domain,
                "exact" (the default for the operators of exact_products.py; "onnxruntime" is refused where what it
                computes depends on the processor), "onnx" (its ReferenceEvaluator),
                {"numpy": ["EXPRESSION", ...]}, one for each output over np, ml_dtypes, and x, the list of inputs; or
                "function": the body that the standard gives the operator, by the ReferenceEvaluator. That makes a second
                case, NAME_body, of the body itself
tolerance       [RTOL, ATOL], by default [0.001, 0.00001]

A VALUE is {"type", "shape"} with random elements (floats: standard normal; integers: "range", by default -10 to 9 or
0 to 9; the seed is made of the case's name), or {"type", "values", "shape"?} with given ones, or {"sequence": [VALUE, ...]},
or {"optional": VALUE}, or {"optional": null, "type": TYPE} for one without a value, or {"map": {KEY: ELEMENT, ...}, "type":
TYPE}. A TYPE is a tensor's, NumPy's or ml_dtypes' name or `string`, or {"sequence": TYPE}, {"optional": TYPE} or {"map": [KEY,
ELEMENT]} with the names of the types of both. Prints one line `STEM COUNT` for each table.
"""

import functools
import math
import os
import zlib
from pathlib import Path

os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import exact_products
from dump_cases import make_tables, write_model

WORDS = ["", "a", "abc", "Zebra", "über", "x y", "1", "nan"]
STANDARD_OPSET = 21
TOLERANCE = [1e-3, 1e-5]
# The domain that function bodies are put in.
BODIES = "bodies"
# Models of older formats name their initializers among their inputs.
FIRST_IR_WITH_HIDDEN_INITIALIZERS = 4


def dtype_of(name: str) -> np.dtype:
    if name == "string":
        return np.dtype(object)
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def random_elements(dtype: np.dtype, shape: list[int], value: dict, rng: np.random.Generator) -> np.ndarray:
    if dtype == object:
        return rng.choice(np.array(WORDS, dtype=object), shape)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if "range" in value:
        low, high = value["range"]
        whole = isinstance(low, int) and isinstance(high, int)
        return (rng.integers(low, high, shape) if whole else rng.uniform(low, high, shape)).astype(dtype)
    if dtype.kind in "iu" or "int" in dtype.name:
        low = 0 if dtype.name.startswith("u") else -min(10, 2 ** (bits_of(dtype) - 1))
        return rng.integers(low, min(10, 2 ** (bits_of(dtype) - 1)), shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def bits_of(dtype: np.dtype) -> int:
    return int(ml_dtypes.iinfo(dtype).bits) if "int" in dtype.name else dtype.itemsize * 8


def value_of(value: dict, rng: np.random.Generator):
    if "sequence" in value:
        return [value_of(item, rng) for item in value["sequence"]]
    if "optional" in value:
        return None if value["optional"] is None else value_of(value["optional"], rng)
    if "map" in value:
        key, element = map(dtype_of, value["type"]["map"])
        of_texts = key == object
        return {text if of_texts else int(text): np.array(item, element)[()] for text, item in value["map"].items()}
    dtype = dtype_of(value["type"])
    if "values" not in value:
        return random_elements(dtype, value["shape"], value, rng)
    # NumPy reads "nan" and "inf" from texts only in lists of floats.
    elements = np.array(value["values"], dtype=object if dtype == object else None)
    elements = elements.astype(np.float64).astype(dtype) if elements.dtype.kind == "U" else elements.astype(dtype)
    return elements.reshape(value["shape"]) if "shape" in value else elements


def tensor_type(dtype: np.dtype, shape=None) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), shape)


def type_named(name) -> onnx.TypeProto:
    if isinstance(name, str):
        return tensor_type(dtype_of(name))
    if "map" in name:
        key, element = name["map"]
        return helper.make_map_type_proto(helper.np_dtype_to_tensor_dtype(dtype_of(key)), type_named(element))
    if "optional" in name:
        return helper.make_optional_type_proto(type_named(name["optional"]))
    return helper.make_sequence_type_proto(type_named(name["sequence"]))


def type_given(given: dict, value) -> onnx.TypeProto:
    """The type of an input, where the value alone does not tell it."""
    if "optional" in given:
        inner = given["optional"]
        element = type_named(given["type"]) if inner is None else type_given(inner, value)
        return helper.make_optional_type_proto(element)
    return type_named(given["type"]) if "map" in given else type_of(value)


def type_of(value, fixed: bool = False) -> onnx.TypeProto:
    if isinstance(value, list):
        return helper.make_sequence_type_proto(type_of(value[0]))
    if isinstance(value, dict):
        key, item = next(iter(value.items()))
        key_type = TensorProto.STRING if isinstance(key, str) else TensorProto.INT64
        return helper.make_map_type_proto(key_type, type_of(np.asarray(item)))
    return tensor_type(np.asarray(value).dtype, np.shape(value) if fixed else None)


def schema_of(entry: dict, opset: int):
    try:
        return onnx.defs.get_schema(entry["op"], opset, entry.get("domain", ""))
    except onnx.defs.SchemaError:
        return None


def attribute_of(name: str, value, schema, rng) -> AttributeProto:
    if isinstance(value, dict) and "list" in value:
        value = value_of(value["list"], rng).ravel().tolist()
    if isinstance(value, dict):
        if "tensor" in value:
            value = numpy_helper.from_array(value_of(value["tensor"], rng))
        elif "graph" in value:
            value = parser.parse_graph(value["graph"])
        elif "type" in value:
            value = type_named(value["type"])
        return helper.make_attribute(name, value)
    formal = schema.attributes.get(name) if schema else None
    kind = int(formal.type) if formal else None
    if kind == AttributeProto.FLOAT:
        value = float(value)
    if kind == AttributeProto.FLOATS:
        value = [float(item) for item in value]
    return helper.make_attribute(name, value, attr_type=kind)


def imports_of(entry: dict, opset: int) -> list[onnx.OperatorSetIdProto]:
    domain = entry.get("domain", "")
    if domain == "":
        return [helper.make_opsetid("", opset)]
    return [helper.make_opsetid("", entry.get("standard_opset", STANDARD_OPSET)), helper.make_opsetid(domain, opset)]


def output_names(entry: dict) -> list[str]:
    wanted = entry.get("outputs", 1)
    wanted = [True] * wanted if isinstance(wanted, int) else wanted
    return [f"y{index}" if there else "" for index, there in enumerate(wanted)]


def model_of(entry: dict, opset: int, values: list, rng) -> onnx.ModelProto:
    """The model without types of its outputs, which the reference tells."""
    schema = schema_of(entry, opset)
    names = ["" if given is None else f"x{index}" for index, given in enumerate(entry["inputs"])]
    node = helper.make_node(entry["op"], names, output_names(entry), name="node", domain=entry.get("domain", ""))
    for name, value in entry.get("attributes", {}).items():
        node.attribute.append(attribute_of(name, value, schema, rng))
    imports = imports_of(entry, opset)
    ir_version = max(3, helper.find_min_ir_version_for(imports, ignore_unknown=True))
    inputs, initializers = [], []
    for name, value, given in zip(names, values, entry["inputs"], strict=True):
        if not name:
            continue
        constant = given.get("constant", False)
        if constant:
            initializers.append(numpy_helper.from_array(value, name))
        if not constant or ir_version < FIRST_IR_WITH_HIDDEN_INITIALIZERS:
            shape = list(value.shape) if isinstance(value, np.ndarray) else None
            inputs.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)
                if shape is not None
                else helper.make_value_info(name, type_given(given, value))
            )
    outputs = [helper.make_empty_tensor_value_info(name) for name in output_names(entry) if name]
    for info, name in zip(outputs, entry.get("output_types", [])):
        info.type.CopyFrom(type_named(name))
    graph = helper.make_graph([node], "case", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def run_onnxruntime(model: onnx.ModelProto, feeds: dict) -> list:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Several threads would each quantize the range of their own sequences in DynamicQuantizeLSTM.
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def run_node(imports, node: onnx.NodeProto, values: list) -> list:
    """A node in ONNX Runtime, without types of its outputs."""
    feeds = {name: value for name, value in zip(node.input, values, strict=True) if value is not None}
    inputs = [helper.make_value_info(name, type_of(value, fixed=True)) for name, value in feeds.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    ir_version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    return run_onnxruntime(helper.make_model(graph, opset_imports=imports, ir_version=ir_version), feeds)


def is_exact(entry: dict) -> bool:
    return (entry.get("domain", ""), entry["op"]) in exact_products.OPERATORS


def depends_on_processor(entry: dict) -> bool:
    """Whether ONNX Runtime multiplies in 8 bits, with the instructions that the processor has for it."""
    return is_exact(entry) or entry["op"] == "QMoE" or entry.get("attributes", {}).get("accuracy_level") == 4


def expected_of(entry: dict, model: onnx.ModelProto, feeds: dict, values: list) -> list:
    reference = entry.get("reference", "exact" if is_exact(entry) else "onnxruntime")
    if reference == "exact":
        run = functools.partial(run_node, model.opset_import)
        node = model.graph.node[0]
        exact_products.check(node, values, entry.get("tolerance", TOLERANCE), run)
        return exact_products.evaluate(node, values, run)
    if "onnxruntime" in reference:
        if depends_on_processor(entry):
            raise ValueError(f"what ONNX Runtime makes of {entry['op']} depends on the processor: it is no reference")
        if reference != "onnxruntime":
            model = onnx.ModelProto.FromString(model.SerializeToString())
            for own in model.opset_import:
                own.version = reference["onnxruntime"] if own.domain == entry.get("domain", "") else own.version
        return run_onnxruntime(model, feeds)
    if reference == "onnx":
        return ReferenceEvaluator(model).run(None, feeds)
    return [eval(expression, {"np": np, "ml_dtypes": ml_dtypes, "math": math, "x": values}) for expression in reference["numpy"]]


def body_of(node: onnx.NodeProto, values: dict, opset: int) -> onnx.FunctionProto:
    """The newest function body of the standard for an operator of this opset and inputs like these."""
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    if schema.has_context_dependent_function:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
        given = [type_of(values[name], fixed=True).SerializeToString() if name else b"" for name in node.input]
        body = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), given)
    else:
        version = max(v for v in schema.function_opset_versions if v <= opset)
        body = schema.get_function_with_opset_version(version)
    return onnx.FunctionProto.FromString(body)


def model_of_body(model: onnx.ModelProto, values: dict, opset: int) -> onnx.ModelProto:
    """The model with a call of the operator's function body in place of the operator."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    node = result.graph.node[0]
    body = body_of(node, values, opset)
    # The evaluator wants as many inputs and outputs of a call as the function has.
    node.input.extend([""] * (len(body.input) - len(node.input)))
    del body.output[len(node.output):]
    given = {attribute.name for attribute in node.attribute}
    for name, formal in onnx.defs.get_schema(node.op_type, opset, node.domain).attributes.items():
        if name not in given and formal.default_value.type != AttributeProto.UNDEFINED:
            node.attribute.append(formal.default_value)
            node.attribute[-1].name = name
    body.domain = node.domain = BODIES
    body.name = node.op_type
    result.functions.append(body)
    result.opset_import.append(helper.make_opsetid(BODIES, 1))
    return result


def write_case(folder: Path, model: onnx.ModelProto, feeds: dict, expected: list, tolerance: list) -> None:
    for info, value in zip(model.graph.output, expected, strict=True):
        if value is not None:
            told = type_of(value)
            # An optional is told by the entry; what ONNX Runtime gives is the value inside.
            info.type.CopyFrom(info.type if info.type.HasField("optional_type") else told)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [feeds[info.name] for info in model.graph.input if info.name not in constants]
    write_model(folder, model, inputs, expected, tolerance)


def make(entry: dict, opset: int, name: str, folder: Path) -> int:
    """Makes the case, and with it the same by the function body where that is its reference; returns how many."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = [None if value is None else value_of(value, rng) for value in entry["inputs"]]
    model = model_of(entry, opset, values, rng)
    constants = {tensor.name for tensor in model.graph.initializer}
    given = {f"x{index}": value for index, value in enumerate(values) if entry["inputs"][index] is not None}
    feeds = {name: value for name, value in given.items() if name not in constants}
    tolerance = entry.get("tolerance", TOLERANCE)
    if entry.get("reference") == "function":
        body = model_of_body(model, given, opset)
        expected = ReferenceEvaluator(body).run(None, feeds)
        write_case(folder.with_name(folder.name + "_body"), body, feeds, expected, tolerance)
    else:
        expected = expected_of(entry, model, feeds, values)
    write_case(folder, model, feeds, expected, tolerance)
    return 2 if entry.get("reference") == "function" else 1


def cases_of(entries: list):
    for entry in entries:
        for opset in entry["opsets"]:
            name = "_".join(filter(None, [entry["op"], str(opset), entry.get("name")]))
            yield name, functools.partial(make, entry, opset, name)


if __name__ == "__main__":
    make_tables(cases_of)
