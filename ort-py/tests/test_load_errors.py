"""Loading: the words of errors that programs look for, and where external data may lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from harness import CPU, Gives, Raises, case, check, f32, options, ort, table
from onnx import TensorProto, helper

node = helper.make_node
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def value(name: str, kind: int = FLOAT, shape: Sequence[int] = (4,)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    weights: Sequence[TensorProto] = (),
    opsets: Sequence[tuple[str, int]] = (("", 17),),
) -> bytes:
    """A model of these nodes; by default from `x` to `y`, both float[4]."""
    made = helper.make_graph(
        list(nodes),
        "g",
        [value("x")] if inputs is None else list(inputs),
        [value("y")] if outputs is None else list(outputs),
        list(weights),
    )
    sets = [helper.make_opsetid(domain, version) for domain, version in opsets]
    return helper.make_model(made, opset_imports=sets, ir_version=9).SerializeToString()


def body(nodes: Sequence[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "body", [], [value(output)])


def with_attribute(kind: int, name: str = "axis") -> onnx.NodeProto:
    made = node("Softmax", ["x"], ["y"], name="N")
    made.attribute.append(onnx.AttributeProto(name=name, type=kind))
    return made


def weight(name: str = "w", **fields: Any) -> TensorProto:
    return TensorProto(name=name, data_type=FLOAT, dims=[4], **fields)


MS = (("", 17), ("com.microsoft", 1))
PAIR = [value("x", shape=(2, 2))], [value("y", shape=(2, 2))]
RELU = node("Relu", ["x"], ["y"], name="N")
ONE = node("Constant", [], ["one"], value_float=1.0)

#: id, class, words, model. Every row holds on the original too.
ERRORS: list[tuple[str, str, str, Callable[[], bytes]]] = [
    (
        "unknown_attribute",
        "InvalidGraph",
        r"Unrecognized attribute: p for operator CDist",
        lambda: graph(
            [node("CDist", ["x", "x"], ["y"], domain="com.microsoft", metric="euclidean", p=1)],
            *PAIR,
            opsets=MS,
        ),
    ),
    (
        "unknown_graph",
        "InvalidGraph",
        r"Unrecognized attribute: body for operator Relu",
        lambda: graph([node("Relu", ["x"], ["y"], body=body([ONE], "one"))]),
    ),
    (
        "attribute_without_name",
        "InvalidGraph",
        r"Field 'name' of 'attr' is required to be non-empty",
        lambda: graph([with_attribute(onnx.AttributeProto.INT, "")]),
    ),
    (
        "required_attribute",
        "InvalidGraph",
        r"This is an invalid model\. .*Required attribute 'to' is missing",
        lambda: graph([node("Cast", ["x"], ["y"])]),
    ),
    (
        "required_graph",
        "InvalidGraph",
        r"Required attribute 'else_branch' is missing",
        lambda: graph(
            [node("If", ["x"], ["y"], then_branch=body([ONE], "one"))], [value("x", BOOL, ())]
        ),
    ),
    (
        "attribute_kind",
        "InvalidGraph",
        r"Mismatched attribute type in '.*axis'\. Expected: 'INT', actual: 'FLOAT'",
        lambda: graph([node("Softmax", ["x"], ["y"], axis=1.5)]),
    ),
    (
        "attribute_is_a_graph",
        "InvalidGraph",
        r"Mismatched attribute type in '.*axis'\. Expected: 'INT', actual: 'GRAPH'",
        lambda: graph([node("Softmax", ["x"], ["y"], axis=body([ONE], "one"))]),
    ),
    (
        "attribute_without_kind",
        "InvalidGraph",
        r"Mismatched attribute type in '.*axis'\. Expected: 'INT', actual: 'UNDEFINED'",
        lambda: graph([with_attribute(0)]),
    ),
    (
        "attribute_kind_99",
        "InvalidGraph",
        r"Field 'type' of 'attr' is required but missing",
        # The field `type` is number 20, so its key has two bytes.
        lambda: graph([with_attribute(7)]).replace(b"\xa0\x01\x07", b"\xa0\x01\x63"),
    ),
    (
        "attribute_twice",
        "InvalidGraph",
        r"Attribute 'axis' appeared multiple times",
        lambda: graph([twice(node("Softmax", ["x"], ["y"], axis=0))]),
    ),
    (
        "unknown_operator",
        "InvalidGraph",
        r"No Op registered for Foo with domain_version of 15",
        lambda: graph([node("Foo", ["x"], ["y"])], opsets=[("", 15)]),
    ),
    (
        "unknown_operator_ml",
        "InvalidGraph",
        r"No Op registered for Foo with domain_version of 3",
        lambda: graph(
            [node("Foo", ["x"], ["y"], domain="ai.onnx.ml")], opsets=[("", 17), ("ai.onnx.ml", 3)]
        ),
    ),
    (
        "unknown_operator_microsoft",
        "Fail",
        r"com\.microsoft:Foo\(-1\) is not a registered function/op",
        lambda: graph([node("Foo", ["x"], ["y"], domain="com.microsoft")], opsets=MS),
    ),
    (
        "unknown_operator_microsoft_without_import",
        "Fail",
        r"com\.microsoft:Foo\(-1\) is not a registered function/op",
        lambda: graph([node("Foo", ["x"], ["y"], domain="com.microsoft")]),
    ),
    (
        "unknown_operator_custom",
        "Fail",
        r"my:Foo\(-1\) is not a registered function/op",
        lambda: graph([node("Foo", ["x"], ["y"], domain="my")], opsets=[("", 17), ("my", 1)]),
    ),
    (
        "domain_without_import",
        "InvalidGraph",
        r"No opset import for domain 'my'",
        lambda: graph([node("Foo", ["x"], ["y"], domain="my")]),
    ),
    (
        "operator_without_name",
        "InvalidGraph",
        r"Field 'op_type' of 'node' is required to be non-empty",
        lambda: graph([node("", ["x"], ["y"])]),
    ),
    (
        "type_invalid",
        "InvalidGraph",
        r"This is an invalid model\. .*Type Error: Type 'tensor\(bool\)' of input parameter \(x\) of "
        r"operator \(Add\) in node \(N\) is invalid\.",
        lambda: graph([node("Add", ["x", "x"], ["y"], name="N")], [value("x", BOOL)]),
    ),
    (
        "type_invalid_sequence",
        "InvalidGraph",
        r"Type 'seq\(tensor\(float\)\)' of input parameter \(x\) of operator \(Relu\) in node \(N\) is invalid\.",
        lambda: graph([RELU], [helper.make_tensor_sequence_value_info("x", FLOAT, None)]),
    ),
    (
        "type_invalid_fixed",
        "InvalidGraph",
        r"Type 'tensor\(float\)' of input parameter \(x\) of operator \(If\) in node \(N\) is invalid\.",
        lambda: graph(
            [
                node(
                    "If",
                    ["x"],
                    ["y"],
                    name="N",
                    then_branch=body([ONE], "one"),
                    else_branch=body([ONE], "one"),
                )
            ]
        ),
    ),
    (
        "types_differ",
        "Fail",
        r"Type Error: Type parameter \(T\) of Optype \(Add\) bound to different types "
        r"\(tensor\(float\) and tensor\(int64\) in node \(N\)\.",
        lambda: graph(
            [node("Add", ["x", "z"], ["y"], name="N")], [value("x"), value("z", INT64)]
        ),
    ),
    (
        "too_few_inputs",
        "InvalidGraph",
        r"Node\(N\) with schema\(::Add:14\) has input size 1 not in range \[min=2, max=2\]",
        lambda: graph([node("Add", ["x"], ["y"], name="N")]),
    ),
    (
        "too_many_inputs",
        "InvalidGraph",
        r"Node\(N\) with schema\(::Clip:13\) has input size 4 not in range \[min=1, max=3\]",
        lambda: graph([node("Clip", ["x", "x", "x", "x"], ["y"], name="N")]),
    ),
    (
        "no_input_of_many",
        "InvalidGraph",
        r"with schema\(::Concat:13\) has input size 0 not in range \[min=1, max=2147483647\]",
        lambda: graph([node("Concat", [], ["y"], name="N", axis=0)]),
    ),
    (
        "too_many_outputs",
        "InvalidGraph",
        r"Node\(N\) with schema\(::Relu:14\) has output size 2 not in range \[min=1, max=1\]",
        lambda: graph([node("Relu", ["x"], ["y", "z"], name="N")]),
    ),
    (
        "no_output",
        "InvalidGraph",
        r"Node\(N\) with schema\(::Relu:14\) has output size 0 not in range \[min=1, max=1\]",
        lambda: graph([node("Relu", ["x"], [], name="N"), node("Neg", ["x"], ["y"])]),
    ),
    (
        "input_left_out",
        "InvalidGraph",
        r"Node \(N\)'s input 0 is marked single but has an empty string in the graph",
        lambda: graph([node("Add", ["", "x"], ["y"], name="N")]),
    ),
    (
        "name_twice",
        "Fail",
        r"Duplicate definition of name \(y\)",
        lambda: graph([RELU, node("Neg", ["x"], ["y"])]),
    ),
    (
        "name_of_a_weight",
        "Fail",
        r"Duplicate definition of name \(w\)",
        lambda: graph(
            [node("Relu", ["x"], ["w"]), node("Neg", ["w"], ["y"])],
            weights=[weight(float_data=[1, 2, 3, 4])],
        ),
    ),
    (
        "input_twice",
        "Fail",
        r"Duplicate definition-site for \(x\)",
        lambda: graph([RELU], [value("x"), value("x")]),
    ),
    (
        "cycle",
        "Fail",
        r"the graph is not acyclic",
        lambda: graph([node("Add", ["x", "b"], ["y"]), node("Relu", ["y"], ["b"])]),
    ),
    (
        "unknown_input",
        "InvalidArgument",
        r"Node input 'nowhere' is not a graph input, initializer, or output of a previous node",
        lambda: graph([node("Add", ["x", "nowhere"], ["y"])]),
    ),
    (
        "unknown_input_of_a_body",
        "InvalidGraph",
        r"Nodes in a graph must be topologically sorted, however input 'nowhere' of node",
        lambda: graph(
            [
                node(
                    "If",
                    ["x"],
                    ["y"],
                    then_branch=body([node("Relu", ["nowhere"], ["a"])], "a"),
                    else_branch=body([ONE], "one"),
                )
            ],
            [value("x", BOOL, ())],
        ),
    ),
    (
        "unknown_output",
        "Fail",
        r"Graph output \(y\) does not exist in the graph",
        lambda: graph([node("Relu", ["x"], ["z"])]),
    ),
    (
        "input_without_type",
        "Fail",
        r"Model input \(x\) does not have type information",
        lambda: graph([RELU], [onnx.ValueInfoProto(name="x")]),
    ),
    (
        "no_opset",
        "Fail",
        r"Missing opset in the model\. All ModelProtos MUST have at least one entry that specifies "
        r"which version of the ONNX OperatorSet is being imported",
        lambda: graph([RELU], opsets=()),
    ),
    (
        "opset_0",
        "InvalidGraph",
        r"This is an invalid model\. .*version",
        lambda: graph([RELU], opsets=[("", 0)]),
    ),
    (
        "short_weight",
        "Fail",
        r"raw_data size \(4 bytes\) does not match expected size from shape and data type \(16 bytes\)",
        lambda: graph([node("Add", ["x", "w"], ["y"])], weights=[weight(raw_data=b"1234")]),
    ),
    (
        "short_float_data",
        "Fail",
        r"data field count \(2\) does not match expected count from shape \(4\)",
        lambda: graph([node("Add", ["x", "w"], ["y"])], weights=[weight(float_data=[1, 2])]),
    ),
    (
        "no_graph",
        "InvalidArgument",
        r"No graph was found in the protobuf",
        lambda: onnx.ModelProto(ir_version=8).SerializeToString(),
    ),
]


def twice(made: onnx.NodeProto) -> onnx.NodeProto:
    made.attribute.append(made.attribute[0])
    return made


@table(
    "model, expected", [case(name, model, Raises(kind, text)) for name, kind, text, model in ERRORS]
)
def test_error(model: Callable[[], bytes], expected: Any) -> None:
    """Class and words of what is wrong with a model."""
    check(expected, lambda: ort.InferenceSession(model(), providers=[CPU]))


# External data.


def outside(location: str) -> bytes:
    """`y = x + w`, where 16 bytes of a file are `w`."""
    made = weight(data_location=TensorProto.EXTERNAL)
    for key, text in (("location", location), ("offset", "0"), ("length", "16")):
        made.external_data.add(key=key, value=text)
    return graph([node("Add", ["x", "w"], ["y"])], weights=[made])


def write(path: Path, content: bytes | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes() if content is None else content)


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def add(model: str | bytes, **entries: str) -> Any:
    """The answer for zeros. Unoptimized: the original folds weights, for which it needs a path."""
    given = options(graph_optimization_level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for key, text in entries.items():
        given.add_session_config_entry(key, text)
    made = ort.InferenceSession(model, given, providers=[CPU])
    return made.run(None, {"x": np.zeros(4, np.float32)})


ADDED = Gives([f32(0, 1, 2, 3)])
ESCAPES = Raises("Fail", "External data path escapes model directory")
ABSENT = Raises("Fail", "External data path does not exist")
ABSOLUTE = Raises("Fail", "Absolute path not allowed for external data location")


def hub(top: Path) -> str:
    """A folder as that of a cache of Hugging Face: the files are links into `blobs`."""
    write(top / "blobs/aa", outside("model.onnx_data"))
    write(top / "blobs/bb")
    link(top / "snapshots/r/model.onnx", "../../blobs/aa")
    link(top / "snapshots/r/model.onnx_data", "../../blobs/bb")
    return "snapshots/r/model.onnx"


def linked(top: Path, data: str, target: str | None = None, location: str = "w.bin") -> str:
    """`here/m.onnx` is a link into `store`, its data the file `data`, to which `target` links."""
    write(top / "store/m.onnx", outside(location))
    link(top / "here/m.onnx", "../store/m.onnx")
    write(top / data)
    if target:
        link(top / "here/w.bin", target)
    return "here/m.onnx"


def plain(top: Path, location: str, data: str | None, target: str | None = None) -> str:
    """`here/m.onnx`, whose data is the file `data`, to which `here/w.bin` links."""
    write(top / "here/m.onnx", outside(location))
    if data:
        write(top / data)
    if target:
        link(top / "here/w.bin", target)
    return "here/m.onnx"


PLACES: list[tuple[str, Callable[[Path], str], Any]] = [
    ("beside", lambda top: plain(top, "w.bin", "here/w.bin"), ADDED),
    ("below", lambda top: plain(top, "a/w.bin", "here/a/w.bin"), ADDED),
    ("link_below", lambda top: plain(top, "w.bin", "here/a/w.bin", "a/w.bin"), ADDED),
    ("link_out", lambda top: plain(top, "w.bin", "other/w.bin", "../other/w.bin"), ESCAPES),
    ("up", lambda top: plain(top, "../w.bin", "w.bin"), ESCAPES),
    ("absolute", lambda top: plain(top, str(top / "here/w.bin"), "here/w.bin"), ABSOLUTE),
    ("absent", lambda top: plain(top, "w.bin", None), ABSENT),
    ("hub", hub, ADDED),
    ("linked_data_beside_link", lambda top: linked(top, "here/w.bin"), ADDED),
    (
        "linked_data_linked_beside_target",
        lambda top: linked(top, "store/w.bin", "../store/w.bin"),
        ADDED,
    ),
    (
        "linked_data_linked_below_target",
        lambda top: linked(top, "store/a/w.bin", "../store/a/w.bin"),
        ADDED,
    ),
    (
        "linked_data_linked_elsewhere",
        lambda top: linked(top, "other/w.bin", "../other/w.bin"),
        ESCAPES,
    ),
    (
        "linked_data_beside_target_alone",
        lambda top: linked(top, "store/w.bin"),
        Raises("Fail", "External data path (escapes|does not exist)"),
    ),
    ("linked_up", lambda top: linked(top, "w.bin", location="../w.bin"), ESCAPES),
]


@table("place, expected", [case(name, place, expected) for name, place, expected in PLACES])
def test_external_data(
    place: Callable[[Path], str],
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the data of a model with a path may lie."""
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path)
    check(expected, lambda: add(path))


