"""Small ONNX models for the tests, built with `onnx.helper`.

`data(name)` gives the serialized model, `path(name)` a file of it in a folder that lives as long as
the test run. Each model is built once. `data("identity", "float16", (2, 3))` passes arguments on to
the builder.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
IR_VERSION = 10

#: ONNX element type by the name used in type strings, `tensor(<name>)`.
ELEMENT_TYPES: dict[str, int] = {
    "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int32": TensorProto.INT32,
    "uint32": TensorProto.UINT32,
    "int64": TensorProto.INT64,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
    "string": TensorProto.STRING,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ,
    "float8e5m2": TensorProto.FLOAT8E5M2,
    "float8e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
}

#: numpy dtype by the same name, for the element types that numpy has.
DTYPES: dict[str, type] = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "bool": np.bool_,
}

Shape = Sequence[int | str | None] | None

_BUILDERS: dict[str, Callable[..., onnx.ModelProto]] = {}


def _model(build: Callable[..., onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    """Registers a builder under its own name."""
    _BUILDERS[build.__name__] = build
    return build


@functools.cache
def folder() -> str:
    """Folder of the model files, removed at exit by the process that made it."""
    place, owner = tempfile.mkdtemp(prefix="ort-py-"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(place, ignore_errors=True))
    return place


@functools.cache
def data(name: str, *args: object) -> bytes:
    """The serialized model `name`, built with `args`."""
    return _BUILDERS[name](*args).SerializeToString()


@functools.cache
def path(name: str, *args: object) -> str:
    """A file with the model `name`, built with `args`."""
    label = "_".join([name, *(str(a) for a in args)])
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in label)
    file = os.path.join(folder(), safe + ".onnx")
    with open(file, "wb") as out:
        out.write(data(name, *args))
    return file


def tensor(name: str, element: str = "float", shape: Shape = None) -> onnx.ValueInfoProto:
    """A value info of a tensor; `shape` None leaves the shape out."""
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[element], shape)


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = OPSET,
    domains: dict[str, int] | None = None,
    ir_version: int = IR_VERSION,
    graph_name: str = "graph",
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A model of one graph."""
    graph = helper.make_graph(nodes, graph_name, inputs, outputs, list(initializers))
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(d, v) for d, v in (domains or {}).items()]
    model = helper.make_model(graph, opset_imports=imports, functions=list(functions))
    model.ir_version = ir_version
    return model


