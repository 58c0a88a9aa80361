"""Libraries of custom operators, which need the C interface of onnxruntime."""

from __future__ import annotations

import ctypes
from typing import NoReturn

from ._errors import Fail, NotImplemented, status

__all__: list[str] = []


def refuse_library(path: str) -> NoReturn:
    """Loads a library to tell what it is, and raises the exception for it."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise status(Fail, f"Failed to load library {path} with error: {error}") from None
    try:
        library.RegisterCustomOps
    except AttributeError as error:
        text = f"Failed to get symbol RegisterCustomOps with error: {error}"
        raise status(Fail, text) from None
    raise status(
        NotImplemented,
        f"libraries of custom operators are not supported: {path} needs the C interface of "
        "onnxruntime",
    )
