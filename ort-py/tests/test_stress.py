"""Many sessions, runs, threads, signals, forks and ends of the process.

The numbers are small, so that the file takes less than a minute. `ORT_STRESS=full` has those that a
release is held to: 1,000 sessions, 100,000 runs, 200 ends of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import models
import numpy as np
import pytest
from harness import (
    CPU,
    IS_ORIGINAL,
    C,
    Gives,
    case,
    check_script,
    f32,
    options,
    ort,
    session,
    strings,
    table,
)

pytestmark = [
    pytest.mark.skipif(IS_ORIGINAL, reason="much of this ends the original's process"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks and sends signals"),
]

FULL = os.environ.get("ORT_STRESS") == "full"
WAIT = 20
MIB = 1 << 20

X = f32(1, 2, 3)
PAGE = os.sysconf("SC_PAGE_SIZE")


def times(few: int, full: int) -> int:
    """How often something is done."""
    return full if FULL else few


def value(array: np.ndarray) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array)


def new_session(name: str = "scale", **settings: Any) -> Any:
    """A session of its own."""
    return ort.InferenceSession(models.data(name), options(**settings), providers=[CPU])


# Memory that stays.


def resident() -> int:
    """The bytes of memory that the process has."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def growth(action: Callable[[], Any], count: int) -> int:
    """The bytes by which the process grows between the halves of the calls.

    Each half counts with the smaller of two sizes: the heaps of a free-threaded interpreter vary by
    more than a MiB.
    """
    sizes = []
    for quarter in range(4):
        for _ in range(max(count // 4, 1)):
            action()
        # A free-threaded interpreter collects cycles later.
        gc.collect()
        sizes.append(resident())
    return max(min(sizes[2:]) - min(sizes[:2]), 0)


def load_and_run() -> None:
    new_session().run(None, {"x": X})


def load_path() -> None:
    ort.InferenceSession(models.path("scale"), providers=[CPU]).run(None, {"x": X})


def load_weights() -> None:
    made = ort.SessionOptions()
    made.add_initializer("one", value(np.ones(3, np.float32)))
    ort.InferenceSession(models.data("add_one"), made).run(None, {"x": np.ones((2, 3), np.float32)})


def load_damaged() -> None:
    with contextlib.suppress(RuntimeError):
        ort.InferenceSession(models.data("scale")[:-9], providers=[CPU])


def load_profiled() -> None:
    prefix = os.path.join(models.folder(), "profile")
    opened = new_session(enable_profiling=True, profile_file_prefix=prefix)
    opened.run(None, {"x": X})
    os.remove(opened.end_profiling())


def load_cycle() -> None:
    opened = new_session()
    opened.itself = opened  # type: ignore[attr-defined]


def load_binding() -> None:
    opened = new_session()
    binding = opened.io_binding()
    binding.bind_cpu_input("x", X)
    opened.run_with_iobinding(binding)


class Options(ort.SessionOptions):
    """Options with attributes of their own, which the session's copy shares."""

    box: list[Any]


class Array(np.ndarray):
    """An array with attributes of its own."""

    held: Any


def of_options(through: Callable[[Any], Any]) -> weakref.ref[Any]:
    """A cycle of a session, or what has it, and the session's copy of its options."""
    made = Options()
    made.box = []
    opened = ort.InferenceSession(models.data("scale"), made, providers=[CPU])
    made.box.append(through(opened))
    return weakref.ref(made.box[0])


def of_array(through: Callable[[Any], Any]) -> weakref.ref[Any]:
    """A cycle of an array, and what keeps it alive."""
    array = X.copy().view(Array)
    array.held = through(array)
    return weakref.ref(array)


def vector_of(array: np.ndarray) -> Any:
    vector = C.OrtValueVector()
    vector.push_back(value(array))
    return vector


@table(
    "make",
    [
        case("session", lambda: of_options(lambda opened: opened)),
        case("binding", lambda: of_options(lambda opened: opened.io_binding())),
        case("value", lambda: of_array(value)),
        case("native_value", lambda: of_array(lambda array: value(array)._ortvalue)),
        case("vector", lambda: of_array(lambda array: vector_of(array))),
    ],
)
def test_cycles_are_collected(make: Callable[[], weakref.ref[Any]]) -> None:
    """Python's garbage collector sees through native objects."""
    alive = make()
    gc.collect()
    assert alive() is None


def test_shared_memory_is_not_collected() -> None:
    """A result that shares the memory of a value keeps an array of a cycle alive."""
    array = X.copy().view(Array)
    array.held = value(array)
    alive, shared = weakref.ref(array), array.held._ortvalue.numpy()
    del array
    gc.collect()
    assert alive() is not None and (shared == X).all()
    del shared
    gc.collect()
    assert alive() is None


@table(
    "load",
    [
        case("run", load_and_run),
        case("path", load_path),
        case("weights", load_weights),
        case("damaged", load_damaged),
        case("profiled", load_profiled),
        case("cycle", load_cycle),
        case("binding", load_binding),
        case("set_providers", lambda: session("two").set_providers([CPU])),
    ],
)
def test_sessions_leave_nothing(load: Callable[[], None]) -> None:
    """1,000 sessions that are made and dropped leave at most 8 MiB."""
    assert growth(load, times(80, 1000)) <= times(1, 8) * MIB


def run_background() -> None:
    done = threading.Event()
    session("scale").run_async(None, {"x": X}, lambda *_: done.set(), None)
    assert done.wait(WAIT)


def run_binding_anew() -> None:
    binding = session("scale").io_binding()
    binding.bind_cpu_input("x", X.copy())
    binding.bind_output("y")
    session("scale").run_with_iobinding(binding)
    binding.copy_outputs_to_cpu()
    binding.get_outputs()


def bound_run() -> Callable[[], None]:
    """Runs of one binding, into a value of the caller."""
    binding = session("scale").io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_shape_and_type([3], np.float32))
    return lambda: session("scale").run_with_iobinding(binding)


def run_terminated() -> None:
    stop = ort.RunOptions()
    stop.terminate = True
    with contextlib.suppress(RuntimeError):
        session("scale").run(None, {"x": X}, stop)


def run_refused() -> None:
    with contextlib.suppress(RuntimeError):
        session("scale").run(None, {"x": X.astype(float)})


def run_dlpack() -> None:
    held = ort.OrtValue.from_dlpack(X.copy())
    np.from_dlpack(held)
    held.__dlpack__()


TEXTS = strings(*(f"text number {i}" for i in range(50)))
ONE_BINDING: list[Callable[[], None]] = []


def run_binding() -> None:
    if not ONE_BINDING:
        ONE_BINDING.append(bound_run())
    ONE_BINDING[0]()


@table(
    "run",
    [
        case("run", lambda: session("scale").run(None, {"x": X})),
        case("large", lambda: session("scale").run(None, {"x": np.ones(100_000, np.float32)})),
        case("options", lambda: session("scale").run(["y"], {"x": X}, ort.RunOptions())),
        case("values", lambda: session("scale").run_with_ort_values(None, {"x": value(X)})),
        case("binding", run_binding),
        case("binding_anew", run_binding_anew),
        case("strings", lambda: session("identity", "string").run(None, {"x": TEXTS})),
        case("sequence", lambda: session("sequence_identity").run(None, {"x": [X, X]})),
        case("map", lambda: session("dict_vectorizer").run(None, {"x": {"a": 1.0}})),
        case("dicts", lambda: session("zip_map").run(None, {"x": np.ones((2, 3), np.float32)})),
        case("optional", lambda: session("optional_tensor").run(None, {"x": None})),
        case("background", run_background),
        case("terminated", run_terminated),
        case("refused", run_refused),
        case("dlpack", run_dlpack),
        case("plan", lambda: session("scale").plan(n=7)),
    ],
)
def test_runs_leave_nothing(run: Callable[[], Any]) -> None:
    """Memory does not grow with the number of runs."""
    assert growth(run, times(1200, 100_000)) <= MIB


def test_shapes_are_forgotten() -> None:
    """Plans of sizes that do not come back take a bounded amount of memory."""
    opened, sizes = new_session(), iter(range(1, 1 << 40))
    assert growth(lambda: opened.plan(n=next(sizes)), times(1200, 100_000)) <= times(4, 8) * MIB


def test_profile_that_has_ended() -> None:
    """A session that goes on after end_profiling() records nothing."""
    prefix = os.path.join(models.folder(), "ended")
    opened = new_session(enable_profiling=True, profile_file_prefix=prefix)
    os.remove(opened.end_profiling())
    for _ in range(20):
        opened.run(None, {"x": X})
    assert opened._sess.profile_events() == []


# Threads.


class Crowd:
    """Threads that do the same until a time is over; what they raise is kept."""

    def __init__(self, count: int, work: Callable[[np.random.RandomState], Any], seconds: float) -> None:
        self.errors: list[BaseException] = []
        self.done = 0
        self._end = time.monotonic() + seconds
        self._work = work
        threads = [threading.Thread(target=self._go, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + WAIT)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"

    def _go(self, seed: int) -> None:
        random = np.random.RandomState(seed)
        try:
            while time.monotonic() < self._end:
                self._work(random)
                self.done += 1
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)


@contextlib.contextmanager
def hurry() -> Any:
    """Lets threads take turns as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_sixteen_threads() -> None:
    """Threads that run one session in every way, load others and drop them."""
    opened, texts = new_session(intra_op_num_threads=2), session("identity", "string")

    def background(x: np.ndarray) -> Any:
        got, done = [], threading.Event()
        opened.run_async(None, {"x": x}, lambda r, _, e: (got.append(r), done.set()), None)
        assert done.wait(WAIT)
        return got[0][0]

    def binding(x: np.ndarray) -> Any:
        made = opened.io_binding()
        made.bind_cpu_input("x", x)
        opened.run_with_iobinding(made)
        return made.copy_outputs_to_cpu()[0]

    ways: list[Callable[[np.ndarray], Any]] = [
        lambda x: opened.run(None, {"x": x})[0],
        lambda x: opened.run_with_ort_values(None, {"x": value(x)})[0].numpy(),
        lambda x: new_session().run(None, {"x": x})[0],
        lambda x: texts.run(None, {"x": x.astype(str)})[0].astype(np.float32) * 2,
        background,
        binding,
    ]

    def work(random: np.random.RandomState) -> None:
        x = random.randint(0, 99, random.randint(1, 200)).astype(np.float32)
        assert (ways[random.randint(len(ways))](x) == x * 2).all()

    with hurry():
        crowd = Crowd(16, work, times(3, 60))
    assert crowd.errors == [] and crowd.done > 16


def test_providers_change_meanwhile() -> None:
    """`set_providers` while others run."""
    opened = new_session()

    def work(random: np.random.RandomState) -> None:
        if random.randint(20) == 0:
            opened.set_providers([CPU])
        assert opened.run(None, {"x": X})[0].tolist() == [2, 4, 6]

    assert Crowd(4, work, times(1, 20)).errors == []


def one_loop(turns: int = 1 << 60) -> dict[str, Any]:
    """The feed of `ENDLESS`."""
    return {"turns": np.array(turns), "x": f32(0)}


def endless() -> bytes:
    """The model `slow` with its number of turns as an input."""
    import onnx

    model = onnx.load_from_string(models.data("slow"))
    kept = [t for t in model.graph.initializer if t.name != "turns"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.append(models.tensor("turns", "int64", []))
    return model.SerializeToString()


def product() -> bytes:
    """x [n, n] -> y = x x."""
    from onnx import helper

    node = helper.make_node("MatMul", ["x", "x"], ["y"], name="product")
    square = models.tensor("x", "float", ["n", "n"]), models.tensor("y", "float", ["n", "n"])
    return models.make([node], [square[0]], [square[1]]).SerializeToString()


@contextlib.contextmanager
def binding_in_a_run() -> Iterator[tuple[Any, Any]]:
    """A session and one of its bindings, which another thread runs until the end of the block."""
    opened = ort.InferenceSession(endless(), providers=[CPU])
    binding, stop = opened.io_binding(), ort.RunOptions()
    for name, array in one_loop().items():
        binding.bind_cpu_input(name, array)

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            opened.run_with_iobinding(binding, stop)

    runner = threading.Thread(target=run)
    runner.start()
    time.sleep(0.1)
    try:
        yield opened, binding
    finally:
        stop.terminate = True
        runner.join(WAIT)
    assert not runner.is_alive()


def test_one_binding_two_threads() -> None:
    """A binding that runs refuses every other use of it until it is done (see below for runs)."""
    with binding_in_a_run() as (_, binding):
        for use in (
            binding.get_outputs,
            binding.copy_outputs_to_cpu,
            binding.clear_binding_inputs,
            binding.clear_binding_outputs,
            lambda: binding.bind_cpu_input("x", X),
            lambda: binding.bind_output("y"),
        ):
            with pytest.raises(RuntimeError, match="borrowed"):
                use()


def test_one_binding_two_runs() -> None:
    """A second run of a binding that runs is a RuntimeError."""
    with binding_in_a_run() as (opened, binding), pytest.raises(RuntimeError):
        opened.run_with_iobinding(binding)


def test_terminate() -> None:
    """The flag ends runs of all threads that have it, at any moment; cleared, it lets runs pass."""
    opened, stop = ort.InferenceSession(endless(), providers=[CPU]), ort.RunOptions()
    for number in range(times(20, 200)):
        ended: list[str] = []

        def go() -> None:
            try:
                opened.run(None, one_loop(), stop)
            except RuntimeError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=go, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * (number % 10))
        stop.terminate = True
        for thread in threads:
            thread.join(WAIT)
        assert len(ended) == 3 and all("terminate flag" in text for text in ended)
        stop.terminate = False
        assert opened.run(None, one_loop(3), stop)[0].tolist() == [3]


# Signals.

SIGNALS = """
    import contextlib, signal, threading, time
    opened = ort.InferenceSession(open({endless!r}, "rb").read())
    other = ort.InferenceSession(models.data("scale"))
    product = ort.InferenceSession(open({product!r}, "rb").read())
    FEED = {{"turns": np.array(1 << 60), "x": np.zeros(1, np.float32)}}
    X = {{"x": np.ones(1, np.float32)}}
    stop = ort.RunOptions()

    # A shell's background jobs ignore it, and their children, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(after):
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    def give_up(after):
        timer = threading.Timer(after, lambda: setattr(stop, "terminate", True))
        timer.daemon = True
        timer.start()

    def ended(call):
        try:
            call()
        except BaseException as error:
            return type(error).__name__
        return "returned"

    def every(seconds, handler):
        once(seconds, handler, seconds)

    def once(seconds, handler, again=0):
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, seconds, again)
"""

USABLE = """
    print(other.run(None, X)[0].tolist(), opened.run(None, {**FEED, "turns": np.array(3)})[0].tolist())
