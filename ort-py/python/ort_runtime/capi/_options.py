"""Session options: what a session is made with.

The native session reads the public attributes, and of the private ones `_entries`,
`_free_dimensions`, `_free_denotations`, `_initializers`, `_external_initializers`,
`_external_files` and `_load_cancel`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ._adapters import native_value
from ._custom_ops import refuse_library
from ._devices import OrtArenaCfg, OrtDevice, OrtEpDevice, OrtMemoryInfo, check_ep_devices
from ._enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtExecutionProviderDevicePolicy,
)
from ._errors import InvalidArgument, status
from ._fields import (
    Slotted,
    find_entry,
    put_entry,
    refuse,
    same_length,
    str_dict,
    to_bool,
    to_choice,
    to_enum,
    to_int,
    to_int64,
    to_path,
    to_size,
    to_str,
    typed,
)
from ._option_values import Budget, OrtExternalInitializerInfo
from ._run_options import RunOptions

__all__ = [
    "Budget",
    "OrtArenaCfg",
    "OrtDevice",
    "OrtExternalInitializerInfo",
    "OrtMemoryInfo",
    "RunOptions",
    "SessionOptions",
]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"


def _to_budget(value: Any, name: str) -> Budget | None:
    if value is not None and not isinstance(value, Budget):
        refuse(name, "a Budget or None", value)
    return value


def _to_folder(value: Any, name: str) -> str | None:
    return None if value is None else to_path(value, name)


class SessionOptions(Slotted):
    """What a session is made with. One object may serve several sessions; each copies it.

    Setting an unknown attribute is an AttributeError, a value of the wrong type a TypeError.

    Example::

        options = SessionOptions()
        options.intra_op_num_threads = 2
        options.memory_limit = "512 MiB"
        session = InferenceSession("model.onnx", options)
    """

    __slots__ = (
        "_budget",
        "_cache_dir",
        "_enable_cpu_mem_arena",
        "_enable_fp16",
        "_enable_mem_pattern",
        "_enable_mem_reuse",
        "_enable_profiling",
        "_entries",
        "_ep_context_read",
        "_execution_mode",
        "_execution_order",
        "_external_files",
        "_external_initializers",
        "_free_denotations",
        "_free_dimensions",
        "_graph_optimization_level",
        "_initializers",
        "_inter_op_num_threads",
        "_intra_op_num_threads",
        "_load_cancel",
        "_log_severity_level",
        "_log_verbosity_level",
        "_logid",
        "_memory_limit",
        "_optimized_model_filepath",
        "_policy",
        "_precision",
        "_profile_file_prefix",
        "_providers",
        "_use_deterministic_compute",
        "_use_per_session_threads",
    )

    def __init__(self) -> None:
        from .onnxruntime_pybind11_state import CancelToken

        self._budget = self._cache_dir = self._memory_limit = None
        self._enable_cpu_mem_arena = self._enable_mem_pattern = self._enable_mem_reuse = True
        self._enable_fp16 = self._enable_profiling = self._use_deterministic_compute = False
        self._entries: dict[str, str] = {}
        self._ep_context_read: tuple[Callable[..., None], int] | None = None
        self._execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self._execution_order = ExecutionOrder.DEFAULT
        self._external_files: dict[str, Any] = {}
        self._external_initializers: dict[str, Any] = {}
        self._free_denotations: dict[str, int] = {}
        self._free_dimensions: dict[str, int] = {}
        self._graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self._initializers: dict[str, Any] = {}
        self._inter_op_num_threads = self._intra_op_num_threads = 0
        self._load_cancel = CancelToken()
        self._log_severity_level, self._log_verbosity_level = -1, 0
        self._logid = self._optimized_model_filepath = ""
        self._policy: OrtExecutionProviderDevicePolicy | Callable[..., Any] | None = None
        self._precision = "fp32"
        self._profile_file_prefix = "onnxruntime_profile_"
        self._providers: list[tuple[str, dict[str, str]]] = []
        self._use_per_session_threads = True

    enable_cpu_mem_arena = typed(
        "enable_cpu_mem_arena",
        to_bool,
        "Whether values whose size is known only at run time come from an arena. Default True.",
    )
    enable_mem_pattern = typed(
        "enable_mem_pattern",
        to_bool,
        "Whether the memory of each run is planned before it starts. Default True.",
    )
    enable_mem_reuse = typed(
        "enable_mem_reuse",
        to_bool,
        "Whether values that are not alive at the same time share memory. Default True.",
    )
    enable_profiling = typed(
        "enable_profiling", to_bool, "Whether a profile of all runs is written. Default False."
    )
    execution_mode = typed(
        "execution_mode", to_enum(ExecutionMode), "Default ORT_SEQUENTIAL; both modes do the same."
    )
    execution_order = typed(
        "execution_order", to_enum(ExecutionOrder), "The order of nodes. Default DEFAULT."
    )
    graph_optimization_level = typed(
        "graph_optimization_level",
        to_enum(GraphOptimizationLevel),
        "How much of the graph may be rewritten. Default ORT_ENABLE_ALL.",
    )
    inter_op_num_threads = typed(
        "inter_op_num_threads", to_int, "Accepted and ignored: nodes run one after another."
    )
    intra_op_num_threads = typed(
        "intra_op_num_threads",
        to_int,
        "Threads inside one operator. 0, the default, and less: all cores the process may use.",
    )
    log_severity_level = typed(
        "log_severity_level", to_int, "Lines of this severity on are logged; -1 is the default's."
    )
    log_verbosity_level = typed("log_verbosity_level", to_int, "How much severity 0 logs.")
    logid = typed("logid", to_str, "What log lines of the session begin with.")
    optimized_model_filepath = typed(
        "optimized_model_filepath",
        to_path,
        "A file to write the optimized model to when the session is made. Default: none.",
    )
    profile_file_prefix = typed(
        "profile_file_prefix", to_path, "What the names of profiles begin with."
    )
    use_deterministic_compute = typed(
        "use_deterministic_compute", to_bool, "Accepted: results do not depend on chance here."
    )
    use_per_session_threads = typed(
        "use_per_session_threads",
        to_bool,
        "Whether the session ignores `set_global_thread_pool_sizes`. Default True.",
    )

    budget = typed(
        "budget", _to_budget, "A `Budget` that several sessions share. Default None."
    )
    cache_dir = typed(
        "cache_dir",
        _to_folder,
        "A folder for packed weights, which later sessions and other processes map. Default None.",
    )
    enable_fp16 = typed(
        "enable_fp16",
        to_bool,
        "Whether matrix products may compute in 16 bits. Where they cannot, as on CPUs, a warning "
        "says so once. Default False.",
    )
    memory_limit = typed(
        "memory_limit",
        to_size,
        'The most bytes that the session may allocate, or text such as "2GiB". Default None: what '
        "is free on the machine.",
    )
    precision = typed(
        "precision",
        to_choice("fp32", "bf16"),
        'How matrix products compute: "fp32" (default) or "bf16", which needs a CPU that has it.',
    )
    threads = property(
        lambda self: self.intra_op_num_threads,
        lambda self, count: setattr(self, "intra_op_num_threads", count),
        doc="Another name of `intra_op_num_threads`.",
    )

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Sets a configuration entry; a later value of a key replaces an earlier one.

        Raises TypeError if key or value is no str, RuntimeError if the key is empty or too long.
        """
        put_entry(self._entries, key, value, "SessionOptions")

    def get_session_config_entry(self, key: str) -> str:
        """Returns a configuration entry. Raises RuntimeError if it was not set."""
        return find_entry(self._entries, key, "SessionOptions")

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fixes the size of the dimensions of a name. The first size of a name counts."""
        self._free_dimensions.setdefault(to_str(name, "name"), to_int64(size, "size"))

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Fixes the size of the dimensions of a denotation, such as `DATA_BATCH`."""
        denotation = to_str(denotation, "denotation")
        self._free_denotations.setdefault(denotation, to_int64(size, "size"))

    def add_initializer(self, name: str, value: Any) -> None:
        """Replaces a weight of the model by an OrtValue or an array.

        It is kept alive and not copied. Raises RuntimeError for anything else.
        """
        if isinstance(value, np.ndarray):
            from ._values import OrtValue

            value = OrtValue.ortvalue_from_numpy(value)
        try:
            native_value(value, "value")
        except TypeError:
            raise RuntimeError("The provided Python object must be an OrtValue") from None
        _add_once(self._initializers, name, value)

    def add_external_initializers(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Gives the values of weights that lie outside the model, by their names."""
        names, values = same_length("add_external_initializers", names, values)
        for name, value in zip(names, values, strict=True):
            native_value(value, "a value")
            _add_once(self._external_initializers, name, value)

    def add_external_initializers_from_files_in_memory(
        self, names: Sequence[str], buffers: Sequence[Any], lengths: Sequence[int]
    ) -> None:
        """Gives the content of the files that hold weights, by the names the model has for them.

        A buffer is bytes or any object with the buffer protocol. It is kept alive, not copied.
        """
        owner = "add_external_initializers_from_files_in_memory"
        for name, buffer, length in zip(*same_length(owner, names, buffers, lengths), strict=True):
            view = memoryview(buffer).cast("B")
            count = to_int64(length, "a length")
            if not 0 <= count <= view.nbytes:
                raise status(
                    InvalidArgument, f"the buffer of {name!r} has {view.nbytes} bytes, not {count}"
                )
            _add_once(self._external_files, name, view[:count])

    def add_provider(self, name: str, options: Mapping[str, str]) -> None:
        """Adds an execution provider; the first one has precedence.

        Raises RuntimeError for an unknown provider, InvalidArgument for one that this build lacks,
        TypeError if options are not strings.
        """
        from .onnxruntime_pybind11_state import get_all_providers, get_available_providers

        name, options = to_str(name, "name"), str_dict(options, "options")
        available = get_available_providers()
        if name not in available and name not in get_all_providers():
            raise RuntimeError(f"Unknown Provider Type: {name}")
        if name not in available:
            raise status(
                InvalidArgument,
                f"Failed to add provider of type '{name}' to SessionOptions. "
                "Provider configuration is not supported.",
            )
        self._providers.append((name, options))

    def append_execution_provider(
        self, name: str, options: Mapping[Any, Any] | None = None
    ) -> None:
        """Adds an execution provider, if it works here; if not, the session warns and goes on.

        Option values become strings.

        Example: `options.append_execution_provider("CUDAExecutionProvider", {"device_id": 0})`
        """
        pairs = {} if options is None else dict(options)
        texts = {str(key): str(value) for key, value in pairs.items()}
        self._providers.append((to_str(name, "name"), texts))

    def add_provider_for_devices(
        self, devices: Sequence[OrtEpDevice], options: Mapping[str, str]
    ) -> None:
        """Adds the provider of devices that `get_ep_devices` returned."""
        listed, options = check_ep_devices(devices, "devices"), str_dict(options, "options")
        if not listed:
            raise status(InvalidArgument, "Must provide one or more OrtEpDevice instances.")
        for name in dict.fromkeys(device.ep_name for device in listed):
            self._providers.append((name, options))

    def has_providers(self) -> bool:
        """Tells whether a provider, or a policy to choose one, was given."""
        return bool(self._providers) or self._policy is not None

    def set_provider_selection_policy(self, policy: OrtExecutionProviderDevicePolicy) -> None:
        """Chooses providers by what is preferred."""
        self._policy = to_enum(OrtExecutionProviderDevicePolicy)(policy, "policy")

    def set_provider_selection_policy_delegate(
        self,
        delegate: Callable[
            [Sequence[OrtEpDevice], dict[str, str], dict[str, str], int], list[OrtEpDevice]
        ],
    ) -> None:
        """Chooses providers by a function of the devices, two dicts of metadata, and a maximum."""
        if not callable(delegate):
            refuse("delegate", "a function", delegate)
        self._policy = delegate

    def register_custom_ops_library(self, path: str | os.PathLike[str]) -> None:
        """Refuses a library of custom operators.

        Such libraries need onnxruntime's C interface. The library is loaded, to tell what it is.
        Raises Fail if that fails or it has no custom operators, NotImplemented if it has.
        """
        refuse_library(to_path(path, "path"))

    def set_load_cancellation_flag(self, cancel: bool) -> None:
        """Ends the making of sessions with these options early, also one that is under way."""
        if to_bool(cancel, "cancel"):
            self._load_cancel.cancel()
        else:
            self._load_cancel.reset()

    def set_ep_context_data_read_func(
        self, read_func: Callable[..., None], max_data_size: int
    ) -> None:
        """Sets the function that gives providers their blocks. No provider here asks for any."""
        if not callable(read_func):
            refuse("read_func", "a function", read_func)
        self._ep_context_read = read_func, to_int64(max_data_size, "max_data_size")

    def clear_ep_context_data_read_func(self) -> None:
        """Removes the function."""
        self._ep_context_read = None

    def _apply_config(self, text: str) -> None:
        """Applies the metadata entry `ort_config` of a model: JSON with a dict `session_options`.

        Raises InvalidArgument if it is no such JSON or a value does not fit.
        """
        import json  # slow to import, and rarely needed

        try:
            settings = json.loads(text).get("session_options", {})
            for name, value in settings.items():
                if not isinstance(getattr(SessionOptions, name, None), property):
                    raise TypeError(f"there is no option {name}")
                setattr(self, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise status(
                InvalidArgument, f"the metadata entry ort_config of the model is wrong: {error}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_load_cancel"] = self._load_cancel.is_cancelled
        files = self._external_files.items()
        state["_external_files"] = {name: bytes(view) for name, view in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        from .onnxruntime_pybind11_state import CancelToken

        cancelled = state.pop("_load_cancel")
        super().__setstate__(state)
        self._load_cancel = CancelToken()
        self.set_load_cancellation_flag(cancelled)

    def __copy__(self) -> SessionOptions:
        copy = type(self).__new__(type(self))
        # A copy is made for each session; the flag and the buffers are those of the original.
        for slot, value in Slotted.__getstate__(self).items():
            setattr(copy, slot, value)
        return copy


def _add_once(values: dict[str, Any], name: Any, value: Any) -> None:
    name = to_str(name, "the name of a value")
    if name in values:
        raise status(InvalidArgument, f"A value for this name has already been added: {name}")
    values[name] = value


SessionOptions.__module__ = _NATIVE
