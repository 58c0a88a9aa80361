"""Plans, memory in use, `check` and `compile`: what ours has besides onnxruntime's names."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from harness import CPU, IS_ORIGINAL, Gives, Raises, case, check, options, ort, table
from more_models import MODELS, data

pytestmark = pytest.mark.skipif(IS_ORIGINAL, reason="the original plans nothing")

#: The keys of `ort plan --json`.
KEYS = {
    "batch_split", "dims", "file_order_peak_bytes", "fits", "kinds", "lower_bound_bytes",
    "peak_bytes", "peak_step", "planned_bytes", "steps", "symbolic_peak", "unsplit", "values",
    "weights_bytes",
}  # fmt: skip


def proto(text: str) -> onnx.ModelProto:
    """Parses a graph in ONNX's textual syntax."""
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]>\n' + text)


def opened(model: Any = None, level: str = "ORT_DISABLE_ALL", **values: Any) -> Any:
    """Returns a session; without a model, on four elementwise nodes over [n, 1000]."""
    level = getattr(ort.GraphOptimizationLevel, level)
    made = options(graph_optimization_level=level, **values)
    return ort.InferenceSession(model or data("wide"), made, providers=[CPU])


def run(session: Any, rows: int) -> None:
    """Runs a session of [n, 1000] and drops the result."""
    session.run(None, {"x": np.ones((rows, 1000), np.float32)})


# Plans.


