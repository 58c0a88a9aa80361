"""Fills model skeletons the way models/fill.py does, without the package onnx, which a machine with a GPU may lack.

usage: python gpu_fill.py IN.skeleton.onnx OUT.onnx      (needs numpy where there is anything to fill)

The values are those of models/fill.py; an initializer to fill may be of float16, too. Only the lengths of the messages around
an initializer change, so that the file is taken apart no further than that.
"""

import sys
from pathlib import Path

# The numbers of fields in onnx.proto, and of types in TensorProto.DataType.
GRAPH, INITIALIZER = 7, 5
DIMS, DATA_TYPE, RAW_DATA, DOC_STRING = 1, 2, 9, 12
FLOAT16 = 10
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes):
    """Each field of a message: its number, its value (an integer or bytes), and all of it as it is written."""
    at = 0
    while at < len(data):
        begin = at
        key, at = read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = read_varint(data, at)
        elif wire == BYTES:
            length, at = read_varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
            value, at = data[at : at + length], at + length
        else:
            raise SystemExit(f"error: field {number} has the unknown wire type {wire}")
        yield number, value, data[begin:at]


def message(number: int, parts: list) -> list:
    """A field that is a message of these parts."""
    length = sum(len(part) for part in parts)
    return [varint(number << 3 | BYTES) + varint(length), *parts]


def filled_tensor(data: bytes) -> list | None:
    """The parts of an initializer with its values, or None where it has some."""
    dims, data_type, doc = [], 0, b""
    for number, value, _ in fields(data):
        if number == DIMS and isinstance(value, int):
            dims.append(value)
        elif number == DIMS:
            at = 0
            while at < len(value):
                size, at = read_varint(value, at)
                dims.append(size)
        elif number == DATA_TYPE:
            data_type = value
        elif number == DOC_STRING:
            doc = value
    if not doc.startswith(b"fill normal "):
        return None
    import numpy as np

    mean, std, seed = doc.decode().split()[2:]
    values = np.random.default_rng(int(seed)).standard_normal(tuple(dims), dtype=np.float32)
    values = values * np.float32(std) + np.float32(mean)
    raw = values.astype("<f2" if data_type == FLOAT16 else "<f4").tobytes()
    return [data, *message(RAW_DATA, [raw])]


def fill(source: Path, target: Path) -> None:
    """Writes the filled model, whole or not at all."""
    model = []
    for number, value, whole in fields(source.read_bytes()):
        if number != GRAPH:
            model.append(whole)
            continue
        graph = []
        for inner, tensor, written in fields(value):
            parts = filled_tensor(tensor) if inner == INITIALIZER else None
            graph += [written] if parts is None else message(INITIALIZER, parts)
        model += message(GRAPH, graph)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(model)
    partial.replace(target)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), Path(sys.argv[2]))
