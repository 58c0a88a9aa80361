"""run and its relatives: names, feeds, run options, threads, termination."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import models
import numpy as np
from harness import C, Gives, Raises, case, check, f32, options, ort, session, table

A, B = f32(1, 2), f32(10, 20)
FEED = {"a": A, "b": B}
SUM, DIFFERENCE = f32(11, 22), f32(-9, -18)


@table(
    "names, expected",
    [
        case("none", lambda: None, Gives([SUM, DIFFERENCE])),
        case("empty_list", list, Gives([SUM, DIFFERENCE])),
        case("empty_tuple", tuple, Gives([SUM, DIFFERENCE])),
        case("one", lambda: ["sum"], Gives([SUM])),
        case("other_order", lambda: ["difference", "sum"], Gives([DIFFERENCE, SUM])),
        case("twice", lambda: ["sum", "sum"], Gives([SUM, SUM])),
        case("thrice_mixed", lambda: ["sum", "difference", "sum"], Gives([SUM, DIFFERENCE, SUM])),
        case("tuple", lambda: ("sum",), Gives([SUM])),
        case("set", lambda: {"sum"}, Gives([SUM])),
        case("frozen_set", lambda: frozenset(["sum"]), Gives([SUM])),
        case("generator", lambda: (n for n in ["sum"]), Gives([SUM])),
        case("map", lambda: map(str, ["sum"]), Gives([SUM])),
        case("deque", lambda: collections.deque(["sum"]), Gives([SUM])),
        case("keys", lambda: {"sum": 1}.keys(), Gives([SUM])),
        case("array", lambda: np.array(["difference"]), Gives([DIFFERENCE])),
        case("object_array", lambda: np.array(["difference"], object), Gives([DIFFERENCE])),
        case("numpy_str", lambda: [np.str_("sum")], Gives([SUM])),
        case("bytes", lambda: [b"sum"], Gives([SUM])),
        case(
            "from_metadata",
            lambda: [o.name for o in session("two").get_outputs()],
            Gives([SUM, DIFFERENCE]),
        ),
        case("list_iterator", lambda: iter(["sum"]), Gives([SUM])),
        case("empty_text", lambda: "", Gives([SUM, DIFFERENCE])),
        case("bare_str", lambda: "sum", Raises("TypeError")),
        case("bare_bytes", lambda: b"sum", Raises("TypeError")),
        case("int", lambda: 3, Raises("TypeError")),
        case("list_of_int", lambda: [3], Raises("TypeError")),
        case("list_of_none", lambda: [None], Raises("TypeError")),
        case("node_args", lambda: [session("two").get_outputs()[0]], Raises("TypeError")),
        case(
            "unknown",
            lambda: ["zz"],
            Raises("InvalidArgument", "INVALID_ARGUMENT : .*Invalid output name: ?zz"),
        ),
        case(
            "one_unknown",
            lambda: ["sum", "zz"],
            Raises("InvalidArgument", "Invalid output name: ?zz"),
        ),
        case("input", lambda: ["a"], Raises("InvalidArgument", "Invalid output name: ?a")),
        case("empty_name", lambda: [""], Raises("InvalidArgument", "Invalid output name: ?")),
        case("other_case", lambda: ["Sum"], Raises("InvalidArgument", "Invalid output name: ?Sum")),
    ],
)
def test_names(names: Callable[[], Any], expected: Any) -> None:
    """The first argument: which outputs, in which order."""
    given = names()
    check(expected, lambda: session("two").run(given, FEED))


class Duck:
    """Has keys, values and items, and is no Mapping by registration."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.held = values

    def keys(self) -> Any:
        return self.held.keys()

    def values(self) -> Any:
        return self.held.values()

    def items(self) -> Any:
        return self.held.items()


