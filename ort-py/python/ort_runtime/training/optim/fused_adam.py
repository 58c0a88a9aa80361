"""`FusedAdam`: Adam as a torch optimizer that updates all parameters at once. Needs torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["AdamWMode", "FusedAdam"]


class AdamWMode(enum.IntEnum):
    """What weight decay does."""

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW, one operation for all parameters of a group.

    Modes: 0 adds the decay to the gradient (Adam of torch), 1 is AdamW of Hugging Face's
    transformers, 2 is AdamW of torch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._adam_w_mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes the gradients, or sets them to zero."""
        super().zero_grad(set_to_none=set_to_none and self._set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters. Returns the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        if any(parameter.grad.is_sparse for parameter in trained):
            raise RuntimeError("FusedAdam does not take sparse gradients; use SparseAdam of torch")
        group["step"] = group.get("step", 0) + 1
        for parameter in trained:
            if not self.state[parameter]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = torch.zeros_like(parameter)
        first = [self.state[parameter]["exp_avg"] for parameter in trained]
        second = [self.state[parameter]["exp_avg_sq"] for parameter in trained]
        self._apply(group, trained, first, second)

    def _apply(self, group: dict[str, Any], trained: Any, first: Any, second: Any) -> None:
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        mode, eps = self._adam_w_mode, group["eps"]
        gradients: Any = [parameter.grad for parameter in trained]
        if mode is AdamWMode.ADAM_L2_REGULARIZATION and decay:
            gradients = torch._foreach_add(gradients, trained, alpha=decay)
        if mode is AdamWMode.ADAMW_TORCH and decay:
            torch._foreach_mul_(trained, 1 - rate * decay)
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        corrects, step = group["bias_correction"], group["step"]
        correction1 = 1 - beta1**step if corrects else 1.0
        correction2 = (1 - beta2**step) ** 0.5 if corrects else 1.0
        roots = torch._foreach_sqrt(second)
        # transformers adds eps before the correction of the second moment, torch after it.
        is_transformers = mode is AdamWMode.ADAMW_TRANSFORMERS
        torch._foreach_add_(roots, eps if is_transformers else eps * correction2)
        torch._foreach_addcdiv_(trained, first, roots, -rate * correction2 / correction1)
        if is_transformers and decay:
            torch._foreach_mul_(trained, 1 - rate * decay)
