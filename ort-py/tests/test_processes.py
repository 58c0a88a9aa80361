"""Fork, pickle and the end of the process."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, data, row, run_program, session
from more_models import package  # noqa: F401  (the fixture `ort`)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")

SQUARES = (A * A).tolist()

ONE = "o = ort.SessionOptions()\no.intra_op_num_threads = {}\n"
OPEN = "s = ort.InferenceSession('square.onnx', o)\n"
RUN = "s.run(None, {'x': np.full((2, 3), 2, np.float32)})[0].sum()"
CHILD = """
p = os.fork()
if p == 0:
    {}
    os._exit(0)
print(os.waitpid(p, 0)[1], flush=True)
"""
MAP = """
import multiprocessing as mp
def go(i):
    return float(s.run(None, {{'x': np.full((1, 3), i, np.float32)}})[0].sum())
if __name__ == '__main__':
    with mp.get_context({!r}).Pool(2) as p:
        print(p.map(go, range(4)))
"""

FORKS = [
    *(
        row(f"threads_{n}", ONE.format(n) + OPEN + RUN + CHILD.format(f"print({RUN}, flush=True)"),
            "24.0\n0")
        for n in (1, 2, 4)
    ),
    row("not_run_before", ONE.format(1) + OPEN + CHILD.format(f"print({RUN}, flush=True)"),
        "24.0\n0"),
    row("parent_goes_on",
        ONE.format(1) + OPEN + CHILD.format(RUN) + f"print({RUN})", "0\n24.0"),
    row("made_in_child",
        "o = None\n" + CHILD.format(f"{OPEN}    print({RUN}, flush=True)"), "24.0\n0"),
    row("made_in_child_after_parent",
        "o = None\n" + OPEN + RUN + CHILD.format(f"{OPEN}    print({RUN}, flush=True)"), "24.0\n0"),
    row("value_in_child",
        "v = ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))\n"
        + CHILD.format("print(v.numpy().sum(), flush=True)"), "3.0\n0"),
    row("pool", ONE.format(1) + OPEN + MAP.format("fork"), "[0.0, 3.0, 12.0, 27.0]"),
]


@pytest.mark.parametrize(("code", "expected"), FORKS)
def test_fork(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    def call(o: ModuleType) -> str:
        return run_program(o, tmp_path, code, "square", timeout=15)

    check(request, ort, call, expected)


LOAD = "s = ort.InferenceSession('square.onnx')\n"
FEED = "{'x': np.ones((1, 3), np.float32)}"

ENDS = [
    row("global_session", LOAD + "sys.kept = s", ""),
    row("global_binding",
        LOAD + f"sys.s = s\nsys.b = b = s.io_binding()\nb.bind_cpu_input('x', {FEED}['x'])\n"
        "b.bind_output('y')\ns.run_with_iobinding(b)", ""),
    row("global_value", "sys.v = ort.OrtValue.ortvalue_from_numpy(np.ones(3))", ""),
    row("global_output", LOAD + f"sys.y = s.run(None, {FEED})", ""),
    row("exit_code", LOAD + f"s.run(None, {FEED})\nsys.exit(3)", "exit 3"),
    row("exception", LOAD + "1 / 0", "exit 1"),
    row("at_exit",
        LOAD + "import atexit\n"
        f"atexit.register(lambda: print(s.run(None, {FEED})[0].sum()))", "3.0"),
    row("cycle", LOAD + "class C: pass\nc = C()\nc.c, c.s = c, s", ""),
    row("running_thread",
        LOAD + f"go = lambda: [s.run(None, {FEED}) for _ in range(100)]\n"
        "threading.Thread(target=go).start()", ""),
    row("output_without_session",
        f"y = ort.InferenceSession('square.onnx').run(None, {FEED})\n"
        "gc.collect()\nprint(y[0].sum())", "3.0"),
    row("value_without_session",
        "v = ort.OrtValue.ortvalue_from_numpy(np.ones((1, 3), np.float32))\n"
        "y = ort.InferenceSession('square.onnx').run_with_ort_values(None, {'x': v})[0]\n"
        "gc.collect()\nprint(y.numpy().sum())", "3.0"),
    row("daemon_thread",
        LOAD + f"def go():\n    while True: s.run(None, {FEED})\n"
        "threading.Thread(target=go, daemon=True).start()\ntime.sleep(0.2)", ""),
    row("async_pending",
        "o = ort.SessionOptions()\no.intra_op_num_threads = 2\n" + OPEN
        + f"s.run_async(None, {FEED}, lambda *_: None, None)", ""),
    row("interrupted", LOAD + "os.kill(os.getpid(), signal.SIGTERM)", "signal 15"),
]


@pytest.mark.parametrize(("code", "expected"), ENDS)
def test_end(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    check(request, ort, lambda o: run_program(o, tmp_path, code, "square"), expected)


IMPORTS = [
    row("torch", "print('torch' in sys.modules)", "False"),
    row("onnx", "print('onnx' in sys.modules)", "False"),
    row("protobuf", "print('google.protobuf' in sys.modules)", "False"),
    row("threads",
        "tasks = '/proc/self/task'\n"
        "print(len(os.listdir(tasks)) if os.path.isdir(tasks) else {many})", "1"),
    row("capi", "print({package!r} + '.capi' in sys.modules)", "True"),
]


@pytest.mark.parametrize(("code", "expected"), IMPORTS)
def test_import(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    code = code.replace("{package!r}", repr(ort.__name__))
    code = code.replace("{many}", "2" if ort.__name__ == "onnxruntime" else "1")
    env = {"OPENBLAS_NUM_THREADS": "1"}
    check(request, ort, lambda o: run_program(o, tmp_path, code, env=env), expected)


def opened(ort: ModuleType) -> Any:
    return session(ort, "square")


def session_options(ort: ModuleType) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    options.add_session_config_entry("a", "b")
    return options


def run_options(ort: ModuleType) -> Any:
    options = ort.RunOptions()
    options.logid = "mine"
    return options


def memory_info(ort: ModuleType) -> Any:
    arena = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    return ort.OrtMemoryInfo("Cpu", arena, 0, ort.OrtMemType.DEFAULT)


OBJECTS = {
    "session": (opened, lambda s: s.run(None, {"x": A})[0].tolist(), SQUARES),
    "session_options": (
        session_options,
        lambda o: (o.intra_op_num_threads, o.get_session_config_entry("a")),
        (3, "b"),
    ),
    "run_options": (run_options, lambda o: o.logid, "mine"),
    "node_arg": (lambda o: opened(o).get_inputs()[0], lambda n: (n.name, n.shape), ("x", ["n", 3])),
    "metadata": (lambda o: opened(o).get_modelmeta(), lambda m: m.graph_name, "square"),
    "device": (lambda o: o.OrtDevice.make("cpu", 2), lambda d: d.device_id(), 2),
    "memory_info": (memory_info, lambda i: (i.name, i.device_id), ("Cpu", 0)),
    "arena_config": (lambda o: o.OrtArenaCfg({"max_mem": 5}), lambda c: c.max_mem, 5),
    "level": (lambda o: o.GraphOptimizationLevel.ORT_ENABLE_ALL, int, 99),
    "vendor": (lambda o: o.OrtDeviceVendorId.AMD, int, 4098),
}

WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deep_copy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize(("make", "read", "expected"), [row(k, *v) for k, v in OBJECTS.items()])
@pytest.mark.parametrize("way", [row(k, v) for k, v in WAYS.items()])
def test_copy(request: Any, ort: ModuleType, make: Any, read: Any, way: Any, expected: Any):
    check(request, ort, lambda o: read(way(make(o))), expected)


def test_level_stays_itself(ort: ModuleType):
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert pickle.loads(pickle.dumps(level)) == level


SPAWN = """
import multiprocessing as mp
def go(s, n):
    return float(s.run(None, {{'x': np.full((1, 3), n, np.float32)}})[0].sum())
