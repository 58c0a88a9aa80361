"""Profiles: the chrome trace that a session with `enable_profiling` writes.

The file is a JSON list of events, with times in microseconds from the start: `Session` events for
loading, building and each run, and a `Node` event, named `<node>_kernel_time`, for each node that
ran. Perfetto and chrome://tracing show it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from . import _logging
from . import onnxruntime_pybind11_state as C

__all__: list[str] = []


class Profile:
    """The events of a session, until `finish` writes them."""

    def __init__(self, prefix: str) -> None:
        now = datetime.now()
        self._path = f"{prefix}_{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond // 1000:03}.json"
        self.start_ns = time.time_ns()
        self._spans: list[tuple[str, int, int, int]] = []
        self._native: C.InferenceSession | None = None
        self._is_finished = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records how long the block takes."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            if not self._is_finished:
                thread = threading.get_native_id()
                self._spans.append((name, start, time.monotonic_ns(), thread))

    def follow(self, native: C.InferenceSession) -> None:
        """Takes the nodes' events from a native session."""
        self._native = native

    def finish(self) -> str:
        """Writes the file and returns its name; "" if it is written already."""
        import json  # slow to import, and rarely needed

        if self._is_finished or self._native is None:
            return ""
        self._is_finished = True
        events = sorted(self._events(self._native), key=lambda event: event["ts"])
        with open(self._path, "w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")
        # A session that goes on keeps no events.
        self._native.stop_profiling()
        self._native = None
        self._spans.clear()
        return self._path

    def finish_quietly(self) -> None:
        """Writes the file of a session that was dropped. A failure is only logged."""
        try:
            self.finish()
        except OSError as error:
            _logging.log(_logging.ERROR, f"the profile cannot be written: {error}")

    def _events(self, native: C.InferenceSession) -> Iterator[dict[str, Any]]:
        start = native.get_profiling_start_time_ns
        origin = min((start for _, start, _, _ in self._spans), default=start)
        for name, start, end, thread in self._spans:
            began, took = (start - origin) // 1000, (end - start) // 1000
            if name == "model_run":
                yield _event("Session", "SequentialExecutor::Execute", began, took, thread)
            yield _event("Session", name, began, took, thread)
        offset = (native.get_profiling_start_time_ns - origin) // 1000
        places: dict[str, int] = {}
        before = peak = 0
        for event in native.profile_events():
            node, live = event["node"], event["live_bytes"]
            peak = max(peak, live)
            held, delta = str(live), str(live - before)
            args: dict[str, Any] = {
                "op_name": event["op"],
                "provider": event["provider"],
                "node_index": str(places.setdefault(node, len(places))),
                "input_type_shape": event["inputs"],
                "output_type_shape": event["outputs"],
                "parameter_size": str(event["parameter_bytes"]),
                "activation_size": str(event["activation_bytes"]),
                "output_size": str(event["output_bytes"]),
                "mem_arena_held": held,
                "mem_arena_held_delta": delta,
                "mem_bytes_in_use": held,
                "mem_bytes_requested_in_use": held,
                "mem_in_use_delta": delta,
                "mem_in_use_peak": str(peak),
                "mem_requested_in_use_delta": delta,
                "thread_scheduling_stats": {"main_thread": {}, "sub_threads": {}},
            }
            before = live
            start, took, thread = event["start_us"], event["duration_us"], threading.get_native_id()
            yield _event("Node", f"{node}_kernel_time", offset + start, took, thread, args)


def of_native(native: C.InferenceSession) -> Profile:
    """Returns the profile of a native session that no session of the package is around."""
    profile = Profile(native.session_options.profile_file_prefix)
    profile.follow(native)
    return profile


def _event(
    category: str,
    name: str,
    start: int,
    duration: int,
    thread: int,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "cat": category,
        "pid": os.getpid(),
        "tid": thread,
        "dur": duration,
        "ts": start,
        "ph": "X",
        "name": name,
        "args": args or {},
    }
