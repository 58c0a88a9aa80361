"""Profiles."""

from __future__ import annotations

import gc
import json
import os
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, Raises, data, row, session
from more_models import package  # noqa: F401  (the fixture `ort`)

STAMP = r"_\d{4}-\d{2}-\d{2}_\d{2}-\d{2}-\d{2}_\d{3}\.json"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profiled(
    ort: ModuleType, model: Any = "chain", prefix: str | None = None, runs: int = 1
) -> Any:
    """Returns a session that was profiled over that many runs, unoptimized."""
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if prefix is not None:
        options.profile_file_prefix = prefix
    source = data(model) if model in ("chain", "square", "two") else model
    made = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    for _ in range(runs):
        made.run(None, {"x": A})
    return made


def events(ort: ModuleType, **how: Any) -> list[dict[str, Any]]:
    """Returns what the profile of such a session holds."""
    return json.loads(Path(profiled(ort, **how).end_profiling()).read_text())


def names(ort: ModuleType, category: str, **how: Any) -> list[str]:
    return [e["name"] for e in events(ort, **how) if e["cat"] == category]


def from_file(ort: ModuleType) -> list[str]:
    Path("chain.onnx").write_bytes(data("chain"))
    return names(ort, "Session", model="chain.onnx")


RUN = ["SequentialExecutor::Execute", "model_run"]
LOAD = ["model_loading_array", "session_initialization"]

CONTENTS = [
    row("session", lambda o: names(o, "Session"), [*LOAD, *RUN]),
    row("session_of_file", from_file, ["model_loading_uri", "session_initialization", *RUN]),
    row("two_runs", lambda o: names(o, "Session", runs=2), [*LOAD, *RUN, *RUN]),
    row("no_run", lambda o: names(o, "Session", runs=0), LOAD),
    row("nodes", lambda o: [n.endswith("_kernel_time") for n in names(o, "Node")], [True] * 2),
    row("nodes_of_two_runs", lambda o: len(names(o, "Node", runs=2)), 4),
    row("categories", lambda o: sorted({e["cat"] for e in events(o)}), ["Node", "Session"]),
    row("phases", lambda o: {e["ph"] for e in events(o)}, {"X"}),
    row("processes", lambda o: {e["pid"] for e in events(o)} == {os.getpid()}, True),
    row("keys", lambda o: {tuple(sorted(e)) for e in events(o)},
        {("args", "cat", "dur", "name", "ph", "pid", "tid", "ts")}),
    row("times", lambda o: all(type(e[k]) is int and e[k] >= 0 for e in events(o)
                               for k in ("ts", "dur", "pid", "tid")), True),
    row("list", lambda o: type(events(o)), list),
]


@pytest.mark.parametrize(("call", "expected"), CONTENTS)
def test_contents(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def node_arguments(ort: ModuleType, key: str) -> list[Any]:
    return [e["args"].get(key) for e in events(ort) if e["cat"] == "Node"]


FLOATS = {"float": [2, 3]}

ARGUMENTS = [
    row("op_name", "op_name", ["Mul", "Relu"]),
    row("provider", "provider", ["CPUExecutionProvider"] * 2),
    row("node_index", "node_index", ["0", "1"]),
    row("input_type_shape", "input_type_shape", [[FLOATS, FLOATS], [FLOATS]]),
    row("output_type_shape", "output_type_shape", [[FLOATS], [FLOATS]]),
    row("parameter_size", "parameter_size", ["0", "0"]),
    row("activation_size", "activation_size", ["48", "24"]),
    row("output_size", "output_size", ["24", "24"]),
]


@pytest.mark.parametrize(("key", "expected"), ARGUMENTS)
def test_node_argument(request: Any, ort: ModuleType, key: str, expected: Any):
    check(request, ort, lambda o: node_arguments(o, key), expected)


MEMORY = [
    "mem_arena_held", "mem_arena_held_delta", "mem_bytes_in_use", "mem_bytes_requested_in_use",
    "mem_in_use_delta", "mem_in_use_peak", "mem_requested_in_use_delta",
]


@pytest.mark.parametrize("key", MEMORY)
def test_memory_argument(ort: ModuleType, key: str):
    for found in node_arguments(ort, key):
        assert isinstance(found, str) and re.fullmatch(r"-?\d+", found)


def test_scheduling_statistics(ort: ModuleType):
    for found in node_arguments(ort, "thread_scheduling_stats"):
        assert isinstance(found, dict) and "main_thread" in found


def test_events_are_inside_each_other(ort: ModuleType):
    found = {e["name"]: e for e in events(ort)}
    run, execute = found["model_run"], found["SequentialExecutor::Execute"]
    nodes = [e for e in events(ort) if e["cat"] == "Node"]
    assert run["ts"] <= execute["ts"] and execute["dur"] <= run["dur"]
    assert [e["ts"] for e in nodes] == sorted(e["ts"] for e in nodes)


FILES = [
    row("default", None, "onnxruntime_profile_" + STAMP),
    row("prefix", "mine", "mine" + STAMP),
    row("folder", "sub/mine", "sub/mine" + STAMP),
]


@pytest.mark.parametrize(("prefix", "pattern"), FILES)
def test_file_name(ort: ModuleType, prefix: str | None, pattern: str):
    Path("sub").mkdir()
    name = profiled(ort, prefix=prefix).end_profiling()
    assert re.fullmatch(pattern, name) and Path(name).is_file()


def test_absolute_prefix(ort: ModuleType, tmp_path: Path):
    name = profiled(ort, prefix=str(tmp_path / "x")).end_profiling()
    assert Path(name).parent == tmp_path and Path(name).is_file()


def test_dropped_session(ort: ModuleType):
    made = profiled(ort, prefix="dropped")
    del made
    gc.collect()
    (file,) = Path().glob("dropped*.json")
    assert len(json.loads(file.read_text())) == 6


def after_the_end(ort: ModuleType) -> Any:
    made = profiled(ort)
    made.end_profiling()
    return made.end_profiling(), made.run(None, {"x": A})[0].shape


def start_times(ort: ModuleType) -> Any:
    before = time.time_ns()
    made = profiled(ort)
    started = made.get_profiling_start_time_ns()
    return type(started), before - 10**9 <= started <= time.time_ns() + 10**9


SESSIONS = [
    row("off", lambda o: session(o, "square").end_profiling(), ""),
    row("off_start", lambda o: session(o, "square").get_profiling_start_time_ns(), 0),
    row("off_attribute", lambda o: session(o, "square")._profiling_start_time_ns, 0),
    row("off_native", lambda o: session(o, "square")._sess.get_profiling_start_time_ns, 0),
    row("ended", after_the_end, ("", (2, 3))),
    row("start", start_times, (int, True)),
    row("prefix_number", lambda o: profiled(o, prefix=3), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), SESSIONS)
def test_session(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_no_file_when_off(ort: ModuleType):
    session(ort, "square").run(None, {"x": np.ones((1, 3), np.float32)})
    assert not list(Path().glob("*.json"))