"""
BIND = """
    binding = opened.io_binding()
    for name, array in FEED.items():
        binding.bind_cpu_input(name, array)
"""
VALUES = "{k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in FEED.items()}"
NESTED = "cancel.rs interruptibly: the inner run sets NEXT to None, and the outer one polls no more"
POLLS = "interrupt.rs look: CURRENT is borrowed while the poll runs Python code, and a run in it panics"
OTHERS = (
    "cancel.rs: only the calling thread sees the signal; the pool's threads finish their tasks first. "
    "The polling token needs a flag of its own that is set for all"
)

INTERRUPTS = [
    case("run", "interrupt(.3); print(ended(lambda: opened.run(None, FEED)))" + USABLE,
         "KeyboardInterrupt\n[2.0] [3.0]"),
    case("values", f"interrupt(.3); print(ended(lambda: opened.run_with_ort_values(None, {VALUES})))"
         + USABLE, "KeyboardInterrupt\n[2.0] [3.0]"),
    case("binding", BIND + "    interrupt(.3); print(ended(lambda: opened.run_with_iobinding(binding)))\n"
         "    binding.bind_cpu_input('turns', np.array(4)); opened.run_with_iobinding(binding)\n"
         "    print(binding.copy_outputs_to_cpu()[0].tolist())" + USABLE,
         "KeyboardInterrupt\n[4.0]\n[2.0] [3.0]"),
    case("handler_raises", "every(.2, lambda: 1 / 0); print(ended(lambda: opened.run(None, FEED)))\n"
         "    signal.setitimer(signal.ITIMER_REAL, 0)" + USABLE, "ZeroDivisionError\n[2.0] [3.0]"),
    case("handler_drops", "kept = [ort.InferenceSession(models.data('scale'))]\n"
         "    every(.1, kept.clear); interrupt(.4); print(ended(lambda: opened.run(None, FEED)))\n"
         "    signal.setitimer(signal.ITIMER_REAL, 0)" + USABLE, "KeyboardInterrupt\n[2.0] [3.0]"),
    case("handler_runs", "begin = time.time(); give_up(3)\n"
          "    once(.1, lambda: other.run(None, X)); interrupt(.4)\n"
          "    print(ended(lambda: opened.run(None, FEED, stop)), time.time() - begin < 2)",
          "KeyboardInterrupt True"),
    case("handler_runs_in_kernel", "M, seen = np.ones((2500, 2500), np.float32), set()\n"
          "    end = time.time() + 1\n"
          "    every(.1, lambda: seen.add(ended(lambda: other.run(None, X))))\n"
          "    while time.time() < end: product.run(None, {'x': M})\n"
          "    signal.setitimer(signal.ITIMER_REAL, 0)\n"
          "    print(*sorted(seen))", "returned"),
    case("handler_runs_the_binding", BIND + "    seen = set(); give_up(1)\n"
          "    once(.1, lambda: seen.add(ended(lambda: opened.run_with_iobinding(binding, stop))))\n"
          "    ended(lambda: opened.run_with_iobinding(binding, stop))\n"
          "    print(*sorted(seen))", "RuntimeError"),
]  # fmt: skip


def interrupted(code: str) -> str:
    """A script about signals."""
    paths = {}
    for name, make in (("endless", endless), ("product", product)):
        paths[name] = os.path.join(models.folder(), f"{name}.onnx")
        with open(paths[name], "wb") as file:
            file.write(make())
    # It replaces names of paths, before the code with braces of its own is there.
    return textwrap.dedent(SIGNALS).format(**paths) + textwrap.dedent(f"    {code}")


@table("code, expected", INTERRUPTS)
def test_signal(code: str, expected: str) -> None:
    """Ctrl-C and handlers that raise or run end what they interrupt, and the sessions go on."""
    models.path("scale")
    check_script(Gives(expected), interrupted(code), RUST_BACKTRACE="0")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two threads at work")
def test_interrupt_of_all_threads() -> None:
    """A product that takes seconds on two threads ends at once on Ctrl-C."""
    code = """
    def seconds(matrix):
        begin = time.time()
        try:
            product.run(None, {'x': matrix})
        except KeyboardInterrupt:
            pass
        return time.time() - begin
    def square(n):
        return np.ones((n, n), np.float32)
    seconds(square(400))
    # The least of several: other tests must not make the product look slow.
    n = int(1000 * (4 / min(seconds(square(1000)) for _ in range(5))) ** (1 / 3))
    # Before the clock starts: new memory may take half a second.
    matrix = square(min(n, 9000))
    interrupt(.5)
    print(seconds(matrix) < 3)
    """
    models.path("scale")
    check_script(Gives("True"), interrupted(code.strip()))


# Processes.

HEAD = """
import atexit, ctypes, gc, os, random, sys, threading, time, weakref
import numpy as np
import ort_runtime as ort
ort.set_default_logger_severity(4)
X = np.ones(3, np.float32)
def load(name, threads=2):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(open(os.path.join({folder!r}, name + ".onnx"), "rb").read(), options)
def daemons(count, work):
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()
def ever(work):
    def go():
        while True:
            work()
    return go
