"""What rows of the table have in common: their type and cost, and the arguments of an FX node by
name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ._emitter import Emitter

__all__ = ["Arguments", "Cost", "Row", "Table", "arguments", "cheap", "free"]


class Arguments(dict[str, Any]):
    """The arguments of a call by the names of its schema, with defaults."""

    @property
    def values(self) -> list[Any]:  # type: ignore[override]
        """All of them, in the order of the schema."""
        return list(super().values())

    @property
    def first(self) -> Any:
        """The first argument, most often `self`."""
        return self.values[0]

    def tensors(self) -> list[fx.Node]:
        """Those that are values of the graph."""
        return [value for value in self.values if isinstance(value, fx.Node)]


Row = Callable[[Emitter, fx.Node, Arguments], Any]
Table = dict[str, Row]


class Cost(enum.Enum):
    """What computing a result again costs."""

    #: Nothing to speak of: the result has the elements of an operand, or is a constant.
    FREE = 0
    #: About as much as reading the result.
    CHEAP = 1
    #: More. Rows without another cost have this one.
    FULL = 2


@dataclass(frozen=True)
class _Costed:
    """A row with a cost."""

    row: Row
    cost: Cost

    def __call__(self, e: Emitter, node: fx.Node, a: Arguments) -> Any:
        """Emits a node."""
        return self.row(e, node, a)


def free(rows: Table) -> Table:
    """Returns rows whose results cost nothing to compute again."""
    return {overload: _Costed(row, Cost.FREE) for overload, row in rows.items()}


def cheap(rows: Table) -> Table:
    """Returns rows whose results are cheap to compute again."""
    return {overload: _Costed(row, Cost.CHEAP) for overload, row in rows.items()}


def arguments(node: fx.Node) -> Arguments:
    """Returns the arguments of a node that calls an overload."""
    found = Arguments()
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if place < len(node.args):
            found[argument.name] = node.args[place]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found
