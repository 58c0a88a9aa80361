"""On-device training: parameters, a model in training, its optimizer and a learning rate.

Example::

    from ort_runtime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint("artifacts/checkpoint")
    module = Module("artifacts/training_model.onnx", state, "artifacts/eval_model.onnx")
    optimizer = Optimizer("artifacts/optimizer_model.onnx", module)
    for x, labels in batches:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "artifacts/checkpoint")

The files are those of `ort_runtime.training.artifacts.generate_artifacts`. Artifacts that
onnxruntime-training wrote have to be generated again.
"""

from .checkpoint_state import CheckpointState
from .lr_scheduler import LinearLRScheduler
from .module import Module
from .optimizer import Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]
