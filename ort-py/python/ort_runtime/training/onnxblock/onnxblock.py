"""`ForwardBlock` and `TrainingBlock`: blocks that make whole models."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from typing import Any

import onnx
from onnx import TensorProto, helper

from ...capi import onnxruntime_pybind11_state as C
from ...capi._options import SessionOptions
from ._model import accessor, with_first_output
from .blocks import Block

Parameters = tuple[list[onnx.TensorProto], list[onnx.TensorProto]]


class ForwardBlock(Block):
    """A block that makes a model for inference."""

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to the model, whose outputs are then those of the block."""
        output = self.build(*args, **kwargs)
        names = [output] if isinstance(output, str) else list(output)
        model = accessor().model
        outputs = [accessor().value(name) for name in names]
        del model.graph.output[:]
        model.graph.output.extend(outputs)
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """Returns the model that the call made."""
        if self._model is None:
            raise RuntimeError("call the block first")
        return self._model


class TrainingBlock(Block):
    """A block whose first output is a loss: it makes a training and an evaluation model.

    Example::

        class Model(onnxblock.TrainingBlock):
            def __init__(self):
                super().__init__()
                self.loss = onnxblock.loss.MSELoss()

            def build(self, output):
                return self.loss(output)

        block = Model()
        block.requires_grad("fc.weight")
        with onnxblock.base(model):
            block(model.graph.output[0].name)
            training_model, eval_model = block.to_model_proto()
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: dict[str, bool] = {}
        self._forward: onnx.ModelProto | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Says whether a parameter is trained."""
        self._trained[argument_name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to the model, with the loss as its first output."""
        output = self.build(*args, **kwargs)
        loss = output if isinstance(output, str) else output[0]
        self._forward = onnx.ModelProto()
        self._forward.CopyFrom(accessor().model)
        with_first_output(self._forward, loss)
        return output

    def parameters(self) -> Parameters:
        """Returns the parameters that are trained, and the others."""
        initializers = list(self._built().graph.initializer)
        trained = [tensor for tensor in initializers if self._trained.get(tensor.name)]
        frozen = [tensor for tensor in initializers if self._trained.get(tensor.name) is False]
        return trained, frozen

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Returns the training model and the evaluation model."""
        trained, frozen = self.parameters()
        with _Artifacts(self._built(), trained, frozen) as artifacts:
            return artifacts.model("training_model.onnx"), artifacts.model("eval_model.onnx")

    def _built(self) -> onnx.ModelProto:
        if self._forward is None:
            raise RuntimeError("call the block first")
        return self._forward


class _Artifacts:
    """The artifacts of a model whose first output is the loss, in a temporary folder."""

    def __init__(
        self,
        model: onnx.ModelProto,
        trained: list[onnx.TensorProto],
        frozen: list[onnx.TensorProto],
        nominal_checkpoint: bool = False,
        **optimizer: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        settings = {
            "requires_grad": [tensor.name for tensor in trained],
            "frozen_params": [tensor.name for tensor in frozen],
            "loss": None,
            "optimizer": None,
            "clip_grad": None,
            **optimizer,
            "artifact_directory": self._folder.name,
            "prefix": "",
            "additional_output_names": [],
            "nominal_checkpoint": nominal_checkpoint,
            "loss_input_names": [],
        }
        C.write_artifacts(model.SerializeToString(), SessionOptions(), json.dumps(settings))

    def __enter__(self) -> _Artifacts:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def path(self, name: str) -> str:
        """Returns the path of a file."""
        return os.path.join(self._folder.name, name)

    def model(self, name: str) -> onnx.ModelProto:
        """Reads a model."""
        return onnx.load(self.path(name))


def _sum_of(parameters: Parameters) -> onnx.ModelProto:
    """Returns a model with these parameters, whose output is the sum of all elements.

    Neither a checkpoint nor the update of parameters depends on the model around them.
    """
    trained, frozen = parameters
    if not trained:
        raise RuntimeError("there is no parameter to train; name some by requires_grad")
    sums = [
        helper.make_node("ReduceSum", [tensor.name], [f"sum::{tensor.name}"], keepdims=0)
        for tensor in (*trained, *frozen)
    ]
    total = helper.make_node("Sum", [node.output[0] for node in sums], ["loss"])
    output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph([*sums, total], "sums", [], [output], [*trained, *frozen])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def optimizer_model(parameters: Parameters, optimizer: dict[str, Any]) -> onnx.ModelProto:
    """Returns the model that updates the first of these parameters."""
    with _Artifacts(_sum_of(parameters), *parameters, **optimizer) as artifacts:
        return artifacts.model("optimizer_model.onnx")


def save_checkpoint(
    parameters: Parameters,
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Writes a checkpoint of these parameters; a nominal one has no values to train."""
    name = "nominal_checkpoint" if nominal_checkpoint else "checkpoint"
    with _Artifacts(_sum_of(parameters), *parameters, nominal_checkpoint) as artifacts:
        # Whole or not at all: the copy takes its name at the end.
        part = f"{os.fspath(path_to_checkpoint)}.part"
        shutil.copyfile(artifacts.path(name), part)
        os.replace(part, path_to_checkpoint)


def load_checkpoint_to_model(
    path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto
) -> None:
    """Sets the initializers of a model from a checkpoint."""
    state = C.CheckpointState.load(os.fspath(path_to_checkpoint))
    names = set(state.parameter_names())
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.CopyFrom(onnx.numpy_helper.from_array(state.data(tensor.name), tensor.name))
