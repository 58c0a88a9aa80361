"""`run_async`, threads, the GIL and the terminate flag."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, Raises, row, run_program, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)

SQUARES = (A * A).tolist()
WAIT = 20


def threads(ort: ModuleType, number: int) -> Any:
    """Returns SessionOptions with that many threads, which sleep when idle."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = number
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def later(feed: Any, names: Any = None, *, data: Any = "mine", model: str = "square",
          number: int = 2, options: Any = None) -> Any:
    """Returns a call: what the callback of `run_async` was given."""

    def call(ort: ModuleType) -> Any:
        opened = session(ort, model, threads(ort, number))
        came, got = threading.Event(), []

        def callback(results: Any, user_data: Any, error: str) -> None:
            got.extend([[r.tolist() for r in results], user_data, error, threading.get_ident()])
            came.set()

        given = feed(ort) if callable(feed) else feed
        run_options = options(ort) if options else None
        assert opened.run_async(names, given, callback, data, run_options) is None
        assert came.wait(WAIT)
        assert got.pop() != threading.get_ident()
        return got

    return call


def stopped(ort: ModuleType) -> Any:
    options = ort.RunOptions()
    options.terminate = True
    return options


DONE = [[SQUARES], "mine", ""]
DTYPE = "Unexpected input data type. Actual: (tensor(double)) , expected: (tensor(float))"

LATER = [
    row("all_outputs", later({"x": A}), DONE),
    row("no_names", later({"x": A}, []), DONE),
    row("names", later({"x": A}, ["y"]), DONE),
    row("list", later({"x": A.tolist()}), DONE),
    row("ort_value", later(lambda o: {"x": value(o, A)}), DONE),
    row("options", later({"x": A}, options=lambda o: o.RunOptions()), DONE),
    row("no_data", later({"x": A}, data=None), [[SQUARES], None, ""]),
    row("two_outputs", later({"a": A[0], "b": A[1]}, model="two"),
        [[(A[0] + A[1]).tolist(), (A[0] - A[1]).tolist()], "mine", ""]),
    row("strings", later({"x": np.array(["a", "b"])}, model="strings"), [[["a", "b"]], "mine", ""]),
    row("one_thread", later({"x": A}, number=1), DONE),
    row("dtype", later({"x": A.astype(float)}), [[], "mine", DTYPE]),
    row("unknown_input", later({"x": A, "q": A}), [[], "mine", "Invalid input name: q"]),
    row("terminated", later({"x": A}, options=stopped),
        [[], "mine", "Exiting due to terminate flag being set to true."]),
    row("missing", later({}), Raises("ValueError", r"Required inputs \(\['x'\]\) are missing")),
    row("not_callable",
        lambda o: session(o, "square", threads(o, 2)).run_async(None, {"x": A}, 3, 0),
        Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), LATER)