FOREVER = dict(turns=np.array(1 << 60), x=np.zeros(1, np.float32))
"""


def program(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program without the tests' own modules: what is left at its end is what it made."""
    for name, make in (("endless", endless), ("product", product)):
        place = os.path.join(models.folder(), f"{name}.onnx")
        if not os.path.exists(place):
            with open(place, "wb") as file:
                file.write(make())
    for name in ("scale", "identity"):
        models.path(name)
    with open(os.path.join(models.folder(), "texts.onnx"), "wb") as file:
        file.write(models.data("identity", "string"))
    search = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", HEAD.format(folder=models.folder()) + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": search, "RUST_BACKTRACE": "0", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


ORDERS = """
s = load("scale")
b = s.io_binding()
b.bind_cpu_input("x", X.copy())
v = ort.OrtValue.ortvalue_from_numpy(X.copy())
w = ort.OrtValue.ortvalue_from_shape_and_type([3], np.float32)
b.bind_ortvalue_output("y", w)
s.run_with_iobinding(b)
y = s.run(None, dict(x=X))
r = s.run_with_ort_values(None, dict(x=v))
q = b.get_outputs()
kept = dict(s=s, b=b, v=v, w=w, y=y, r=r, d=np.from_dlpack(r[0]), c=r[0].__dlpack__(), q=q,
            z=q[0].numpy(), o=s.get_session_options(), p=s.plan(n=3), t=ort.RunOptions())
del s, b, v, w, y, r, q
names = list(kept)
random.seed(SEED)
random.shuffle(names)
for name in names[: random.randrange(len(names) + 1)]:
    del kept[name]
if random.random() < 0.5:
    sys.kept = kept
if random.random() < 0.3:
    kept["itself"] = kept
if random.random() < 0.3:
    del kept
"""

