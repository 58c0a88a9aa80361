"""Optimizers as blocks: what `generate_artifacts` takes, and the models of `empty_base`."""

from __future__ import annotations

from typing import Any

from ._model import accessor
from .onnxblock import ForwardBlock, Parameters, optimizer_model

__all__ = ["SGD", "AdamW", "ClipGradNorm"]


class ClipGradNorm:
    """A bound on the Euclidean norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm


class _Optimizer(ForwardBlock):
    """An optimizer of the engine."""

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__()
        self.clip_grad = clip_grad

    def update(self) -> dict[str, Any]:
        """Returns the settings of the update."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns what the engine takes."""
        bound = None if self.clip_grad is None else self.clip_grad.max_norm
        return {"optimizer": self.update(), "clip_grad": bound}

    def build(self, parameters: Parameters) -> list[str]:
        """Makes the model that updates the first of these parameters."""
        model = accessor().model
        model.CopyFrom(optimizer_model(parameters, self.settings()))
        return [output.name for output in model.graph.output]


class AdamW(_Optimizer):
    """AdamW as in Hugging Face's transformers."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self.bias_correction = bias_correction
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def update(self) -> dict[str, Any]:
        beta1, beta2 = self.betas
        return {
            "kind": "adam",
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": self.eps,
            "weight_decay": self.weight_decay,
            "correct_bias": self.bias_correction,
            "form": "hugging_face",
        }


class SGD(_Optimizer):
    """Gradient descent without momentum."""

    def update(self) -> dict[str, Any]:
        return {"kind": "sgd", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
