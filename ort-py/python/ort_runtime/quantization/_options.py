"""The keys of `extra_options`, their defaults, and where each is read."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

#: Read by the quantizers.
QUANTIZER_OPTIONS: dict[str, Any] = {
    "ActivationSymmetric": False,
    "ActivationRestrictedAsymmetric": False,
    "WeightSymmetric": None,
    "EnableSubgraph": False,
    "ForceQuantizeNoInputCheck": False,
    "MatMulConstBOnly": False,
    "AddQDQPairToWeight": False,
    "QuantizeBias": True,
    "OpTypesToExcludeOutputQuantization": (),
    "DedicatedQDQPair": False,
    "QDQOpTypePerChannelSupportToAxis": {},
    "UseQDQContribOps": False,
    "MinimumRealRange": None,
    "TensorQuantOverrides": {},
    "QDQKeepRemovableActivations": False,
    "QDQDisableWeightAdjustForInt32Bias": False,
    "BlockSize": 0,
    "extra.Sigmoid.nnapi": False,
    "DefaultTensorType": None,
}
#: Handed to the calibrator, under the name that it has there.
CALIBRATOR_OPTIONS: dict[str, str] = {
    "CalibTensorRangeSymmetric": "symmetric",
    "CalibMovingAverage": "moving_average",
    "CalibMovingAverageConstant": "averaging_constant",
    "CalibMaxIntermediateOutputs": "max_intermediate_outputs",
    "CalibPercentile": "percentile",
}
#: Read by `quantize_static`.
STATIC_OPTIONS: dict[str, Any] = {
    "CalibStridedMinMax": None,
    "SmoothQuant": False,
    "SmoothQuantAlpha": 0.5,
    "SmoothQuantFolding": True,
}
KNOWN_OPTIONS = frozenset((*QUANTIZER_OPTIONS, *CALIBRATOR_OPTIONS, *STATIC_OPTIONS))


def unknown_name(kind: str, name: str, known: Collection[str]) -> str:
    """Returns a message about an unknown name, with the nearest known one."""
    nearest = difflib.get_close_matches(name, sorted(known), 1, 0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}{hint}"


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of `extra_options`.

    Raises:
        ValueError: a key is unknown.
    """
    options = dict(options or {})
    for name in options:
        if name not in KNOWN_OPTIONS:
            raise ValueError(unknown_name("extra option", name, KNOWN_OPTIONS))
    return options
