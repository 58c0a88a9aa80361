"""What rows of the table have in common: their type, and the arguments of an FX node by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ._emitter import Emitter

__all__ = ["Arguments", "Row", "Table", "arguments"]


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
