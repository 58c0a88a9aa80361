"""Settings of optimizers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

__all__ = ["AdamConfig", "LambConfig", "SGDConfig"]

_GROUP = (
    "Each dict inside 'params' must contain a {'params' : [model parameter names]} entry "
    "and additional entries for custom hyper parameter values"
)

Groups = Sequence[dict[str, Any]]


def _check(holds: bool, message: str) -> None:
    """Raises what programs for onnxruntime expect of settings."""
    if not holds:
        raise AssertionError(message)


class _OptimizerConfig:
    """An optimizer by name, its settings, and groups of parameters with settings of their own."""

    def __init__(self, name: str, params: Groups, defaults: dict[str, Any]) -> None:
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = defaults
        self.params = [dict(group) if isinstance(group, dict) else group for group in params]
        _check(self.lr >= 0, "lr must be a positive number")
        for group in self.params:
            is_group = isinstance(group, dict) and "params" in group and len(group) > 1
            _check(is_group, _GROUP)
            _check("lr" not in group, "'lr' is not supported inside params")
            for key in group.keys() - {"params"}:
                text = f"'params' has {key} hyper parameter not present at 'defaults'"
                _check(key.removesuffix("_coef") in defaults, text)
            for key, value in defaults.items():
                group.setdefault(key, value)


def _check_moments(alpha: float, beta: float, epsilon: float, max_norm_clip: float) -> None:
    _check(alpha >= 0, "'alpha' must be a positive number")
    _check(beta >= 0, "'beta' must be a positive number")
    _check(epsilon >= 0, "'epsilon' must be a positive number")
    _check(max_norm_clip != 0, "'max_norm_clip' must not be 0")


class SGDConfig(_OptimizerConfig):
    """Gradient descent without momentum."""

    def __init__(self, params: Groups = (), lr: float = 0.001) -> None:
        _check(not params, _GROUP)
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(_OptimizerConfig):
    """Adam with weight decay."""

    class DecayMode(enum.IntEnum):
        """Whether weights decay before or after the update."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Groups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        _check(lr >= 0, "'lr' must be a positive number")
        _check_moments(alpha, beta, epsilon, max_norm_clip)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        super().__init__("AdamOptimizer", params, defaults)
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
        self.weight_decay_mode = weight_decay_mode


class LambConfig(_OptimizerConfig):
    """LAMB."""

    def __init__(
        self,
        params: Groups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = float("-inf"),
        ratio_max: float = float("inf"),
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        _check(lr >= 0, "'lr' must be a positive number")
        _check_moments(alpha, beta, epsilon, max_norm_clip)
        _check(ratio_min <= ratio_max, "'ratio_min' must be a valid float")
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)
        self.alpha = alpha
        self.beta = beta
        self.lambda_coef = lambda_coef
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max
        self.epsilon = epsilon
        self.max_norm_clip = max_norm_clip
        self.do_bias_correction = do_bias_correction
