"""A prepared model: a session behind ONNX's `BackendRep`."""

from __future__ import annotations

from typing import Any

try:
    from onnx.backend.base import BackendRep
except ImportError as error:
    raise ImportError("ort_runtime.backend needs the package onnx: pip install onnx") from error

from .. import InferenceSession, RunOptions

#: Run options that a caller of the backend may set. The others act beyond one run's results.
_ALLOWED_RUN_OPTIONS = frozenset(
    {"log_severity_level", "log_verbosity_level", "logid", "only_execute_path_to_fetches"}
)


def _apply(options: Any, allowed: frozenset[str], values: dict[str, Any]) -> None:
    """Sets the allowed attributes of `options` from `values`.

    Names that the options do not have are ignored: ONNX's test runner hands on its own.

    Raises:
        RuntimeError: an attribute exists and is not allowed.
    """
    for name, value in values.items():
        if name in allowed:
            setattr(options, name, value)
        elif hasattr(options, name):
            raise RuntimeError(
                f"{type(options).__name__} attribute '{name}' is not permitted via the backend "
                f"API. Allowed attributes: {', '.join(sorted(allowed))}"
            )


class OnnxRuntimeBackendRep(BackendRep):
    """A model that is ready to run.

    Args:
        session: the session that runs it.
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def run(self, inputs: Any, **kwargs: Any) -> list[Any]:
        """Runs the model and returns all outputs, as `InferenceSession.run` does.

        Args:
            inputs: a list or tuple with a value per model input, in the model's order, or the one
                value of a model with one input.
            kwargs: `log_severity_level`, `log_verbosity_level`, `logid` and
                `only_execute_path_to_fetches` of RunOptions; unknown names are ignored.

        Raises:
            RuntimeError: another attribute of RunOptions is given.
            ValueError: there are more values than inputs, or a required input has none.

        Example:
            >>> import numpy as np
            >>> from ort_runtime import backend
            >>> from ort_runtime.datasets import get_example
            >>> rep = backend.prepare(get_example("mul_1.onnx"))
            >>> rep.run([np.ones((3, 2), np.float32)])[0].shape
            (3, 2)
        """
        options = RunOptions()
        _apply(options, _ALLOWED_RUN_OPTIONS, kwargs)
        names = [value.name for value in self._session.get_inputs()]
        values = inputs if isinstance(inputs, list | tuple) else [inputs]
        if len(values) > len(names):
            raise ValueError(f"The model has {len(names)} inputs ({names}), got {len(values)}")
        return self._session.run(None, dict(zip(names, values, strict=False)), options)
