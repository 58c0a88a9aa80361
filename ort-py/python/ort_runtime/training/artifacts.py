"""`generate_artifacts`: the files that on-device training starts from.

Needs the package `onnx` if the model is a ModelProto, or the loss a block.
"""

from __future__ import annotations

import enum
import errno
import json
import os
from typing import TYPE_CHECKING, Any

from ..capi import onnxruntime_pybind11_state as C
from ..capi._options import SessionOptions

if TYPE_CHECKING:
    import onnx

    from .onnxblock import Block
    from .onnxblock.optim import SGD, AdamW

_NAME = __name__

__all__ = ["LossType", "OptimType", "generate_artifacts"]


class LossType(enum.Enum):
    """The losses that `generate_artifacts` adds to a model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.Enum):
    """The optimizers that `generate_artifacts` writes."""

    AdamW = 1
    SGD = 2


_LOSSES: dict[LossType, dict[str, Any]] = {
    LossType.MSELoss: {"kind": "mse"},
    LossType.CrossEntropyLoss: {
        "kind": "cross_entropy",
        "label_smoothing": 0.0,
        "ignore_index": None,
        "class_axis": None,
    },
    LossType.BCEWithLogitsLoss: {"kind": "bce_with_logits"},
    LossType.L1Loss: {"kind": "l1"},
}


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | Block | None = None,
    optimizer: OptimType | AdamW | SGD | None = None,
    artifact_directory: str | bytes | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Writes `training_model.onnx`, `eval_model.onnx` and `checkpoint` for a model.

    With an optimizer it also writes `optimizer_model.onnx`, with `nominal_checkpoint` also
    `nominal_checkpoint`. The files are for `ort_runtime.training.api`.

    - `requires_grad` names the parameters to train, `frozen_params` those to keep as they are.
    - `loss` adds a loss and its input: `labels` (int64) for cross entropy, `target` for the others.
      Without one the first output of the model is the loss. A block of
      `ort_runtime.training.onnxblock` makes a loss of your own.
    - `loss_input_names` names the outputs that the loss takes, the first by default.
    - `additional_output_names` are values that a call returns next to the loss.

    Example::

        generate_artifacts(
            "model.onnx",
            requires_grad=["fc.weight", "fc.bias"],
            loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW,
            artifact_directory="artifacts",
        )
    """
    if isinstance(model, (str, os.PathLike)) and not os.path.exists(model):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(model))
    both = sorted(set(requires_grad or []) & set(frozen_params or []))
    if both:
        raise RuntimeError(
            "A parameter cannot be frozen and require gradient computation at the same time "
            f"{set(both)}"
        )
    if ort_format:
        raise NotImplementedError("artifacts are written in ONNX format; leave ort_format out")
    if custom_op_library is not None:
        raise NotImplementedError("operators of a library have no gradients; leave it out")
    for names in (additional_output_names, loss_input_names):
        if isinstance(names, str):
            raise RuntimeError(
                f"Unknown type provided for additional output names {type(names)}. "
                "Expected additional output names to be a list of strings."
            )
    source: Any = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model
    known = None
    if isinstance(loss, LossType):
        known = _LOSSES[loss]
    elif loss is not None:
        source = _with_loss(source, _block(loss), loss_input_names)
        loss_input_names = None
    settings = {
        "requires_grad": requires_grad or [],
        "frozen_params": frozen_params or [],
        "loss": known,
        **_optimizer(optimizer),
        "artifact_directory": os.fsdecode(artifact_directory) if artifact_directory else None,
        "prefix": prefix,
        "additional_output_names": additional_output_names or [],
        "nominal_checkpoint": nominal_checkpoint,
        "loss_input_names": loss_input_names or [],
    }
    C.write_artifacts(_model(source), SessionOptions(), json.dumps(settings))


def _model(model: Any) -> str | bytes:
    """Returns a model as the path of a file, or as bytes."""
    if isinstance(model, str):
        return model
    import onnx

    if not isinstance(model, onnx.ModelProto):
        raise RuntimeError(
            "Please pass in either a string or an ONNX ModelProto for the model, "
            f"not {type(model)}."
        )
    try:
        return model.SerializeToString()
    except Exception as problem:
        raise RuntimeError(
            f"the model cannot be serialized ({problem}); give a model above 2 GB by its path"
        ) from problem


def _block(loss: object) -> Block:
    """Returns a loss that is a block."""
    from .onnxblock import Block

    if not isinstance(loss, Block):
        raise RuntimeError(
            f"Unknown loss provided {type(loss)}. Expected loss to be either one of "
            f"{_NAME}.LossType or {_NAME.rpartition('.')[0]}.onnxblock.Block."
        )
    return loss


def _with_loss(
    model: onnx.ModelProto | str, loss: Block, loss_input_names: list[str] | None
) -> onnx.ModelProto:
    """Returns a copy of the model whose first output is the loss that the block makes."""
    import onnx

    from . import onnxblock

    whole = onnx.load(model) if isinstance(model, str) else model
    copy = onnx.ModelProto()
    copy.CopyFrom(whole)
    names = loss_input_names or [output.name for output in copy.graph.output]
    with onnxblock.base(copy):
        made = loss(*names)
    return onnxblock.with_first_output(copy, made if isinstance(made, str) else made[0])


def _optimizer(optimizer: object) -> dict[str, Any]:
    """Returns the settings of an optimizer."""
    if optimizer is None:
        return {"optimizer": None, "clip_grad": None}
    from .onnxblock import optim

    if isinstance(optimizer, OptimType):
        optimizer = optim.AdamW() if optimizer is OptimType.AdamW else optim.SGD()
    if not isinstance(optimizer, (optim.AdamW, optim.SGD)):
        raise TypeError(
            f"Unknown optimizer provided {type(optimizer)}. Expected optimizer to be either one of "
            f"{_NAME}.OptimType or AdamW or SGD of {_NAME.rpartition('.')[0]}.onnxblock.optim."
        )
    return optimizer.settings()
