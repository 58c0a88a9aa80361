"""What every test file needs: the package under test, expectations and tables of cases.

The tests are tables. A row is `case("id", ..., expected)`; the test does one thing and hands it to
`check(expected, action)`. An expectation is one of

* `Gives(value)`: the action returns `value` (arrays by dtype, shape and content),
* `Raises("InvalidArgument", "text")`: it raises that class, with a text that matches,
* `Dies()`: the process ends by a signal (for `check_script` alone).

`ORT_PACKAGE` names the package, `ort_runtime` by default. With `ORT_PACKAGE=onnxruntime` the same
tables run against the original; rows listed in `deviations.py` then expect what the original does.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import models
import numpy as np
import pytest

PACKAGE = os.environ.get("ORT_PACKAGE", "ort_runtime")
IS_ORIGINAL = PACKAGE == "onnxruntime"
NATIVE = PACKAGE + ".capi.onnxruntime_pybind11_state"

ort: ModuleType = importlib.import_module(PACKAGE)
C: ModuleType = importlib.import_module(PACKAGE + ".capi._pybind_state")

CPU = "CPUExecutionProvider"


# Outcomes and expectations.


@dataclass
class Outcome:
    """What an action did."""

    value: Any = None
    error: BaseException | None = None
    warned: list[str] = field(default_factory=list)
    printed: str = ""


def observe(action: Callable[[], Any]) -> Outcome:
    """Calls `action` and notes result, exception, user warnings and standard output."""
    out = Outcome()
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            out.value = action()
        except Exception as error:
            out.error = error
    out.warned = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    out.printed = printed.getvalue()
    return out


def exception(name: str) -> type[BaseException]:
    """The exception class of that name: the package's own, else Python's."""
    if name == "ScriptError":
        return ScriptError
    return getattr(C, name, None) or getattr(builtins, name)


@dataclass(frozen=True)
class _Side:
    """Warnings and printed text that come with an outcome; none unless named."""

    warns: tuple[str, ...] = ()
    prints: str = ""

    def _check_side(self, seen: Outcome) -> None:
        assert len(seen.warned) == len(self.warns), f"warnings: {seen.warned}"
        for pattern, text in zip(self.warns, seen.warned):
            assert re.search(pattern, text), f"warning {text!r} lacks {pattern!r}"
        if self.prints:
            assert re.search(self.prints, seen.printed, re.DOTALL), f"printed: {seen.printed!r}"
        else:
            assert not seen.printed, f"printed: {seen.printed!r}"


@dataclass(frozen=True)
class Gives(_Side):
    """The action returns `value`; with `near`, numbers need to agree to that relative error."""

    value: Any = None
    near: float = 0.0

    def __init__(
        self, value: Any = None, near: float = 0.0, warns: Iterable[str] = (), prints: str = ""
    ) -> None:
        fields = {"value": value, "near": near, "warns": tuple(warns), "prints": prints}
        for key, given in fields.items():
            object.__setattr__(self, key, given)

    def verify(self, seen: Outcome) -> None:
        """Fails with an AssertionError unless `seen` is what is expected."""
        if seen.error is not None:
            raise AssertionError(f"raised {seen.error!r}") from seen.error
        same(seen.value, self.value, self.near)
        self._check_side(seen)


@dataclass(frozen=True)
class Raises(_Side):
    """The action raises one of `kinds` (names); the pattern `text` is found in its text."""

    kinds: tuple[str, ...] = ()
    text: str = ""

    def __init__(
        self,
        kinds: str | tuple[str, ...],
        text: str = "",
        warns: Iterable[str] = (),
        prints: str = "",
    ) -> None:
        names = (kinds,) if isinstance(kinds, str) else kinds
        fields = {"kinds": names, "text": text, "warns": tuple(warns), "prints": prints}
        for key, given in fields.items():
            object.__setattr__(self, key, given)

    def verify(self, seen: Outcome) -> None:
        """Fails with an AssertionError unless `seen` is what is expected."""
        assert seen.error is not None, f"returned {seen.value!r}"
        classes = tuple(exception(k) for k in self.kinds)
        assert isinstance(seen.error, classes), f"raised {type(seen.error).__mro__}: {seen.error}"
        assert re.search(self.text, str(seen.error), re.DOTALL), f"text: {seen.error}"
        self._check_side(seen)


@dataclass(frozen=True)
class Dies(_Side):
    """The process ends by a signal."""

    def verify(self, seen: Outcome) -> None:
        """Fails with an AssertionError unless the script of `seen` died."""
        assert isinstance(seen.error, _Died), f"lived: {seen.value!r} {seen.error!r}"


@dataclass(frozen=True)
class AnyOf:
    """One of several, where the original reads freed memory and may do anything."""

    choices: tuple[Gives | Raises | Dies, ...]

    def verify(self, seen: Outcome) -> None:
        """Fails with an AssertionError unless `seen` fits one of the choices."""
        faults = []
        for choice in self.choices:
            try:
                return choice.verify(seen)
            except AssertionError as fault:
                faults.append(str(fault))
        raise AssertionError("; ".join(faults))


Expectation = Gives | Raises | Dies | AnyOf


@dataclass(frozen=True)
class Deviates:
    """Expects what the original does, and that this is not what ours does."""

    original: Expectation
    ours: Expectation

    def verify(self, seen: Outcome) -> None:
        """Fails with an AssertionError unless `seen` fits the original alone."""
        self.original.verify(seen)
        try:
            self.ours.verify(seen)
        except AssertionError:
            return
        raise AssertionError("the original does what ours does: no deviation")


def same(got: Any, want: Any, near: float = 0.0) -> None:
    """Compares by kind and content; arrays by dtype and shape too."""
    if isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray), f"got a {type(got)}: {got!r}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), f"got {got!r}, want {want!r}"
        if want.dtype == object:
            assert got.tolist() == want.tolist(), f"got {got!r}, want {want!r}"
        else:
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=near, atol=near
            )
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want), f"got {got!r}, want {want!r}"
        for one, other in zip(got, want):
            same(one, other, near)
    elif isinstance(want, dict):
        assert type(got) is dict and list(got) == list(want), f"got {got!r}, want {want!r}"
        assert [type(k) for k in got] == [type(k) for k in want], f"got {got!r}, want {want!r}"
        for key in want:
            same(got[key], want[key], near)
    else:
        assert type(got) is type(want) and got == want, f"got {got!r}, want {want!r}"


def check(expected: Expectation | Deviates, action: Callable[[], Any]) -> None:
    """Runs `action` and holds what it did against `expected`."""
    expected.verify(observe(action))


# Scripts in a process of their own.


class _Died(Exception):
    pass


class ScriptError(Exception):
    """A script ended with a traceback; the text is its last line, `Class: message`."""


# `models` in a script reads files that this process made: the import of onnx takes a second.
_PRELUDE = """
import importlib, os, sys
import numpy as np
ort = importlib.import_module({package!r})
C = importlib.import_module({package!r} + ".capi._pybind_state")
CPU = "CPUExecutionProvider"
class models:
    path = staticmethod(lambda name: os.path.join({folder!r}, name + ".onnx"))
    data = staticmethod(lambda name: open(models.path(name), "rb").read())