def test_run_async(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize(
    ("feed", "names", "text"),
    [
        row("rank", {"x": A[0]}, None, "Invalid rank for input: x Got: 1 Expected: 2"),
        row("dimension", {"x": A[:, :2].copy()}, None, "Got invalid dimensions for input: x"),
        row("output", {"x": A}, ["zz"], "Invalid output name:"),
    ],
)
def test_error_text(ort: ModuleType, feed: Any, names: Any, text: str):
    results, _, error = later(feed, names)(ort)
    assert results == [] and error.startswith(text)


def test_feed_is_kept(ort: ModuleType):
    opened = session(ort, "square", threads(ort, 2))
    came, got = threading.Event(), []

    def callback(results: Any, _: Any, error: str) -> None:
        got.append((results[0][0].tolist(), error))
        came.set()

    opened.run_async(None, {"x": np.full((1, 3), 3, np.float32)}, callback, None)
    del opened
    assert came.wait(WAIT) and got == [([9, 9, 9], "")]


def test_many_async_runs(ort: ModuleType):
    opened = session(ort, "square", threads(ort, 2))
    left, lock, done = [50], threading.Lock(), threading.Event()
    sums: dict[int, float] = {}

    def callback(results: Any, number: int, _: str) -> None:
        with lock:
            sums[number] = float(results[0].sum())
            left[0] -= 1
            if not left[0]:
                done.set()

    for i in range(50):
        opened.run_async(None, {"x": np.full((1, 3), i, np.float32)}, callback, i)
    assert done.wait(WAIT) and sums == {i: 3.0 * i * i for i in range(50)}


def test_async_runs_share_threads(ort: ModuleType):
    """Runs that follow each other start few threads, and leave few."""
    opened, before = session(ort, "square", threads(ort, 2)), threading.active_count()
    used = set()
    for i in range(200):
        done = threading.Event()

        def callback(*_: Any, done: threading.Event = done) -> None:
            used.add(threading.get_native_id())
            done.set()

        opened.run_async(None, {"x": np.full((1, 3), i, np.float32)}, callback, None)
        assert done.wait(WAIT)
    assert len(used) <= 32 and threading.active_count() <= before + 32


def test_callback_that_raises(ort: ModuleType, monkeypatch: pytest.MonkeyPatch):
    seen, reported = [], threading.Event()

    def hook(unraisable: Any) -> None:
        seen.append(repr(unraisable.exc_value))
        reported.set()

    monkeypatch.setattr(sys, "unraisablehook", hook)
    opened = session(ort, "square", threads(ort, 2))

    def callback(*_: Any) -> None:
        raise ValueError("in the callback")

    opened.run_async(None, {"x": A}, callback, None)
    assert reported.wait(WAIT) and seen == ["ValueError('in the callback')"]
    assert opened.run(None, {"x": A})[0].tolist() == SQUARES


REPORTED = """
import io, sys
reports = sys.stderr = io.StringIO()
options = ort.SessionOptions()
options.intra_op_num_threads = 2
opened = ort.InferenceSession("square.onnx", options)
def callback(*_):
    raise ValueError("in the callback")
opened.run_async(None, {"x": np.ones((1, 3), np.float32)}, callback, None)
while "in the callback" not in reports.getvalue().rpartition("ValueError")[2]:
    pass
print(reports.getvalue().count("Exception ignored in"), reports.getvalue().count("Traceback"))
"""


def test_callback_that_raises_is_reported(ort: ModuleType, tmp_path: Path):
    """Python's own hook takes nothing but what the interpreter hands it."""
    assert run_program(ort, tmp_path, REPORTED, "square") == "1 1"


@pytest.mark.parametrize("number", [1, 2, 4])
def test_one_session_many_threads(ort: ModuleType, number: int):
    opened = session(ort, "square", threads(ort, number))

    def go(i: int) -> float:
        return float(opened.run(None, {"x": np.full((2, 3), i, np.float32)})[0].sum())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(go, range(100))) == [6.0 * i * i for i in range(100)]


def test_one_array_many_threads(ort: ModuleType):
    opened = session(ort, "square", threads(ort, 1))
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: opened.run(None, {"x": A})[0].tolist(), range(40)))
    assert outputs == [SQUARES] * 40


def test_sessions_made_in_threads(ort: ModuleType):
    def go(i: int) -> float:
        opened = session(ort, "square", threads(ort, 1))
        return float(opened.run(None, {"x": np.full((1, 3), i, np.float32)})[0].sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(go, range(12))) == [3.0 * i * i for i in range(12)]


def test_terminate_from_another_thread(ort: ModuleType):
    """The run never ends by itself; meanwhile this thread has the GIL."""
    opened = session(ort, "loop", threads(ort, 1))
    options, errors = ort.RunOptions(), []

    def go() -> None:
        try:
            opened.run(None, {"n": np.array(2**60), "x": A[0, :2].copy()}, options)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    runner = threading.Thread(target=go, daemon=True)
    runner.start()
    runner.join(0.3)
    ticks = sum(1 for _ in range(100_000))
    assert ticks == 100_000 and runner.is_alive()
    options.terminate = True
    runner.join(WAIT)
    assert not runner.is_alive() and len(errors) == 1
    assert type(errors[0]).__name__ == "Fail"
    assert "Exiting due to terminate flag being set to true." in str(errors[0])
    assert options.terminate is True


def test_terminate_stays_set(ort: ModuleType):
    opened, options = session(ort, "square"), ort.RunOptions()
    options.terminate = True
    for _ in range(2):
        with pytest.raises(Exception, match="Exiting due to terminate flag") as caught:
            opened.run(None, {"x": A}, options)
        assert type(caught.value).__name__ == "Fail"
    options.terminate = False
    assert opened.run(None, {"x": A}, options)[0].tolist() == SQUARES


INTERRUPT = """
s = ort.InferenceSession('loop.onnx')
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    s.run(None, {'n': np.array(2**60), 'x': np.ones(2, np.float32)})
except KeyboardInterrupt:
    print('KeyboardInterrupt', flush=True)
os._exit(0)
"""


def test_keyboard_interrupt(request: Any, ort: ModuleType, tmp_path: Path):
    def call(o: ModuleType) -> str:
        return run_program(o, tmp_path, INTERRUPT, "loop", timeout=8)

    check(request, ort, call, "KeyboardInterrupt")
