"""What all quantizers share: options, types of values, ranges, and the codes of weights and biases.

Needs the package `onnx`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..transformers._graph_queries import reads
from ._options import QUANTIZER_OPTIONS, check_options
from .calibrate import TensorData
from .onnx_model import ONNXModel
from .quant_utils import (
    DEQUANT_OP_NAME,
    ONNX_TYPE_TO_NP_TYPE,
    QUANT_OP_NAME,
    QuantType,
    codes_to_tensor,
    compute_scale_zp,
    compute_scale_zp_float8,
    get_qmin_qmax_for_qType,
    model_has_infer_metadata,
    normalize_axis,
    quantize_nparray,
    save_and_reload_model_with_shape_infer,
    snap_zero_point_to_uint8,
    tensor_proto_to_array,
)
from .tensor_quant_overrides import TensorQuantOverridesHelper

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


class QuantizationParams(Mapping[str, Any]):
    """Zero point, scale and what else describes the codes of a tensor, by name."""

    def __init__(self, **data: Any) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class BaseQuantizer:
    """A model with what is known of its tensors; a quantizer changes `model`."""

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        weight_qType: Any,
        activation_qType: Any,
        tensors_range: Mapping[str, Any] | None,
        nodes_to_quantize: Collection[str] | None,
        nodes_to_exclude: Collection[str] | None,
        op_types_to_quantize: Collection[str],
        extra_options: dict[str, Any] | None = None,
    ) -> None:
        if not model_has_infer_metadata(model):
            model = save_and_reload_model_with_shape_infer(model)
        self.model = ONNXModel(model)
        self.per_channel, self.reduce_range = per_channel, reduce_range
        self.weight_qType, self.activation_qType = _code(weight_qType), _code(activation_qType)
        self.tensors_range = dict(tensors_range.items()) if tensors_range else {}
        self.nodes_to_quantize = frozenset(nodes_to_quantize or ())
        self.nodes_to_exclude = frozenset(nodes_to_exclude or ())
        self.op_types_to_quantize = frozenset(op_types_to_quantize)
        self.extra_options = check_options(extra_options)
        self.opset_version = next(
            opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")
        )
        self.is_activation_symmetric = bool(self.option("ActivationSymmetric"))
        self.is_activation_restricted = bool(self.option("ActivationRestrictedAsymmetric"))
        self.force_quantize_no_input_check = bool(self.option("ForceQuantizeNoInputCheck"))
        self.min_real_range = self.option("MinimumRealRange")
        graph = model.graph
        self.initializers: dict[str, Any] = {weight.name: weight for weight in graph.initializer}
        self.value_infos: dict[str, Any] = {
            value.name: value for value in (*graph.value_info, *graph.output, *graph.input)
        }
        self.graph_outputs = {value.name for value in graph.output}
        self.reader_counts = Counter(name for node in graph.node for name in reads(node))
        self.tensor_quant_overrides = TensorQuantOverridesHelper(
            dict(self.option("TensorQuantOverrides") or {})
        )
        self._check_overrides()

    def _check_overrides(self) -> None:
        """Raises ValueError if the overrides do not fit the model."""
        known = {name for node in self.model.nodes() for name in (*node.input, *node.output)}
        default = next(t for t in QuantType if t.tensor_type == self.activation_qType)
        activations = known - self.initializers.keys()
        valid, why = self.tensor_quant_overrides.is_valid(self.initializers, activations, default)
        if not valid:
            raise ValueError(why)

    def option(self, name: str) -> Any:
        """Returns an extra option, or its default."""
        return self.extra_options.get(name, QUANTIZER_OPTIONS[name])

    # Questions.

    def should_quantize_node(self, node: Any) -> bool:
        """Returns whether the options choose a node."""
        if node.op_type in (QUANT_OP_NAME, DEQUANT_OP_NAME) or node.name in self.nodes_to_exclude:
            return False
        if self.nodes_to_quantize and node.name not in self.nodes_to_quantize:
            return False
        return node.op_type in self.op_types_to_quantize

    def is_input_a_initializer(self, input_name: str) -> bool:
        """Returns whether a value is a weight."""
        return input_name in self.initializers

    def is_per_channel(self) -> bool:
        """Returns whether weights get a scale for each channel."""
        return self.per_channel

    def is_valid_quantize_weight(self, weight_name: str) -> bool:
        """Returns whether a value is a weight of floats."""
        weight = self.initializers.get(weight_name)
        return weight is not None and weight.data_type in FLOATS

    def element_type(self, name: str) -> int | None:
        """Returns the type of a value, None if the model does not say."""
        weight = self.initializers.get(name)
        if weight is not None:
            return weight.data_type
        value = self.value_infos.get(name)
        if value is None or not value.type.HasField("tensor_type"):
            return None
        return value.type.tensor_type.elem_type

    def is_weight_symmetric(self, weight_quant_type: int) -> bool:
        """Returns whether weights of that type of codes have the zero point in the middle."""
        chosen = self.option("WeightSymmetric")
        signed = (TensorProto.INT4, TensorProto.INT8, TensorProto.INT16, TensorProto.FLOAT8E4M3FN)
        return weight_quant_type in signed if chosen is None else bool(chosen)

    # Ranges.

    def adjust_tensor_ranges(self) -> None:
        """Replaces ranges that an activation function narrows, and that of Softmax.

        Codes below those of ReLU's output would never occur, so the producer gets its range.
        """
        for node in self.model.nodes():
            if self.is_implied(node):
                source, result = node.input[0], node.output[0]
                ranges = self.tensors_range
                if self.reader_counts[source] == 1 and source in ranges and result in ranges:
                    if self.should_quantize_node(node):
                        ranges[source] = ranges[result]
            elif node.op_type == "Softmax" and node.output[0] in self.tensors_range:
                # Scales of float8 are deviations, which the range does not say.
                fixed = self.activation_qType != TensorProto.FLOAT8E4M3FN
                if fixed and self.should_quantize_node(node):
                    zero_one = (np.array(v, np.float32) for v in (0.0, 1.0))
                    low, high = zero_one
                    self.tensors_range[node.output[0]] = TensorData(lowest=low, highest=high)

    def is_implied(self, node: Any) -> bool:
        """Returns whether a node is an activation that clips no value of a range with 0 in it.

        Codes end where the range of its output ends, so the node would change none of them.
        """
        if node.op_type != "Clip":
            return node.op_type == "Relu"
        bounds = {"min": -np.inf, "max": np.inf}
        for attribute in node.attribute:
            bounds[attribute.name] = attribute.f
        for key, name in zip(bounds, node.input[1:]):
            if name:
                value = self.model.get_constant_value(name)
                bounds[key] = np.nan if value is None else float(value.reshape(()))
        return bounds["min"] <= 0.0 <= bounds["max"]

    def activation_params(
        self, name: str, override: Mapping[str, Any], default_type: int
    ) -> QuantizationParams:
        """Returns the parameters of an activation, from its override or its range.

        Raises:
            ValueError: neither is there.
        """
        kind = _code(override.get("quant_type", default_type))
        if "scale" in override:
            return _given_params(override, kind)
        ranges = self.tensors_range.get(name)
        if ranges is None:
            ranges = self._constant_range(name)
        if ranges is None:
            raise ValueError(
                f"Quantization parameters are not specified for param {name}. In static mode "
                "quantization params for inputs and outputs of nodes to be quantized are required."
            )
        if kind == TensorProto.FLOAT8E4M3FN:
            zero, scale = compute_scale_zp_float8(kind, np.asarray(ranges.avg_std[1]))
            return QuantizationParams(zero_point=zero, scale=scale, quant_type=kind)
        low, high = (np.asarray(bound) for bound in ranges.range_value)
        low = np.asarray(override.get("rmin", low), low.dtype)
        high = np.asarray(override.get("rmax", high), high.dtype)
        symmetric = override.get("symmetric", self.is_activation_symmetric)
        limits = get_qmin_qmax_for_qType(kind, override.get("reduce_range", False), symmetric)
        if self.is_activation_restricted and kind == TensorProto.UINT8 and not symmetric:
            zero, scale = snap_zero_point_to_uint8(low, high, min_real_range=self.min_real_range)
        else:
            extent = self.min_real_range
            if high.dtype == np.float16 and (high != low).any():
                # 16-bit codes of a short range have no scale in float16: fewer of them will do.
                steps = float(limits[1]) - float(limits[0])
                extent = max(extent or 0.0, float(np.finfo(np.float16).tiny) * (steps + 1))
            zero, scale = compute_scale_zp(low, high, *limits, symmetric, extent)
        return QuantizationParams(
            zero_point=zero.reshape(()), scale=scale.reshape(()), quant_type=kind
        )

    def _constant_range(self, name: str) -> TensorData | None:
        """Returns the range of what a Constant node makes, None for other values."""
        value = self.model.get_constant_value(name)
        if value is None or name in self.initializers:
            return None
        low, high = _extremes(value, None)
        return TensorData(lowest=low, highest=high)

    # Weights.

    def weight_params(
        self,
        weight: Any,
        kind: int,
        axis: int | None,
        reduce_range: bool,
        symmetric: bool | None = None,
    ) -> QuantizationParams:
        """Returns the parameters of a weight: one scale, or one for each channel of an axis.

        Args:
            weight: the weight.
            kind: the type of its codes.
            axis: the axis of channels, None for one scale.
            reduce_range: uses codes of one bit less.
            symmetric: whether the zero point is in the middle, as the options say if None.
        """
        overrides = self.tensor_quant_overrides
        if axis is None:
            given = [overrides.get_per_tensor_overrides(weight.name) or {}]
        else:
            given = overrides.get_per_channel_overrides(weight.name) or [{}]
        kind = _code(given[0].get("quant_type", kind))
        if axis is None and "scale" in given[0]:
            return _given_params(given[0], kind)
        data = tensor_proto_to_array(weight)
        if kind == TensorProto.FLOAT8E4M3FN:
            others = None if axis is None else _other_axes(data.ndim, axis)
            zero, scale = compute_scale_zp_float8(kind, np.std(data, axis=others))
            zero = np.zeros(scale.shape, ONNX_TYPE_TO_NP_TYPE[kind])
            return QuantizationParams(zero_point=zero, scale=scale, quant_type=kind, axis=axis)
        low, high = _extremes(data, axis)
        default = axis is not None or self.is_weight_symmetric(kind)
        if symmetric is not None:
            default = symmetric
        if len(given) == 1:
            zero, scale = self._weight_scale(low, high, given[0], kind, default, reduce_range)
        else:
            parts = [
                _scalars(entry)
                if "scale" in entry
                else self._weight_scale(low[i], high[i], entry, kind, default, reduce_range)
                for i, entry in enumerate(_inherited(given))
            ]
            zero = np.array([part[0] for part in parts], ONNX_TYPE_TO_NP_TYPE[kind])
            scale = np.array([part[1] for part in parts], data.dtype)
        return QuantizationParams(zero_point=zero, scale=scale, quant_type=kind, axis=axis)

    def params_over(self, data: np.ndarray, kind: int, axes: tuple[int, ...]) -> QuantizationParams:
        """Returns parameters with a zero point in the middle, one for all along the axes."""
        low, high = data.min(axis=axes), data.max(axis=axes)
        limits = get_qmin_qmax_for_qType(kind, self.reduce_range, True)
        zero, scale = compute_scale_zp(low, high, *limits, True, self.min_real_range)
        return QuantizationParams(zero_point=zero, scale=scale, quant_type=kind)

    def _weight_scale(
        self,
        low: np.ndarray,
        high: np.ndarray,
        override: Mapping[str, Any],
        kind: int,
        symmetric: bool,
        reduce_range: bool,
    ) -> list[np.ndarray]:
        """Returns zero points and scales of the extremes of a weight."""
        symmetric = override.get("symmetric", symmetric)
        limits = get_qmin_qmax_for_qType(
            kind, override.get("reduce_range", reduce_range), symmetric
        )
        if "rmin" in override:
            low = np.full_like(low, override["rmin"])
        if "rmax" in override:
            high = np.full_like(high, override["rmax"])
        return compute_scale_zp(low, high, *limits, symmetric, self.min_real_range)

    def weight_codes(self, weight: Any, params: Mapping[str, Any], name: str) -> Any:
        """Returns the codes of a weight as an initializer."""
        data = tensor_proto_to_array(weight)
        codes = quantize_nparray(
            params["quant_type"],
            data,
            along_axis(params["scale"], data.ndim, params.get("axis")),
            along_axis(params["zero_point"], data.ndim, params.get("axis")),
        )
        return codes_to_tensor(codes, params["quant_type"], name)


def bias_codes(bias: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the 32-bit codes of a bias whose zero point is 0."""
    limits = np.iinfo(np.int32)
    codes = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    return np.clip(codes, limits.min, limits.max).astype(np.int32)


