"""Recomputation clusters: groups of operators that can be computed again, by the names that
configuration files use."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from ._table import is_free

__all__ = ["Cluster", "Occurrence", "Request", "clusters_of", "read_requests"]

#: Names of operators in clusters, where they are not the ATen name in capitals.
_NAMES = {
    "_softmax": "Softmax", "_log_softmax": "LogSoftmax", "native_layer_norm": "LayerNormalization",
    "native_dropout": "Dropout", "native_dropout_backward": "Dropout", "mm": "MatMul",
    "addmm": "Gemm", "bmm": "FusedMatMul", "gelu": "Gelu", "relu": "Relu", "_to_copy": "Cast",
    "convert_element_type": "Cast", "convolution": "Conv", "silu": "QuickGelu",
    "_native_batch_norm_legit_functional": "BatchNormalization", "where": "Where",
    "_native_batch_norm_legit": "BatchNormalization",
    "max_pool2d_with_indices": "MaxPool", "avg_pool2d": "AveragePool", "embedding": "Gather",
    "_scaled_dot_product_flash_attention_for_cpu": "Attention", "hardtanh": "Clip",
    "clamp": "Clip", "clone": "Identity", "cat": "Concat", "index": "GatherND",
}  # fmt: skip

#: Operators that end a cluster: their results are kept, unless a layer is computed again.
_ENDS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Conv", "Attention", "Gather"})
_MOST_NODES = 8


@dataclass(frozen=True)
class Request:
    """An entry of the configuration: a cluster, what to do (0 nothing, 1 compute again, 2 only
    from a cheaper input), and how often, -1 for always."""

    id: str
    strategy: int
    count: int


@dataclass
class Occurrence:
    """One operator whose kept results can be computed again.

    Attributes:
        nodes: the kept results.
        inside: the operators between them and what is kept anyway.
        is_on: whether they are computed again.
    """

    nodes: list[fx.Node]
    inside: list[fx.Node]
    is_on: bool = False


@dataclass
class Cluster:
    """Kept activations that the same operators compute.

    Attributes:
        id: the operators in topological order, each followed by `+`.
        places: where they occur, in topological order.
    """

    id: str
    places: list[Occurrence] = field(default_factory=list)

    @property
    def nodes(self) -> list[fx.Node]:
        """The kept activations of all occurrences."""
        return [node for place in self.places for node in place.nodes]

    @property
    def applied(self) -> int:
        """How many occurrences are computed again."""
        return sum(place.is_on for place in self.places)


def read_requests(path: str) -> list[Request]:
    """Reads a configuration file: a JSON array of texts `id:strategy:count`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such array. The text says which entry, and what was expected.
    """
    with open(os.fspath(path), encoding="utf-8") as file:
        try:
            entries = json.load(file)
        except json.JSONDecodeError as problem:
            raise ValueError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(entries, list):
        raise ValueError(f"{path}: type must be array, but is {type(entries).__name__}")
    found: dict[str, Request] = {}
    for entry in entries:
        if not isinstance(entry, str):
            raise ValueError(f"{path}: entries are texts 'id:strategy:count', not {entry!r}")
        for part in entry.split(","):
            request = _request(path, part.strip())
            # The last entry of a cluster counts.
            found[request.id] = request
    return list(found.values())


def _request(path: str, text: str) -> Request:
    fields = text.split(":")
    if len(fields) != 3:
        raise ValueError(f"{path}: an entry has three fields 'id:strategy:count', not {text!r}")
    try:
        strategy, count = int(fields[1]), int(fields[2])
    except ValueError:
        raise ValueError(f"{path}: strategy and count are numbers, in {text!r}") from None
    if strategy not in (0, 1, 2) or count < -1:
        raise ValueError(f"{path}: strategy is 0, 1 or 2 and count -1 or more, in {text!r}")
    return Request(fields[0], strategy, count)


def name_of(node: fx.Node) -> str:
    """Returns the name of a node's operator in clusters."""
    if node.target is operator.getitem:
        return name_of(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    name = node.target._opname
    if name == "gelu" and _root(node.args[0]) == "Gemm":
        return "BiasGelu"
    return _NAMES.get(name) or "".join(part.capitalize() for part in name.split("_"))


def _root(node: object) -> str:
    while isinstance(node, fx.Node) and is_free(node):
        node = node.args[0]
    return name_of(node) if isinstance(node, fx.Node) and node.op == "call_function" else ""


def clusters_of(kept: Iterable[fx.Node]) -> list[Cluster]:
    """Groups kept activations by the operators that compute them from what else is kept."""
    kept_set = set(kept)
    found: dict[str, Cluster] = {}
    occurrences: dict[object, Occurrence] = {}
    for node in [node for node in kept if node.op == "call_function"]:
        entry = node.args[0] if _is_part(node) else node
        if entry in occurrences:
            occurrences[entry].nodes.append(node)
            continue
        inside = _inside(node, kept_set)
        if inside is None:
            continue
        names = [name_of(one) for one in inside if not is_free(one) and not _is_part(one)]
        key = "".join(f"{name}+" for name in names)
        occurrences[entry] = Occurrence([node], inside)
        found.setdefault(key, Cluster(key)).places.append(occurrences[entry])
    return list(found.values())


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _inside(node: fx.Node, kept: set[fx.Node]) -> list[fx.Node] | None:
    """Returns the operators that compute an activation from other kept values, in order.

    None if an expensive operator or a random one is among them.
    """
    found: list[fx.Node] = []
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found or one.op != "call_function" or (one in kept and one is not node):
            continue
        if not isinstance(one.meta.get("val"), torch.Tensor | tuple | list):
            # Numbers of sizes are handed over apart.
            continue
        tags = getattr(one.target, "tags", ())
        if name_of(one) in _ENDS or torch.Tag.nondeterministic_seeded in tags:
            return None
        found.append(one)
        waiting += one.all_input_nodes
        if len(found) > _MOST_NODES:
            return None
    return found[::-1]
