"""Logging: one line each on standard error, in the form of onnxruntime's lines."""

from __future__ import annotations

import os
import sys
import time

from ._fields import to_int

__all__ = ["set_default_logger_severity", "set_default_logger_verbosity"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"

VERBOSE, INFO, WARNING, ERROR, FATAL = range(5)
_LETTERS = "VIWEF"

_severity = WARNING
_verbosity = 0


def set_default_logger_severity(severity: int, /) -> None:
    """Logs only lines of a severity on: 0 verbose, 1 info, 2 warning (default), 3 error, 4 fatal.

    Raises TypeError for no int, RuntimeError for another number.

    Example: `set_default_logger_severity(3)` silences warnings.
    """
    global _severity
    level = to_int(severity, "severity")
    if not VERBOSE <= level <= FATAL:
        raise RuntimeError(
            "Invalid logging severity. 0:Verbose, 1:Info, 2:Warning, 3:Error, 4:Fatal"
        )
    _severity = level
    from .onnxruntime_pybind11_state import set_engine_log_severity

    set_engine_log_severity(level)


def set_default_logger_verbosity(verbosity: int, /) -> None:
    """Sets how much severity 0 logs."""
    global _verbosity
    _verbosity = to_int(verbosity, "verbosity")


def log(severity: int, text: str, *, logid: str = "", threshold: int = -1) -> None:
    """Writes a line, if its severity reaches the threshold; -1 is the default's."""
    if severity < (_severity if threshold < 0 else threshold):
        return
    now, caller = time.time_ns(), sys._getframe(1)
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now // 10**9))
    place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    origin = f"{_LETTERS[severity]}:onnxruntime:{logid}, {place} {caller.f_code.co_name}"
    try:
        # One write, so that lines of several threads do not mix.
        sys.stderr.write(f"{date}.{now % 10**9:09} [{origin}] {text}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no standard error, or it is closed: a log line is no reason to fail.
        pass


set_default_logger_severity.__module__ = set_default_logger_verbosity.__module__ = _NATIVE
