"""Losses as blocks. Each adds an input, `labels` or `target`, that the loss compares with."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from . import blocks
from ._model import accessor

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]


class _Loss(blocks.Block):
    """A loss of elements, reduced to their mean or their sum."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise RuntimeError(f"there is no reduction '{reduction}'; it is mean, sum or none")
        self._reduction = reduction

    def reduced(self, name: str) -> str:
        """Reduces elements."""
        if self._reduction == "none":
            return name
        operator = {"mean": "ReduceMean", "sum": "ReduceSum"}[self._reduction]
        return accessor().node(operator, [name], keepdims=0)

    def difference(self, name: str, target: str) -> str:
        """Subtracts the target, which becomes an input."""
        model = accessor()
        return model.node("Sub", [name, model.input_like(name, target)])


class MSELoss(_Loss):
    """The squared error."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        difference = self.difference(loss_input_name, target_name)
        return self.reduced(accessor().node("Mul", [difference, difference]))


class L1Loss(_Loss):
    """The absolute error."""

    def build(self, loss_input_name: str, target_name: str | None = "target") -> str:
        difference = self.difference(loss_input_name, target_name or "target")
        return self.reduced(accessor().node("Abs", [difference]))


class CrossEntropyLoss(_Loss):
    """The cross entropy of scores and classes.

    `weight` has a factor for each class, `ignore_index` is a class that does not count.
    """

    def __init__(
        self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._ignored = {} if ignore_index is None else {"ignore_index": ignore_index}

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        model = accessor()
        rank = len(model.value(scores_input_name).type.tensor_type.shape.dim) - 1
        labels = model.input_like(scores_input_name, labels_name, TensorProto.INT64, rank)
        inputs = [scores_input_name, labels]
        if self._weight is not None:
            inputs.append(model.constant(self._weight, "weight"))
        operator = "SoftmaxCrossEntropyLoss"
        return model.node(operator, inputs, reduction=self._reduction, **self._ignored)


class BCEWithLogitsLoss(_Loss):
    """The binary cross entropy of logits: `max(x, 0) - x * target + log(1 + exp(-|x|))`.

    `weight` has a factor for each element, `pos_weight` one for the positive class.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._pos_weight = pos_weight

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        model, x = accessor(), loss_input_name
        target = model.input_like(x, target_name)
        # With y = target, p = pos_weight: (1 - y) * x + (1 + (p - 1) * y) * softplus(-x).
        softplus = model.node("Softplus", [model.node("Neg", [x])])
        if self._pos_weight is not None:
            less_one = model.node("Sub", [model.constant(self._pos_weight), model.constant(1.0)])
            share = model.node("Mul", [less_one, target])
            factor = model.node("Add", [share, model.constant(1.0)])
            softplus = model.node("Mul", [factor, softplus])
        rest = model.node("Mul", [model.node("Sub", [model.constant(1.0), target]), x])
        loss = model.node("Add", [rest, softplus])
        if self._weight is not None:
            loss = model.node("Mul", [loss, model.constant(self._weight, "weight")])
        return self.reduced(loss)
