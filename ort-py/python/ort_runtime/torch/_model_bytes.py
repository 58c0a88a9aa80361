"""ONNX serialization: the protobuf wire format of the messages that a translated graph needs.

The package does not depend on `onnx`. Field numbers are those of onnx.proto3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["attribute", "model", "node", "tensor", "value_info"]

IR_VERSION = 10

# AttributeProto.AttributeType.
_FLOAT, _INT, _STRING, _TENSOR, _FLOATS, _INTS = 1, 2, 3, 4, 6, 7


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _int(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _float(field: int, number: float) -> bytes:
    return _varint(field << 3 | 5) + np.float32(number).tobytes()


def tensor(name: str, element_type: int, shape: Sequence[int], data: bytes) -> bytes:
    """Returns a TensorProto with raw data."""
    dims = b"".join(_int(1, size) for size in shape)
    return dims + _int(2, element_type) + _text(8, name) + _bytes(9, data)


def attribute(name: str, value: Any) -> bytes:
    """Returns an AttributeProto; its type follows from that of the value. Bytes are a tensor."""
    head = _text(1, name)
    if isinstance(value, bool | int):
        return head + _int(3, int(value)) + _int(20, _INT)
    if isinstance(value, float):
        return head + _float(2, value) + _int(20, _FLOAT)
    if isinstance(value, str):
        return head + _text(4, value) + _int(20, _STRING)
    if isinstance(value, bytes):
        return head + _bytes(5, value) + _int(20, _TENSOR)
    if any(isinstance(number, float) for number in value):
        return head + b"".join(_float(7, number) for number in value) + _int(20, _FLOATS)
    return head + b"".join(_int(8, number) for number in value) + _int(20, _INTS)


def node(
    name: str,
    operator: str,
    domain: str,
    inputs: Iterable[str],
    outputs: Iterable[str],
    attributes: Iterable[tuple[str, Any]],
) -> bytes:
    """Returns a NodeProto. An empty name is an absent input or output."""
    parts = [_text(1, name) for name in inputs]
    parts += [_text(2, name) for name in outputs]
    parts += [_text(3, name), _text(4, operator)]
    parts += [_bytes(5, attribute(key, value)) for key, value in attributes]
    if domain:
        parts.append(_text(7, domain))
    return b"".join(parts)


def value_info(name: str, element_type: int, shape: Sequence[int | str]) -> bytes:
    """Returns a ValueInfoProto of a tensor. A text is the name of a dimension."""
    dims = b"".join(
        _bytes(1, _text(2, size) if isinstance(size, str) else _int(1, size)) for size in shape
    )
    of_tensor = _int(1, element_type) + _bytes(2, dims)
    return _text(1, name) + _bytes(2, _bytes(1, of_tensor))


def model(
    name: str,
    nodes: Iterable[bytes],
    initializers: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
    opsets: Iterable[tuple[str, int]],
) -> bytes:
    """Returns a ModelProto."""
    graph = [_bytes(1, part) for part in nodes]
    graph.append(_text(2, name))
    graph += [_bytes(5, part) for part in initializers]
    graph += [_bytes(11, part) for part in inputs]
    graph += [_bytes(12, part) for part in outputs]
    imports = [_bytes(8, _text(1, domain) + _int(2, version)) for domain, version in opsets]
    head = _int(1, IR_VERSION) + _text(2, "ort-runtime")
    return head + _bytes(7, b"".join(graph)) + b"".join(imports)