def _weight(name: str, values: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


# Plain models.


@_model
def identity(element: str = "float", shape: Shape = ("n",)) -> onnx.ModelProto:
    """x -> y, both of one element type and shape."""
    node = helper.make_node("Identity", ["x"], ["y"], name="copy")
    return make([node], [tensor("x", element, shape)], [tensor("y", element, shape)])


@_model
def add_one() -> onnx.ModelProto:
    """x [batch, 3] + 1 -> y; the weight `one` is an initializer."""
    return make(
        [helper.make_node("Add", ["x", "one"], ["y"], name="add")],
        [tensor("x", "float", ["batch", 3])],
        [tensor("y", "float", ["batch", 3])],
        [_weight("one", [1, 1, 1])],
    )


@_model
def two() -> onnx.ModelProto:
    """a [n], b [n] -> sum = a + b, difference = a - b."""
    return make(
        [
            helper.make_node("Add", ["a", "b"], ["sum"], name="add"),
            helper.make_node("Sub", ["a", "b"], ["difference"], name="sub"),
        ],
        [tensor("a", "float", ["n"]), tensor("b", "float", ["n"])],
        [tensor("sum", "float", ["n"]), tensor("difference", "float", ["n"])],
    )


@_model
def scale(element: str = "float") -> onnx.ModelProto:
    """x [n] -> y = x + x, so that values are read, not only passed on."""
    return make(
        [helper.make_node("Add", ["x", "x"], ["y"], name="twice")],
        [tensor("x", element, ["n"])],
        [tensor("y", element, ["n"])],
    )


@_model
def fixed() -> onnx.ModelProto:
    """x [2, 3] -> y = -x."""
    return make(
        [helper.make_node("Neg", ["x"], ["y"], name="neg")],
        [tensor("x", "float", [2, 3])],
        [tensor("y", "float", [2, 3])],
    )


@_model
def passed_through() -> onnx.ModelProto:
    """x [n] -> x itself is not an output, but two Identity chains of it are; and a weight."""
    return make(
        [
            helper.make_node("Identity", ["x"], ["y"], name="first"),
            helper.make_node("Identity", ["x"], ["z"], name="second"),
            helper.make_node("Identity", ["w"], ["v"], name="third"),
        ],
        [tensor("x", "float", ["n"])],
        [tensor("y", "float", ["n"]), tensor("z", "float", ["n"]), tensor("v", "float", [2])],
        [_weight("w", [5, 6])],
    )


@_model
def weight_output() -> onnx.ModelProto:
    """x [n] -> y = x + x; the initializer w [2] is a graph output too."""
    return make(
        [helper.make_node("Add", ["x", "x"], ["y"], name="add")],
        [tensor("x", "float", ["n"])],
        [tensor("y", "float", ["n"]), tensor("w", "float", [2])],
        [_weight("w", [5, 6])],
    )


@_model
def input_output() -> onnx.ModelProto:
    """The graph input x [n] is itself a graph output; y = x + x."""
    return make(
        [helper.make_node("Add", ["x", "x"], ["y"], name="add")],
        [tensor("x", "float", ["n"])],
        [tensor("x", "float", ["n"]), tensor("y", "float", ["n"])],
    )


@_model
def reshape_view() -> onnx.ModelProto:
    """x [2, 3] -> y [6] by Reshape."""
    return make(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape")],
        [tensor("x", "float", [2, 3])],
        [tensor("y", "float", [6])],
        [_weight("shape", [6], np.int64)],
    )


@_model
def overridable() -> onnx.ModelProto:
    """x [2] + w [2] -> y, where the initializer w is a graph input too."""
    return make(
        [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        [tensor("x", "float", [2]), tensor("w", "float", [2])],
        [tensor("y", "float", [2])],
        [_weight("w", [10, 20])],
    )


@_model
def shapes() -> onnx.ModelProto:
    """Inputs of every way to write a shape, each passed on under `<name>_out`."""
    inputs = [
        tensor("numbers", "float", [2, 3]),
        tensor("symbols", "float", ["batch", "length"]),
        tensor("mixed", "float", ["batch", 3]),
        tensor("unknown", "float", [None, 3]),
        tensor("empty_symbol", "float", ["", 3]),
        tensor("scalar", "float", []),
        tensor("no_shape", "float", None),
        tensor("zero", "float", [0, 3]),
    ]
    nodes = [helper.make_node("Identity", [i.name], [i.name + "_out"], name=i.name) for i in inputs]
    outputs = [helper.make_tensor_value_info(i.name + "_out", 1, None) for i in inputs]
    for given, made in zip(inputs, outputs):
        made.type.CopyFrom(given.type)
    return make(nodes, inputs, outputs)


@_model
def declared_sizes() -> onnx.ModelProto:
    """Sizes declared as expressions, marks, and less than inference knows."""
    sizes = ["?", "past + length", -1, "n"]
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Shape", ["x"], ["four"]),
        helper.make_node("NonZero", ["x"], ["found"]),
    ]
    outputs = [
        tensor("y", shape=["any", "past + length", None, "other"]),
        tensor("four", "int64", ["rank"]),
        tensor("found", "int64", [4, "hits"]),
    ]
    return make(nodes, [tensor("x", shape=sizes)], outputs)


@_model
def wrong_declared() -> onnx.ModelProto:
    """x [2, 3] -> y declared as [2, 4]."""
    return make(
        [helper.make_node("Neg", ["x"], ["y"], name="neg")],
        [tensor("x", "float", [2, 3])],
        [tensor("y", "float", [2, 4])],
    )


@_model
def no_inputs() -> onnx.ModelProto:
    """No input; y [2] = w + w."""
    return make(
        [helper.make_node("Add", ["w", "w"], ["y"], name="add")],
        [],
        [tensor("y", "float", [2])],
        [_weight("w", [1, 2])],
    )


@_model
def described() -> onnx.ModelProto:
    """A model with every field of the metadata set."""
    model = add_one()
    model.producer_name = "maker"
    model.producer_version = "9"
    model.domain = "org.example"
    model.doc_string = "what the model does"
    model.model_version = 7
    model.graph.name = "the graph"
    model.graph.doc_string = "what the graph does"
    entries = {"author": "me", "words": "é 猫", "empty": "", "long": "x" * 300_000}
    helper.set_model_props(model, entries)
    return model


@_model
def configured() -> onnx.ModelProto:
    """`add_one` with session options in its metadata."""
    model = add_one()
    options = {"session_options": {"intra_op_num_threads": 3, "execution_mode": 0}}
    helper.set_model_props(model, {"ort_config": json.dumps(options)})
    return model


@_model
def denoted() -> onnx.ModelProto:
    """x [d, 3] -> y, where the first dimension has the denotation DATA_BATCH."""
    model = fixed()
    for value in (model.graph.input[0], model.graph.output[0]):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        dim.dim_param = "d"
        dim.denotation = "DATA_BATCH"
    return model


@_model
def external(file: str = "weights.bin") -> onnx.ModelProto:
    """x [4] + w [4] -> y, where w lies in an external file (see `external_file`)."""
    model = make(
        [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        [tensor("x", "float", [4])],
        [tensor("y", "float", [4])],
        [_weight("w", [0, 0, 0, 0])],
    )
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", "0"), ("length", "16")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return model


EXTERNAL_WEIGHTS = np.array([1, 2, 3, 4], np.float32)


@functools.cache
def external_file(file: str = "weights.bin") -> str:
    """Writes the file of `external` and gives its path."""
    place = os.path.join(folder(), file)
    EXTERNAL_WEIGHTS.tofile(place)
    return place


@_model
def slow(iterations: int = 200_000) -> onnx.ModelProto:
    """x [n] -> y = x + iterations, one addition per turn of a Loop."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["v_in", "unit"], ["v_out"], name="step"),
            helper.make_node("Identity", ["go_in"], ["go_out"], name="go"),
        ],
        "body",
        [tensor("i", "int64", []), tensor("go_in", "bool", []), tensor("v_in", "float", ["n"])],
        [tensor("go_out", "bool", []), tensor("v_out", "float", ["n"])],
    )
    return make(
        [helper.make_node("Loop", ["turns", "go", "x"], ["y"], name="loop", body=body)],
        [tensor("x", "float", ["n"])],
        [tensor("y", "float", ["n"])],
        [
            numpy_helper.from_array(np.array(iterations, np.int64), "turns"),
            numpy_helper.from_array(np.array(True), "go"),
            _weight("unit", [1]),
        ],
    )


@_model
def gather() -> onnx.ModelProto:
    """table [4] at i [n] -> y; an index out of range fails at run."""
    return make(
        [helper.make_node("Gather", ["table", "i"], ["y"], name="pick")],
        [tensor("i", "int64", ["n"])],
        [tensor("y", "float", ["n"])],
        [_weight("table", [0, 1, 2, 3])],
    )


@_model
def reshape() -> onnx.ModelProto:
    """x [n] to the shape s [k] -> y; sizes that disagree fail at run."""
    return make(
        [helper.make_node("Reshape", ["x", "s"], ["y"], name="reshape")],
        [tensor("x", "float", ["n"]), tensor("s", "int64", ["k"])],
        [tensor("y", "float", None)],
    )


@_model
def expand() -> onnx.ModelProto:
    """x [1] expanded to the shape s [k] -> y."""
    return make(
        [helper.make_node("Expand", ["x", "s"], ["y"], name="expand")],
        [tensor("x", "float", [1]), tensor("s", "int64", ["k"])],
        [tensor("y", "float", None)],
    )


@_model
def cast(source: str = "float", target: str = "float16") -> onnx.ModelProto:
    """x [n] cast to another element type -> y."""
    node = helper.make_node("Cast", ["x"], ["y"], name="cast", to=ELEMENT_TYPES[target])
    return make([node], [tensor("x", source, ["n"])], [tensor("y", target, ["n"])])


@_model
def logic(operator: str) -> onnx.ModelProto:
    """a [n], b [n] of bool -> y, what an operator makes of both."""
    node = helper.make_node(operator, ["a", "b"], ["y"], name="logic")
    inputs = [tensor(name, "bool", ["n"]) for name in "ab"]
    return make([node], inputs, [tensor("y", "bool", ["n"])])


@_model
def scatter_bools(reduction: str) -> onnx.ModelProto:
    """a [n] of bool, i [k], b [k] of bool -> y, a with each of b joined to the element at i."""
    node = helper.make_node("ScatterElements", ["a", "i", "b"], ["y"], name="scatter", reduction=reduction)
    inputs = [tensor("a", "bool", ["n"]), tensor("i", "int64", ["k"]), tensor("b", "bool", ["k"])]
    return make([node], inputs, [tensor("y", "bool", ["n"])])


@_model
def concat_strings() -> onnx.ModelProto:
    """a [n], b [n] of strings -> y, each of a followed by that of b."""
    return make(
        [helper.make_node("StringConcat", ["a", "b"], ["y"], name="concat")],
        [tensor("a", "string", ["n"]), tensor("b", "string", ["n"])],
        [tensor("y", "string", ["n"])],
    )


# Sequences, maps, optionals.


def sequence_info(name: str, element: str = "float") -> onnx.ValueInfoProto:
    """A value info of a sequence of tensors."""
    return helper.make_tensor_sequence_value_info(name, ELEMENT_TYPES[element], None)


def _optional(name: str, inner: onnx.TypeProto) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, helper.make_optional_type_proto(inner))


@_model
def sequence_identity(element: str = "float") -> onnx.ModelProto:
    """x seq -> y, the same sequence."""
    node = helper.make_node("Identity", ["x"], ["y"], name="copy")
    return make([node], [sequence_info("x", element)], [sequence_info("y", element)])


@_model
def sequence_make() -> onnx.ModelProto:
    """a [n], b [n] -> y, a sequence of both."""
    return make(
        [helper.make_node("SequenceConstruct", ["a", "b"], ["y"], name="both")],
        [tensor("a", "float", ["n"]), tensor("b", "float", ["n"])],
        [sequence_info("y")],
    )


@_model
def sequence_length() -> onnx.ModelProto:
    """x seq -> y, its length."""
    return make(
        [helper.make_node("SequenceLength", ["x"], ["y"], name="length")],
        [sequence_info("x")],
        [tensor("y", "int64", [])],
    )


@_model
def optional_tensor(element: str = "float") -> onnx.ModelProto:
    """x optional -> has (bool), y the element of it if there is one, else -1."""
    inner = helper.make_tensor_type_proto(ELEMENT_TYPES[element], ["n"])
    then = helper.make_graph(
        [helper.make_node("OptionalGetElement", ["x"], ["got"], name="get")],
        "then",
        [],
        [tensor("got", element, ["n"])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["none"], ["kept"], name="keep")],
        "else",
        [],
        [tensor("kept", element, [1])],
    )
    return make(
        [
            helper.make_node("OptionalHasElement", ["x"], ["has"], name="has"),
            helper.make_node("If", ["has"], ["y"], name="if", then_branch=then, else_branch=other),
        ],
        [_optional("x", inner)],
        [tensor("has", "bool", []), tensor("y", element, None)],
        [_weight("none", [-1], DTYPES[element])],
    )


@_model
def optional_identity() -> onnx.ModelProto:
    """x optional(tensor) -> y, the same."""
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    node = helper.make_node("Identity", ["x"], ["y"], name="copy")
    return make([node], [_optional("x", inner)], [_optional("y", inner)])


@_model
def optional_sequence() -> onnx.ModelProto:
    """x optional(seq(tensor)) -> has."""
    inner = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    return make(
        [helper.make_node("OptionalHasElement", ["x"], ["has"], name="has")],
        [_optional("x", inner)],
        [tensor("has", "bool", [])],
    )


def map_info(name: str, key: str, value: str) -> onnx.ValueInfoProto:
    """A value info of a map with tensor values of no shape."""
    inner = helper.make_tensor_type_proto(ELEMENT_TYPES[value], [])
    return helper.make_value_info(name, helper.make_map_type_proto(ELEMENT_TYPES[key], inner))


@_model
def dict_vectorizer(key: str = "string", value: str = "float") -> onnx.ModelProto:
    """x map -> y [1, 3], the values of keys a, b, c (or 1, 2, 3)."""
    if key == "string":
        words: dict[str, object] = {"string_vocabulary": ["a", "b", "c"]}
    else:
        words = {"int64_vocabulary": [1, 2, 3]}
    ml = "ai.onnx.ml"
    node = helper.make_node("DictVectorizer", ["x"], ["y"], name="vec", domain=ml, **words)
    return make([node], [map_info("x", key, value)], [tensor("y", value, None)], domains={ml: 3})


@_model
def zip_map(key: str = "string", labels: Sequence[object] = ()) -> onnx.ModelProto:
    """x [n, 3] -> y, a sequence of maps with keys a, b, c (or 10, 20, 30), or with these labels."""
    if key == "string":
        keys: dict[str, object] = {"classlabels_strings": list(labels or "abc")}
    else:
        keys = {"classlabels_int64s": list(labels or (10, 20, 30))}
    node = helper.make_node("ZipMap", ["x"], ["y"], name="zip", domain="ai.onnx.ml", **keys)
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    made = helper.make_map_type_proto(ELEMENT_TYPES[key], inner)
    output = helper.make_value_info("y", helper.make_sequence_type_proto(made))
    return make([node], [tensor("x", "float", ["n", 3])], [output], domains={"ai.onnx.ml": 3})


# Faulty models.


@_model
def cyclic() -> onnx.ModelProto:
    """Two nodes that read each other."""
    return make(
        [
            helper.make_node("Add", ["x", "q"], ["p"], name="one"),
            helper.make_node("Add", ["p", "x"], ["q"], name="two"),
        ],
        [tensor("x", "float", [1])],
        [tensor("q", "float", [1])],
    )


@_model
def dangling() -> onnx.ModelProto:
    """A node reads a value that nothing produces."""
    return make(
        [helper.make_node("Add", ["x", "nowhere"], ["y"], name="add")],
        [tensor("x", "float", [1])],
        [tensor("y", "float", [1])],
    )


@_model
def unknown_op() -> onnx.ModelProto:
    """An operator that the standard domain does not have."""
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], name="odd")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])])


@_model
def unknown_domain() -> onnx.ModelProto:
    """An operator of a domain that nobody knows."""
    node = helper.make_node("Thing", ["x"], ["y"], name="odd", domain="org.example")
    info = tensor("x", "float", [1]), tensor("y", "float", [1])
    return make([node], [info[0]], [info[1]], domains={"org.example": 1})


@_model
def unknown_attribute() -> onnx.ModelProto:
    """A known operator with an attribute that it does not have."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu", colour=3)
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])])


