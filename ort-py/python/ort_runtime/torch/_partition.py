"""Partition of a joint graph: which activations the forward pass keeps, and which the backward pass
computes again.

Level 0 keeps what the backward pass reads, except views, which cost nothing to make again. Level 1
also drops the inside of layers: their inputs are found as cuts of the forward graph, where a single
activation is alive, so no pattern of a known architecture is needed. Level 2 drops whatever lies
between two kept cuts. A plan is applied only if it lowers the bytes that are kept.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners

from ._clusters import Cluster, Request, clusters_of
from ._table import is_cheap, is_free

__all__ = ["Partition", "Recompute", "bytes_of", "partition", "prepare"]

logger = logging.getLogger("ort_runtime.torch")

_DROPOUT = torch.ops.aten.native_dropout.default
_DROPPED = torch.ops.aten.native_dropout_backward.default
_NORMALIZED = torch.ops.aten._native_batch_norm_legit_functional.default
_NORMALIZED_ALONE = torch.ops.aten._native_batch_norm_legit.no_stats
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"

@dataclass
class Recompute:
    """What is computed again in the backward pass.

    Attributes:
        level: 0, 1 or 2. Level 0 computes results of cheap operators again if what they read is
            kept anyway.
        requests: clusters to compute again at level 0 instead, as the configuration file lists
            them.
    """

    level: int = 0
    requests: list[Request] = field(default_factory=list)


@dataclass
class Partition:
    """A joint graph cut in two.

    Attributes:
        kept: what the forward pass keeps for the backward pass, without arguments of the graph.
        returned: what the forward pass returns to its caller.
        clusters: what could be computed again, and whether it is.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept: list[fx.Node]
    returned: set[fx.Node]
    clusters: list[Cluster]
    level: int

    def donated(self) -> frozenset[str]:
        """The names of what is kept and belongs to the backward pass alone."""
        return frozenset(node.name for node in self.kept if node not in self.returned)

    def kept_bytes(self) -> int:
        """The bytes of what is kept, at the sizes of the first call."""
        return sum(bytes_of(node) for node in self.kept)