@table("level", [case(level, level) for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")])
def test_peak_is_what_a_run_takes(level: str):
    session = opened(level=level)
    for rows in (1, 8, 100):
        planned = session.plan(n=rows).peak_bytes
        run(session, rows)
        assert session.memory_use()["activations_peak"] == planned
    assert planned >= 100 * 1000 * 4


def test_sizes_are_given_in_two_ways():
    session = opened()
    assert session.plan().to_dict() == session.plan(n=1).to_dict()
    assert session.plan({"n": 8}).to_dict() == session.plan(n=8).to_dict()
    assert session.plan({"n": 8}, n=9).to_dict()["dims"] == {"n": 9}
    assert session.plan(n=8).peak_bytes > session.plan(n=1).peak_bytes


REFUSED_SIZES = [
    case("unknown", {"m": 1}, Raises("InvalidArgument", "'m'.*n")),
    case("negative", {"n": -1}, Raises("InvalidArgument", "expected 0 or more")),
    case("text", {"n": "8"}, Raises("TypeError")),
    case("fraction", {"n": 1.5}, Raises("TypeError")),
]


@table("sizes, expected", REFUSED_SIZES)
def test_refused_sizes(sizes: dict[str, Any], expected: Raises):
    check(expected, lambda: opened().plan(sizes))


def test_table():
    plan = opened().plan(n=8)
    text = str(plan)
    lines = text.splitlines()
    assert lines[0] == "dimensions        n=8"
    assert re.fullmatch(rf"activations peak  [\d.]+ KiB \({plan.peak_bytes} bytes\)", lines[1])
    for words in ("in file order", "lower bound", "steps             4, the peak at"):
        assert words in text, words
    for header in (r"kind +bytes +symbolic", r"alive at the peak +bytes +share"):
        assert re.search(header, text), text
    assert "\x1b" not in text


def test_table_with_a_limit():
    text = str(opened(memory_limit="1 MiB").plan(n=8))
    assert re.search(r"^memory limit      1\.0 MiB, .* it fits$", text, re.MULTILINE), text


def test_short_text():
    assert re.fullmatch(r"<Plan peak \d+\.\d KiB, n=8>", repr(opened().plan(n=8)))
    fixed = ort.InferenceSession(data("fixed"), providers=[CPU])
    assert re.fullmatch(r"<Plan peak \d+ B>", repr(fixed.plan()))


def test_dict():
    plan = opened().plan(n=8)
    found = plan.to_dict()
    assert set(found) == KEYS and json.loads(json.dumps(found)) == found
    assert (found["dims"], found["peak_bytes"], found["fits"]) == ({"n": 8}, plan.peak_bytes, True)
    assert [step["op"] for step in found["steps"]] == ["Mul", "Exp", "Add", "Sub"]
    for value in found["values"]:
        assert set(value) == {"name", "bytes", "offset", "first_step", "last_step", "kind"}
        assert value["kind"] in ("planned", "view", "in_place", "dynamic")
    kinds = ("activations", "workspaces", "outputs", "gaps")
    assert sum(found["kinds"][kind]["bytes"] for kind in kinds) == plan.peak_bytes
    assert found["kinds"]["outputs"]["bytes"] == 8 * 1000 * 4


def test_drawing():
    plan = opened().plan(n=8)
    drawing = plan.to_svg()
    assert plan._repr_svg_() == drawing
    root = xml.etree.ElementTree.fromstring(drawing)
    texts = ["".join(node.itertext()).strip() for node in root.iter()]
    assert root.tag.endswith("svg") and "Memory of wide" in texts
    assert any(text.startswith("n=8: peak ") for text in texts)


def test_sizes_that_only_the_run_tells():
    model = proto(
        "found (float[n] x) => (int64[1,k] y) { a = Neg(x)\n b = NonZero(a)\n y = Add(b, b) }"
    )
    plan = opened(model).plan(n=8)
    assert plan.peak_bytes is None and plan.to_dict()["peak_bytes"] is None
    assert repr(plan).startswith("<Plan peak at least ")
    assert "some value sizes depend on data and are not included" in str(plan)


# The largest batch, and memory in use.


def test_largest_batch_is_the_largest_plan_that_fits():
    session, budget = opened(), 1_000_000
    rows = session.largest_batch("n", budget)
    assert session.largest_batch("n", str(budget)) == rows
    peaks = [session.plan(n=size).peak_bytes for size in (rows, rows + 1)]
    assert peaks[0] <= budget < peaks[1]
    limited = opened(memory_limit=budget)
    splits = [limited.plan(n=size).to_dict()["batch_split"] for size in (rows, rows + 1)]
    assert splits[0] is None and splits[1]["dim"] == "n"
    run(limited, rows)


BUDGETS = [
    case("too_small", ("n", 8), Gives(None)),
    case("unknown", ("m", 8), Raises("InvalidArgument", "'m'")),
    case("words", ("n", "much"), Raises("InvalidArgument", "a size such as")),
]


@table("arguments, expected", BUDGETS)
def test_budget(arguments: tuple[str, Any], expected: Gives | Raises):
    check(expected, lambda: opened().largest_batch(*arguments))


def test_trim():
    session = opened()
    run(session, 8)
    before = session.memory_use()
    assert before["idle"] > 0 and before["slabs"] > 0
    assert session.trim() is None
    after = session.memory_use()
    assert after["idle"] == after["slabs"] == after["outputs_waiting"] == after["activations"] == 0
    run(session, 8)


# check and compile.

TWISTED = "twisted (float[n] x) => (float[n] y) { a = Twist(x)\n y = Twist(a) }"
LAX = "lax (float[n] x) => (float[n] y) { y = com.microsoft.Gelu(x) }"

CHECKED = [
    case("good", lambda: data("wide"), []),
    case("message", lambda: proto(MODELS["wide"]), []),
    case("junk", lambda: b"junk", [r"model '\(memory\)'"]),
    case(
        "unknown_operator",
        lambda: proto(TWISTED),
        [r"node '.*' \(ai\.onnx\.Twist\): the operator is not known; .* \(and 1 more like it\)$"],
    ),
    case("off_the_standard", lambda: proto(LAX), [r"^warning: node '.*com\.microsoft.* not imp"]),
]


@table("model, patterns", CHECKED)
def test_check(model: Callable[[], Any], patterns: list[str]):
    found = ort.check(model())
    assert len(found) == len(patterns), found
    for line, pattern in zip(found, patterns, strict=True):
        assert re.search(pattern, line) and "\n" not in line, line


def test_check_of_a_file(tmp_path: Path):
    good, bad = tmp_path / "good.onnx", tmp_path / "bad.onnx"
    good.write_bytes(data("wide"))
    bad.write_bytes(proto(TWISTED).SerializeToString())
    assert ort.check(good) == ort.check(str(good)) == []
    assert len(ort.check(bad)) == 1
    check(Raises("NoSuchFile"), lambda: ort.check(tmp_path / "missing.onnx"))


def test_check_of_no_model():
    check(Raises("TypeError", "Unable to load from type"), lambda: ort.check(3))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A file with x [n, 64] times a weight."""
    model = proto("dense (float[n,64] x, float[64,256] w) => (float[n,256] y) { y = MatMul(x, w) }")
    weight = np.random.default_rng(1).standard_normal((64, 256), np.float32)
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "dense.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@table("as_path", [case("path", True), case("bytes", False)])
def test_compiled_model_is_packed(dense: Path, tmp_path: Path, as_path: bool):
    out = tmp_path / "dense.compiled"
    assert ort.compile(dense if as_path else dense.read_bytes(), out) is None
    plain, compiled = (ort.InferenceSession(path, providers=[CPU]) for path in (dense, out))
    feed = {"x": np.ones((2, 64), np.float32)}
    np.testing.assert_array_equal(plain.run(None, feed)[0], compiled.run(None, feed)[0])
    assert plain.memory_use()["packed"] > 0
    assert compiled.memory_use()["packed"] == 0 < compiled.memory_use()["cached"]


REFUSED_FILES = [
    case("own_file", "dense.onnx", Raises("InvalidArgument", "give another file")),
    case("no_folder", "none/dense.compiled", Raises("Fail", "cannot write")),
    case("folder", ".", Raises("Fail", "cannot write")),
]


@table("out, expected", REFUSED_FILES)
def test_refused_files(dense: Path, tmp_path: Path, out: str, expected: Raises):
    before = dense.read_bytes()
    check(expected, lambda: ort.compile(dense, tmp_path / out))
    assert dense.read_bytes() == before


def test_compile_takes_session_options(dense: Path, tmp_path: Path):
    out = tmp_path / "dense.compiled"
    ort.compile(dense, out, options(precision="fp32"))
    assert out.exists()
    check(Raises("TypeError", "SessionOptions"), lambda: ort.compile(dense, out, {"precision": 1}))
