"""Log lines and their severity."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import Raises, row, start_program
from more_models import package  # noqa: F401  (the fixture `ort`)


def severity(given: Any) -> Any:
    """Returns a call: sets the default severity, and back."""

    def call(ort: ModuleType) -> None:
        try:
            return ort.set_default_logger_severity(given)
        finally:
            ort.set_default_logger_severity(4)

    return call


SEVERITIES = [
    *(row(f"level_{n}", severity(n), None) for n in range(5)),
    row("numpy", severity(np.int32(3)), None),
    row("bool", severity(True), None),
    row("five", severity(5), Raises("RuntimeError", "Invalid logging severity")),
    row("nine", severity(9), Raises("RuntimeError", "Invalid logging severity")),
    row("negative", severity(-1), Raises("RuntimeError", "Invalid logging severity")),
    row("str", severity("3"), Raises("TypeError")),
    row("float", severity(1.0), Raises("TypeError")),
    row("none", severity(None), Raises("TypeError")),
    row("keyword", lambda o: o.set_default_logger_severity(severity=3), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), SEVERITIES)
def test_severity(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def verbosity(given: Any) -> Any:
    """Returns a call: sets the default verbosity, and back."""

    def call(ort: ModuleType) -> None:
        try:
            return ort.set_default_logger_verbosity(given)
        finally:
            ort.set_default_logger_verbosity(0)

    return call


VERBOSITIES = [
    row("zero", verbosity(0), None),
    row("hundred", verbosity(100), None),
    row("negative", verbosity(-1), None),
    row("str", verbosity("1"), Raises("TypeError")),
    row("float", verbosity(1.5), Raises("TypeError")),
    row("none", verbosity(None), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), VERBOSITIES)
def test_verbosity(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


DEFAULT = "ort.set_default_logger_severity({})\n"
OPTIONS = "o = ort.SessionOptions()\no.log_severity_level = {}\n"
#: What makes a warning: an initializer that no node reads in the original, a misspelt key in ours.
UNUSED = """
o = o or ort.SessionOptions()
if ort.__name__ != 'onnxruntime':
    o.add_session_config_entry('session.disable_prepackin', '1')
s = ort.InferenceSession('unused.onnx', o, providers=['CPUExecutionProvider'])
"""
RESHAPE = """
s = ort.InferenceSession('reshape.onnx', o, providers=['CPUExecutionProvider'])
try:
    s.run(None, {'x': np.ones((1, 3), np.float32), 's': np.array([5])}, r)
except Exception as e:
    print(type(e).__name__)
"""
NEITHER = "o = r = None\n"
RUN_OPTIONS = "o = None\nr = ort.RunOptions()\nr.log_severity_level = {}\n"

#: Letters of the severities that the lines on standard error have.
LINES = [
    row("unused_initializer", NEITHER + UNUSED, {"W"}),
    row("error_default", DEFAULT.format(3) + NEITHER + UNUSED, set()),
    row("fatal_default", DEFAULT.format(4) + NEITHER + UNUSED, set()),
    row("error_options", OPTIONS.format(3) + UNUSED, set()),
    row("warning_options", DEFAULT.format(3) + OPTIONS.format(2) + UNUSED, {"W"}),
    row("info_options", OPTIONS.format(1) + UNUSED, {"I", "W"}),
    row("failed_run", NEITHER + RESHAPE, {"E"}),
    row("failed_run_fatal", DEFAULT.format(4) + NEITHER + RESHAPE, set()),
    row("failed_run_options", OPTIONS.format(4) + "r = None\n" + RESHAPE, set()),
    row("failed_run_run_options", RUN_OPTIONS.format(4) + RESHAPE, set()),
]


def letters(error: str) -> set[str]:
    return set(re.findall(r"\[([VIWEF]):onnxruntime:", error))


@pytest.mark.parametrize(("code", "expected"), LINES)
def test_lines(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    def call(o: ModuleType) -> set[str]:
        status, _, error = start_program(o, tmp_path, code, "unused", "reshape")
        assert status == 0, error
        return letters(error)

    check(request, ort, call, expected)


LINE = (
    r"(?:\x1b\[[0-9;]+m)?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{9} "
    r"\[W:onnxruntime:mine, [\w.]+:\d+ \w+\] .*(spare|prepackin).*(?:\x1b\[m)?"
)


def test_line_form(ort: ModuleType, tmp_path: Path):
    code = "o = ort.SessionOptions()\no.logid = 'mine'\n" + UNUSED
    status, output, error = start_program(ort, tmp_path, code, "unused")
    assert (status, output) == (0, "")
    assert len(error.splitlines()) == 1
    assert re.fullmatch(LINE, error.strip())