ENDS = [
    case("orders", ORDERS, times(4, 200)),
    case("short_runs", "s = load('scale')\n"
         "daemons(4, ever(lambda: s.run(None, dict(x=X))))\ntime.sleep(.003 * (SEED % 17))", times(3, 200)),
    case("products", "s, m = load('product'), np.ones((200, 200), np.float32)\n"
         "daemons(3, ever(lambda: s.run(None, dict(x=m))))\ntime.sleep(.005 * (SEED % 17))", times(2, 200)),
    case("long_runs", "s = load('endless')\n"
         "daemons(3, lambda: s.run(None, FOREVER))\ntime.sleep(.15)", times(2, 200)),
    case("bindings", "s = load('scale')\ndef go():\n    b = s.io_binding()\n    b.bind_cpu_input('x', X)\n"
         "    while True:\n        s.run_with_iobinding(b)\n        b.copy_outputs_to_cpu()\n"
         "daemons(3, go)\ntime.sleep(.005 * (SEED % 17))", times(2, 200)),
    case("strings", "s = load('texts')\nt = np.array(['abc'] * 200, object)\n"
         "sys.setswitchinterval(1e-5)\n"
         "daemons(16, ever(lambda: s.run(None, dict(x=t))))\ntime.sleep(.1)", times(3, 200)),
    case("background", "s = load('scale')\n"
         "for i in range(20): s.run_async(None, dict(x=X), lambda *_: None, None)", times(2, 200)),
    case("background_again", "s = load('scale')\ndef again(results, left, error):\n"
         "    if left: s.run_async(None, dict(x=X), again, left - 1)\n"
         "s.run_async(None, dict(x=X), again, 5)", times(2, 200)),
    case("at_exit", "s = load('product')\nm = np.ones((300, 300), np.float32)\n"
         "atexit.register(lambda: s.run(None, dict(x=m)))\n"
         "atexit.register(lambda: load('scale').run(None, dict(x=X)))", times(2, 200)),
    case("destructor", "class Last:\n    s = load('scale')\n"
         "    def __del__(self): self.s.run(None, dict(x=X))\n"
         "sys.kept = Last()\nLast.s.run(None, dict(x=X))", times(2, 200)),
    case("first_run_in_destructor", "class Last:\n    s = load('scale')\n"
          "    def __del__(self): self.s.run(None, dict(x=X))\nsys.kept = Last()", 1),
    case("finalizer", "s = load('scale')\ny = s.run(None, dict(x=X))[0]\n"
         "weakref.finalize(y, lambda: s.run(None, dict(x=X)))\nsys.kept = s, y", times(2, 200)),
    case("array_protocol", "s = load('scale')\nclass Given:\n"
         "    def __array__(self, dtype=None, copy=None): return X\n"
         "sys.setswitchinterval(1e-5)\n"
         "daemons(16, ever(lambda: s.run(None, dict(x=Given()))))\ntime.sleep(.1)", times(8, 200)),
    case("loads", "sys.setswitchinterval(1e-5)\n"
         "daemons(8, ever(lambda: load('scale')))\ntime.sleep(.1)", times(8, 200)),
    case("stuck", "s = load('scale')\nclass Given:\n"
         "    def __array__(self, dtype=None, copy=None): time.sleep(1000)\n"
         "daemons(1, lambda: s.run(None, dict(x=Given())))\ntime.sleep(.1)", 1),
]  # fmt: skip