ort.set_default_logger_severity(4)
"""


def run_script(code: str, **environment: str) -> str:
    """Runs `code` in a fresh interpreter and returns what it prints; `ort`, `C`, `np`, `CPU` and
    `models.path`, `models.data` (of models without arguments) are there. Raises ScriptError if the
    script ends with a traceback.
    """
    for name in re.findall(r"models\.(?:path|data)\(['\"](\w+)['\"]\)", code):
        models.path(name)
    prelude = _PRELUDE.format(package=PACKAGE, folder=models.folder())
    search = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode < 0:
        raise _Died(f"signal {-done.returncode}")
    if done.returncode:
        raise ScriptError(done.stderr.strip().rsplit("\n", 1)[-1])
    return done.stdout.strip()


def check_script(expected: Expectation | Deviates, code: str, **environment: str) -> None:
    """Holds a script against `Gives(output)`, `Raises("ScriptError", ...)` or `Dies()`."""
    expected.verify(observe(lambda: run_script(code, **environment)))


# Tables.


def case(label: str, *values: Any) -> Any:
    """A row of a table."""
    return pytest.param(*values, id=label)


def table(names: str, rows: Iterable[Any]) -> Any:
    """Decorates a test with the rows of a table."""
    return pytest.mark.parametrize(names, list(rows))


# Sessions.


@functools.cache
def session(name: str, *args: Any) -> Any:
    """One session per model, shared by all tests; do not change it."""
    return ort.InferenceSession(models.data(name, *args), providers=[CPU])


def options(**values: Any) -> Any:
    """SessionOptions with these properties set."""
    made = ort.SessionOptions()
    for key, value in values.items():
        setattr(made, key, value)
    return made


def f32(*values: float) -> np.ndarray:
    """A vector of float32."""
    return np.array(values, np.float32)


def strings(*values: object) -> np.ndarray:
    """A vector of objects."""
    return np.array(values, object)
