"""The backend: models in any form to sessions, by ONNX's `Backend` interface."""

from __future__ import annotations

import os
import unittest
from typing import Any

from .backend_rep import OnnxRuntimeBackendRep, _apply

# After backend_rep, which says what to install if onnx is missing.
import onnx
from onnx.backend.base import Backend

from .. import InferenceSession, SessionOptions, get_available_providers, get_device

#: Session options that a caller of the backend may set: those that change speed, memory and
#: logging, and write no files.
_ALLOWED_SESSION_OPTIONS = frozenset(
    {
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "execution_mode",
        "execution_order",
        "graph_optimization_level",
        "inter_op_num_threads",
        "intra_op_num_threads",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "use_deterministic_compute",
        "use_per_session_threads",
    }
)

#: The provider that each kind of device in ONNX's device strings ("CPU", "CUDA:0") needs.
_PROVIDERS = {
    "CPU": "CPUExecutionProvider",
    "CUDA": "CUDAExecutionProvider",
    "GPU": "CUDAExecutionProvider",
}


def _provider(device: str) -> str | None:
    """Returns the provider for an ONNX device string, None if no provider here is for it."""
    provider = _PROVIDERS.get(device.partition(":")[0])
    return provider if provider in get_available_providers() else None


class OnnxRuntimeBackend(Backend):
    """ONNX's `Backend` over sessions. All methods are class methods.

    Example:
        >>> import numpy as np
        >>> from ort_runtime import backend
        >>> from ort_runtime.datasets import get_example
        >>> backend.run(get_example("sigmoid.onnx"), np.zeros((3, 4, 5), np.float32))[0][0, 0, 0]
        np.float32(0.5)
    """

    #: Whether `prepare` skips models whose opsets are not in a release of ONNX.
    allowReleasedOpsetsOnly = os.environ.get("ALLOW_RELEASED_ONNX_OPSET_ONLY", "1") == "1"

    @classmethod
    def is_compatible(cls, model: Any, device: str | None = None, **kwargs: Any) -> bool:
        """Returns whether `device` exists here; `model` and `kwargs` are not looked at."""
        return device is None or cls.supports_device(device)

    @classmethod
    def is_opset_supported(cls, model: onnx.ModelProto) -> tuple[bool, str]:
        """Returns whether all opsets of `model` are in a release of ONNX, and if not, why.

        `ALLOW_RELEASED_ONNX_OPSET_ONLY=0` in the environment allows every opset.
        """
        if not cls.allowReleasedOpsetsOnly:
            return True, ""
        for opset in model.opset_import:
            domain = opset.domain or "ai.onnx"
            if (domain, opset.version) not in onnx.helper.OP_SET_ID_VERSION_MAP:
                return False, (
                    "Skipping this test as only released onnx opsets are supported."
                    "To run this test set env variable ALLOW_RELEASED_ONNX_OPSET_ONLY to 0."
                    f" Got Domain '{domain}' version '{opset.version}'."
                )
        return True, ""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Returns whether `device`, such as "CPU" or "CUDA:0", exists here."""
        return _provider(device) is not None

    @classmethod
    def prepare(cls, model: Any, device: str | None = None, **kwargs: Any) -> OnnxRuntimeBackendRep:
        """Returns `model` ready to run.

        Args:
            model: a path, a serialized model, an `onnx.ModelProto`, a session, or what `prepare`
                returned, which is returned as it is.
            device: "CPU", "CUDA" or "CUDA:<id>"; None stands for every provider there is.
            kwargs: attributes of SessionOptions, for models that are not sessions yet; unknown
                names are ignored.

        Raises:
            RuntimeError: the device is not there, or an attribute is not permitted.
            unittest.SkipTest: a ModelProto has an opset that is not released.
            onnx.checker.ValidationError: a ModelProto is not valid.
        """
        if isinstance(model, OnnxRuntimeBackendRep):
            return model
        if isinstance(model, InferenceSession):
            return OnnxRuntimeBackendRep(model)
        if isinstance(model, onnx.ModelProto):
            onnx.checker.check_model(model)
            supported, reason = cls.is_opset_supported(model)
            if not supported:
                raise unittest.SkipTest(reason)
            model = model.SerializeToString()
        if not cls.is_compatible(model, device):
            raise RuntimeError(f"Incompatible device expected '{device}', got '{get_device()}'")
        options = SessionOptions()
        _apply(options, _ALLOWED_SESSION_OPTIONS, kwargs)
        return OnnxRuntimeBackendRep(InferenceSession(model, options, **cls._providers(device)))

    @classmethod
    def _providers(cls, device: str | None) -> dict[str, Any]:
        """Returns the provider arguments of a session on `device`.

        `ORT_ONNX_BACKEND_EXCLUDE_PROVIDERS` names providers to leave out, separated by commas.
        """
        excluded = os.environ.get("ORT_ONNX_BACKEND_EXCLUDE_PROVIDERS", "").split(",")
        names = get_available_providers() if device is None else [_provider(device)]
        index = device.partition(":")[2] if device else ""
        options = {"device_id": index} if index and names != [_PROVIDERS["CPU"]] else {}
        return {"providers": [(name, options) for name in names if name not in excluded]}

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str | None = None, **kwargs: Any) -> Any:
        """Prepares `model` and runs it once; see `prepare` and `OnnxRuntimeBackendRep.run`.

        `kwargs` go to both.
        """
        return cls.prepare(model, device, **kwargs).run(inputs, **kwargs)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Any,
        device: str | None = None,
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> None:
        """Raises NotImplementedError: put the node into a model and run that."""
        raise NotImplementedError(
            "It is much more efficient to run a whole model than every node independently."
        )


is_compatible = OnnxRuntimeBackend.is_compatible
prepare = OnnxRuntimeBackend.prepare
run = OnnxRuntimeBackend.run_model
supports_device = OnnxRuntimeBackend.supports_device
