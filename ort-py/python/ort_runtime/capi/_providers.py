"""Providers: what a session's `providers` arguments mean."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from . import onnxruntime_pybind11_state as C
from ._enums import OrtExecutionProviderDevicePolicy as Policy
from ._errors import Fail, InvalidArgument, status

__all__ = ["check_and_normalize_provider_args"]

CPU = "CPUExecutionProvider"

Providers = Sequence[str | tuple[str, dict[Any, Any]]]
ProviderOptions = Sequence[dict[Any, Any]]


def check_and_normalize_provider_args(
    providers: Providers | None,
    provider_options: ProviderOptions | None,
    available_provider_names: Sequence[str],
) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the names of providers and, in parallel, their options as strings.

    `providers` holds names and (name, options) tuples, or names alone with `provider_options`
    beside it; one name may be given as it is. A name twice, or one that is not available, is kept
    and warned about.

    Raises ValueError if the arguments have another form.

    Example::

        >>> check_and_normalize_provider_args([("A", {"id": 0}), "B"], None, ["A", "B"])
        (['A', 'B'], [{'id': '0'}, {}])
    """
    if providers is None:
        return [], []
    if isinstance(providers, str):
        providers = [providers]
    if not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    pairs = _pairs(providers, provider_options)
    normalized: dict[str, dict[str, str]] = {}
    for name, options in pairs:
        if name not in available_provider_names:
            warn(
                f"Specified provider '{name}' is not in available provider names."
                f"Available providers: '{', '.join(available_provider_names)}'"
            )
        if name in normalized:
            warn(f"Duplicate provider '{name}' encountered, ignoring.")
            continue
        normalized[name] = {str(key): str(value) for key, value in options.items()}
    return list(normalized), list(normalized.values())


def _pairs(
    providers: Providers, provider_options: ProviderOptions | None
) -> list[tuple[str, dict[Any, Any]]]:
    if provider_options is None:
        return [_pair(provider) for provider in providers]
    if isinstance(provider_options, str) or not isinstance(provider_options, Sequence):
        raise ValueError("'provider_options' should be a sequence.")
    if len(providers) != len(provider_options):
        raise ValueError(
            "'providers' and 'provider_options' should be the same length if both are given."
        )
    names = [provider for provider in providers if isinstance(provider, str)]
    if len(names) != len(providers):
        raise ValueError(
            "Only string values for 'providers' are supported if 'provider_options' is given."
        )
    if not all(isinstance(options, dict) for options in provider_options):
        raise ValueError("'provider_options' values must be dicts.")
    return list(zip(names, provider_options, strict=True))


def _pair(provider: Any) -> tuple[str, dict[Any, Any]]:
    match provider:
        case str():
            return provider, {}
        case (str() as name, dict() as options) if isinstance(provider, tuple):
            return name, options
    raise ValueError("'providers' values must be either strings or (string, dict) tuples.")


def chosen(
    options: C.SessionOptions, providers: Providers | None, provider_options: ProviderOptions | None
) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the providers that the arguments ask for; without any, those that the options do."""
    available = _available(providers)
    names, given = check_and_normalize_provider_args(providers, provider_options, available)
    if names and options.has_providers():
        warn(
            "Specified 'providers'/'provider_options' when creating InferenceSession but "
            "SessionOptions has already been configured with providers. InferenceSession will "
            "only use the providers passed to InferenceSession()."
        )
    elif not names and options._providers:
        available = C.get_available_providers()
        return check_and_normalize_provider_args(options._providers, None, available)
    elif not names and options._policy is not None:
        names = _preferred(options._policy, C.get_available_providers())
        given = [{} for _ in names]
    return names, given


def _available(providers: Any) -> list[str]:
    """Returns the available providers; the CPU alone, without a search for GPUs, if that is all."""
    is_list = isinstance(providers, list | tuple)
    if providers is None or (is_list and all(provider == CPU for provider in providers)):
        return [CPU]
    return C.get_available_providers()


def _preferred(policy: Any, available: Sequence[str]) -> list[str]:
    devices = C.get_ep_devices()
    if not isinstance(policy, Policy):
        try:
            return list(dict.fromkeys(device.ep_name for device in policy(devices, {}, {}, 8)))
        except Exception as error:
            text = f"EP selection delegate failed: {type(error).__name__}: {error}"
            raise status(Fail, text) from error
    kinds = {
        Policy.PREFER_GPU: C.OrtHardwareDeviceType.GPU,
        Policy.MAX_PERFORMANCE: C.OrtHardwareDeviceType.GPU,
        Policy.PREFER_NPU: C.OrtHardwareDeviceType.NPU,
        Policy.MAX_EFFICIENCY: C.OrtHardwareDeviceType.NPU,
        Policy.MIN_OVERALL_POWER: C.OrtHardwareDeviceType.NPU,
    }
    names = [device.ep_name for device in devices if device.device.type is kinds.get(policy)]
    return [name for name in dict.fromkeys(names) if name in available]


def usable(
    names: list[str], options: list[dict[str, str]], *, strict: bool
) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the providers of this build among the named ones, and the CPU.

    The CPU is the last if it is not named, and has no options. A name that no build has is a
    RuntimeError if `strict`.
    """
    available = _available(names)
    if strict:
        known = {*available, *C.get_all_providers()}
        for name in names:
            if name not in known:
                raise RuntimeError(f"Unknown Provider Type: {name}")
    kept = {name: given for name, given in zip(names, options, strict=True) if name in available}
    kept[CPU] = {}
    return list(kept), list(kept.values())


def check_cpu_fallback(options: C.SessionOptions, asked: list[str], used: list[str]) -> None:
    """Raises if the options forbid the CPU and it was asked for, or is all that there is."""
    if options._entries.get("session.disable_cpu_ep_fallback") != "1":
        return
    if CPU in asked:
        raise status(
            InvalidArgument,
            "Conflicting session configuration: explicitly added the CPU EP to the session, but "
            "also disabled fallback to the CPU EP via session configuration options.",
        )
    if used == [CPU]:
        raise status(
            Fail,
            "This session contains graph nodes that are assigned to the default CPU EP, but "
            "fallback to CPU EP has been explicitly disabled by the user.",
        )


def warn(text: str) -> None:
    """Warns at the line outside of the package that made the call."""
    package = __package__.partition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
