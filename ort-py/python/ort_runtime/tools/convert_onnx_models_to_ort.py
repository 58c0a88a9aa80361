"""Stands for the converter to ONNX Runtime's flatbuffer format, which ort-runtime reads only.

The format saves the start of a minimal build the parsing and rewriting of ONNX. Here the compiled
cache does that: set `SessionOptions.cache_dir` and the next process maps what the first compiled.
"""

from __future__ import annotations

import enum
import sys
from typing import Any, NoReturn

_MESSAGE = (
    "ort-runtime reads models in ORT format (.ort), but does not write them: keep the ONNX model "
    "and set SessionOptions.cache_dir, which keeps the rewritten model and its packed weights on disk. "
    "python -m ort_runtime.tools.optimize_onnx_model saves an optimized ONNX model."
)


class OptimizationStyle(enum.Enum):
    """The styles of the original's converter."""

    Fixed = 0
    Runtime = 1


def convert_onnx_models_to_ort(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError, which names the cache and the tool to use instead."""
    raise NotImplementedError(_MESSAGE)


def main() -> NoReturn:
    """Prints the message and exits with code 1, whatever the command line is."""
    sys.exit(_MESSAGE)


if __name__ == "__main__":
    main()