if __name__ == '__main__':
    s = ort.InferenceSession({}, providers=['CPUExecutionProvider'])
    with mp.get_context('spawn').Pool(1) as p:
        print(p.starmap(go, [(s, 2), (s, 3)]))
"""

SPAWNED = [
    row("path", "'square.onnx'", "[12.0, 27.0]"),
    row("bytes", "open('square.onnx', 'rb').read()", "[12.0, 27.0]"),
]


@pytest.mark.parametrize(("model", "expected"), SPAWNED)
def test_spawn(request: Any, ort: ModuleType, tmp_path: Path, model: str, expected: Any):
    head = f"import numpy as np\nimport {ort.__name__} as ort\n"
    (tmp_path / "program.py").write_text(head + SPAWN.format(model))
    starter = (
        "import subprocess\nr = subprocess.run([sys.executable, 'program.py'],"
        " capture_output=True, text=True)\nprint(r.stdout, end='')\nsys.exit(r.returncode)"
    )
    check(request, ort, lambda o: run_program(o, tmp_path, starter, "square"), expected)


def test_wrapped_session(ort: ModuleType):
    """The wrapper that programs write because the original cannot be pickled."""
    made = pickle.loads(pickle.dumps(Wrapper(ort.__name__, data("square"))))
    assert made.session.run(None, {"x": A})[0].tolist() == SQUARES


class Wrapper:
    """A session that is pickled as the model's bytes."""

    def __init__(self, package: str, model: bytes):
        self.package, self.model = package, model
        self.session = importlib.import_module(package).InferenceSession(
            model, providers=["CPUExecutionProvider"]
        )

    def __getstate__(self) -> tuple[str, bytes]:
        return self.package, self.model

    def __setstate__(self, state: tuple[str, bytes]) -> None:
        self.__init__(*state)
