"""`get_qnn_qdq_config`: what QNN's operators need of the types and scales of their tensors.

Needs the package `onnx`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ...calibrate import CalibrationDataReader, CalibrationMethod
from ...quant_utils import QuantFormat, QuantType, get_opset_version
from ...quantize import Model, StaticQuantConfig
from ...tensor_quant_overrides import TensorQuantOverridesHelper

Q16_TYPES = {QuantType.QInt16, QuantType.QUInt16}
Q8_TYPES = {QuantType.QInt8, QuantType.QUInt8}
Q4_TYPES = {QuantType.QInt4, QuantType.QUInt4}
OP_TYPES_TO_EXCLUDE = {"Cast"}

#: Scales and zero points that QNN fixes for 16-bit outputs.
_FIXED: dict[tuple[str, QuantType], tuple[float, int]] = {
    ("Sigmoid", QuantType.QUInt16): (1 / 65536, 0),
    ("Sigmoid", QuantType.QInt16): (1 / 32768, 0),
    ("Tanh", QuantType.QUInt16): (1 / 32768, 32768),
    ("Tanh", QuantType.QInt16): (1 / 32768, 0),
}


def get_qnn_qdq_config(
    model_input: Model,
    calibration_data_reader: CalibrationDataReader,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    activation_type: QuantType = QuantType.QUInt8,
    weight_type: QuantType = QuantType.QUInt8,
    per_channel: bool = False,
    init_overrides: dict[str, list[dict[str, Any]]] | None = None,
    add_qtype_converts: bool = True,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    keep_removable_activations: bool = False,
    stride: int | None = None,
    calibration_providers: list[str] | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
) -> StaticQuantConfig:
    """Returns a configuration whose models QNN runs on integers as a whole.

    Args:
        model_input: the model or its path.
        calibration_data_reader: the samples.
        calibrate_method: how ranges follow from them.
        activation_type: the type of codes of activations.
        weight_type: the type of codes of weights.
        per_channel: weights have a scale for each channel.
        init_overrides: parameters of single tensors. Their types may differ from `activation_type`.
        add_qtype_converts: converts the other tensors of the nodes at tensors of such a type.
        activation_symmetric: the zero point of activations is in the middle.
        weight_symmetric: that of weights is; so for signed types if None.
        keep_removable_activations: Clip and Relu nodes stay.
        stride: samples that are calibrated at a time.
        calibration_providers: where calibration runs.
        op_types_to_quantize: operators, all of the model if None.
        nodes_to_exclude: names of nodes that stay float.

    Raises:
        ValueError: `init_overrides` do not fit the model.

    Example::

        config = get_qnn_qdq_config("model.onnx", reader, activation_type=QuantType.QUInt16)
        quantize("model.onnx", "qnn.onnx", config)
    """
    model = model_input
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model), load_external_data=False)
    if weight_symmetric is None:
        weight_symmetric = weight_type in (QuantType.QInt8, QuantType.QInt16)
    weights = {weight.name: weight for weight in model.graph.initializer}
    overrides = TensorQuantOverridesHelper(copy.deepcopy(init_overrides or {}))
    named = {name for node in model.graph.node for name in (*node.input, *node.output)}
    valid, why = overrides.is_valid(weights, named - weights.keys(), activation_type)
    if not valid:
        raise ValueError(why)
    if add_qtype_converts and not overrides.empty():
        _add_conversions(model, overrides, weights, activation_type)
    for node in model.graph.node:
        if per_channel and node.op_type == "LayerNormalization":
            continue
        if node.op_type in ("MatMul", "LayerNormalization"):
            kind = {"quant_type": weight_type, "symmetric": weight_symmetric}
            _use_weight_type(node, overrides, weights, activation_type, kind)
        elif node.op_type in ("Sigmoid", "Tanh"):
            _fix_scale(node, overrides, activation_type)
    excluded = set(nodes_to_exclude or ())
    kept = {node.op_type for node in model.graph.node if node.name not in excluded}
    types = set(op_types_to_quantize or kept - OP_TYPES_TO_EXCLUDE)
    options: dict[str, Any] = {
        "MinimumRealRange": 0.0001,
        "DedicatedQDQPair": False,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "TensorQuantOverrides": overrides.get_dict(),
        "ActivationSymmetric": activation_symmetric,
        "WeightSymmetric": weight_symmetric,
        "CalibStridedMinMax": stride,
    }
    kinds = overrides.get_quant_types() | {activation_type, weight_type}
    if get_opset_version(model) < 21 and kinds & (Q16_TYPES | Q4_TYPES):
        options["UseQDQContribOps"] = True
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method,
        QuantFormat.QDQ,
        activation_type,
        weight_type,
        sorted(types),
        None,
        list(nodes_to_exclude or ()),
        per_channel,
        False,
        False,
        calibration_providers,
        options,
    )


def _add_conversions(
    model: onnx.ModelProto,
    overrides: TensorQuantOverridesHelper,
    weights: dict[str, Any],
    default: QuantType,
) -> None:
    """Adds overrides that let all activations of a node have one type.

    The nodes that make or read a tensor of another type compute in that type. Their other tensors
    are converted, where they come from or go to the rest.
    """
    nodes = list(model.graph.node)
    chosen = {
        name: entries[0]["quant_type"]
        for name, entries in overrides.items()
        if name not in weights and entries and entries[0].get("quant_type", default) != default
    }
    kinds: dict[int, QuantType] = {}
    for place, node in enumerate(nodes):
        for name in (*node.input, *node.output):
            if name in chosen:
                kinds.setdefault(place, chosen[name])
    floats = {n for place in kinds for n in (*nodes[place].input, *nodes[place].output) if n}
    for name in sorted(floats - weights.keys() - overrides.get_dict().keys()):
        made = [kinds.get(p, default) for p, node in enumerate(nodes) if name in node.output]
        kind = made[0] if made else default
        readers: dict[QuantType, set[str]] = {}
        for place, node in enumerate(nodes):
            if name in node.input:
                readers.setdefault(kinds.get(place, default), set()).add(node.name)
        entry: dict[str, Any] = {"quant_type": kind}
        others = [reader for reader in readers if reader != kind]
        if others:
            entry["convert"] = {"quant_type": others[0], "recv_nodes": readers[others[0]]}
        if others or kind != default:
            overrides[name] = [entry]


def _use_weight_type(
    node: Any,
    overrides: TensorQuantOverridesHelper,
    weights: dict[str, Any],
    default: QuantType,
    kind: dict[str, Any],
) -> None:
    """Gives the weight of a node with 16-bit activations the type of weights.

    QNN has no such product of two 16-bit operands.
    """
    source = overrides.get_node_input_qtype_info(node.input[0], node.name, default)
    name = node.input[1]
    if source.quant_type in Q16_TYPES and name in weights and name not in overrides:
        overrides[name] = [dict(kind)]


def _fix_scale(node: Any, overrides: TensorQuantOverridesHelper, default: QuantType) -> None:
    """Gives a 16-bit output the scale that QNN has for it."""
    name = node.output[0]
    kind = overrides.get_node_output_qtype_info(name, default).quant_type
    if (node.op_type, kind) not in _FIXED:
        return
    scale, zero = _FIXED[node.op_type, kind]
    dtype = np.uint16 if kind == QuantType.QUInt16 else np.int16
    entry = dict((overrides.get_dict().get(name) or [{}])[0])
    for key in ("symmetric", "reduce_range", "rmin", "rmax"):
        entry.pop(key, None)
    entry |= {
        "quant_type": kind,
        "scale": np.array(scale, np.float32),
        "zero_point": np.array(zero, dtype),
    }
    overrides[name] = [entry]