def widened_for_bias(
    bias: np.ndarray, input_scale: np.ndarray, weight_scale: np.ndarray, kind: int
) -> np.ndarray | None:
    """Returns scales of a weight with which all codes of a bias have 32 bits, None if they have.

    The scale of a bias is the product of those of input and weight, so a large bias of a layer with
    small weights would be clipped.
    """
    if kind not in (TensorProto.INT8, TensorProto.INT16):
        return None
    largest = np.abs(bias.astype(np.float64))
    if not weight_scale.ndim:
        largest = largest.max(initial=0.0)
    elif largest.size != weight_scale.size:
        # The groups of a transposed convolution share the scales of their channels.
        largest = largest.reshape(-1, weight_scale.size).max(0)
    smallest = 1.0001 * (2 * largest) / (2.0**32 - 2)
    current = input_scale.astype(np.float64) * weight_scale.astype(np.float64)
    ratio = np.where(current < smallest, smallest / current, 1.0)
    if (ratio == 1.0).all():
        return None
    return (weight_scale.astype(np.float64) * ratio).astype(weight_scale.dtype)


def _code(kind: Any) -> int:
    """Returns the number of a type in ONNX."""
    return kind.tensor_type if isinstance(kind, QuantType) else kind


def _inherited(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the overrides of channels, which have what the first says about all of them."""
    common = {k: v for k, v in entries[0].items() if k in ("symmetric", "reduce_range")}
    return [common | entry for entry in entries]


def _scalars(override: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns zero point and scale of an override."""
    return np.asarray(override["zero_point"]).reshape(()), np.asarray(override["scale"]).reshape(())


def _given_params(override: Mapping[str, Any], kind: int) -> QuantizationParams:
    """Returns the parameters that an override gives in full."""
    zero, scale = _scalars(override)
    return QuantizationParams(
        zero_point=zero.astype(ONNX_TYPE_TO_NP_TYPE[kind]), scale=scale, quant_type=kind
    )


def _other_axes(rank: int, axis: int) -> tuple[int, ...]:
    """Returns all axes but one."""
    kept = normalize_axis(axis, rank)[1]
    return tuple(place for place in range(rank) if place != kept)


def _extremes(data: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the largest value of an array, or of each of its channels."""
    if not data.size:
        shape = () if axis is None else (data.shape[axis],)
        return np.zeros(shape, data.dtype), np.zeros(shape, data.dtype)
    others = None if axis is None else _other_axes(data.ndim, axis)
    return np.asarray(data.min(axis=others)), np.asarray(data.max(axis=others))


def along_axis(values: np.ndarray, rank: int, axis: int | None) -> np.ndarray:
    """Returns one value for each channel in a shape that broadcasts to a weight."""
    if axis is None or not np.ndim(values):
        return np.asarray(values).reshape(())
    kept = normalize_axis(axis, rank)[1]
    return values.reshape([-1 if place == kept else 1 for place in range(rank)])


def scalar_tensor(value: np.ndarray, name: str) -> Any:
    """Returns an initializer of zero points or scales."""
    if value.dtype in (np.float32, np.float16, np.float64):
        return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
    kind = next(k for k, dtype in ONNX_TYPE_TO_NP_TYPE.items() if value.dtype == dtype)
    return codes_to_tensor(value, kind, name)


