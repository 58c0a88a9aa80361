"""Operator schemas and kernel records."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from more_deviations import check
from more_models import native, row
from more_models import package  # noqa: F401  (the fixture `ort`)

MANY = 2**31 - 1


@functools.cache
def schemas(ort: ModuleType) -> dict[tuple[str, str], Any]:
    """Returns the newest schema of each operator, by domain and name."""
    newest: dict[tuple[str, str], Any] = {}
    for s in native(ort).get_all_operator_schema():
        key = (s.domain, s.name)
        if key not in newest or newest[key].since_version < s.since_version:
            newest[key] = s
    return newest


@functools.cache
def kernels(ort: ModuleType) -> list[Any]:
    return native(ort).get_all_opkernel_def()


#: Name, fewest and most inputs, fewest and most outputs, names of the first inputs, attributes.
OPERATORS = [
    row("Relu", 1, 1, 1, 1, ["X"], []),
    row("Add", 2, 2, 1, 1, ["A", "B"], []),
    row("MatMul", 2, 2, 1, 1, ["A", "B"], []),
    row("Gemm", 2, 3, 1, 1, ["A", "B", "C"], ["alpha", "beta", "transA", "transB"]),
    row("Conv", 2, 3, 1, 1, ["X", "W", "B"],
        ["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"]),
    row("LSTM", 3, 8, 0, 3, ["X", "W", "R", "B", "sequence_lens"],
        ["activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size",
         "input_forget", "layout"]),
    row("If", 1, 1, 1, MANY, ["cond"], ["else_branch", "then_branch"]),
    row("Loop", 2, MANY, 1, MANY, ["M", "cond", "v_initial"], ["body"]),
    row("Concat", 1, MANY, 1, 1, ["inputs"], ["axis"]),
    row("Sum", 1, MANY, 1, 1, ["data_0"], []),
    row("Dropout", 1, 3, 1, 2, ["data", "ratio", "training_mode"], ["seed"]),
    row("BatchNormalization", 5, 5, 1, 3, ["X", "scale", "B", "input_mean", "input_var"],
        ["epsilon", "momentum", "training_mode"]),
    row("Identity", 1, 1, 1, 1, ["input"], []),
    row("Reshape", 2, 2, 1, 1, ["data", "shape"], ["allowzero"]),
    row("Constant", 0, 0, 1, 1, [],
        ["sparse_value", "value", "value_float", "value_floats", "value_int", "value_ints",
         "value_string", "value_strings"]),
]


@pytest.mark.parametrize(
    ("low", "high", "out_low", "out_high", "inputs", "attributes"), OPERATORS
)
def test_operator(request: Any, ort: ModuleType, low: int, high: int, out_low: int, out_high: int,
                  inputs: list[str], attributes: list[str]):
    name = request.node.callspec.id
    found = schemas(ort)["", name]
    assert (found.name, found.domain, found.deprecated) == (name, "", False)
    assert (found.min_input, found.max_input) == (low, high)
    assert (found.min_output, found.max_output) == (out_low, out_high)
    assert [i.name for i in found.inputs][: len(inputs)] == inputs
    assert sorted(found.attributes) == attributes


def conv(ort: ModuleType) -> Any:
    return schemas(ort)["", "Conv"]


def relu(ort: ModuleType) -> Any:
    return schemas(ort)["", "Relu"]


FIELDS = [
    row("since_version", lambda o: relu(o).since_version, 14),
    row("since_version_conv", lambda o: conv(o).since_version, 22),
    row("doc", lambda o: type(conv(o).doc), str),
    row("file", lambda o: type(conv(o).file), str),
    row("line", lambda o: type(conv(o).line), int),
    row("support_level", lambda o: conv(o).support_level.name, "COMMON"),
    row("inference", lambda o: conv(o).has_type_and_shape_inference_function, True),
    row("deprecated", lambda o: schemas(o)["", "Upsample"].deprecated, True),
    row("infinite", lambda o: conv(o).is_infinite(MANY), True),
    row("finite", lambda o: conv(o).is_infinite(3), False),
    row("options", lambda o: [i.option.name for i in conv(o).inputs],
        ["Single", "Single", "Optional"]),
    row("variadic", lambda o: schemas(o)["", "Concat"].inputs[0].option.name, "Variadic"),
    row("homogeneous", lambda o: conv(o).inputs[0].isHomogeneous, True),
    row("type", lambda o: conv(o).inputs[0].typeStr, "T"),
    row("output_type", lambda o: conv(o).outputs[0].typeStr, "T"),
    row("input_description", lambda o: type(conv(o).inputs[0].description), str),
    row("float_is_allowed", lambda o: "tensor(float)" in conv(o).inputs[0].types, True),
    row("constraint", lambda o: [c.type_param_str for c in conv(o).type_constraints], ["T"]),
    row("constraint_types",
        lambda o: "tensor(float)" in conv(o).type_constraints[0].allowed_type_strs, True),
    row("attribute_type", lambda o: conv(o).attributes["group"].type.name, "INT"),
    row("attribute_list", lambda o: conv(o).attributes["pads"].type.name, "INTS"),
    row("attribute_string", lambda o: conv(o).attributes["auto_pad"].type.name, "STRING"),
    row("attribute_optional", lambda o: conv(o).attributes["auto_pad"].required, False),
    row("attribute_required", lambda o: schemas(o)["", "Concat"].attributes["axis"].required, True),
    row("attribute_name", lambda o: conv(o).attributes["pads"].name, "pads"),
    row("graph_attribute", lambda o: schemas(o)["", "If"].attributes["then_branch"].type.name,
        "GRAPH"),
    row("class", lambda o: type(conv(o)) is native(o).schemadef.OpSchema, True),
    row("many", lambda o: len(schemas(o)) > 200, True),
    row("ml_domain", lambda o: ("ai.onnx.ml", "LinearClassifier") in schemas(o), True),
    row("contrib_domain", lambda o: ("com.microsoft", "FusedMatMul") in schemas(o), True),
    row("unknown", lambda o: ("", "Nope") in schemas(o), False),
    row("list", lambda o: type(native(o).get_all_operator_schema()), list),
]


@pytest.mark.parametrize(("call", "expected"), FIELDS)
def test_field(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


WITH_KERNELS = ["Relu", "Add", "MatMul", "Gemm", "Conv", "Concat", "LSTM", "Loop"]


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernel(ort: ModuleType, name: str):
    found = [k for k in kernels(ort) if k.op_name == name and k.domain == ""]
    assert any(k.provider == "CPUExecutionProvider" for k in found)
    for k in found:
        low, high = k.version_range
        assert 1 <= low <= high <= MANY
        assert all(isinstance(t, str) for types in k.type_constraints.values() for t in types)


def relu_types(ort: ModuleType) -> set[str]:
    cpu = [k for k in kernels(ort) if k.op_name == "Relu" and k.provider == "CPUExecutionProvider"]
    return {t for k in cpu if k.version_range[1] == MANY for t in k.type_constraints["T"]}


KERNELS = [
    row("types", lambda o: {"tensor(float)", "tensor(double)", "tensor(int8)", "tensor(int32)"}
        <= relu_types(o), True),
    row("class", lambda o: type(kernels(o)[0]) is native(o).opkernel.KernelDef, True),
    row("list", lambda o: type(kernels(o)), list),
    row("range_is_tuple", lambda o: type(kernels(o)[0].version_range), tuple),
]


@pytest.mark.parametrize(("call", "expected"), KERNELS)
def test_kernel_record(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)
