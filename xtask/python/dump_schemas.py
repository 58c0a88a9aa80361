"""Dumps every operator schema of the `onnx` package as JSON, one operator version per line.

usage: python dump_schemas.py OUT.json

The file is an array of objects, sorted by domain, name and version, without the fields that are at
their usual value:

  domain, name, since_version
  deprecated     true where this version withdraws the operator
  function       true where the schema has a body of other operators
  inputs/outputs list of {name, type, option?, homogeneous?, min_arity?}; `type` is a type constraint's
                 name or a concrete type, `option` is "optional" or "variadic" (else it must be given),
                 `homogeneous` is false where a variadic one may mix types
  types          object from type constraint name to its allowed types
  attributes     list of {name, type, required?, default?}, sorted by name
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from onnx.defs import OpSchema, get_all_schemas_with_history

OPTIONS = {
    OpSchema.FormalParameterOption.Single: None,
    OpSchema.FormalParameterOption.Optional: "optional",
    OpSchema.FormalParameterOption.Variadic: "variadic",
}


def parameter(formal: OpSchema.FormalParameter) -> dict:
    entry = {"name": formal.name, "type": formal.type_str}
    option = OPTIONS[formal.option]
    if option:
        entry["option"] = option
    if option == "variadic":
        if not formal.is_homogeneous:
            entry["homogeneous"] = False
        entry["min_arity"] = formal.min_arity
    return entry


def plain(value):
    """A default value as JSON: text for bytes, shortest text that gives the same float32 for floats."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, onnx.TensorProto):
        return {"tensor": onnx.numpy_helper.to_array(value).tolist()}
    return value


def attribute(spec: OpSchema.Attribute) -> dict:
    entry = {"name": spec.name, "type": spec.type.name}
    if spec.required:
        entry["required"] = True
    elif spec.default_value.type != onnx.AttributeProto.UNDEFINED:
        entry["default"] = plain(helper.get_attribute_value(spec.default_value))
    return entry


def record(schema: OpSchema) -> dict:
    entry = {"domain": schema.domain, "name": schema.name, "since_version": schema.since_version}
    if schema.deprecated:
        entry["deprecated"] = True
    if schema.has_function or schema.has_context_dependent_function:
        entry["function"] = True
    entry["inputs"] = [parameter(formal) for formal in schema.inputs]
    entry["outputs"] = [parameter(formal) for formal in schema.outputs]
    entry["types"] = {c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints}
    entry["attributes"] = [attribute(schema.attributes[name]) for name in sorted(schema.attributes)]
    return entry


def main() -> None:
    schemas = get_all_schemas_with_history()
    schemas.sort(key=lambda schema: (schema.domain, schema.name, schema.since_version))
    lines = [json.dumps(record(schema), separators=(",", ":")) for schema in schemas]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "schemas")


if __name__ == "__main__":
    main()
