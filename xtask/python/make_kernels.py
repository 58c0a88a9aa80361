"""Makes models of one operator, or of a chain of them, to time kernels with.

usage: python make_kernels.py TABLE.json OUT

TABLE.json lists {name, inputs, weights, nodes, speed}: values by name with their shapes, float32 unless the first entry names another type, and nodes
in the text form of ONNX, `y = MatMul (a, b)`; the last node's output is the model's. Writes OUT/FILE.onnx and OUT/FILE.npz, and OUT/kernels.json
with {name, file, bytes, speed}; bytes are those of inputs, weights and output. Kernels that are there and unchanged are left alone.
"""

import json
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

from reference import open_session

OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]


def values(name: str, shape: list, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype("float32")
    if shape and isinstance(shape[0], str):
        dtype, shape = np.dtype(shape[0]), shape[1:]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * 0.1).astype(dtype)


def make(kernel: dict, model: Path, inputs: Path) -> int:
    """Writes the two files; returns the bytes of all values but those between nodes."""
    rng = np.random.default_rng(zlib.crc32(kernel["name"].encode()))
    given = {name: values(name, shape, rng) for name, shape in kernel["inputs"].items()}
    weights = {name: values(name, shape, rng) for name, shape in kernel.get("weights", {}).items()}
    nodes = [onnx.parser.parse_node(text) for text in kernel["nodes"]]
    last = nodes[-1].output[0]
    graph = helper.make_graph(
        nodes,
        "kernel",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in given.items()
        ],
        [onnx.ValueInfoProto(name=last)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    # The output's type is what the operators make of it.
    made = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=OPSETS, ir_version=10))
    if not made.graph.output[0].type.WhichOneof("value"):
        made.graph.output[0].CopyFrom(helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    onnx.save(made, model)
    np.savez(inputs, **given)
    (output,) = open_session(model, threads=1).run([last], given)
    return output.nbytes + sum(value.nbytes for value in (given | weights).values())


def main() -> None:
    table, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for kernel in json.loads(table.read_text()):
        file = re.sub(r"[^a-z0-9]+", "_", kernel["name"].lower()).strip("_")
        model, inputs, stamp = (out / f"{file}.{ending}" for ending in ("onnx", "npz", "json"))
        row = {"name": kernel["name"], "file": file, "speed": kernel.get("speed")}
        description = json.dumps([kernel, onnx.__version__])
        known = json.loads(stamp.read_text()) if stamp.exists() else {}
        if known.get("description") != description or not model.exists():
            known = {"description": description, "bytes": make(kernel, model, inputs)}
            stamp.write_text(json.dumps(known))
        made.append(row | {"bytes": known["bytes"]})
    (out / "kernels.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
