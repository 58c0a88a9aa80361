"""Capture of a module's joint graph without a run, to plan steps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._search import largest_fitting
from ._backend import Backend
from ._memory import NotEnoughMemory, StepPlan, hints_of
from ._partition import Partition, Recompute

__all__ = ["Example", "StepPlanner", "largest"]

#: A batch that no other size is likely to equal, with which graphs for any batch are traced.
_TRACED_BATCH = 7
#: The most examples that are tried.
_MOST = 1 << 24


class _Traced(Exception):
    """Ends a compilation whose graph has been seen."""


class _Probe(Backend):
    """A backend that keeps how a joint graph is cut at some levels, and compiles nothing."""

    levels: Sequence[Recompute] = ()
    found: list[Partition] | None = None

    def _chosen(self, joint: fx.GraphModule, num_fwd_outputs: int) -> Partition:
        self.found = [self._cut(joint, num_fwd_outputs, level) for level in self.levels]
        raise _Traced


@dataclass
class Example:
    """The inputs of a module, of which types and ranks matter."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(inputs: Any) -> Example:
        """Reads inputs: a tensor, a sequence of arguments, or a mapping of named ones."""
        if isinstance(inputs, Mapping):
            return Example((), dict(inputs))
        if isinstance(inputs, torch.Tensor):
            return Example((inputs,), {})
        return Example(tuple(inputs), {})

    def sized(self, batch: int | None, seq: int | None) -> Example:
        """Returns inputs of zeros with other sizes.

        The batch is the first axis of each tensor. The length is the second axis of tensors that
        have as many elements there as the first tensor with such an axis.
        """
        tensors = [one for one in (*self.args, *self.kwargs.values()) if _is_tensor(one)]
        lengths = [one.shape[1] for one in tensors if one.dim() > 1]

        def resized(value: Any) -> Any:
            if not _is_tensor(value) or not value.dim():
                return value
            shape = list(value.shape)
            shape[0] = shape[0] if batch is None else batch
            if seq is not None and len(shape) > 1 and shape[1] == lengths[0]:
                shape[1] = seq
            return torch.zeros(shape, dtype=value.dtype)

        return self._each(resized)

    def emptied(self) -> Example:
        """Returns inputs of the same types and sizes without memory."""
        return self._each(lambda value: value.to("meta") if _is_tensor(value) else value)

    def _each(self, change: Callable[[Any], Any]) -> Example:
        args = tuple(change(value) for value in self.args)
        return Example(args, {name: change(value) for name, value in self.kwargs.items()})

    def any_batch(self) -> Example:
        """Marks the first axis of each tensor as one that may have any size."""

        def marked(value: Any) -> Any:
            if _is_tensor(value) and value.dim():
                torch._dynamo.mark_dynamic(value, 0)
            return value

        return self._each(marked)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class StepPlanner:
    """Plans training steps of a module, which is traced but not run.

    Args:
        module: the module.
        example: inputs of a call.
        levels: the levels of recomputation to choose from, the first that fits.

    Raises:
        ValueError: the module has no single graph of a forward and a backward pass.
        NotTranslated: the graph has operators that the table lacks.
    """

    def __init__(
        self, module: torch.nn.Module, example: Example, levels: Sequence[Recompute]
    ) -> None:
        self._probe = _Probe(on_missing="raise")
        self._probe.levels = levels
        traced = torch.compile(module, backend=self._probe, fullgraph=True, dynamic=None)
        try:
            with torch.enable_grad():
                traced(*example.args, **example.kwargs)
        except torch._dynamo.exc.Unsupported as problem:
            raise ValueError(
                f"the module is more than one graph, so its steps cannot be planned: {problem}"
            ) from problem
        except Exception:
            if self._probe.found is None:
                raise
        if self._probe.found is None:
            raise ValueError("nothing in the module requires a gradient, so it has no steps")
        self.symbols = hints_of(self._probe.found[0])

    def plan(self, limit: int | None = None, **sizes: int) -> StepPlan:
        """Returns the plan of the first level within a limit.

        Raises:
            NotEnoughMemory: none is.
        """
        plans = []
        for found in self._probe.found or ():
            plans.append(self._probe.plan_of(found, **sizes))
            if limit is None or plans[-1].peak_bytes <= limit:
                return plans[-1]
        raise NotEnoughMemory(limit or 0, min(plan.peak_bytes for plan in plans))


def largest(
    module: torch.nn.Module, example: Example, levels: Sequence[Recompute], limit: int
) -> int | None:
    """Returns the most examples of a step within a limit, None if one example is too much."""
    planner = StepPlanner(module, example.sized(_TRACED_BATCH, None).any_batch(), levels)
    symbols = [symbol for symbol, hint in planner.symbols.items() if hint == _TRACED_BATCH]
    if not symbols:
        raise ValueError("the module fixes the size of its batch")

    def fits(batch: int) -> bool:
        try:
            planner.plan(limit, **dict.fromkeys(symbols, batch))
        except NotEnoughMemory:
            return False
        return True

    return largest_fitting(fits, _MOST) or None
