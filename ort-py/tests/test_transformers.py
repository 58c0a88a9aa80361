"""`transformers.io_binding_helper`: names of types, and bindings of torch's tensors."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from harness import IS_ORIGINAL, PACKAGE, Gives, Raises, case, check, session, table

# The original imports torch with the module; ours where torch's types are asked for.
if IS_ORIGINAL:
    pytest.importorskip("torch")
helper = importlib.import_module(PACKAGE + ".transformers.io_binding_helper")
TYPES = helper.TypeHelper

# ONNX's name, numpy's class, torch's name, ONNX's number.
TABLE = [
    ("float", np.float32, "float32", 1),
    ("double", np.float64, "float64", 11),
    ("float16", np.float16, "float16", 10),
    ("int64", np.int64, "int64", 7),
    ("int32", np.int32, "int32", 6),
    ("int16", np.int16, "int16", 5),
    ("int8", np.int8, "int8", 3),
    ("uint8", np.uint8, "uint8", 2),
    ("bool", bool, "bool", 9),
]


def absent(name: str) -> Raises:
    return Raises("ValueError", f"{name} not found in map")


@table("ort_type, expected", [case(o, f"tensor({o})", Gives(n)) for o, n, _, _ in TABLE] + [
    case("strings", "tensor(string)", absent(r"tensor\(string\)")),
    case("unknown", "foo", absent("foo")),
])
def test_numpy_types(ort_type: str, expected: Any) -> None:
    check(expected, lambda: TYPES.ort_type_to_numpy_type(ort_type))


@table("ort_type, expected", [case(o, f"tensor({o})", Gives(n)) for o, _, _, n in TABLE] + [
    case("bfloat16", "tensor(bfloat16)", Gives(16)),
    case("strings", "tensor(string)", Gives(8)),
    case("unknown", "foo", absent("foo")),
])
def test_onnx_types(ort_type: str, expected: Any) -> None:
    check(expected, lambda: TYPES.ort_type_to_onnx_type(ort_type))


@table("row", [case(row[0], row) for row in TABLE])
def test_torch_types(row: tuple[str, Any, str, int]) -> None:
    torch = pytest.importorskip("torch")
    name, numpy_type, torch_name, _ = row
    dtype = getattr(torch, torch_name)
    assert TYPES.ort_type_to_torch_type(f"tensor({name})") is dtype
    assert TYPES.numpy_type_to_torch_type(numpy_type) is dtype
    assert TYPES.torch_type_to_numpy_type(dtype) is numpy_type


@table("call, expected", [
    case("input", lambda s: TYPES.get_input_type(s, "x"), Gives("tensor(float)")),
    case("output", lambda s: TYPES.get_output_type(s, "y"), Gives("tensor(float)")),
    case("no_input", lambda s: TYPES.get_input_type(s, "q"), Raises("ValueError", "input name q not found")),
    case("no_output", lambda s: TYPES.get_output_type(s, "q"), Raises("ValueError", "output name q not found")),
    case("numpy", TYPES.get_io_numpy_type_map, Gives({"x": np.float32, "y": np.float32})),
    case("onnx", TYPES.get_io_onnx_type_map, Gives({"x": 1, "y": 1})),
])
def test_types_of_sessions(call: Any, expected: Any) -> None:
    check(expected, lambda: call(session("identity")))


def test_bound_tensors_are_read_and_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    import models
    from onnx import helper as onnx_helper

    ids = models.tensor("input_ids", "int64", ("batch", "length"))
    past = models.tensor("past_0", "float", ("batch", "width"))
    outputs = [models.tensor("logits", "int64", ("batch", "length")), models.tensor("present_0", "float", ("batch", "width"))]
    nodes = [onnx_helper.make_node("Add", ["input_ids", "input_ids"], ["logits"]),
             onnx_helper.make_node("Neg", ["past_0"], ["present_0"])]
    model = models.make(nodes, [ids, past], outputs)
    ort = importlib.import_module(PACKAGE)
    opened = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {"logits": [2, 3], "present_0": [2, 4]}
    buffers = helper.IOBindingHelper.get_output_buffers(opened, shapes, torch.device("cpu"))
    given, cache = torch.arange(6).reshape(2, 3), torch.ones(2, 4)
    bind = helper.IOBindingHelper.prepare_io_binding
    opened.run_with_iobinding(bind(opened, given, None, None, [cache], buffers, shapes))
    read = helper.IOBindingHelper.get_outputs_from_io_binding_buffer
    logits, present = read(opened, buffers, shapes)
    assert logits.tolist() == (given * 2).tolist() and present.tolist() == (-cache).tolist()
    assert read(opened, buffers, shapes, return_numpy=False)[0].equal(given * 2)
