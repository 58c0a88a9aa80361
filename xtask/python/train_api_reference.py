"""Trains a small model by ONNX Runtime's on-device training API and writes what the same calls must come to.

usage: python train_api_reference.py OUT

Writes OUT/api/model.onnx, a perceptron with its first weights; OUT/api/data.npz, the inputs and targets of BATCHES batches, stacked (step k
takes batch k % BATCHES); and OUT/api/reference.json: for each case of CASES its options, the losses and learning rates of STEPS steps, the loss
in evaluation mode after them, all parameters after them as get_contiguous_parameters has them, and the names that the module says.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

STEPS = 24
BATCHES = 3
BATCH, INPUTS, HIDDEN, OUTPUTS = 6, 8, 16, 5
TRAINED = ["first.weight", "first.bias", "second.weight", "second.bias"]
LOSSES = {
    "cross_entropy": artifacts.LossType.CrossEntropyLoss,
    "mse": artifacts.LossType.MSELoss,
    "bce_with_logits": artifacts.LossType.BCEWithLogitsLoss,
    "l1": artifacts.LossType.L1Loss,
}
# `every`: gradients are summed over so many batches, then applied and reset; 0 never resets them.
DEFAULT = {"loss": "cross_entropy", "optimizer": "adamw", "rate": 0.01, "every": 1, "clip": None, "linear": None, "frozen": []}
CASES = {
    "cross_entropy_adamw": {},
    "mse_adamw": {"loss": "mse"},
    "bce_with_logits_adamw": {"loss": "bce_with_logits"},
    "l1_adamw": {"loss": "l1"},
    "cross_entropy_sgd": {"optimizer": "sgd", "rate": 0.1},
    "mse_sgd": {"loss": "mse", "optimizer": "sgd", "rate": 0.1},
    "initial_rate": {"rate": None},
    "sums_of_three": {"every": 3},
    "sums_of_three_sgd": {"every": 3, "optimizer": "sgd", "rate": 0.05},
    "never_reset": {"every": 0, "optimizer": "sgd", "rate": 0.005},
    "clipped": {"clip": 0.05},
    "linear_rate": {"optimizer": "sgd", "rate": None, "linear": [5, 20, 0.2]},
    "frozen": {"frozen": ["first.weight", "first.bias"]},
}


def model(random: np.random.Generator) -> onnx.ModelProto:
    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array((random.standard_normal(shape) * 0.4).astype(np.float32), name)

    nodes = [
        helper.make_node("Gemm", ["input", "first.weight", "first.bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "second.weight"], ["product"]),
        helper.make_node("Add", ["product", "second.bias"], ["scores"]),
    ]
    weights = [
        weight("first.weight", INPUTS, HIDDEN),
        weight("first.bias", HIDDEN),
        weight("second.weight", HIDDEN, OUTPUTS),
        weight("second.bias", OUTPUTS),
    ]
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", INPUTS])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", OUTPUTS])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batches(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "input": random.standard_normal((BATCHES, BATCH, INPUTS)).astype(np.float32),
        "labels": random.integers(0, OUTPUTS, (BATCHES, BATCH)).astype(np.int64),
        "target": random.random((BATCHES, BATCH, OUTPUTS)).astype(np.float32),
    }


def generate(base: onnx.ModelProto, case: dict, folder: str) -> None:
    clip = onnxblock.optim.ClipGradNorm(case["clip"]) if case["clip"] else None
    kinds = {
        "adamw": onnxblock.optim.AdamW(clip_grad=clip) if clip else artifacts.OptimType.AdamW,
        "sgd": artifacts.OptimType.SGD,
    }
    copy = onnx.ModelProto()
    copy.CopyFrom(base)
    artifacts.generate_artifacts(
        copy,
        requires_grad=[name for name in TRAINED if name not in case["frozen"]],
        frozen_params=case["frozen"],
        loss=LOSSES[case["loss"]],
        optimizer=kinds[case["optimizer"]],
        artifact_directory=folder,
        additional_output_names=["scores"],
    )


def train(base: onnx.ModelProto, data: dict[str, np.ndarray], case: dict, folder: Path) -> dict:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    scheduler = None
    if case["linear"]:
        # 1.19.2 takes the two counts in the other order than it documents.
        warmup, total, rate = case["linear"]
        scheduler = LinearLRScheduler(optimizer, total, warmup, rate)
    if case["rate"]:
        optimizer.set_learning_rate(case["rate"])
    names = {"train_inputs": module.input_names(), "train_outputs": module.output_names()}
    target = "labels" if case["loss"] == "cross_entropy" else "target"
    losses, rates = [], []
    for step in range(STEPS):
        given = [np.ascontiguousarray(data[name][step % BATCHES]) for name in ("input", target)]
        loss, _ = module(*given)
        losses.append(float(loss))
        rates.append(optimizer.get_learning_rate())
        if (step + 1) % max(case["every"], 1) == 0:
            optimizer.step()
            if scheduler:
                scheduler.step()
            if case["every"]:
                module.lazy_reset_grad()
    module.eval()
    evaluated, scores = module(*(np.ascontiguousarray(data[name][0]) for name in ("input", target)))
    return {
        **names,
        "losses": losses,
        "rates": rates,
        "evaluated": float(evaluated),
        "scores": scores.flatten().tolist(),
        "sizes": [module.get_parameters_size(flag) for flag in (True, False)],
        "parameters": {name: it.data.flatten().tolist() for name, it in state.parameters},
    }


def main() -> None:
    out = Path(sys.argv[1]) / "api"
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    base, data = model(random), batches(random)
    records = {}
    for name, changes in CASES.items():
        case = {**DEFAULT, **changes}
        with tempfile.TemporaryDirectory() as folder:
            generate(base, case, folder)
            records[name] = {**case, **train(base, data, case, Path(folder))}
        ends = [records[name]["losses"][index] for index in (0, -1)]
        print(f"{name}: loss {ends[0]:.4f} to {ends[1]:.4f}", flush=True)
    for name, write in {
        "model.onnx": lambda path: onnx.save(base, path),
        "data.npz": lambda path: np.savez_compressed(path, **data),
        "reference.json": lambda path: path.write_text(json.dumps(records, indent=1) + "\n"),
    }.items():
        partial = out / f"partial.{name}"
        write(partial)
        partial.replace(out / name)


if __name__ == "__main__":
    main()
