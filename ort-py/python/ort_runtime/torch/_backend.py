"""The backend `ort_runtime` of `torch.compile`: AOTAutograd's graphs run in sessions.

AOTAutograd traces the joint graph of a forward and a backward pass. It is checked against the table,
cut in two by `_partition`, and each part becomes one session. A graph that the table does not cover
runs in torch.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ._compiled import CompiledGraph, SessionCode, TorchCode, session_options
from ._memory import NotEnoughMemory, StepPlan, bytes_of_text, step_plan
from ._partition import Partition, Recompute, partition, prepare
from ._table import TABLE
from ._translate import Program, missing, translate

if TYPE_CHECKING:
    from ._step_cache import Recorder

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
        recorder: keeps what is compiled for later processes.
    """

    recompute: Recompute | None = None
    on_missing: str = "torch"
    memory_limit: int | str | None = None
    on_compiled: Callable[[str, Any], None] | None = None
    on_partition: Callable[[Partition], None] | None = None
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        if self.on_missing not in ("torch", "raise"):
            raise ValueError(f"on_missing is 'torch' or 'raise', not {self.on_missing!r}")
        self._warned = False

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compiles a graph that Dynamo captured."""
        compilers = {
            "fw_compiler": self._forward,
            "bw_compiler": self._backward,
            "inference_compiler": self._inference,
        }
        with contextlib.ExitStack() as stack:
            if self.recorder is not None:
                # It changes torch, which only a cache needs.
                from ._step_cache import recording

                stack.enter_context(recording(self.recorder, graph))
                compilers = {
                    name: SerializableAOTDispatchCompiler(OutputCode, compiler)
                    for name, compiler in compilers.items()
                }
            compiler = aot_autograd(
                **compilers, partition_fn=self._partition, decompositions=decompositions()
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
            compiled: Any = TorchCode(make_boxed_func(graph.forward))
            if self.recorder is not None:
                self.recorder.refuse("a graph runs in torch")
        else:
            # Torch compiles under a mode that makes tensors without memory.
            with unset_fake_temporarily():
                program, donated = self._translated(graph, kind)
                compiled = SessionCode(program, donated, self.memory_limit)
        if self.on_compiled is not None:
            self.on_compiled(kind, compiled.graph)
        return compiled

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

    def _session(self, graph: fx.GraphModule, kind: str) -> CompiledGraph:
        program, donated = self._translated(graph, kind)
        return CompiledGraph(program, session_options(None), donated)

    @staticmethod
    def _translated(graph: fx.GraphModule, kind: str) -> tuple[Program, frozenset[str]]:
        saved_from = graph.meta.get("ort_runtime_saved_from")
        donated = graph.meta.get("ort_runtime_donated", frozenset())
        return translate(graph, kind, saved_from=saved_from), donated

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