class Mapping(collections.abc.Mapping):
    """A Mapping by inheritance."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.held = values

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


NO_KEYS = "has no attribute 'keys'"


@table(
    "feed, expected",
    [
        case("dict", lambda: FEED, Gives([SUM])),
        case("other_order", lambda: {"b": B, "a": A}, Gives([SUM])),
        case("ordered", lambda: collections.OrderedDict(FEED), Gives([SUM])),
        case("default_dict", lambda: collections.defaultdict(list, FEED), Gives([SUM])),
        case("user_dict", lambda: collections.UserDict(FEED), Gives([SUM])),
        case("proxy", lambda: types.MappingProxyType(FEED), Gives([SUM])),
        case("chain", lambda: collections.ChainMap({"a": A}, {"b": B}), Gives([SUM])),
        case("mapping", lambda: Mapping(FEED), Gives([SUM])),
        case("numpy_str_keys", lambda: {np.str_("a"): A, np.str_("b"): B}, Gives([SUM])),
        case("same_array_twice", lambda: {"a": A, "b": A}, Gives([f32(2, 4)])),
        case("extra_none", lambda: {**FEED, "q": None}, Gives([SUM])),
        case("duck", lambda: Duck(FEED), Gives([SUM])),
        case(
            "empty",
            dict,
            Raises(
                "ValueError",
                r"Required inputs \(\['a', 'b'\]\) are missing from input feed \(\[\]\)\.",
            ),
        ),
        case(
            "one_missing",
            lambda: {"a": A},
            Raises(
                "ValueError",
                r"Required inputs \(\['b'\]\) are missing from input feed \(\['a'\]\)\.",
            ),
        ),
        case(
            "other_case",
            lambda: {"a": A, "B": B},
            Raises(
                "ValueError",
                r"Required inputs \(\['b'\]\) are missing from input feed \(\['a', 'B'\]\)\.",
            ),
        ),
        case("bytes_keys", lambda: {b"a": A, b"b": B}, Raises("ValueError", "Required inputs")),
        case("int_keys", lambda: {0: A, 1: B}, Raises("ValueError", "Required inputs")),
        case(
            "extra",
            lambda: {**FEED, "q": A},
            Raises("InvalidArgument", "INVALID_ARGUMENT : .*Invalid input name: q"),
        ),
        case(
            "extra_output",
            lambda: {**FEED, "sum": A},
            Raises("InvalidArgument", "Invalid input name: sum"),
        ),
        case("extra_int_key", lambda: {**FEED, 3: A}, Raises("TypeError")),
        case("extra_none_key", lambda: {**FEED, None: A}, Raises("TypeError")),
        case("list", lambda: [A, B], Raises("AttributeError", NO_KEYS)),
        case("pairs", lambda: list(FEED.items()), Raises("AttributeError", NO_KEYS)),
        case("none", lambda: None, Raises("AttributeError", NO_KEYS)),
        case("array", lambda: A, Raises("AttributeError", NO_KEYS)),
        case("str", lambda: "a", Raises("AttributeError", NO_KEYS)),
    ],
)
def test_feed(feed: Callable[[], Any], expected: Any) -> None:
    """The second argument: a mapping of names to values."""
    given = feed()
    check(expected, lambda: session("two").run(["sum"], given))


@table(
    "call, expected",
    [
        case(
            "keywords",
            lambda s: s.run(output_names=["sum"], input_feed=FEED, run_options=None),
            Gives([SUM]),
        ),
        case("positions", lambda s: s.run(["sum"], FEED, None), Gives([SUM])),
        case("no_arguments", lambda s: s.run(), Raises("TypeError", "output_names.*input_feed")),
        case("one_argument", lambda s: s.run(None), Raises("TypeError", "input_feed")),
        case("four_arguments", lambda s: s.run(None, FEED, None, None), Raises("TypeError")),
        case("unknown_keyword", lambda s: s.run(None, FEED, options=None), Raises("TypeError")),
        case("options_dict", lambda s: s.run(None, FEED, {}), Raises("TypeError")),
        case("options_str", lambda s: s.run(None, FEED, "x"), Raises("TypeError")),
        case("options_false", lambda s: s.run(None, FEED, False), Raises("TypeError")),
        case("options_class", lambda s: s.run(None, FEED, ort.RunOptions), Raises("TypeError")),
        case(
            "session_options",
            lambda s: s.run(None, FEED, ort.SessionOptions()),
            Raises("TypeError"),
        ),
    ],
)
def test_signature(call: Callable[[Any], Any], expected: Any) -> None:
    """Arguments of run by place and by name."""
    check(expected, lambda: call(session("two")))


@table(
    "feed, expected",
    [
        case("empty", {}, Gives([f32(2, 4)])),
        case("extra", {"x": A}, Raises("InvalidArgument", "Invalid input name: x")),
    ],
)
def test_no_inputs(feed: dict[str, Any], expected: Any) -> None:
    """A model without inputs."""
    check(expected, lambda: session("no_inputs").run(None, feed))


@table(
    "feed, expected",
    [
        case("default", {"x": A}, Gives([f32(11, 22)])),
        case("override", {"x": A, "w": B}, Gives([SUM])),
        case("none_is_default", {"x": A, "w": None}, Gives([f32(11, 22)])),
        case(
            "other_type",
            {"x": A, "w": np.ones(2)},
            Raises(
                "InvalidArgument", r"Actual: \(tensor\(double\)\) , expected: \(tensor\(float\)\)"
            ),
        ),
        case(
            "other_shape",
            {"x": A, "w": f32(1, 2, 3)},
            Raises(
                "InvalidArgument",
                "Got invalid dimensions for input: w .* index: 0 Got: 3 Expected: 2",
            ),
        ),
        case(
            "only_the_weight",
            {"w": B},
            Raises(
                "ValueError", r"Required inputs \(\['x'\]\) are missing from input feed \(\['w'\]\)"
            ),
        ),
    ],
)
def test_overridable_initializer(feed: dict[str, Any], expected: Any) -> None:
    """An initializer that is a graph input may be fed."""
    check(expected, lambda: session("overridable").run(None, feed))


@table(
    "name, names, feed, expected",
    [
        case(
            "constant_weight_fed",
            "add_one",
            None,
            {"x": np.ones((1, 3), np.float32), "one": f32(1, 1, 1)},
            Raises("InvalidArgument", "Invalid input name: one"),
        ),
        case(
            "weight_fetched",
            "add_one",
            ["one"],
            {"x": np.ones((1, 3), np.float32)},
            Raises("InvalidArgument", "Invalid output name: ?one"),
        ),
        case("input_fetched", "input_output", ["x"], {"x": A}, Gives([A])),
        case("weight_output_fetched", "weight_output", ["w"], {"x": A}, Gives([f32(5, 6)])),
    ],
)
def test_which_values(name: str, names: Any, feed: dict[str, Any], expected: Any) -> None:
    """Only graph inputs are fed, only graph outputs are fetched."""
    check(expected, lambda: session(name).run(names, feed))


STATUS = r"Non-zero status code returned while running {} node\. Name:'{}' Status Message: "


@table(
    "name, feed, expected",
    [
        case(
            "index",
            "gather",
            {"i": np.array([9])},
            Raises(
                "InvalidArgument",
                r"^\[ONNXRuntimeError\] : 2 : INVALID_ARGUMENT : .*" + STATUS.format("Gather", "pick"),
            ),
        ),
        case(
            "negative_index",
            "gather",
            {"i": np.array([-5])},
            Raises("InvalidArgument", STATUS.format("Gather", "pick")),
        ),
        case("right_index", "gather", {"i": np.array([3, -4])}, Gives([f32(3, 0)])),
        case(
            "reshape",
            "reshape",
            {"x": f32(1, 2, 3), "s": np.array([4])},
            Raises(
                "Fail",
                r"^\[ONNXRuntimeError\] : 1 : FAIL : .*" + STATUS.format("Reshape", "reshape"),
            ),
        ),
        case(
            "right_reshape",
            "reshape",
            {"x": f32(1, 2, 3), "s": np.array([3, -1])},
            Gives([f32(1, 2, 3).reshape(3, 1)]),
        ),
        case(
            "too_large",
            "expand",
            {"x": f32(1), "s": np.array([1 << 45])},
            Raises("Fail", STATUS.format("Expand", "expand")),
        ),
        case(
            "beyond_64_bits",
            "expand",
            {"x": f32(1), "s": np.array([1 << 62, 1 << 62])},
            Raises("Fail", STATUS.format("Expand", "expand")),
        ),
        case("broadcast", "two", {"a": A, "b": f32(1, 2, 3)}, Raises(("Fail", "InvalidArgument"))),
    ],
)
def test_failure_at_run(name: str, feed: dict[str, Any], expected: Any) -> None:
    """Errors of kernels carry class, operator and node name."""
    check(expected, lambda: session(name).run(None, feed))


def after_failure(name: str, bad: dict[str, Any], good: dict[str, Any]) -> list[Any]:
    for _ in range(3):
        try:
            session(name).run(None, bad)
        except Exception:
            continue
        raise AssertionError("no failure")
    return session(name).run(None, good)


@table(
    "name, bad, good, expected",
    [
        case("kernel", "gather", {"i": np.array([9])}, {"i": np.array([1])}, Gives([f32(1)])),
        case(
            "memory",
            "expand",
            {"x": f32(1), "s": np.array([1 << 45])},
            {"x": f32(1), "s": np.array([2])},
            Gives([f32(1, 1)]),
        ),
        case("type", "scale", {"x": np.ones(2)}, {"x": A}, Gives([f32(2, 4)])),
        case("missing", "scale", {}, {"x": A}, Gives([f32(2, 4)])),
    ],
)
def test_session_survives(name: str, bad: dict[str, Any], good: dict[str, Any], expected: Any) -> None:
    """A session is usable after an error, running out of memory included."""
    check(expected, lambda: after_failure(name, bad, good))


# Relatives of run.


def value(array: np.ndarray) -> Any:
    """An OrtValue of an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def with_values(names: Any, feed: dict[str, Any], *rest: Any) -> list[np.ndarray]:
    return [v.numpy() for v in session("two").run_with_ort_values(names, feed, *rest)]