def bytes_of(node: fx.Node) -> int:
    """The bytes of a node's tensor, symbolic sizes taken as those of the first call."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else hint_of(size)
    return count * value.element_size()


def hint_of(size: torch.SymInt) -> int:
    """The number that a symbolic size had in the first call."""
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def prepare(joint: fx.GraphModule) -> None:
    """Rewrites a joint graph, once, so that less of it has to be kept."""
    _expose_masks(joint)
    _part_from_statistics(joint)
    _forget_unread(joint)


def partition(joint: fx.GraphModule, num_fwd_outputs: int, recompute: Recompute) -> Partition:
    """Cuts a prepared joint graph, of which the first outputs are those of the forward pass."""
    cut = _Cut(joint, num_fwd_outputs)
    kept = cut.needed(lambda node: is_free(node) or _is_copy(node))
    found = clusters_of(kept)
    level = recompute.level
    if level:
        kept = cut.layers(kept, level)
    elif recompute.requests:
        kept = cut.without(kept, found, recompute.requests)
    else:
        kept = cut.without_cheap(kept)
    for occurrence in (place for cluster in found for place in cluster.places):
        occurrence.is_on = not any(node in kept for node in occurrence.nodes)
    sizes = [node for node in cut.sizes if node not in kept]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint, list(kept), saved_sym_nodes=sizes, num_fwd_outputs=num_fwd_outputs
    )
    for part in (forward, backward):
        part.graph.eliminate_dead_code()
        part.recompile()
    activations = [node for node in kept if node.op != "placeholder"]
    return Partition(forward, backward, activations, cut.returned, found, level)


def _is_copy(node: fx.Node) -> bool:
    """Whether a node has the elements of its operand in another order of memory."""
    return str(node.target) == "aten.clone.default"


def _expose_masks(joint: fx.GraphModule) -> None:
    """Splits dropout into the draw of a mask, which is kept, and its use, which is not random.

    The use is the function that the gradient applies to the upstream gradient.
    """
    graph = joint.graph
    for node in list(graph.nodes):
        if node.target is not _DROPOUT or not node.args[2] or not 0 < node.args[1] < 1:
            continue
        parts = {user.args[1]: user for user in node.users}
        if 0 not in parts:
            continue
        output = parts[0]
        if 1 not in parts:
            with graph.inserting_after(node):
                mask = graph.call_function(operator.getitem, (node, 1))
            mask.meta = {**output.meta, "val": node.meta["val"][1]}
            parts[1] = mask
        after = max(parts.values(), key=lambda part: list(graph.nodes).index(part))
        with graph.inserting_after(after):
            scale = 1 / (1 - node.args[1])
            used = graph.call_function(_DROPPED, (node.args[0], parts[1], scale))
        used.meta = dict(output.meta)
        output.replace_all_uses_with(used)
        graph.erase_node(output)
    joint.recompile()


def _part_from_statistics(joint: fx.GraphModule) -> None:
    """Splits batch normalization into its results and the update of running statistics.

    The results can then be computed again after the update. Both halves compute the statistics of
    the batch, which the runtime merges.
    """
    graph = joint.graph
    for node in list(graph.nodes):
        if node.target is not _NORMALIZED or not node.args[5]:
            continue
        x, weight, bias, _, _, training, momentum, epsilon = node.args
        with graph.inserting_before(node):
            twin = graph.call_function(
                _NORMALIZED_ALONE, (x, weight, bias, training, momentum, epsilon)
            )
        twin.meta = {**node.meta, "val": tuple(node.meta["val"][:3])}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] < 3:
                user.args = (twin, user.args[1])
    joint.recompile()


def _forget_unread(joint: fx.GraphModule) -> None:
    """Lets gradients read only what they compute with, so that nothing else is kept for them.

    That of attention reads neither the output nor the logarithms of sums; that of batch
    normalization in training mode reads no running statistics.
    """
    for node in joint.graph.nodes:
        unread: tuple[int, ...] = ()
        if str(node.target) == f"{_ATTENTION}_backward.default":
            unread = (4, 5)
        elif str(node.target) == "aten.native_batch_norm_backward.default" and node.args[7]:
            unread = (3, 4)
        arguments = enumerate(node.args)
        if unread:
            node.args = tuple(None if at in unread else given for at, given in arguments)
    joint.recompile()


class _Cut:
    """The forward part of a joint graph, and what of it the backward part reads."""

    def __init__(self, joint: fx.GraphModule, num_fwd_outputs: int) -> None:
        self.nodes = list(joint.graph.nodes)
        (output,) = (node for node in self.nodes if node.op == "output")
        results = output.args[0]
        forward = [node for node in results[:num_fwd_outputs] if isinstance(node, fx.Node)]
        backward = [node for node in results[num_fwd_outputs:] if isinstance(node, fx.Node)]
        arguments = [node for node in self.nodes if node.op == "placeholder"]
        primals = [node for node in arguments if not partitioners._is_tangent(node)]
        self.returned = set(forward)
        self.forward = _ancestors(forward) | set(primals)
        # Of an operator with several results, those that only the backward part reads.
        self.forward |= {
            node
            for node in self.nodes
            if node.target is operator.getitem and node.args[0] in self.forward
        }
        read = _ancestors(backward) - self.forward
        self.backward = [node for node in self.nodes if node in read]
        self.results = backward
        self.sizes = [
            node
            for node in self.nodes
            if node in self.forward and not _is_tensor(node) and _is_number(node)
        ]

    def needed(self, again: Any) -> dict[fx.Node, None]:
        """Returns what to keep if the nodes for which `again` holds are computed again."""
        kept: dict[fx.Node, None] = {}
        readers = [*self.backward]
        waiting = [
            source
            for reader in readers
            for source in reader.all_input_nodes
            if source in self.forward
        ]
        waiting += [node for node in self.results if node in self.forward]
        seen = set()
        while waiting:
            node = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if node.op == "get_attr" or not _is_tensor(node):
                # Numbers are handed over apart; a tuple is computed again with its operator.
                if _is_tuple(node):
                    waiting += [s for s in node.all_input_nodes if s in self.forward]
                continue
            if node.op == "placeholder" or not self._may(node, again):
                kept[node] = None
                continue
            waiting += [s for s in node.all_input_nodes if s in self.forward]
        order = {node: place for place, node in enumerate(self.nodes)}
        return dict.fromkeys(sorted(kept, key=order.__getitem__))

    def _may(self, node: fx.Node, again: Any) -> bool:
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, fx.Node) and _is_random(source):
            return False
        if node.target is operator.getitem:
            return again(source) or again(node)
        return again(node)

    def without(
        self, kept: dict[fx.Node, None], found: list[Cluster], requests: Iterable[Request]
    ) -> dict[fx.Node, None]:
        """Computes again the clusters that a configuration names."""
        chosen: set[fx.Node] = set()
        for cluster in found:
            for request in requests:
                if request.id == cluster.id and request.strategy:
                    count = len(cluster.places) if request.count < 0 else request.count
                    for place in cluster.places[:count]:
                        chosen |= {*place.nodes, *place.inside}
        fewer = self.needed(lambda n: is_free(n) or _is_copy(n) or n in chosen)
        return fewer if _weight(fewer) < _weight(kept) else kept

    def without_cheap(self, kept: dict[fx.Node, None]) -> dict[fx.Node, None]:
        """Computes again what cheap operators make of values that are kept or given anyway."""
        chosen = set()
        for node in kept:
            maker = node.args[0] if node.target is operator.getitem else node
            if isinstance(maker, fx.Node) and self._is_cheap(maker, kept):
                chosen.add(maker)
        fewer = self.needed(lambda n: is_free(n) or _is_copy(n) or n in chosen)
        return fewer if _weight(fewer) < _weight(kept) else kept

    def _is_cheap(self, maker: fx.Node, kept: dict[fx.Node, None]) -> bool:
        if not is_cheap(maker):
            return False
        waiting = list(maker.all_input_nodes)
        while waiting:
            source = waiting.pop()
            if source in kept or source.op in ("placeholder", "get_attr") or not _is_tensor(source):
                continue
            if not is_free(source) or _is_random(source):
                return False
            waiting += source.all_input_nodes
        return True

    def layers(self, kept: dict[fx.Node, None], level: int) -> dict[fx.Node, None]:
        """Keeps the inputs of layers alone; of the possible spacings, the one of least peak."""
        best, least = kept, self._peak(kept, kept)
        cuts = self._cuts()
        for stride in range(1, max(2, len(cuts) // 2 + 1)):
            chosen = set(cuts[::stride])
            fewer = self._between(chosen, level)
            peak = self._peak(fewer, kept)
            if peak < least:
                best, least = fewer, peak
        if best is kept:
            logger.warning(
                "No layer boundaries found whose recomputation lowers the memory of activations; "
                "all of them are kept"
            )
        return best

    def _between(self, cuts: set[fx.Node], level: int) -> dict[fx.Node, None]:
        """Returns what to keep if what lies between cuts is computed again."""
        return self.needed(lambda node: node not in cuts and self._is_recomputed(node, level))

    def _is_recomputed(self, node: fx.Node, level: int) -> bool:
        if level > 1 or is_free(node):
            return True
        # Level 1 leaves the last cast of a statistic where it is: it is small.
        return bytes_of(node) > 4096 or _is_tuple(node) or not _is_tensor(node)

    def _cuts(self) -> list[fx.Node]:
        """Returns the activations that everything after them is computed from.

        Parameters and what is computed from them alone are alive everywhere and do not count.
        """
        varying = self._varying()
        order = [node for node in self.nodes if node in varying]
        place = {node: at for at, node in enumerate(order)}
        last = {
            node: max((place[user] for user in node.users if user in place), default=at)
            for node, at in place.items()
        }
        found: list[fx.Node] = []
        alive: set[fx.Node] = set()
        for at, node in enumerate(order):
            alive = {other for other in alive if last[other] > at}
            if last[node] > at:
                alive.add(node)
            if alive == {node} and not is_free(node) and _is_tensor(node):
                found.append(node)
        return found

    def _varying(self) -> set[fx.Node]:
        """Returns the forward nodes that depend on a floating-point argument that is no parameter.

        Without one (a model of token numbers), embeddings are where activations begin.
        """
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node not in self.forward or node.op in ("placeholder", "get_attr", "output"):
                continue
            value = node.meta.get("val")
            if not (isinstance(value, torch.Tensor) or _is_tuple(node)):
                continue
            sources = [s for s in node.all_input_nodes if s in self.forward]
            starts = any(
                s.op == "placeholder" and not is_parameter(s) and _is_tensor(s) for s in sources
            )
            is_mask = isinstance(value, torch.Tensor) and not value.is_floating_point()
            if is_mask or _is_random(node):
                continue
            if node.target is operator.getitem and any(map(_is_random, sources)):
                continue
            if starts or any(s in found for s in sources):
                found.add(node)
        return found

    def _peak(self, kept: dict[fx.Node, None], all_kept: dict[fx.Node, None]) -> int:
        """Estimates the peak: what is kept, and the largest run of what is computed again between
        two kept activations."""
        largest = segment = 0
        for node in self.nodes:
            if node in kept:
                largest, segment = max(largest, segment), 0
            elif node in all_kept and node.op != "placeholder":
                segment += bytes_of(node)
        return _weight(kept) + max(largest, segment)


def is_parameter(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or buffer of the module."""
    descriptor = type(node.meta.get("desc")).__name__
    if descriptor != "NoneType":
        return descriptor in ("ParamAOTInput", "BufferAOTInput") or node.meta.get(
            "is_parameter", False
        )
    return bool(node.meta.get("is_parameter", False))


def _weight(kept: Iterable[fx.Node]) -> int:
    return sum(bytes_of(node) for node in kept if node.op != "placeholder")


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
