"""Writes onnx_values.json: tensors of every element type and values of every kind, as the `onnx` package
serializes them.

Usage: python onnx_values.py > onnx_values.json
"""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NUMBERS = [1, 0, 3, 2, 1, 1, 0]
SIGNED = [1, -1, 0, -2, 1, 1, 0]
FLOATS = [1.0, -0.5, 0.0, 2.0, 1.5, -1.0, 4.0]


def tensors():
    for name, code in TensorProto.DataType.items():
        if name in ("UNDEFINED", "STRING"):
            continue
        if name.startswith("COMPLEX"):
            values = [complex(f, -f) for f in FLOATS]
        elif name == "FLOAT8E8M0":
            values = [1.0, 0.5, 2.0, 4.0, 1.0, 8.0, 0.25]
        elif "FLOAT" in name or name == "DOUBLE":
            values = FLOATS
        elif name.startswith("INT"):
            values = SIGNED
        elif name == "BOOL":
            values = [True, False, True, True, False, False, True]
        else:
            values = NUMBERS
        typed = helper.make_tensor("t", code, [7], values)
        raw = numpy_helper.from_array(numpy_helper.to_array(typed), "t")
        assert raw.data_type == code, name
        yield {
            "name": name,
            "typed": typed.SerializeToString().hex(),
            "raw": raw.SerializeToString().hex(),
            "bytes": raw.raw_data.hex(),
        }


def sparse():
    values = helper.make_tensor("s", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    linear = helper.make_tensor("", TensorProto.INT64, [3], [1, 4, 5])
    pairs = helper.make_tensor("", TensorProto.INT64, [3, 2], [0, 1, 1, 1, 1, 2])
    for indices in (linear, pairs):
        yield helper.make_sparse_tensor(values, indices, [2, 3]).SerializeToString().hex()


def string_map():
    """`numpy_helper.from_dict` takes no strings as keys."""
    message = onnx.MapProto(name="m", key_type=TensorProto.STRING, string_keys=[b"x", b"y"])
    message.values.CopyFrom(numpy_helper.from_list([np.array(1, np.int64), np.array(2, np.int64)]))
    return message


def main():
    a, b = np.array([1, 2], np.int64), np.array([[3]], np.int64)
    values = {
        "sequence(int64)": numpy_helper.from_list([a, b], "s"),
        "sequence(sequence(int64))": numpy_helper.from_list([[a], [b, a]], "s"),
        "optional(int64)": numpy_helper.from_optional(a, "o"),
        "optional(none)": numpy_helper.from_optional(None, "o"),
        "optional(sequence(int64))": numpy_helper.from_optional([a, b], "o"),
        "map(int64, float)": numpy_helper.from_dict({7: np.float32(0.5), 9: np.float32(1.5)}, "m"),
        "map(string, int64)": string_map(),
        "tensor(string)": numpy_helper.from_array(np.array(["a", "", "é"], object), "t"),
    }
    golden = {
        "onnx": onnx.__version__,
        "tensors": list(tensors()),
        "sparse": list(sparse()),
        "values": {kind: value.SerializeToString().hex() for kind, value in values.items()},
    }
    print(json.dumps(golden, indent=1))


main()
