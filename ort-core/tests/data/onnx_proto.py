"""Writes onnx_proto.json: for each ONNX message, samples serialized by the `onnx` package.

Usage: python onnx_proto.py > onnx_proto.json

Every field of every message is set to a value that tells which field it is: text is the field's name,
numbers are 1000 plus the field's number, lists have two elements. Alternatives of a oneof get a sample
each. A reader that has every field with its right number, type and label writes the same bytes back.
"""

import json

from google.protobuf.descriptor import FieldDescriptor as F
from onnx import onnx_data_pb2, onnx_ml_pb2


def scalar(field, shift):
    if field.type == F.TYPE_STRING:
        return field.name
    if field.type == F.TYPE_BYTES:
        return field.name.encode()
    if field.type == F.TYPE_ENUM:
        return field.enum_type.values[-1].number
    number = 1000 * (1 + shift) + field.number
    return float(number) + 0.5 if field.type in (F.TYPE_FLOAT, F.TYPE_DOUBLE) else number


def is_repeated(field):
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == F.LABEL_REPEATED


def fill(message, field, deep):
    if field.type == F.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        for part in [inner.add(), inner.add()] if is_repeated(field) else [inner]:
            part.SetInParent()
            plain = [f for f in part.DESCRIPTOR.fields if f.type != F.TYPE_MESSAGE]
            if deep and plain:
                fill(part, plain[0], False)
    elif is_repeated(field):
        getattr(message, field.name).extend([scalar(field, 0), scalar(field, 1)])
    else:
        setattr(message, field.name, scalar(field, 0))


def printed(field):
    """What a debug print of the field shows, or null where it is not a plain value."""
    if field.type == F.TYPE_MESSAGE or field.containing_oneof or field.type == F.TYPE_ENUM:
        return None
    value = scalar(field, 0)
    if isinstance(value, bytes):
        return 'b"%s"' % value.decode()
    return json.dumps(value)


def sample(descriptor, make, chosen):
    message = make()
    fields = [f for f in descriptor.fields if f.containing_oneof is None or f is chosen]
    for field in fields:
        fill(message, field, True)
    shown = [{"name": f.name, "oneof": bool(f.containing_oneof), "value": printed(f)} for f in fields]
    return {"fields": shown, "hex": message.SerializeToString(deterministic=True).hex()}


def walk(descriptor, make, out):
    choices = [f for f in descriptor.fields if f.containing_oneof] or [None]
    out[descriptor.full_name.removeprefix("onnx.")] = [sample(descriptor, make, c) for c in choices]
    for nested in descriptor.nested_types:
        walk(nested, getattr(make, nested.name), out)


def main():
    messages, enums = {}, {}
    for module in (onnx_ml_pb2, onnx_data_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            walk(descriptor, getattr(module, name), messages)
            for enum in descriptor.enum_types:
                enums[f"{name}.{enum.name}"] = {v.name: v.number for v in enum.values}
    print(json.dumps({"messages": messages, "enums": enums}, indent=1, sort_keys=True))


main()