@_model
def type_clash() -> onnx.ModelProto:
    """The declared type of the output contradicts the operator."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "int64", [1])])


@_model
def shape_clash() -> onnx.ModelProto:
    """MatMul of [2, 3] and [4, 5]."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="mul")
    return make(
        [node],
        [tensor("x", "float", [2, 3])],
        [tensor("y", "float", None)],
        [_weight("w", np.zeros((4, 5)))],
    )


@_model
def future_opset() -> onnx.ModelProto:
    """An operator set of the far future."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])], opset=999)


@_model
def future_ir() -> onnx.ModelProto:
    """A file format of the far future."""
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])], ir_version=999)


@_model
def duplicate_output() -> onnx.ModelProto:
    """Two nodes that make the same value."""
    return make(
        [
            helper.make_node("Relu", ["x"], ["y"], name="one"),
            helper.make_node("Neg", ["x"], ["y"], name="two"),
        ],
        [tensor("x", "float", [1])],
        [tensor("y", "float", [1])],
    )


@_model
def missing_output() -> onnx.ModelProto:
    """A graph output that nothing produces."""
    node = helper.make_node("Relu", ["x"], ["z"], name="relu")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])])


@_model
def bad_arity() -> onnx.ModelProto:
    """Add with a single input."""
    node = helper.make_node("Add", ["x"], ["y"], name="add")
    return make([node], [tensor("x", "float", [1])], [tensor("y", "float", [1])])
