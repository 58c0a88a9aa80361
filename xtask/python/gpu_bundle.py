"""Writes the part of the folder of `cargo xtask gpu` that the package onnx makes, and its archives.

usage: python gpu_bundle.py OUT MODELS BIN CASES

Puts the skeletons of MODELS into OUT/models, each also with float16 in place of float32 (NAME_f16), and small models of single
operators; the programs of BIN into OUT/bin.tar.xz and the case folders of CASES into OUT/cases.tar.xz. Prints a line for each.
"""

import lzma
import platform
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ENDING = ".skeleton.onnx"
LARGEST_HALF = float(np.finfo(np.float16).max)
# Of seven programs of 140 MB that share most of their code, what comes again is found only within a window that holds them all, and where
# calls are written as the addresses that they go to: that takes a third of what it does with tar's own presets.
WINDOW = 192 << 20
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": WINDOW}]
if platform.machine() in ("x86_64", "AMD64"):
    FILTERS.insert(0, {"id": lzma.FILTER_X86})


def halve_tensor(tensor: TensorProto) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    if tensor.doc_string.startswith("fill "):
        tensor.data_type = TensorProto.FLOAT16
        return
    # What stands for minus infinity in masks must not become it: a row that is masked whole would be NaN.
    values = np.clip(numpy_helper.to_array(tensor), -LARGEST_HALF, LARGEST_HALF)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """float16 wherever the model has float32, inputs and outputs, too."""
    graph = model.graph
    for tensor in graph.initializer:
        halve_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                raise SystemExit(f"error: {node.op_type} has a graph, which this does not convert")
            if attribute.type == onnx.AttributeProto.TENSOR:
                halve_tensor(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    for info in [*graph.input, *graph.output, *graph.value_info]:
        tensor = info.type.tensor_type
        if tensor.elem_type == TensorProto.FLOAT:
            tensor.elem_type = TensorProto.FLOAT16
    return model


def model_of(nodes: list, inputs: dict, outputs: dict, initializers: list = ()) -> onnx.ModelProto:
    def infos(shapes: dict) -> list:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    graph = helper.make_graph(nodes, "model", infos(inputs), infos(outputs), list(initializers))
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def values(name: str, *shape: int) -> TensorProto:
    drawn = np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32) / 8
    return numpy_helper.from_array(drawn, name)


def unfilled(name: str, *shape: int) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, doc_string="fill normal 1 0.02 0")


def operators() -> dict[str, onnx.ModelProto]:
    """What is held against the card, and `tiny`: a few operators in a model that runs anywhere, with its values in it."""
    node = helper.make_node
    rows = ["rows", "columns"]
    return {
        "op_matmul": model_of(
            [node("MatMul", ["a", "b"], ["y"])], {"a": ["m", "k"], "b": ["k", "n"]}, {"y": ["m", "n"]}
        ),
        "op_add": model_of([node("Add", ["a", "b"], ["y"])], {"a": rows, "b": rows}, {"y": rows}),
        "op_softmax": model_of([node("Softmax", ["x"], ["y"], axis=-1)], {"x": rows}, {"y": rows}),
        "op_layernorm": model_of(
            [node("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=-1)],
            {"x": ["rows", 4096]},
            {"y": ["rows", 4096]},
            [unfilled("scale", 4096), unfilled("bias", 4096)],
        ),
        "tiny": model_of(
            [
                node("MatMul", ["x", "weight"], ["product"]),
                node("Add", ["product", "bias"], ["sum"]),
                node("Relu", ["sum"], ["positive"]),
                node("LayerNormalization", ["positive", "scale", "shift"], ["normal"], axis=-1),
                node("Softmax", ["normal"], ["y"], axis=-1),
            ],
            {"x": ["batch", "seq", 32]},
            {"y": ["batch", "seq", 48]},
            [values("weight", 32, 48), values("bias", 48), values("scale", 48), values("shift", 48)],
        ),
    }


def write(model: onnx.ModelProto, folder: Path, name: str) -> None:
    path = folder / f"{name}{ENDING}"
    onnx.save(model, path)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def pack(folder: Path, archive: Path) -> None:
    """The folder's files, in the order of their names and without the times and owners of this machine: the same bytes each time."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with lzma.open(archive, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=plain)
    print(f"{archive.name}: {archive.stat().st_size:,} bytes", flush=True)


def main() -> None:
    out, models, programs, cases = (Path(argument) for argument in sys.argv[1:5])
    folder = out / "models"
    folder.mkdir(parents=True, exist_ok=True)
    made = {path.name.removesuffix(ENDING): onnx.load(path) for path in sorted(models.glob(f"*{ENDING}"))}
    for name, model in {**made, **operators()}.items():
        write(model, folder, name)
        write(halve(model), folder, f"{name}_f16")
    pack(programs, out / "bin.tar.xz")
    pack(cases, out / "cases.tar.xz")


if __name__ == "__main__":
    main()
