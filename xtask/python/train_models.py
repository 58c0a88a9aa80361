"""Exports the models that training is tested and timed on as inference models, OUT/NAME.onnx.

usage: python train_models.py OUT [--size test|bench] [--batches N] [--only NAME]...

Trainable tensors are initializers with the names of the module's parameters. Of a linear layer whose input has three
dimensions the initializer is the transposed weight; of an LSTM they are W, R and B in ONNX's layout, named
`lstm.weight_ih_l0`, `lstm.weight_hh_l0` and `lstm.bias_l0`. BatchNormalization and Dropout stay nodes, in inference mode.
With --batches OUT/NAME.npz has inputs and labels of as many batches, one after the other.
Fails where ONNX Runtime's outputs are not those of the module.
"""

import argparse
import copy
import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from train_modules import MODELS, build, drawn

OPSET = 17
# Dimensions of inputs and outputs that are no numbers, by name of the value.
AXES = {
    "input_ids": {0: "batch", 1: "sequence"},
    "attention_mask": {0: "batch", 1: "sequence"},
    "image": {0: "batch"},
}


def in_training_form(module: nn.Module, name: str, inputs: dict[str, Tensor]) -> onnx.ModelProto:
    """What PyTorch exports for training: nothing folded, nothing renamed."""
    logits = {0: "batch", 1: "sequence"} if name == "gpt" else {0: "batch"}
    file = io.BytesIO()
    with warnings.catch_warnings():
        # Of constants in the trace, and of a counter that is left out: `check` tells whether they matter.
        warnings.simplefilter("ignore")
        # Of a copy, as tracing updates running statistics.
        torch.onnx.export(
            copy.deepcopy(module),
            tuple(inputs.values()),
            file,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_axes={**{value: AXES[value] for value in inputs}, "logits": logits},
            opset_version=OPSET,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            dynamo=False,
        )
    return onnx.load_from_string(file.getvalue())


def to_inference(graph: onnx.GraphProto) -> None:
    """BatchNormalization takes the running statistics, and Dropout passes all on."""
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]
        elif node.op_type == "Dropout":
            del node.input[2:]
            del node.output[1:]


def transposed_parameters(graph: onnx.GraphProto) -> set[str]:
    """Names of initializers that one Transpose reads and nothing else."""
    readers: dict[str, list] = {}
    for node in graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    names = {initializer.name for initializer in graph.initializer}
    return {name for name in names if [node.op_type for node in readers.get(name, [])] == ["Transpose"]}


def of_onnx(gates: Tensor) -> Tensor:
    """Gates of an LSTM from PyTorch's order (input, forget, cell, output) to ONNX's (input, output, forget, cell)."""
    in_gate, forget, cell, out_gate = gates.chunk(4)
    return torch.cat([in_gate, out_gate, forget, cell])


def in_layout(tensors: dict[str, Tensor], transposed: set[str]) -> dict[str, Tensor]:
    """Tensors by name of parameter as the exported model has them: weights, or anything of their shapes."""
    laid = {}
    for name, tensor in tensors.items():
        if "lstm.bias_ih" in name:
            both = (tensor, tensors[name.replace("_ih", "_hh")])
            laid[name.replace("bias_ih", "bias")] = torch.cat([of_onnx(bias) for bias in both])[None]
        elif "lstm.weight" in name:
            laid[name] = of_onnx(tensor)[None]
        elif "lstm.bias_hh" not in name:
            laid[name] = tensor.t() if name in transposed else tensor
    return laid


def lay_out(graph: onnx.GraphProto, module: nn.Module) -> set[str]:
    """Initializers in place of what only rearranges them; returns the names of those transposed."""
    transposed = transposed_parameters(graph)
    renamed = {}
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in transposed:
            renamed[node.output[0]] = node.input[0]
    layer = 0
    for node in graph.node:
        for index, value in enumerate(node.input):
            node.input[index] = renamed.get(value, value)
        if node.op_type == "LSTM":
            node.input[1:4] = [f"lstm.{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias")]
            layer += 1
    # The names of parameters, not those of the state: there a shared one has two.
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = in_layout({name: tensor.detach() for name, tensor in state.items()}, transposed)
    kept = [tensor for tensor in graph.initializer if tensor.name not in state]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, tensor in tensors.items():
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(tensor.numpy()), name))
    return transposed


def drop_unread(graph: onnx.GraphProto) -> None:
    needed = {output.name for output in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(initializers)


def export(name: str, module: nn.Module, inputs: dict[str, Tensor]) -> tuple[onnx.ModelProto, set[str]]:
    """The inference model, and the names of the parameters that it has transposed."""
    model = in_training_form(module, name, inputs)
    to_inference(model.graph)
    transposed = lay_out(model.graph, module)
    drop_unread(model.graph)
    del model.graph.value_info[:]
    model.graph.name = name
    onnx.checker.check_model(model, full_check=True)
    trained = in_layout(dict(module.named_parameters()), transposed)
    lost = trained.keys() - {tensor.name for tensor in model.graph.initializer}
    if lost:
        raise SystemExit(f"error: {name}: no initializers for {sorted(lost)}")
    check(name, model, module, inputs)
    return model, transposed


def check(name: str, model: onnx.ModelProto, module: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Fails unless ONNX Runtime computes what the module does, also of one item alone."""
    provider = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=provider)
    module = copy.deepcopy(module).eval()
    for items in (len(next(iter(inputs.values()))), 1):
        part = {value: tensor[:items] for value, tensor in inputs.items()}
        with torch.no_grad():
            wanted = module(**part).numpy()
        (found,) = session.run(None, {value: tensor.numpy() for value, tensor in part.items()})
        difference = np.abs(found - wanted).max() / np.abs(wanted).max()
        if found.shape != wanted.shape or not difference < 1e-4:
            raise SystemExit(f"error: {name}: ONNX Runtime's outputs differ from the module's by {difference}")


def inputs_of(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {value: tensor for value, tensor in batch.items() if value != MODELS[name].label}


def write(model: onnx.ModelProto, path: Path) -> None:
    """Written beside and moved into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(model.SerializeToString())
    partial.replace(path)


def write_data(batches: list[dict[str, Tensor]], path: Path) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **{key: torch.cat([batch[key] for batch in batches]).numpy() for key in batches[0]})
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--size", choices=["test", "bench"], default="test")
    parser.add_argument("--batches", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.only or MODELS:
        batches = drawn(name, given.size, max(1, given.batches))
        model, _ = export(name, build(name, given.size), inputs_of(name, batches[0]))
        path = given.out / f"{name}.onnx"
        write(model, path)
        if given.batches:
            write_data(batches, path.with_suffix(".npz"))
        print(f"{name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