@table("code, count", ENDS)
def test_end(code: str, count: int) -> None:
    """The process ends with status 0 and without a word, whatever is dropped last or still runs."""
    for seed in range(count):
        done = program(f"SEED = {seed}\n{code}")
        assert (done.returncode, done.stderr) == (0, ""), f"at {seed}: {done.returncode} {done.stderr}"


def test_end_is_slow() -> None:
    """A run of a daemon thread goes on while other libraries end: it must leave Python alone."""
    done = program(
        """
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc.sleep, ctypes.c_void_p), None)  # It sleeps for the status.
        s = load("endless")
        daemons(2, lambda: s.run(None, FOREVER))
        time.sleep(0.02)
        sys.exit(1)
        """
    )
    assert (done.returncode, done.stderr) == (1, "")


FORKED = """
    import threading, time
    options = ort.SessionOptions()
    options.intra_op_num_threads = {threads}
    s = ort.InferenceSession(models.data("scale"), options)
    x = np.ones(100_000, np.float32)
    s.run(None, {{"x": x}})
    for _ in range({daemons}):
        threading.Thread(target=lambda: [s.run(None, {{"x": x}}) for _ in iter(int, 1)], daemon=True).start()

    def child():
        assert s.run(None, {{"x": x}})[0].sum() == 200_000
        binding = s.io_binding()
        binding.bind_cpu_input("x", x)
        s.run_with_iobinding(binding)
        ort.InferenceSession(models.data("scale"), options).run(None, {{"x": x}})
        done = threading.Event()
        s.run_async(None, {{"x": x}}, lambda *_: done.set(), None)
        assert done.wait(10)
        threads = [threading.Thread(target=lambda: s.run(None, {{"x": x}})) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

    ended = set()
    for _ in range({count}):
        number = os.fork()
        if not number:
            import signal
            signal.alarm(10)
            try:
                child()
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        ended.add(os.waitpid(number, 0)[1])
    print(ended, s.run(None, {{"x": x}})[0].sum() == 200_000)
"""


