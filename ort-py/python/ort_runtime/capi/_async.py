"""Runs in threads of their own, for `run_async`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import onnxruntime_pybind11_state as C


def start(
    run: Callable[[], list[Any]],
    callback: Callable[[list[Any], Any, str], None],
    user_data: Any,
) -> None:
    """Calls `run` in another thread, which then calls `callback(results, user_data, error)`."""
    if not callable(callback):
        raise TypeError(f"callback must be a function, not {type(callback).__name__}")

    def work() -> None:
        try:
            results, error = run(), ""
        except BaseException as raised:
            results, error = [], message(raised)
        try:
            callback(results, user_data, error)
        except BaseException as raised:
            C.write_unraisable(raised, "ort_runtime.InferenceSession.run_async callback")

    threading.Thread(target=work, name="ort-run-async").start()


def message(error: BaseException) -> str:
    """Returns the text of an exception without its code."""
    try:
        text = str(error)
    except Exception:
        text = type(error).__name__
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    return text
