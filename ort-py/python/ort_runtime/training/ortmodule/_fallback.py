"""Fallback policies: for which problems a module runs in torch, and the exceptions otherwise."""

from __future__ import annotations

import enum

__all__ = [
    "DEFAULT_POLICY",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "_FallbackPolicy",
]


class _FallbackPolicy(enum.IntFlag):
    """Which problems make a module run in torch. The values are onnxruntime's."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def is_set(self, policy: _FallbackPolicy) -> bool:
        """Returns whether all flags of `policy` are set."""
        return self & policy == policy

    def is_disabled(self) -> bool:
        """Returns whether problems are raised instead."""
        return _FallbackPolicy.FALLBACK_DISABLE in self


DEFAULT_POLICY = (
    _FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)


class ORTModuleFallbackException(Exception):
    """What keeps a module from running here."""


class ORTModuleInitException(ORTModuleFallbackException):
    """The module could not be wrapped."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """Parameters or inputs are on a device that sessions do not read."""


class ORTModuleIOError(ORTModuleFallbackException):
    """Inputs or outputs are of a kind that graphs do not have."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """The torch module is of a kind that cannot be wrapped."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """A graph has operators without a translation."""
