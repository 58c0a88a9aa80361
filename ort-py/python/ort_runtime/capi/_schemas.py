"""Operator schemas and kernels, as documentation generators read them."""

from __future__ import annotations

import types
from typing import Any

from ._enums import NativeEnum
from ._fields import Slotted, read_only

__all__ = ["opkernel", "schemadef"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"
_VARIADIC = 2**31 - 1


class _AttrType(NativeEnum):
    """The type of an attribute."""

    FLOAT = 1
    INT = 2
    STRING = 3
    TENSOR = 4
    GRAPH = 5
    FLOATS = 6
    INTS = 7
    STRINGS = 8
    TENSORS = 9
    GRAPHS = 10
    SPARSE_TENSOR = 11
    SPARSE_TENSORS = 12
    TYPE_PROTO = 13
    TYPE_PROTOS = 14


class _FormalParameterOption(NativeEnum):
    """Whether an input or output may be absent or repeated."""

    Single = 0
    Optional = 1
    Variadic = 2


class _SupportType(NativeEnum):
    """Whether an operator is settled."""

    COMMON = 0
    EXPERIMENTAL = 1


class _Attribute(Slotted):
    """An attribute of an operator."""

    __slots__ = ("_default_value", "_description", "_name", "_required", "_type")

    def __init__(
        self, name: str, description: str, type: int, required: bool, default_value: bytes = b""
    ) -> None:
        self._name, self._description, self._type = name, description, _AttrType(type)
        self._required, self._default_value = required, default_value

    name = read_only("name", "The name.")
    description = read_only("description", "The documentation.")
    type = read_only("type", "The type.")
    required = read_only("required", "Whether nodes must have it.")


class _FormalParameter(Slotted):
    """An input or output of an operator."""

    __slots__ = ("_description", "_isHomogeneous", "_name", "_option", "_typeStr", "_types")

    def __init__(
        self,
        name: str,
        description: str,
        typeStr: str,  # noqa: N803
        types: set[str],
        option: int,
        isHomogeneous: bool = True,  # noqa: N803
    ) -> None:
        self._name, self._description, self._typeStr = name, description, typeStr
        self._types, self._option = set(types), _FormalParameterOption(option)
        self._isHomogeneous = isHomogeneous

    name = read_only("name", "The name.")
    description = read_only("description", "The documentation.")
    typeStr = read_only("typeStr", "Its type, or the name of a type constraint.")  # noqa: N815
    types = read_only("types", "The types it may have.")
    option = read_only("option", "Whether it may be absent or repeated.")
    isHomogeneous = read_only("isHomogeneous", "Whether repeats have one type.")  # noqa: N815


class _TypeConstraintParam(Slotted):
    """The types that a name stands for."""

    __slots__ = ("_allowed_type_strs", "_description", "_type_param_str")

    def __init__(self, type_param_str: str, description: str, allowed_type_strs: list[str]) -> None:
        self._type_param_str, self._description = type_param_str, description
        self._allowed_type_strs = list(allowed_type_strs)

    type_param_str = read_only("type_param_str", "The name.")
    description = read_only("description", "The documentation.")
    allowed_type_strs = read_only("allowed_type_strs", "The types.")


_OP_FIELDS = {
    "name": "The operator.",
    "domain": "Its domain.",
    "since_version": "The opset that introduced this version.",
    "doc": "The documentation.",
    "file": "Where it is defined.",
    "line": "The line there.",
    "support_level": "Whether it is settled.",
    "deprecated": "Whether it is out of use.",
    "min_input": "The fewest inputs.",
    "max_input": "The most inputs.",
    "min_output": "The fewest outputs.",
    "max_output": "The most outputs.",
    "inputs": "The inputs.",
    "outputs": "The outputs.",
    "attributes": "The attributes by name.",
    "type_constraints": "The names of types.",
    "has_type_and_shape_inference_function": "Whether shapes are inferred.",
}


class _OpSchema(Slotted):
    """An operator: `OpSchema(**fields)` with a field for each attribute of the class."""

    __slots__ = tuple(f"_{name}" for name in _OP_FIELDS)

    AttrType = _AttrType
    Attribute = _Attribute
    FormalParameter = _FormalParameter
    FormalParameterOption = _FormalParameterOption
    SupportType = _SupportType
    TypeConstraintParam = _TypeConstraintParam

    def __init__(self, **fields: Any) -> None:
        if fields.keys() != _OP_FIELDS.keys():
            raise TypeError(f"OpSchema takes {', '.join(_OP_FIELDS)}")
        for name, value in fields.items():
            setattr(self, f"_{name}", value)
        self._support_level = _SupportType(fields["support_level"])

    @staticmethod
    def is_infinite(count: int) -> bool:
        """Tells whether a number of inputs or outputs stands for any number."""
        return count == _VARIADIC


for _field, _text in _OP_FIELDS.items():
    setattr(_OpSchema, _field, read_only(_field, _text))


class _KernelDef(Slotted):
    """A kernel: which operator a provider runs, in which versions and for which types."""

    __slots__ = ("_domain", "_op_name", "_provider", "_type_constraints", "_version_range")

    def __init__(
        self,
        op_name: str,
        domain: str,
        version_range: tuple[int, int],
        provider: str,
        type_constraints: dict[str, list[str]],
    ) -> None:
        self._op_name, self._domain, self._provider = op_name, domain, provider
        self._version_range = tuple(version_range)
        self._type_constraints = dict(type_constraints)

    op_name = read_only("op_name", "The operator.")
    domain = read_only("domain", "Its domain.")
    version_range = read_only("version_range", "The first and the last opset.")
    provider = read_only("provider", "The provider.")
    type_constraints = read_only("type_constraints", "The types by constraint.")


def _module(name: str, **classes: type) -> types.ModuleType:
    """Makes a submodule of the native module, whose classes lose their underscore."""
    module = types.ModuleType(f"{_NATIVE}.{name}")
    for class_name, kind in classes.items():
        kind.__module__, kind.__name__, kind.__qualname__ = module.__name__, class_name, class_name
        setattr(module, class_name, kind)
    return module


schemadef = _module("schemadef", OpSchema=_OpSchema)
opkernel = _module("opkernel", KernelDef=_KernelDef)
for _name in (
    "AttrType",
    "Attribute",
    "FormalParameter",
    "FormalParameterOption",
    "SupportType",
    "TypeConstraintParam",
):
    _kind = getattr(_OpSchema, _name)
    _kind.__module__, _kind.__name__ = schemadef.__name__, _name
    _kind.__qualname__ = f"OpSchema.{_name}"

# For type checkers; programs find the classes in the submodules.
OpSchema = _OpSchema
KernelDef = _KernelDef
