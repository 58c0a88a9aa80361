"""The types that operators of the standard take: the evaluator takes others as well."""

import functools

import numpy as np
import onnx
from onnx import TensorProto, helper


@functools.cache
def type_name(dtype: np.dtype) -> str:
    return f"tensor({TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(dtype)).lower()})"


@functools.cache
def formals_of(op: str, opset: int) -> tuple[list[tuple[str, bool]], dict[str, set[str]], bool]:
    """The type of each input, the types that a variable stands for, and whether the last input may
    come again."""
    schema = onnx.defs.get_schema(op, opset)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    formals = [(formal.type_str, formal.is_homogeneous) for formal in schema.inputs]
    repeats = bool(schema.inputs) and schema.inputs[-1].option == variadic
    return formals, {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}, repeats


def check_types(op: str, opset: int, dtypes: list) -> None:
    """Raises an error if some input is of a type that the operator does not take, or of another
    than its like."""
    formals, variables, repeats = formals_of(op, opset)
    found: dict[str, str] = {}
    for index, dtype in enumerate(dtypes):
        if index >= len(formals) and not repeats:
            raise TypeError(f"{op} has no input {index}")
        name, is_homogeneous = formals[min(index, len(formals) - 1)]
        if dtype is None or dtype == object:
            continue
        own = type_name(dtype)
        if own not in variables.get(name, {name}):
            raise TypeError(f"{op} takes no {own}")
        if is_homogeneous and found.setdefault(name, own) != own:
            raise TypeError(f"{op} takes inputs of one type")
