"""Options of ORTModule: those given as objects, and those read from the environment."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from typing import Any

from ._fallback import DEFAULT_POLICY, _FallbackPolicy

__all__ = ["DebugOptions", "Environment", "LogLevel", "MemoryLevel"]


class LogLevel(enum.IntEnum):
    """How much ORTModule logs."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


class MemoryLevel(enum.IntEnum):
    """Levels of the memory optimizer, by their names in the report."""

    USER_SPECIFIED = 0
    TRANSFORMER_LAYERWISE_RECOMPUTE = 1
    TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE = 2


class _Logging:
    def __init__(self, level: LogLevel) -> None:
        self.log_level = level


class _SavedModels:
    def __init__(self, save: bool, prefix: str, path: str) -> None:
        self.save = save
        self.name_prefix = prefix
        self.path = path


class DebugOptions:
    """What ORTModule logs and saves.

    Args:
        log_level: the least severe level that is logged; `ORTMODULE_LOG_LEVEL` overrides it.
        save_onnx: whether to write each compiled graph as a model.
        onnx_prefix: the first part of these files' names; required with `save_onnx`.
        save_path: their folder, `ORTMODULE_SAVE_ONNX_PATH` or the working directory without one.
        config: accepted for compatibility, and ignored.

    Raises:
        TypeError: `log_level` is no LogLevel, or `onnx_prefix` no text.
        ValueError: `onnx_prefix` is empty although models are saved.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"log_level must be a LogLevel, not {type(log_level).__name__}")
        if save_onnx:
            if not isinstance(onnx_prefix, str):
                raise TypeError(f"onnx_prefix must be a str, not {type(onnx_prefix).__name__}")
            if not onnx_prefix:
                raise ValueError("onnx_prefix must not be empty if save_onnx is True")
        folder = save_path or os.environ.get("ORTMODULE_SAVE_ONNX_PATH", "") or os.getcwd()
        if save_onnx and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            raise OSError(f"the folder for models, {folder}, does not exist or is not writable")
        name = os.environ.get("ORTMODULE_LOG_LEVEL", "")
        self._logging = _Logging(_level_named(name) if name else log_level)
        self._saved = _SavedModels(bool(save_onnx), onnx_prefix, folder)
        self.torch_exporter_options = config

    @property
    def logging(self) -> Any:
        """`.log_level` is what is logged."""
        return self._logging

    @property
    def log_level(self) -> LogLevel:
        """The least severe level that is logged."""
        return self._logging.log_level

    @property
    def save_onnx_models(self) -> Any:
        """`.save`, `.name_prefix` and `.path` of saved models."""
        return self._saved


def _level_named(name: str) -> LogLevel:
    try:
        return LogLevel[name]
    except KeyError:
        names = ", ".join(level.name for level in LogLevel)
        raise ValueError(f"ORTMODULE_LOG_LEVEL is one of {names}, not {name!r}") from None


@dataclass
class Environment:
    """What the environment says when a module is wrapped.

    Attributes:
        level: the memory optimizer's level.
        config: the path of its configuration, empty without one.
        policy: the fallback policy.
    """

    level: MemoryLevel = MemoryLevel.USER_SPECIFIED
    config: str = ""
    policy: _FallbackPolicy = field(default=DEFAULT_POLICY)

    @staticmethod
    def read() -> Environment:
        """Reads the variables. Raises ValueError for values that mean nothing."""
        text = os.environ.get("ORTMODULE_MEMORY_OPT_LEVEL", "0").strip() or "0"
        if text not in ("0", "1", "2"):
            raise ValueError(f"ORTMODULE_MEMORY_OPT_LEVEL is 0, 1 or 2, not {text!r}")
        policy = os.environ.get("ORTMODULE_FALLBACK_POLICY", "")
        return Environment(
            MemoryLevel(int(text)),
            os.environ.get("ORTMODULE_MEMORY_OPT_CONFIG", ""),
            _policy_named(policy) if policy else DEFAULT_POLICY,
        )


def _policy_named(text: str) -> _FallbackPolicy:
    found = _FallbackPolicy(0)
    for name in text.split("|"):
        try:
            found |= _FallbackPolicy[name.strip()]
        except KeyError:
            names = ", ".join(policy.name or "" for policy in _FallbackPolicy)
            raise ValueError(
                f"ORTMODULE_FALLBACK_POLICY has names of {names}, joined by |; not {name!r}"
            ) from None
    return found