@table(
    "call, expected",
    [
        case(
            "all",
            lambda: with_values(None, {"a": value(A), "b": value(B)}),
            Gives([SUM, DIFFERENCE]),
        ),
        case(
            "empty_is_all",
            lambda: with_values([], {"a": value(A), "b": value(B)}),
            Gives([SUM, DIFFERENCE]),
        ),
        case(
            "one",
            lambda: with_values(["difference"], {"a": value(A), "b": value(B)}),
            Gives([DIFFERENCE]),
        ),
        case(
            "options",
            lambda: with_values(["sum"], {"a": value(A), "b": value(B)}, ort.RunOptions()),
            Gives([SUM]),
        ),
        case(
            "kind",
            lambda: [type(v) is ort.OrtValue for v in session("scale").run_with_ort_values(None, {"x": value(A)})],
            Gives([True]),
        ),
        case(
            "fed_again",
            lambda: session("scale").run_with_ort_values(None, {"x": session("scale").run_with_ort_values(None, {"x": value(A)})[0]})[0].numpy(),
            Gives(f32(4, 8)),
        ),
        case(
            "missing",
            lambda: with_values(None, {"a": value(A)}),
            Raises(
                "ValueError", r"Required inputs \(\['b'\]\) are missing from input feed \(\['a'\]\)"
            ),
        ),
        case(
            "extra",
            lambda: with_values(None, {"a": value(A), "b": value(B), "q": value(A)}),
            Raises("InvalidArgument", "Invalid input name: q"),
        ),
        case(
            "unknown_output",
            lambda: with_values(["zz"], {"a": value(A), "b": value(B)}),
            Raises("InvalidArgument", "Invalid output name: ?zz"),
        ),
        case(
            "other_type",
            lambda: with_values(None, {"a": value(A), "b": value(np.ones(2))}),
            Raises(
                "InvalidArgument", r"Actual: \(tensor\(double\)\) , expected: \(tensor\(float\)\)"
            ),
        ),
        case("arrays", lambda: with_values(["sum"], FEED), Gives([SUM])),
        case(
            "native_values",
            lambda: with_values(["sum"], {"a": value(A)._ortvalue, "b": value(B)._ortvalue}),
            Gives([SUM]),
        ),
    ],
)
def test_run_with_ort_values(call: Callable[[], Any], expected: Any) -> None:
    """OrtValues in, OrtValues out."""
    check(expected, call)


