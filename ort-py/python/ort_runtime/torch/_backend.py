"""The backend `ort_runtime` of `torch.compile`: AOTAutograd's graphs run in sessions.

AOTAutograd traces the joint graph of a forward and a backward pass. It is checked against the table,
cut in two by `_partition`, and each part becomes one session. A graph that the table does not cover
runs in torch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily

import ort_runtime

from ._compiled import CompiledGraph
from ._memory import NotEnoughMemory, StepPlan, bytes_of_text, step_plan
from ._partition import Partition, Recompute, partition, prepare
from ._table import TABLE
from ._translate import missing, translate

__all__ = ["Backend", "NotTranslated", "decompositions"]

logger = logging.getLogger("ort_runtime.torch")

#: Gradients that torch decomposes into operators of the table.
_DECOMPOSED = (
    "elu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward",
    "softplus_backward", "mish_backward", "logit_backward", "log_sigmoid_backward",
    "glu_backward", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "native_group_norm", "native_group_norm_backward", "upsample_nearest2d_backward",
    "upsample_bilinear2d_backward", "masked_fill", "log_sigmoid_forward", "glu", "elu", "mish",
    "softplus", "hardswish", "hardsigmoid", "rsub", "addmv", "mv", "dot", "var", "std", "std_mean",
    "norm", "linalg_vector_norm", "unfold_backward", "diagonal_backward", "cumsum_backward",
    "reflection_pad2d_backward", "threshold", "logsumexp", "tril", "index_add", "new_empty",
    "aminmax", "eye", "split_with_sizes", "addr", "celu", "selu", "silu", "frac", "square",
)  # fmt: skip


class NotTranslated(RuntimeError):
    """A graph has operators that the table lacks, and the policy is to raise."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns torch's decompositions of what the table lacks."""
    packets = [getattr(torch.ops.aten, name, None) for name in _DECOMPOSED]
    found = dict(core_aten_decompositions())
    found.update(get_decompositions([packet for packet in packets if packet is not None]))
    return {overload: how for overload, how in found.items() if str(overload) not in TABLE}


def boxed(graph: CompiledGraph) -> Callable[[list[Any]], list[Any]]:
    """Returns a graph as a function, whose marks survive torch's wrappers."""

    def run(arguments: list[Any]) -> list[Any]:
        return graph(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.graph = graph  # type: ignore[attr-defined]
    return run


@dataclass
class Backend:
    """A backend with settings; `ort_runtime.torch.backend` is one with the defaults.

    Attributes:
        recompute: which activations the backward pass computes again. None takes the lowest level
            that a memory limit allows.
        on_missing: "torch" runs a graph that the table does not cover in torch, with one warning;
            "raise" raises NotTranslated.
        memory_limit: the most bytes of a training step, gradients included: a number, or a text
            such as "2 GiB". It is checked at the sizes with which a graph is compiled, and each
            session has it as a limit of its own.
        on_compiled: is called with the kind of each graph ("forward", "backward", "inference") and
            its CompiledGraph, or None if it runs in torch.
        on_partition: is called with how each joint graph was cut.
    """

    recompute: Recompute | None = None
    on_missing: str = "torch"
    memory_limit: int | str | None = None
    on_compiled: Callable[[str, Any], None] | None = None
    on_partition: Callable[[Partition], None] | None = None

    def __post_init__(self) -> None:
        if self.on_missing not in ("torch", "raise"):
            raise ValueError(f"on_missing is 'torch' or 'raise', not {self.on_missing!r}")
        self._warned = False

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compiles a graph that Dynamo captured."""
        compiler = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=decompositions(),
        )
        return compiler(graph, inputs)

    # Compilers.

    def _forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return self._compile(graph, "forward")

    def _backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return self._compile(graph, "backward")

    def _inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        problems = self._problems(graph)
        if problems:
            self._refuse(problems)
            graph.meta["ort_runtime"] = "torch"
        return self._compile(graph, "inference")

    def _compile(self, graph: fx.GraphModule, kind: str) -> Any:
        if graph.meta.get("ort_runtime") == "torch":
            compiled = make_boxed_func(graph.forward)
        else:
            # Torch compiles under a mode that makes tensors without memory.
            with unset_fake_temporarily():
                compiled = boxed(self._session(graph, kind, limited=True))
        if self.on_compiled is not None:
            self.on_compiled(kind, getattr(compiled, "graph", None))
        return compiled

    def _options(self, limited: bool) -> ort_runtime.SessionOptions:
        options = ort_runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        if limited and self.memory_limit is not None:
            options.memory_limit = self.memory_limit
        return options

    # Policy.

    def _partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        problems = self._problems(joint)
        if problems:
            self._refuse(problems)
            from torch._functorch.partitioners import default_partition

            parts = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
            for part in parts:
                part.meta["ort_runtime"] = "torch"
            return parts
        prepare(joint)
        found = self._chosen(joint, num_fwd_outputs)
        if self.on_partition is not None:
            self.on_partition(found)
        return found.forward, found.backward

    def _chosen(self, joint: fx.GraphModule, num_fwd_outputs: int) -> Partition:
        """Returns the partition of the lowest level that the memory limit allows."""
        levels = [self.recompute] if self.recompute else [Recompute(level) for level in range(3)]
        limit = bytes_of_text(self.memory_limit)
        if limit is None:
            return self._cut(joint, num_fwd_outputs, levels[0])
        plans: list[StepPlan] = []
        for recompute in levels:
            found = self._cut(joint, num_fwd_outputs, recompute)
            plans.append(self.plan_of(found))
            if plans[-1].peak_bytes <= limit:
                return found
        raise NotEnoughMemory(limit, min(plan.peak_bytes for plan in plans))

    def _cut(self, joint: fx.GraphModule, num_fwd_outputs: int, recompute: Recompute) -> Partition:
        found = partition(joint, num_fwd_outputs, recompute)
        found.forward.meta["ort_runtime_saved_from"] = num_fwd_outputs
        found.backward.meta["ort_runtime_donated"] = found.donated()
        return found

    def plan_of(self, found: Partition, **sizes: int) -> StepPlan:
        """Returns what a step allocates, at the sizes of the first call or at others by symbol."""
        with unset_fake_temporarily():
            forward = self._session(found.forward, "forward")
            backward = self._session(found.backward, "backward")
            return step_plan(found, forward, backward, sizes)

    def _session(self, graph: fx.GraphModule, kind: str, limited: bool = False) -> CompiledGraph:
        saved_from = graph.meta.get("ort_runtime_saved_from")
        donated = graph.meta.get("ort_runtime_donated", frozenset())
        program = translate(graph, kind, saved_from=saved_from)
        return CompiledGraph(program, self._options(limited), donated)

    def _problems(self, graph: fx.GraphModule) -> list[str]:
        """Returns all that keeps a graph from running in a session."""
        with unset_fake_temporarily():
            problems = missing(graph)
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                if value.device.type != "cpu":
                    problems.append(f"a tensor on {value.device}")
        return list(dict.fromkeys(problems))

    def _refuse(self, problems: list[str]) -> None:
        text = "\n".join(f"  {problem}" for problem in problems)
        if self.on_missing == "raise":
            raise NotTranslated(f"the graph has operators without a translation:\n{text}")
        if not self._warned:
            self._warned = True
            warnings.warn(f"a graph runs in torch, since it has:\n{text}", stacklevel=2)