@table("threads", [case(str(n), n) for n in (1, 2, 4)])
def test_fork(threads: int) -> None:
    """Children of a process that has run go on with the session, with its threads idle."""
    code = FORKED.format(threads=threads, daemons=0, count=times(5, 200))
    check_script(Gives("{0} True"), code)


LEFT = """
    import signal, sys, threading
    x, s = np.ones(3, np.float32), ort.InferenceSession(models.data("scale"))

    def run() -> None:
        done = threading.Event()
        s.run_async(None, {{"x": x}}, lambda *_: done.set(), None)
        assert done.wait(10)

    run()
    ended = set()
    for _ in range({count}):
        number = os.fork()
        if not number:
            signal.alarm(10)
            run()
            sys.exit(0)
        ended.add(os.waitpid(number, 0)[1])
    run()
    print(ended)
"""


def test_fork_and_exit() -> None:
    """A child runs in the background, as its parent did, and leaves through the interpreter."""
    check_script(Gives("{0}"), LEFT.format(count=times(5, 200)))


HELD = """
    import itertools, signal, threading, time
    # Read once: a file that is not closed warns, and a free-threaded CPython 3.14 does not free the
    # lock of warnings in a child.
    model = models.data("scale")
    s = ort.InferenceSession(model)
    rows = np.ones(1 << 16, np.float32)
    meanwhile = {{
        "plans": lambda n: s.plan(n=n),
        "runs": lambda n: s.run(None, {{"x": rows[: 1 + n % rows.size]}}),
        "loads": lambda n: ort.InferenceSession(model),
        "providers": lambda n: ort.get_available_providers(),
    }}["{what}"]

    def use() -> None:
        # Results are not kept: a fork of a process that grows takes longer each time.
        for n in itertools.count(1):
            meanwhile(n)

    for _ in range({threads}):
        threading.Thread(target=use, daemon=True).start()
    time.sleep(1)
    ended = set()
    for _ in range({count}):
        number = os.fork()
        if not number:
            signal.alarm(10)
            s.run(None, {{"x": np.ones(3, np.float32)}})
            t = ort.InferenceSession(model)
            t.run(None, {{"x": np.ones(3, np.float32)}})
            os._exit(0)
        ended.add(os.waitpid(number, 0)[1])
        if ended != {{0}}:
            break
    print(ended)
"""


@table("what", [case(what, what) for what in ("plans", "runs", "loads", "providers")])
def test_fork_meanwhile(what: str) -> None:
    """A fork while another thread uses the package: the child can use it too."""
    code = HELD.format(what=what, threads=2, count=times(20, 300))
    check_script(Gives("{0}"), code)
