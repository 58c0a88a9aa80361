"""Checks of the system when the package is imported: there is nothing to check."""

from __future__ import annotations

from .build_and_package_info import cuda_version, package_name
from .onnxruntime_pybind11_state import get_version_string

__all__ = ["check_distro_info", "check_training_module", "get_package_name_and_version_info"]


def check_distro_info() -> None:
    """Does nothing: every system that loads the native module is supported."""


def get_package_name_and_version_info() -> tuple[str, str, str]:
    """Returns the name of the package, its version, and the version of CUDA it was built for."""
    return package_name, get_version_string(), cuda_version


def check_training_module() -> tuple[bool, str, str, str]:
    """Returns whether the package trains, then its name, its version and that of CUDA."""
    return False, *get_package_name_and_version_info()