def vectors() -> list[Any]:
    feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
    feeds.push_back(value(A)._ortvalue)
    feeds.push_back(value(B)._ortvalue)
    device = ort.OrtDevice.make("cpu", 0)._get_c_device()
    session("two").run_with_ortvaluevector(
        ort.RunOptions(), ["a", "b"], feeds, ["difference", "sum"], fetches, [device, device]
    )
    return [fetches[i].numpy() for i in range(len(fetches))]


def asynchronous(names: Any, feed: dict[str, Any], threads: int = 2) -> list[Any]:
    """Results, user data, error text, and whether another thread called back."""
    called = threading.Event()
    got: list[Any] = []

    def back(results: Any, user_data: Any, error: str) -> None:
        got.extend([results, user_data, error, threading.current_thread() is not threading.main_thread()])
        called.set()

    made = session_of_threads(threads)
    returned = made.run_async(names, feed, back, "mine")
    assert returned is None and called.wait(60)
    return got


def session_of_threads(count: int) -> Any:
    return ort.InferenceSession(models.data("two"), options(intra_op_num_threads=count))


def failed(got: list[Any], word: str) -> list[Any]:
    results, user_data, error, _ = got
    return [results, user_data, word in error, error.startswith("[ONNXRuntimeError]")]


@table(
    "call, expected",
    [
        case("vectors", vectors, Gives([DIFFERENCE, SUM])),
        case("async", lambda: asynchronous(["sum"], FEED), Gives([[SUM], "mine", "", True])),
        case(
            "async_all",
            lambda: asynchronous(None, FEED),
            Gives([[SUM, DIFFERENCE], "mine", "", True]),
        ),
        case(
            "async_missing",
            lambda: asynchronous(None, {"a": A}),
            Raises("ValueError", r"Required inputs \(\['b'\]\)"),
        ),
        case(
            "async_unknown",
            lambda: failed(asynchronous(["zz"], FEED), "Invalid output name:"),
            Gives([[], "mine", True, False]),
        ),
        case(
            "async_type",
            lambda: failed(
                asynchronous(None, {"a": A, "b": np.ones(2)}), "Unexpected input data type"
            ),
            Gives([[], "mine", True, False]),
        ),
        case(
            "async_one_thread",
            lambda: asynchronous(["sum"], FEED, 1),
            Gives([[SUM], "mine", "", True]),
        ),
    ],
)
def test_relatives(call: Callable[[], Any], expected: Any) -> None:
    """run_with_ortvaluevector and run_async."""
    check(expected, call)


