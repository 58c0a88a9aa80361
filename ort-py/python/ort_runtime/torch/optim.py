"""Optimizers for `torch`: fused steps in place, one run of a session for a group of parameters.

They take parameter groups, schedules, closures, `GradScaler` and clipping as those of
`torch.optim` do. `AdamW` and `Adafactor` compute what the optimizers of `torch.optim` with these
names do, and their states can be loaded from one another. `AdamW8bit` keeps two bytes of state for
a number, `Adafactor` a row and a column for a matrix.

Example::

    from ort_runtime.torch.optim import AdamW8bit

    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    model(inputs).backward()
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ort_runtime

from . import _model_bytes
from ._emitter import ELEMENT_TYPES, OPSETS, RUNTIME

__all__ = ["LAMB", "Adafactor", "AdamW", "AdamW8bit"]

#: The elements of a parameter that share a scale of `AdamW8bit`.
_BLOCK = 256
#: The most runs of different parameters for which an optimizer keeps sessions, beside its groups.
_SPARE_SESSIONS = 8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """A tensor of state of a parameter, zeros at first.

    Attributes:
        key: its key in `state_dict`. Empty for an operand that the operator lists and the parameter
            lacks.
        shape: its shape, from that of the parameter.
        dtype: its type, that of the parameter by default.
    """

    key: str
    shape: Callable[[Shape], Shape] = lambda shape: shape
    dtype: torch.dtype | None = None


class _Optimizer(torch.optim.Optimizer):
    """Updates the parameters of a group by one operator of the runtime each, in one run."""

    _operator: str

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._updates: dict[Any, _Update] = {}
        super().__init__(params, defaults)

    # What an optimizer defines.

    def _states(self, parameter: torch.Tensor) -> Sequence[_State]:
        raise NotImplementedError

    def _attributes(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    # The interface of torch.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters. Raises ValueError for a setting that is out of range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients. Returns the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for number, parameters in self._by_step(group).items():
                self._run(group, number, parameters)
        return loss

    def state_bytes(self) -> int:
        """Returns the bytes of the states of all parameters, without their step counts."""
        return sum(
            value.nbytes
            for state in self.state.values()
            for key, value in state.items()
            if key != "step"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updates = {}
        for group in self.param_groups:
            self._check_group(group)
            for parameter in group["params"]:
                if parameter in self.state:
                    self._restore(parameter, self.state[parameter])

    # Checks.

    def _check_group(self, group: dict[str, Any]) -> None:
        for key in ("lr", "weight_decay", "eps"):
            if isinstance(value := group.get(key, 0.0), float | int) and not value >= 0:
                raise ValueError(f"Invalid {key} value: {value}; it is 0 or more")
        for place, beta in enumerate(group.get("betas", ())):
            if not 0 <= beta < 1:
                raise ValueError(
                    f"Invalid beta parameter at index {place}: {beta}; it is at least 0 and below 1"
                )
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise ValueError(f"{type(self).__name__} has no {key}; use the one of torch.optim")
        for parameter in group["params"]:
            self._check_parameter(parameter)

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        name = f"a parameter of shape {list(parameter.shape)}"
        if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            raise ValueError(
                f"{name} is a {type(parameter.data).__name__} of layout {parameter.layout}, and "
                f"{type(self).__name__} updates dense tensors; use an optimizer of torch.optim"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name} is on {parameter.device}; sessions update those of the CPU")
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} has type {parameter.dtype}, and torch.float32 or torch.float64 is expected; "
                "train in bfloat16 by torch.autocast, which keeps parameters in float32"
            )

    def _restore(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Gives loaded states their types again: torch gives them all that of the parameter."""
        for spec in self._named_states(parameter):
            if spec.key not in state:
                raise ValueError(
                    f"the state of a parameter has {', '.join(state)}, and {type(self).__name__} "
                    f"needs {spec.key}; load the state of the same optimizer"
                )
            value, shape = state[spec.key], spec.shape(tuple(parameter.shape))
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"the state {spec.key} of a parameter of shape {list(parameter.shape)} has "
                    f"shape {list(value.shape)}, expected {list(shape)}"
                )
            state[spec.key] = value.to(spec.dtype or parameter.dtype).contiguous()

    # Steps.

    def _named_states(self, parameter: torch.Tensor) -> list[_State]:
        return [spec for spec in self._states(parameter) if spec.key]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Returns the state of a parameter, which is made before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for spec in self._named_states(parameter):
                dtype = spec.dtype or parameter.dtype
                state[spec.key] = torch.zeros(spec.shape(tuple(parameter.shape)), dtype=dtype)
        return state

    def _by_step(self, group: dict[str, Any]) -> dict[int, list[torch.Tensor]]:
        """Counts a step of the parameters with gradients, and returns them by their counts."""
        found: dict[int, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam"
                )
            step = self._state_of(parameter)["step"]
            step += 1
            if parameter.numel():
                found.setdefault(int(step), []).append(parameter)
        return found

    def _run(self, group: dict[str, Any], number: int, parameters: list[torch.Tensor]) -> None:
        key = tuple(map(id, parameters))
        signature = self._signature(group, parameters)
        update = self._updates.get(key)
        if update is None or update.signature != signature:
            if len(self._updates) >= len(self.param_groups) + _SPARE_SESSIONS:
                self._updates.clear()
            nodes = [self._node(place, one) for place, one in enumerate(parameters)]
            update = self._updates[key] = _Update(signature, self._operator, nodes)
        states = [self.state[parameter] for parameter in parameters]
        update.run(float(group["lr"]), number, parameters, states)

    def _signature(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> _Signature:
        kinds = [(one.dtype, tuple(one.shape)) for one in parameters]
        return _Signature(kinds, self._attributes(group))

    def _node(self, place: int, parameter: torch.Tensor) -> list[_Operand]:
        shape, dtype = tuple(parameter.shape), parameter.dtype
        operands = [_Operand("parameter", f"parameter.{place}", shape, dtype)]
        for spec in self._states(parameter):
            name = f"{spec.key}.{place}" if spec.key else ""
            operands.append(_Operand(spec.key, name, spec.shape(shape), spec.dtype or dtype))
        return operands


@dataclass(frozen=True)
class _Signature:
    """What a session of an update depends on."""

    kinds: list[tuple[torch.dtype, Shape]]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Operand:
    """A tensor that a node updates: a parameter or a state. Without a name it is absent."""

    key: str
    name: str
    shape: Shape
    dtype: torch.dtype

    def info(self, name: str) -> bytes:
        """Returns the tensor as an input or output of a graph."""
        return _model_bytes.value_info(name, ELEMENT_TYPES[self.dtype], self.shape)


class _Update:
    """A session that updates parameters, bound to their memory.

    Each output is bound to the memory of its input, so the step allocates nothing but what the
    operator needs for itself.
    """

    def __init__(self, signature: _Signature, operator: str, nodes: list[list[_Operand]]) -> None:
        self.signature = signature
        self._nodes = nodes
        options = ort_runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = ort_runtime.InferenceSession(
            _model(nodes, operator, signature.attributes),
            options,
            providers=["CPUExecutionProvider"],
        )
        self._binding = self._session.io_binding()
        self._rate, self._number = np.zeros((), np.float32), np.zeros((), np.int64)
        self._binding.bind_cpu_input("learning_rate", self._rate)
        self._binding.bind_cpu_input("step", self._number)
        self._bound: dict[str, int] = {}

    def run(
        self,
        rate: float,
        number: int,
        parameters: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        """Updates the parameters and their states."""
        self._rate[...], self._number[...] = rate, number
        # Copies of what is not contiguous live until the run ends.
        used, copied = [], []
        for place, (operands, parameter, state) in enumerate(
            zip(self._nodes, parameters, states, strict=True)
        ):
            own = parameter.detach()
            dense = own.contiguous()
            if dense.data_ptr() != own.data_ptr():
                copied.append((own, dense))
            gradient: Any = parameter.grad
            gradient = gradient.detach().to(parameter.dtype).contiguous()
            used.append((dense, gradient))
            self._bind(f"gradient.{place}", gradient)
            for operand in operands:
                if operand.name:
                    tensor = dense if operand.key == "parameter" else state[operand.key]
                    self._bind(operand.name, tensor, f"new.{operand.name}")
        self._session.run_with_iobinding(self._binding)
        for own, dense in copied:
            own.copy_(dense)

    def _bind(self, name: str, tensor: torch.Tensor, output: str = "") -> None:
        address = tensor.data_ptr()
        if self._bound.get(name) == address:
            return
        self._bound[name] = address
        memory = (ELEMENT_TYPES[tensor.dtype], tensor.shape, address)
        self._binding.bind_input(name, "cpu", 0, *memory)
        if output:
            self._binding.bind_output(output, "cpu", 0, *memory)


def _model(nodes: list[list[_Operand]], operator: str, attributes: dict[str, Any]) -> bytes:
    """Returns a model with a node for each parameter."""
    inputs = [
        _model_bytes.value_info("learning_rate", ELEMENT_TYPES[torch.float32], ()),
        _model_bytes.value_info("step", ELEMENT_TYPES[torch.int64], ()),
    ]
    outputs, made = [], []
    for place, operands in enumerate(nodes):
        parameter, *states = operands
        gradient = f"gradient.{place}"
        inputs.append(parameter.info(gradient))
        present = [operand for operand in operands if operand.name]
        inputs += [operand.info(operand.name) for operand in present]
        outputs += [operand.info(f"new.{operand.name}") for operand in present]
        # Between them are the factor on gradients and whether to update at all.
        given = [parameter.name, gradient, "learning_rate", "", "", "step"]
        given += [state.name for state in states]
        written = [f"new.{operand.name}" if operand.name else "" for operand in operands]
        name = f"{operator}.{place}"
        made.append(_model_bytes.node(name, operator, RUNTIME, given, written, attributes.items()))
    return _model_bytes.model(operator, made, [], inputs, outputs, OPSETS)


class AdamW(_Optimizer):
    """AdamW, as `torch.optim.AdamW`: Adam with decoupled weight decay."""

    _operator = "AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _states(self, parameter: torch.Tensor) -> Sequence[_State]:
        return [_State("exp_avg"), _State("exp_avg_sq")]

    def _attributes(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "beta1": float(beta1),
            "beta2": float(beta2),
            "epsilon": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
        }


def _scales(shape: Shape) -> Shape:
    return (-(-math.prod(shape) // _BLOCK),)


class AdamW8bit(AdamW):
    """AdamW whose moments are quantized to 8 bits in blocks of 256 (Dettmers et al., 2022)."""

    _operator = "AdamW8bit"

    def _states(self, parameter: torch.Tensor) -> Sequence[_State]:
        return [
            _State("first_codes", dtype=torch.uint8),
            _State("first_scales", _scales, torch.float32),
            _State("second_codes", dtype=torch.uint8),
            _State("second_scales", _scales, torch.float32),
        ]


class LAMB(AdamW):
    """LAMB: Adam whose steps are relative to the norm of each parameter (You et al., 2020)."""

    _operator = "LAMB"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class Adafactor(_Optimizer):
    """Adafactor, as `torch.optim.Adafactor`: a matrix's second moments are a row and a column."""

    _operator = "Adafactor"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            # Read by torch's optimizer, which may load the state.
            "foreach": None,
            "maximize": False,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay should be <= 0 but is: {group['beta2_decay']}")
        if not group["d"] > 0:
            raise ValueError(f"Clipping threshold d should be > 0 but is: {group['d']}")
        for place, value in enumerate(group["eps"]):
            if value is not None and not value >= 0:
                raise ValueError(f"epsilon{place + 1} should be >= 0 but is: {value}")

    def _states(self, parameter: torch.Tensor) -> Sequence[_State]:
        if parameter.dim() < 2:
            return [_State(""), _State(""), _State("variance")]
        return [
            _State("row_var", lambda shape: (*shape[:-1], 1)),
            _State("col_var", lambda shape: (*shape[:-2], 1, shape[-1])),
            _State(""),
        ]

    def _attributes(self, group: dict[str, Any]) -> dict[str, Any]:
        least, smallest = group["eps"]
        return {
            "beta2_decay": float(group["beta2_decay"]),
            # 0 stands for the machine epsilon of the parameter's type.
            "epsilon1": float(least or 0.0),
            "epsilon2": float(smallest),
            "clip_threshold": float(group["d"]),
            "weight_decay": float(group["weight_decay"]),
        }
