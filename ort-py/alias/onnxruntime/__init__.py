"""The name `onnxruntime` for `ort_runtime`: this package replaces itself with that one."""

import sys

import ort_runtime

# Before the alias is installed: it refuses a name that another package holds.
sys.modules[__name__] = ort_runtime

import ort_runtime.as_onnxruntime  # noqa: E402, F401
