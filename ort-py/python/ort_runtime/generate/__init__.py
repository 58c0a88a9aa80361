"""Text generation with language models, within a memory limit.

    from ort_runtime.generate import Model

    model = Model("llama", memory_limit="2GiB")
    print(model.largest_context(requests=4))
    for piece in model.stream([{"role": "user", "content": "Hello!"}]):
        print(piece, end="", flush=True)

It needs the packages of the extra `ort-runtime[generate]`.
"""

from ._constraint import Constraint
from ._model import ContextPlan, Model, Prompt, Sampling, Statistics
from ._stream import Answer, Stream
from ._text import TextCodec

__all__ = [
    "Answer",
    "Constraint",
    "ContextPlan",
    "Model",
    "Prompt",
    "Sampling",
    "Statistics",
    "Stream",
    "TextCodec",
]
