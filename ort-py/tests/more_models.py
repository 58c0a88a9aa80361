"""Models and helpers for the tests of values, bindings, devices and processes.

A model is a line of ONNX's textual syntax in `MODELS`. `session(ort, "square")` opens one on the
CPU. `Raises` stands for an exception in a table of expectations. `run_program` runs code in a
process of its own, for what must not end the test run.

Example::

    session(ort, "square").run(None, {"x": np.ones((2, 3), np.float32)})
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx.parser
import pytest

#: Graphs by name, each without its header.
MODELS: dict[str, str] = {
    "square": "square (float[n,3] x) => (float[n,3] y) { y = Mul(x, x) }",
    "square_any": "square_any (float[n,m] x) => (float[n,m] y) { y = Mul(x, x) }",
    "square_scalar": "square_scalar (float x) => (float y) { y = Mul(x, x) }",
    "fixed": "fixed (float[2] x) => (float[2] y) { y = Mul(x, x) }",
    "two": "two (float[n] a, float[n] b) => (float[n] s, float[n] d)"
    " { s = Add(a, b)\n d = Sub(a, b) }",
    "chain": "chain (float[n,3] x) => (float[n,3] y) { z = Mul(x, x)\n y = Relu(z) }",
    "both": "both (float[n,3] x) => (float[n,3] y, float[n,3] z) { y = Mul(x, x)\n z = Neg(x) }",
    "strings": "strings (string[n] x) => (string[n] y) { y = Identity(x) }",
    "sequence": "sequence (seq(float[n]) x) => (seq(float[n]) y) { y = Identity(x) }",
    "pair": "pair (float[n] a, float[n] b) => (seq(float[n]) y) { y = SequenceConstruct(a, b) }",
    "scaled": "scaled (float[n,2] x, float[2] w) => (float[n,2] y)"
    " <float[2] w = {1, 2}> { y = Mul(x, w) }",
    "unused": "unused (float[n,3] x) => (float[n,3] y) <float[1] spare = {1}> { y = Mul(x, x) }",
    "reshape": "reshape (float[n,3] x, int64[k] s) => (float[m] y) { y = Reshape(x, s) }",
    "wide": "wide (float[n,1000] x) => (float[n,1000] y)"
    " { a = Mul(x, x)\n b = Exp(a)\n c = Add(a, b)\n y = Sub(c, a) }",
    "branches": """branches (bool c, float[n] x) => (float[n] y) {
        y = If(c)
            <then_branch = yes () => (float[n] a) { a = Relu(x) },
             else_branch = no () => (float[n] b) { b = Neg(x) }> }""",
    "loop": """loop (int64 n, float[2] x) => (float[2] y) {
        go = Constant<value = bool {1}>()
        y = Loop(n, go, x)
            <body = body (int64 i, bool before, float[2] a) => (bool after, float[2] b)
                { after = Identity(before)
                  b = Identity(a) }> }""",
}

#: Numeric dtypes: name, type string, ONNX element type, bytes of an element.
DTYPES: list[tuple[str, str, int, int]] = [
    ("float32", "tensor(float)", 1, 4),
    ("uint8", "tensor(uint8)", 2, 1),
    ("int8", "tensor(int8)", 3, 1),
    ("uint16", "tensor(uint16)", 4, 2),
    ("int16", "tensor(int16)", 5, 2),
    ("int32", "tensor(int32)", 6, 4),
    ("int64", "tensor(int64)", 7, 8),
    ("bool", "tensor(bool)", 9, 1),
    ("float16", "tensor(float16)", 10, 2),
    ("float64", "tensor(double)", 11, 8),
    ("uint32", "tensor(uint32)", 12, 4),
    ("uint64", "tensor(uint64)", 13, 8),
]

#: 2 x 3 float32 values 0 to 5. Tests that write take a copy.
A = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(name="ort", scope="session")
def package() -> ModuleType:
    """Returns the package under test: that of ORT_PACKAGE, else ours."""
    return importlib.import_module(os.environ.get("ORT_PACKAGE", "ort_runtime"))


@functools.cache
def data(name: str) -> bytes:
    """Returns the serialized model `name` of `MODELS`."""
    text = '<ir_version: 10, opset_import: ["" : 20]>\n' + MODELS[name]
    return onnx.parser.parse_model(text).SerializeToString()


def session(ort: ModuleType, name: str, options: Any = None) -> Any:
    """Opens the model `name` on the CPU with the given SessionOptions."""
    return ort.InferenceSession(data(name), options, providers=["CPUExecutionProvider"])


def native(ort: ModuleType) -> ModuleType:
    """Returns the native module of the package."""
    return importlib.import_module(f"{ort.__name__}.capi.onnxruntime_pybind11_state")


def value(ort: ModuleType, array: np.ndarray) -> Any:
    """Returns an OrtValue of `array` on the CPU."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def row(name: str, *values: Any) -> Any:
    """Returns a row of a table: its id and its values."""
    return pytest.param(*values, id=name)


@dataclass(frozen=True)
class Raises:
    """An exception: name of a builtin or of the package's own class, and a pattern of its text."""

    kind: str
    text: str | None = None

    def verify(self, ort: ModuleType, call: Any) -> None:
        """Calls `call(ort)`. AssertionError unless this exception comes."""
        found = getattr(builtins, self.kind, None) or getattr(native(ort), self.kind)
        with pytest.raises(found, match=self.text):
            call(ort)


@dataclass(frozen=True)
class Like:
    """Equal to every string that matches the pattern from its start."""

    pattern: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.match(self.pattern, other) is not None


@dataclass(frozen=True)
class OneOf:
    """Equal to each of the values."""

    values: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return other in self.values


@dataclass(frozen=True)
class Anything:
    """Equal to everything but one value: garbage."""

    but: Any

    def __eq__(self, other: object) -> bool:
        return other != self.but


#: The program ended by itself, whatever it printed.
NO_CRASH = Like(r"(?!signal|timeout)")


def run_program(
    ort: ModuleType,
    folder: Path,
    code: str,
    *models: str,
    timeout: float = 60,
    env: dict[str, str] | None = None,
) -> str:
    """Runs `code` in a process of its own, in `folder`, with `ort` and `np` imported.

    The named models lie there as `<name>.onnx`. Returns what the program printed. If it failed:
    `exit <code>`, `signal <number>` or `timeout`.
    """
    return _outcome(*start_program(ort, folder, code, *models, timeout=timeout, env=env)[:2])


def start_program(
    ort: ModuleType,
    folder: Path,
    code: str,
    *models: str,
    timeout: float = 60,
    env: dict[str, str] | None = None,
) -> tuple[int | None, str, str]:
    """Like `run_program`. Returns exit code (None at a timeout), output, error output."""
    for name in models:
        (folder / f"{name}.onnx").write_bytes(data(name))
    head = (
        "import gc, os, signal, sys, threading, time\n"
        f"import numpy as np\nimport {ort.__name__} as ort\n"
    )
    home = str(Path(ort.__file__).resolve().parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-c", head + code],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=folder,
            env=variables,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


def _outcome(code: int | None, output: str) -> str:
    if code is None:
        return "timeout"
    if code < 0:
        return f"signal {-code}"
    return output.strip() if code == 0 else f"exit {code}"
