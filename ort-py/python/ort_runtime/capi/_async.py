"""Runs in the threads of a pool, for `run_async`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import onnxruntime_pybind11_state as C

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# How many runs go on at once. More wait for one of these to end.
AT_ONCE = 32

# The pool of each process: a child of a fork has none of its parent's threads.
_pools: dict[int, ThreadPoolExecutor] = {}


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

    try:
        _pool().submit(work)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        # The interpreter is about to exit. It waits for the pool, which takes no more runs, and
        # then for threads that callbacks have started meanwhile.
        threading.Thread(target=work, name="ort-run-async").start()


def _pool() -> ThreadPoolExecutor:
    """Returns the pool of this process. Its threads stay: a new one for each run costs more than a
    small run, and a free-threaded interpreter gives each a heap of its own."""
    pool = _pools.get(os.getpid())
    if pool is None:
        # Imported at the first run: most programs need none of it.
        from concurrent.futures import ThreadPoolExecutor

        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(AT_ONCE, "ort-run-async"))
    return pool


def message(error: BaseException) -> str:
    """Returns the text of an exception without its code."""
    try:
        text = str(error)
    except Exception:
        text = type(error).__name__
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    return text
