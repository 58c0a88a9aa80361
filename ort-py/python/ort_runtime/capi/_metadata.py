"""Metadata: what a session says of its model and of where its nodes run."""

from __future__ import annotations

from ._devices import OrtEpDevice, OrtHardwareDevice
from ._fields import Slotted, read_only, str_dict, to_int64, to_str, typed

__all__ = [
    "ModelMetadata",
    "NodeArg",
    "OrtEpAssignedNode",
    "OrtEpAssignedSubgraph",
    "OrtEpDevice",
    "OrtHardwareDevice",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class NodeArg(Slotted):
    """An input, an output or an initializer of a model.

    `shape` is a list: a number for a fixed dimension, a name for a symbolic one, None for an
    unknown one. A scalar, an unknown shape, a sequence and a map all have `[]`.

    Example: `str(arg)` is `NodeArg(name='x', type='tensor(float)', shape=['batch', 3])`.
    """

    __slots__ = ("_name", "_shape", "_type")

    def __init__(self, name: str, type: str, shape: list[int | str | None]) -> None:
        self._name, self._type, self._shape = name, type, list(shape)

    name = read_only("name", "The name.")
    type = read_only("type", "The type as text: `tensor(float)`, `seq(map(string,tensor(float)))`.")
    shape = property(lambda self: self._shape.copy(), doc="The dimensions, as a new list.")

    def __str__(self) -> str:
        return f"NodeArg(name={self._name!r}, type={self._type!r}, shape={self._shape})"

    __repr__ = __str__


class ModelMetadata(Slotted):
    """What the author of a model wrote into it. A session is not changed with it."""

    __slots__ = (
        "_custom_metadata_map",
        "_description",
        "_domain",
        "_graph_description",
        "_graph_name",
        "_producer_name",
        "_version",
    )

    def __init__(
        self,
        *,
        producer_name: str,
        domain: str,
        description: str,
        graph_name: str,
        graph_description: str,
        version: int,
        custom_metadata_map: dict[str, str],
    ) -> None:
        self._producer_name, self._domain, self._description = producer_name, domain, description
        self._graph_name, self._graph_description = graph_name, graph_description
        self._version, self._custom_metadata_map = version, dict(custom_metadata_map)

    producer_name = typed("producer_name", to_str, "The tool that wrote the model.")
    domain = typed("domain", to_str, "The model's domain, in reverse DNS notation.")
    description = typed("description", to_str, "The model's documentation.")
    graph_name = typed("graph_name", to_str, "The name of its graph.")
    graph_description = typed("graph_description", to_str, "The documentation of its graph.")
    version = typed("version", to_int64, "The version of the model.")

    @property
    def custom_metadata_map(self) -> dict[str, str]:
        """The metadata entries, as a new dict."""
        return self._custom_metadata_map.copy()

    @custom_metadata_map.setter
    def custom_metadata_map(self, entries: dict[str, str]) -> None:
        self._custom_metadata_map = str_dict(entries, "ModelMetadata.custom_metadata_map")


class OrtEpAssignedNode(Slotted):
    """A node that a provider runs."""

    __slots__ = ("_domain", "_name", "_op_type")

    def __init__(self, name: str, domain: str, op_type: str) -> None:
        self._name, self._domain, self._op_type = name, domain, op_type

    name = read_only("name", "The name of the node.")
    domain = read_only("domain", "The domain of its operator.")
    op_type = read_only("op_type", "Its operator.")


class OrtEpAssignedSubgraph(Slotted):
    """The nodes that a provider runs together."""

    __slots__ = ("_ep_name", "_nodes")

    def __init__(self, ep_name: str, nodes: list[OrtEpAssignedNode]) -> None:
        self._ep_name, self._nodes = ep_name, list(nodes)

    ep_name = read_only("ep_name", "The provider.")

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """Returns the nodes, as a new list."""
        return self._nodes.copy()


for _class in (NodeArg, ModelMetadata, OrtEpAssignedNode, OrtEpAssignedSubgraph):
    _class.__module__ = _NATIVE
del _class