FOLDER = "session.model_external_initializers_file_folder_path"


@table(
    "location, files, expected",
    [
        case("beside", "w.bin", ["w.bin"], ADDED),
        case("below", "a/w.bin", ["a/w.bin"], ADDED),
        case("link_below", "w.bin", ["a/w.bin", "w.bin -> a/w.bin"], ADDED),
        case("link_out", "w.bin", ["../w.bin", "w.bin -> ../w.bin"], ESCAPES),
        case("up", "../w.bin", ["../w.bin"], ESCAPES),
        case("absolute", "{}/w.bin", ["w.bin"], ABSOLUTE),
        case("absent", "w.bin", [], ABSENT),
    ],
)
def test_external_data_of_bytes(
    location: str,
    files: Sequence[str],
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data of a model in memory lies in the working directory, unless an option names a folder."""
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    for file in files:
        name, _, target = file.partition(" -> ")
        link(here / name, target) if target else write(here / name)
    model = outside(location.format(here))
    monkeypatch.chdir(here)
    check(expected, lambda: add(model))
    monkeypatch.chdir(other)
    check(expected, lambda: add(model, **{FOLDER: str(here)}))


def test_bytes_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without external data needs no working directory."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    made = ort.InferenceSession(graph([RELU]), providers=[CPU])
    check(Gives([f32(0, 0, 1, 2)]), lambda: made.run(None, {"x": f32(-1, 0, 1, 2)}))


# Sparse weights.


@table(
    "name, expected",
    [case(label, name, Gives([f32(0, 1, 0, 2)])) for label, name in (("used", "z"), ("output", "w"))],
)
def test_sparse_weight(name: str, expected: Any) -> None:
    """A sparse weight is dense to nodes, and as an output of the model."""
    values = onnx.numpy_helper.from_array(f32(1, 2), "w")
    indices = onnx.numpy_helper.from_array(np.array([1, 3]))
    made = helper.make_graph(
        [node("Identity", ["w"], ["z"])],
        "g",
        [],
        [value(name)],
        sparse_initializer=[helper.make_sparse_tensor(values, indices, [4])],
    )
    sets = [helper.make_opsetid("", 17)]
    content = helper.make_model(made, opset_imports=sets, ir_version=9).SerializeToString()
    check(expected, lambda: ort.InferenceSession(content, providers=[CPU]).run(None, {}))
