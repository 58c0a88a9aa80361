"""The memory of a training step: known from its graphs before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
import torch

from ort_runtime.capi._fields import to_size

if TYPE_CHECKING:
    from ._compiled import CompiledGraph
    from ._partition import Partition

__all__ = ["NotEnoughMemory", "StepPlan", "bytes_of_text", "step_plan"]


class NotEnoughMemory(RuntimeError):
    """A memory limit that no level of recomputation meets.

    Attributes:
        minimum: the bytes of the smallest step.
    """

    def __init__(self, limit: int, minimum: int) -> None:
        super().__init__(
            f"the memory limit of {limit} bytes is too small: a training step needs at least "
            f"{minimum} bytes at these sizes; raise the limit, or use a smaller batch"
        )
        self.minimum = minimum


@dataclass(frozen=True)
class StepPlan:
    """What a training step allocates beside parameters, inputs and the optimizer.

    Attributes:
        level: the level of recomputation.
        forward_bytes: the most that the forward pass allocates, what it keeps included.
        kept_bytes: what the forward pass keeps for the backward pass.
        backward_bytes: the most that the backward pass allocates, gradients included. It reuses
            what was kept, and frees it, which does not count here.
    """

    level: int
    forward_bytes: int
    kept_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the step."""
        return max(self.forward_bytes, self.kept_bytes + self.backward_bytes)


def bytes_of_text(limit: int | str | None) -> int | None:
    """Returns a memory limit as a number of bytes. Raises ValueError for texts that are none."""
    if limit is None:
        return None
    found = to_size(limit, "memory_limit")
    if found is None:
        raise ValueError(f"memory_limit is a number of bytes or a text, not {limit!r}")
    return int(found)


def step_plan(
    partition: Partition,
    forward: CompiledGraph,
    backward: CompiledGraph,
    sizes: Mapping[str, int],
) -> StepPlan:
    """Returns the plan of a step.

    Args:
        partition: how the joint graph was cut.
        forward: the graph of the forward pass.
        backward: the graph of the backward pass.
        sizes: symbols of sizes; those of the first call are the defaults.
    """
    known = {**hints_of(partition), **sizes}
    kept = sum(product(node.meta["val"], known) for node in partition.kept)
    return StepPlan(
        partition.level, forward.planned_bytes(known), kept, backward.planned_bytes(known)
    )


def hints_of(partition: Partition) -> dict[str, int]:
    """Returns the sizes of the first call by symbol."""
    found: dict[str, int] = {}
    for node in partition.forward.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder":
            continue
        for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found[str(size.node.expr)] = int(size.node.hint)
    return found


def product(value: torch.Tensor, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a tensor whose sizes may be symbolic."""
    count = value.element_size()
    for size in value.shape:
        count *= size if isinstance(size, int) else evaluated(size.node.expr, sizes)
    return count


def evaluated(expression: int | sympy.Expr, sizes: Mapping[str, int]) -> int:
    """Returns the number that an expression of sizes is."""
    if isinstance(expression, int):
        return expression
    known = {symbol: sizes[str(symbol)] for symbol in expression.free_symbols}
    return int(expression.subs(known))
