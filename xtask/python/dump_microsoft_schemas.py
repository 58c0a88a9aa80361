"""Dumps the operator schemas that ONNX Runtime has beside the standard's, in the format of `dump_schemas.py`.

usage: python dump_microsoft_schemas.py OUT.json

These are the domain `com.microsoft`, and what it registers in the standard's domain without the standard having it.
"""

import json
import sys
from pathlib import Path

import onnx
from onnx import AttributeProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from dump_schemas import plain


def parameter(formal, least: int) -> dict:
    entry = {"name": formal.name, "type": formal.typeStr}
    option = formal.option.name.lower()
    if option != "single":
        entry["option"] = option
    if option == "variadic":
        if not formal.isHomogeneous:
            entry["homogeneous"] = False
        entry["min_arity"] = least
    return entry


def parameters(formals, least: int) -> list[dict]:
    return [parameter(formal, max(0, least - index)) for index, formal in enumerate(formals)]


def attribute(name: str, spec) -> dict:
    entry = {"name": name, "type": spec.type.name}
    default = AttributeProto.FromString(spec._default_value)
    if spec.required:
        entry["required"] = True
    elif default.type != AttributeProto.UNDEFINED:
        entry["default"] = plain(helper.get_attribute_value(default))
    return entry


def record(schema) -> dict:
    return {
        "domain": schema.domain,
        "name": schema.name,
        "since_version": schema.since_version,
        "inputs": parameters(schema.inputs, schema.min_input),
        "outputs": parameters(schema.outputs, schema.min_output),
        "types": {c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints},
        "attributes": [attribute(name, schema.attributes[name]) for name in sorted(schema.attributes)],
    }


def main() -> None:
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    schemas = [
        schema
        for schema in state.get_all_operator_schema()
        if schema.domain == "com.microsoft" or (schema.domain == "" and schema.name not in standard)
    ]
    schemas.sort(key=lambda schema: (schema.domain, schema.name, schema.since_version))
    lines = [json.dumps(record(schema), separators=(",", ":")) for schema in schemas]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "schemas")


if __name__ == "__main__":
    main()
