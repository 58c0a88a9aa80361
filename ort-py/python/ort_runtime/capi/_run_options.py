"""Run options: what one call of `run` may be told."""

from __future__ import annotations

from typing import Any

from ._adapters import LoraAdapter
from ._errors import Fail, status
from ._fields import (
    Slotted,
    find_entry,
    put_entry,
    refuse,
    to_bool,
    to_int,
    to_str,
    typed,
)
from ._logging import FATAL

__all__ = ["RunOptions"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


class RunOptions(Slotted):
    """Options of one run, or of several runs one after another.

    Setting an unknown attribute is an AttributeError, a value of the wrong type a TypeError.

    Example::

        options = RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        session.run(None, feed, options)
    """

    __slots__ = (
        "_adapters",
        "_token",
        "_entries",
        "_log_severity_level",
        "_log_verbosity_level",
        "_logid",
        "_only_execute_path_to_fetches",
        "_training_mode",
    )

    def __init__(self) -> None:
        self._adapters: list[LoraAdapter] = []
        self._token = _cancel_token()
        self._entries: dict[str, str] = {}
        self._log_severity_level = -1
        self._log_verbosity_level = 0
        self._logid = ""
        self._only_execute_path_to_fetches = False
        self._training_mode = False

    log_severity_level = typed(
        "log_severity_level", to_int, "Lines of this severity on are logged; -1 is the default's."
    )
    log_verbosity_level = typed(
        "log_verbosity_level", to_int, "How much severity 0 logs."
    )
    logid = typed("logid", to_str, "What log lines of the run begin with.")
    only_execute_path_to_fetches = typed(
        "only_execute_path_to_fetches",
        to_bool,
        "Whether nodes that no requested output needs are skipped.",
    )
    training_mode = typed("training_mode", to_bool, "Whether the run is part of a training step.")

    @property
    def terminate(self) -> bool:
        """Whether runs with these options end early, with `Fail`.

        Another thread may set it during a run. It stays set until it is cleared.
        """
        return self._token.is_cancelled

    @terminate.setter
    def terminate(self, value: bool) -> None:
        if to_bool(value, "RunOptions.terminate"):
            self._token.cancel()
        else:
            self._token.reset()

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Sets a configuration entry; a later value of a key replaces an earlier one.

        Raises TypeError if key or value is no str, RuntimeError if the key is empty or too long.
        """
        put_entry(self._entries, key, value, "RunOptions")

    def get_run_config_entry(self, key: str) -> str:
        """Returns a configuration entry. Raises RuntimeError if it was not set."""
        return find_entry(self._entries, key, "RunOptions")

    def add_active_adapter(self, adapter: LoraAdapter) -> None:
        """Lets the parameters of an adapter replace initializers of their names in runs."""
        if not isinstance(adapter, LoraAdapter):
            refuse("adapter", "a LoraAdapter", adapter)
        self._adapters.append(adapter)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_token"] = self.terminate
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cancelled = state.pop("_token")
        self._token = _cancel_token()
        self.terminate = cancelled
        super().__setstate__(state)


def check_options(options: Any) -> None:
    """Raises TypeError unless it is RunOptions or None, Fail for a severity that is none."""
    if options is None:
        return
    if not isinstance(options, RunOptions):
        raise TypeError(f"run_options must be RunOptions, not {type(options).__name__}")
    severity = options.log_severity_level
    if not -1 <= severity <= FATAL:
        raise status(
            Fail,
            "Invalid run log severity level. Not a valid onnxruntime::logging::Severity value: "
            f"{severity}",
        )


def active_adapters(options: Any) -> dict[str, Any]:
    """Checks options, and returns the parameters of their adapters; an earlier one goes first.

    The native session calls it for each run with options.
    """
    check_options(options)
    values: dict[str, Any] = {}
    for adapter in reversed(options._adapters):
        values |= adapter._parameters
    return values


def _cancel_token() -> Any:
    # The native module imports this one, so it cannot be imported above.
    from .onnxruntime_pybind11_state import CancelToken

    return CancelToken()


RunOptions.__module__ = _NATIVE