# Run options that act.


def run_options(*entries: tuple[str, str], **values: Any) -> Any:
    made = ort.RunOptions()
    for key, given in values.items():
        setattr(made, key, given)
    for key, given in entries:
        made.add_run_config_entry(key, given)
    return made


SHRINK = "memory.enable_memory_arena_shrinkage"


@table(
    "make, expected",
    [
        case("fresh", run_options, Gives([SUM])),
        case("log_id", lambda: run_options(logid="me"), Gives([SUM])),
        case("only_path", lambda: run_options(only_execute_path_to_fetches=True), Gives([SUM])),
        case("severity", lambda: run_options(log_severity_level=4), Gives([SUM])),
        case("no_severity", lambda: run_options(log_severity_level=5), Raises("Fail", "severity")),
        case("below_all", lambda: run_options(log_severity_level=-2), Raises("Fail", "severity")),
        case("unknown_key", lambda: run_options(("foo.bar", "1")), Gives([SUM])),
        case("no_graph", lambda: run_options(("gpu_graph_id", "-1")), Gives([SUM])),
        case(
            "no_synchronization",
            lambda: run_options(("disable_synchronize_execution_providers", "1")),
            Gives([SUM]),
        ),
        case("shrink", lambda: run_options((SHRINK, "cpu:0")), Gives([SUM])),
        case("shrink_no_id", lambda: run_options((SHRINK, "cpu")), Gives([SUM])),
        case("shrink_twice", lambda: run_options((SHRINK, "cpu:0;cpu:0")), Gives([SUM])),
        case("shrink_one_absent", lambda: run_options((SHRINK, "cpu:0;gpu:0")), Gives([SUM])),
        case("shrink_absent_first", lambda: run_options((SHRINK, "gpu:0;cpu:0")), Gives([SUM])),
        case("shrink_semicolon", lambda: run_options((SHRINK, "cpu:0;")), Gives([SUM])),
        case("shrink_nothing", lambda: run_options((SHRINK, "")), Gives([SUM])),
        case(
            "shrink_unknown",
            lambda: run_options((SHRINK, "foo:0")),
            Raises(
                "InvalidArgument",
                "Unsupported device specified in the memory arena shrink list: foo",
            ),
        ),
        case(
            "shrink_bad_id",
            lambda: run_options((SHRINK, "cpu:x")),
            Raises("InvalidArgument", "Unsupported device id in the memory arena shrink list: x"),
        ),
        case(
            "shrink_absent",
            lambda: run_options((SHRINK, "gpu:0")),
            Raises(
                "InvalidArgument",
                "Did not find an arena based allocator registered for device-id combination in the memory arena shrink list: gpu:0",
            ),
        ),
        case(
            "terminated",
            lambda: run_options(terminate=True),
            Raises(
                "Fail",
                r"^\[ONNXRuntimeError\] : 1 : FAIL : .*Exiting due to terminate flag being set to true\.",
            ),
        ),
    ],
)
def test_run_options(make: Callable[[], Any], expected: Any) -> None:
    """Run options of a run."""
    made = make()
    check(expected, lambda: session("two").run(["sum"], FEED, made))


