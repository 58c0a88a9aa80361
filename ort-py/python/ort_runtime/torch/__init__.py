"""The backend of `torch.compile`: `torch.compile(model, backend="ort_runtime")`.

Forward, backward and inference graphs run in sessions of this runtime; tensors cross without
copies. An installed package is found by name. From a source tree, import this module first.

Example::

    import torch
    import ort_runtime.torch

    model = torch.compile(model, backend="ort_runtime")
    loss = model(x).sum()
    loss.backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch._dynamo
from torch import fx

from ._backend import Backend, NotTranslated
from ._clusters import Request, read_requests
from ._memory import NotEnoughMemory, StepPlan
from ._partition import Recompute

__all__ = [
    "Backend",
    "NotEnoughMemory",
    "NotTranslated",
    "Recompute",
    "Request",
    "StepPlan",
    "backend",
    "read_requests",
]


def backend(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compiles a graph that Dynamo captured. The options are those of `Backend`."""
    return Backend(**options)(graph, inputs)


# Libraries that take only the names they list, such as Accelerate, list `onnxrt`, which torch no
# longer has. Older versions of torch have it, and keep it.
for _name in ("ort_runtime", "onnxrt"):
    if _name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name=_name)
