"""`InferenceSession`: loads a model and builds it for its providers."""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Iterable
from typing import Any

from . import _config_keys, _environment, _logging
from . import onnxruntime_pybind11_state as C
from ._errors import InvalidArgument, ModelLoadCanceled, status
from ._fields import refuse
from ._profiling import Profile
from ._providers import (
    CPU,
    ProviderOptions,
    Providers,
    check_cpu_fallback,
    chosen,
    usable,
    warn,
)
from ._session import Session

__all__ = ["InferenceSession"]

# Keyword arguments that are options of `SessionOptions`.
_OPTION_ARGUMENTS = ("memory_limit", "budget", "cache_dir", "precision", "enable_fp16", "threads")
_OWN_ARGUMENTS = ("enable_fallback", "disabled_optimizers", "read_config_from_model")

# Filled by the first session that asks for 16 bits: the process is told once.
_fp16_is_explained: list[bool] = []


class InferenceSession(Session):
    """A model, loaded and built.

    `path_or_bytes` is the path of an ONNX file (mapped into memory), or a serialized model: bytes,
    bytearray, memoryview, or an object with `SerializeToString` such as ModelProto.

    `providers` are the execution providers to use, by name or as (name, options) tuples, in order
    of preference; without them it is the CPU, which is always the last. What this build lacks is
    warned about and left out.

    Keyword arguments:

    - `enable_fallback` (default 1): go on without a provider that cannot be opened, with a warning.
    - `disabled_optimizers`: names of rewrites to switch off.
    - `read_config_from_model` (default: environment variable ORT_LOAD_CONFIG_FROM_MODEL): apply the
      metadata entry `ort_config` of the model.
    - `memory_limit`, `budget`, `cache_dir`, `precision`, `enable_fp16`, `threads`: the options of
      that name, for a session without a SessionOptions of its own.

    Raises NoSuchFile, InvalidProtobuf, InvalidGraph and so on for models, TypeError and ValueError
    for arguments.

    A session can be pickled and copied: the model is then loaded again.

    Example::

        session = InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
        outputs = session.run(None, {"x": x})
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: C.SessionOptions | None = None,
        providers: Providers | None = None,
        provider_options: ProviderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(enable_fallback=int(kwargs.get("enable_fallback", 1)) == 1)
        self._model_path, self._model_bytes = _model(path_or_bytes)
        if sess_options is not None and not isinstance(sess_options, C.SessionOptions):
            refuse("sess_options", "SessionOptions", sess_options)
        self._sess_options_initial = sess_options = _with_arguments(sess_options, kwargs)
        self._sess_options = sess_options if sess_options else C.SessionOptions()
        default = os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL", "0")
        self._read_config_from_model = int(kwargs.get("read_config_from_model", default)) == 1
        self._disabled_optimizers = _names(kwargs.get("disabled_optimizers"))
        self._provider_arguments = providers, provider_options
        self._create_inference_session(providers, provider_options, self._disabled_optimizers)

    def _create_inference_session(
        self,
        providers: Providers | None,
        provider_options: ProviderOptions | None,
        disabled_optimizers: Iterable[str] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        given = self._sess_options_initial or C.SessionOptions()
        asked, asked_options = chosen(given, providers, provider_options)
        strict = strict or (bool(providers) and not self._enable_fallback)
        names, options = usable(asked, asked_options, strict=strict)
        check_cpu_fallback(given, asked, names)
        self._fallback_providers = [CPU]
        if names[0] == "TensorrtExecutionProvider" and "CUDAExecutionProvider" in names:
            self._fallback_providers = ["CUDAExecutionProvider", CPU]
        disabled = _names(disabled_optimizers)
        try:
            self._build(given, names, options, disabled)
        except C.EPFail as error:
            if not self._enable_fallback or names == [CPU]:
                raise
            warn(
                f"EP Error: {error} using {names}. "
                f"Falling back to {self._fallback_providers} and retrying."
            )
            without: list[dict[str, str]] = [{} for _ in self._fallback_providers]
            names, options = usable(self._fallback_providers, without, strict=False)
            self._build(given, names, options, disabled)

    def _build(
        self,
        given: C.SessionOptions,
        names: list[str],
        options: list[dict[str, str]],
        disabled: list[str],
    ) -> None:
        settings = copy.copy(given)
        _environment.apply_to(settings)
        _check(settings)
        is_path = self._model_bytes is None
        model: Any = self._model_path if is_path else self._model_bytes
        profile = Profile(settings.profile_file_prefix)
        with profile.span("model_loading_uri" if is_path else "model_loading_array"):
            native = C.InferenceSession(settings, model, is_path, self._read_config_from_model)
        with profile.span("session_initialization"):
            native.initialize_session(names, options, set(disabled))
        if self._profile is not None:
            self._profile.finish_quietly()
        self._sess, self._profile = native, None
        self._describe()
        self._profiling_start_time_ns = 0
        if self._sess_options.enable_profiling:
            self._profile, self._profiling_start_time_ns = profile, profile.start_ns
            self._is_plain = False
            profile.follow(native)
            weakref.finalize(self, profile.finish_quietly)
        self._log_warnings()

    def _log_warnings(self) -> None:
        """Logs what of the model and of the options deserves a second look."""
        options = self._sess_options
        warnings = list(self._sess.warnings)
        for key, near in _config_keys.misspelt(options._entries):
            warnings.append(f"there is no configuration entry '{key}'. Did you mean '{near}'?")
        if options.enable_fp16 and not _fp16_is_explained:
            _fp16_is_explained.append(True)
            warnings.append("enable_fp16 has no effect: matrix products are computed in 32 bits")
        threshold, logid = options.log_severity_level, options.logid
        model = self._model_path or "a model in memory"
        text = f"{model} is loaded for {', '.join(self._providers)}"
        _logging.log(_logging.INFO, text, logid=logid, threshold=threshold)
        for warning in warnings:
            _logging.log(_logging.WARNING, warning, logid=logid, threshold=threshold)

    def _reset_session(
        self, providers: Providers | None, provider_options: ProviderOptions | None
    ) -> None:
        self._create_inference_session(
            providers, provider_options, self._disabled_optimizers, strict=True
        )
        self._provider_arguments = providers, provider_options

    def __getstate__(self) -> dict[str, Any]:
        extra = {name: value for name, value in vars(self).items() if name not in _OWN_STATE}
        path = None if self._model_path is None else os.path.abspath(self._model_path)
        return extra | {
            "_enable_fallback": self._enable_fallback,
            "_model_path": path,
            "_model_bytes": self._model_bytes,
            "_sess_options_initial": self._sess_options_initial,
            "_read_config_from_model": self._read_config_from_model,
            "_disabled_optimizers": self._disabled_optimizers,
            "_provider_arguments": self._provider_arguments,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._profile = None
        self._create_inference_session(*self._provider_arguments, self._disabled_optimizers)


# What a session of this class holds, all of it made anew from what `__getstate__` gives.
_OWN_STATE = frozenset(
    {
        "_disabled_optimizers",
        "_enable_fallback",
        "_fallback_providers",
        "_has_sparse_output",
        "_is_plain",
        "_inputs_meta",
        "_model_bytes",
        "_model_meta",
        "_model_path",
        "_output_names",
        "_outputs_meta",
        "_profile",
        "_overridable_initializers",
        "_profiling_start_time_ns",
        "_provider_arguments",
        "_provider_options",
        "_providers",
        "_read_config_from_model",
        "_required",
        "_required_names",
        "_sess",
        "_sess_options",
        "_sess_options_initial",
    }
)


_AFFINITIES = re.compile(r"\d+([,-]\d+)*(;\d+([,-]\d+)*)*")


def _check(options: C.SessionOptions) -> None:
    """Raises ModelLoadCanceled, or InvalidArgument for options that mean nothing."""
    if options._load_cancel.is_cancelled:
        raise status(ModelLoadCanceled, "The load was canceled by its session options.")
    if not -1 <= options.log_severity_level <= _logging.FATAL:
        raise status(
            InvalidArgument, f"log_severity_level must be -1 to 4, not {options.log_severity_level}"
        )
    affinities = options._entries.get("session.intra_op_thread_affinities", "")
    if affinities and not _AFFINITIES.fullmatch(affinities):
        raise status(
            InvalidArgument,
            "session.intra_op_thread_affinities must be groups of processors such as '1,2;3-4', "
            f"not {affinities!r}",
        )


def _model(source: Any) -> tuple[str | None, bytes | None]:
    """Returns the path of a model, or its bytes."""
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(source), None
    return None, model_bytes(source)


def model_bytes(source: Any) -> bytes:
    """Returns a serialized model as bytes. Raises TypeError for what holds none."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if hasattr(source, "SerializeToString"):
        return source.SerializeToString()
    raise TypeError(f"Unable to load from type '{type(source)}'")


def _with_arguments(
    options: C.SessionOptions | None, arguments: dict[str, Any]
) -> C.SessionOptions | None:
    """Returns the options with our keyword arguments; without any, the options as they are."""
    given = {name: arguments[name] for name in _OPTION_ARGUMENTS if name in arguments}
    for name in arguments.keys() - given.keys() - set(_OWN_ARGUMENTS):
        warn(f"InferenceSession has no keyword argument '{name}'; it is ignored.{_advice(name)}")
    if not given:
        return options
    changed = copy.copy(options) if options is not None else C.SessionOptions()
    for name, value in given.items():
        setattr(changed, name, value)
    return changed


def _advice(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, (*_OPTION_ARGUMENTS, *_OWN_ARGUMENTS), 1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _names(names: Iterable[str] | None) -> list[str]:
    return [] if names is None else sorted(set(names))