# Threads and termination.

LONG = 2_000_000_000  # Additions of a loop that nobody waits for.


def terminated(call: str = "run") -> list[Any]:
    """Ends a long run from another thread; the flag stays set until it is cleared."""
    flag = ort.RunOptions()
    seen: list[BaseException] = []

    def work() -> None:
        try:
            if call == "run":
                session("slow", LONG).run(None, {"x": f32(0)}, flag)
            else:
                session("slow", LONG).run_with_ort_values(None, {"x": value(f32(0))}, flag)
        except Exception as error:
            seen.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    time.sleep(0.1)
    flag.terminate = True
    worker.join(60)
    ended = "Exiting due to terminate flag being set to true" in str(seen[0])
    again = None
    try:
        session("scale").run(None, {"x": A}, flag)
    except C.Fail as error:
        again = "terminate flag" in str(error)
    flag.terminate = False
    return [type(seen[0]) is C.Fail, ended, again, session("scale").run(None, {"x": A}, flag)[0]]


def ticks_meanwhile() -> bool:
    """Python goes on while a run computes: it does not hold the GIL."""
    flag = ort.RunOptions()

    def work() -> None:
        with contextlib.suppress(Exception):
            session("slow", LONG).run(None, {"x": f32(0)}, flag)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    count, end = 0, time.monotonic() + 0.3
    while time.monotonic() < end:
        time.sleep(0.001)
        count += 1
    flag.terminate = True
    worker.join(60)
    return count > 20


def in_threads(count: int, each: Callable[[int], bool]) -> bool:
    """Whether `each(i)` is true on `count` threads at once."""
    results: list[bool] = []
    gate = threading.Barrier(count)

    def work(i: int) -> None:
        gate.wait()
        results.append(all(each(i) for _ in range(50)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return len(results) == count and all(results)


SHARED = np.arange(1000, dtype=np.float32)


def own_array(i: int) -> bool:
    x = np.full(100 + i, i, np.float32)
    return bool((session("scale").run(None, {"x": x})[0] == 2 * x).all())


def one_array(i: int) -> bool:
    return bool((session("scale").run(None, {"x": SHARED})[0] == 2 * SHARED).all())


def own_options(i: int) -> bool:
    x = np.full(10, i, np.float32)
    return bool((session("scale").run(None, {"x": x}, ort.RunOptions())[0] == 2 * x).all())


def some_fail(i: int) -> bool:
    if i % 2:
        return own_array(i)
    try:
        session("scale").run(None, {"x": np.ones(2)})
    except C.InvalidArgument:
        return True
    return False


def some_terminate(i: int) -> bool:
    if i % 2:
        return own_array(i)
    try:
        session("scale").run(None, {"x": A}, run_options(terminate=True))
    except C.Fail:
        return True
    return False


def text(i: int) -> bool:
    words = np.array([f"{i}-{j}" for j in range(20)])
    return session("identity", "string").run(None, {"x": words})[0].tolist() == words.tolist()


def metadata(i: int) -> bool:
    return session("two").get_inputs()[0].name == "a" and session("two").get_providers()[-1].startswith("CPU")


@table(
    "act, expected",
    [
        case("terminate", terminated, Gives([True, True, True, f32(2, 4)])),
        case(
            "terminate_values",
            lambda: terminated("values"),
            Gives([True, True, True, f32(2, 4)]),
        ),
        case("gil", ticks_meanwhile, Gives(True)),
        case("own_arrays", lambda: in_threads(4, own_array), Gives(True)),
        case("one_array", lambda: in_threads(4, one_array), Gives(True)),
        case("own_options", lambda: in_threads(4, own_options), Gives(True)),
        case("failures", lambda: in_threads(4, some_fail), Gives(True)),
        case("terminations", lambda: in_threads(4, some_terminate), Gives(True)),
        case("strings", lambda: in_threads(4, text), Gives(True)),
        case("metadata", lambda: in_threads(4, metadata), Gives(True)),
        case("many", lambda: in_threads(16, own_array), Gives(True)),
    ],
)
def test_threads(act: Callable[[], Any], expected: Any) -> None:
    """One session, many threads."""
    check(expected, act)
