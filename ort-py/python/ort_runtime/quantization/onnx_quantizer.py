"""`ONNXQuantizer`: a model whose operators compute on codes.

Nodes are visited in order, and the rule of each (`_operator_rules.py`) writes what takes its place.
A value may exist as codes, as floats, or as both: QuantizeLinear and DequantizeLinear nodes are
written where a reader needs the form that is missing.

Needs the package `onnx`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..transformers._graph_queries import reads
from .base_quantizer import (
    FLOATS,
    BaseQuantizer,
    QuantizationParams,
    bias_codes,
    scalar_tensor,
    widened_for_bias,
)
from .onnx_model import _keep
from .quant_utils import (
    DEQUANT_OP_NAME,
    QUANT_OP_NAME,
    QuantizationMode,
    QuantizedValue,
    QuantizedValueType,
    add_dequant_suffix,
    add_quant_suffix,
    codes_to_tensor,
    ms_domain,
    quantize_nparray,
)
from .registry import CreateOpQuantizer

logger = logging.getLogger(__name__)


class ONNXQuantizer(BaseQuantizer):
    """Replaces operators by those that compute on codes.

    Args:
        mode: operators whose ranges are known before the run, or not.
        static: the same, as a flag.
        parent: the quantizer of the graph around this one.

    Example::

        mode = QuantizationMode.IntegerOps
        quantizer = ONNXQuantizer(
            model, False, False, mode, False, QuantType.QInt8, QuantType.QUInt8, None, [], [],
            ["MatMul"],
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file("quantized.onnx")
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        mode: QuantizationMode,
        static: bool,
        weight_qType: Any,
        activation_qType: Any,
        tensors_range: Mapping[str, Any] | None,
        nodes_to_quantize: Any,
        nodes_to_exclude: Any,
        op_types_to_quantize: Any,
        extra_options: dict[str, Any] | None = None,
        parent: ONNXQuantizer | None = None,
    ) -> None:
        super().__init__(
            model,
            per_channel,
            reduce_range,
            weight_qType,
            activation_qType,
            tensors_range,
            nodes_to_quantize,
            nodes_to_exclude,
            op_types_to_quantize,
            extra_options,
        )
        self.mode, self.static, self.parent = mode, static, parent
        self.enable_subgraph = bool(self.option("EnableSubgraph"))
        self.const_right_only = bool(self.option("MatMulConstBOnly"))
        self.uses_contrib = False
        self._graph: Any = self.model.graph()
        self._codes: dict[str, QuantizedValue] = {}
        self._biases: dict[str, tuple[str, Any]] = {}
        self._nodes: list[Any] = []
        self._floats: set[str] = set()

    # The model.

    def quantize_model(self) -> Any:
        """Quantizes the model. Returns it as a message."""
        if any(node.op_type in (QUANT_OP_NAME, DEQUANT_OP_NAME) for node in self.model.nodes()):
            logger.warning("the model has QuantizeLinear or DequantizeLinear nodes already")
        self.adjust_tensor_ranges()
        self._quantize_graph()
        self.model.clean_initializers()
        self.model.topological_sort()
        self.model.model.producer_name = "onnx.quantize"
        self.model.model.producer_version = "0.1.0"
        if self.uses_contrib:
            self.model.set_opset_import(ms_domain, 1)
        return self.model.model

    def _quantize_graph(self) -> None:
        """Writes the nodes of the graph."""
        graph = self._graph
        self._floats |= {value.name for value in graph.input}
        for node in list(graph.node):
            if self.enable_subgraph:
                node = self._with_quantized_bodies(node)
            if self.should_quantize_node(node) and CreateOpQuantizer(self, node).quantize():
                continue
            self.keep(node)
        for value in graph.output:
            self.float_of(value.name)
        _keep(graph.node, self._nodes)

    def keep(self, node: Any) -> None:
        """Writes a node that computes in floats."""
        for name in sorted(reads(node)):
            self.float_of(name)
        self._floats.update(node.output)
        self._nodes.append(node)

    def _with_quantized_bodies(self, node: Any) -> Any:
        """Returns a node whose subgraphs are quantized."""
        if not any(a.HasField("g") or a.graphs for a in node.attribute):
            return node
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for attribute in changed.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                self._quantize_body(body)
        return changed

    def _quantize_body(self, body: Any) -> None:
        """Quantizes a subgraph, which can read the values of the graphs around it."""
        inner = copy.copy(self)
        inner.parent, inner._graph = self, body
        inner.initializers = {weight.name: weight for weight in body.initializer}
        inner.value_infos = {v.name: v for v in (*body.value_info, *body.output, *body.input)}
        inner.graph_outputs = {value.name for value in body.output}
        inner._codes, inner._biases, inner._nodes, inner._floats = {}, {}, [], set()
        inner._quantize_graph()
        self.uses_contrib |= inner.uses_contrib
        read = {name for node in body.node for name in reads(node)}
        read |= inner.graph_outputs
        for place in reversed(range(len(body.initializer))):
            if body.initializer[place].name not in read:
                del body.initializer[place]

    def add(self, node: Any) -> None:
        """Writes a node whose outputs are neither floats of the model nor known codes."""
        self._nodes.append(node)
        self.uses_contrib |= node.domain == ms_domain

    def add_float(self, node: Any) -> None:
        """Writes a node whose outputs are floats of the model."""
        self._floats.update(node.output)
        self.add(node)

    # Questions.

    def _holder(self, name: str) -> ONNXQuantizer | None:
        """Returns the quantizer of the graph that has a weight."""
        if name in self.initializers:
            return self
        return self.parent._holder(name) if self.parent is not None else None

    def weight(self, name: str) -> Any:
        """Returns a weight of floats of this graph or one around it, None for other values."""
        holder = self._holder(name) if name else None
        found = holder.initializers[name] if holder is not None else None
        return found if found is not None and found.data_type in FLOATS else None

    def type_of(self, name: str) -> int:
        """Returns the element type of a value of this graph or one around it.

        Outputs of operators that shape inference does not know are taken for floats, if no range is
        needed.
        """
        kind = self.element_type(name)
        if kind is None and self.parent is not None:
            return self.parent.type_of(name)
        default = self.option("DefaultTensorType")
        if default is None:
            default = TensorProto.UNDEFINED if self.static else TensorProto.FLOAT
        return default if kind is None else kind

    def is_float_tensor(self, tensor_name: str) -> bool:
        """Returns whether a value has floats."""
        return bool(tensor_name) and self.type_of(tensor_name) in FLOATS

    def find_quantized_value(self, input_name: str) -> QuantizedValue | None:
        """Returns the codes of a value of this graph or one around it, None if it has none."""
        if input_name in self._codes or self.parent is None:
            return self._codes.get(input_name)
        return self.parent.find_quantized_value(input_name)

    # Activations.

    def note_float(self, name: str) -> None:
        """Notes that a value exists as floats."""
        self._floats.add(name)

    def add_initializer(self, tensor: Any) -> None:
        """Adds an initializer to the graph."""
        self._graph.initializer.append(tensor)

    def set_codes(self, name: str, codes: str, scale: str, zero_point: str) -> None:
        """Notes the codes of a value."""
        self._codes[name] = QuantizedValue(
            name, codes, scale, zero_point, QuantizedValueType.Input
        )

    def float_of(self, name: str) -> None:
        """Makes sure that a value exists as floats."""
        value = self._codes.get(name)
        if value is None or name in self._floats or name in self.initializers:
            return
        inputs = [value.q_name, value.scale_name, value.zp_name]
        self.add_float(
            helper.make_node(DEQUANT_OP_NAME, inputs, [name], add_dequant_suffix(name))
        )

    def codes_of(self, name: str) -> QuantizedValue | None:
        """Makes sure that a value exists as codes. Returns None if its range is not known."""
        found = self.find_quantized_value(name)
        if found is not None or not self.is_float_tensor(name):
            return found
        if self.weight(name) is not None:
            return self.weight_codes_of(name, as_activation=True)
        holder = self._maker(name)
        return holder._quantized_static(name) if self.static else holder._quantized_dynamic(name)

    def _maker(self, name: str) -> ONNXQuantizer:
        """Returns the quantizer of the graph that makes a value: its codes serve all bodies."""
        if name in self._floats or self.parent is None:
            return self
        return self.parent._maker(name)

    def _quantized_static(self, name: str) -> QuantizedValue | None:
        """Writes a QuantizeLinear."""
        params = self.output_params(name)
        if params is None:
            raise ValueError(
                f"Quantization parameters are not specified for param {name}. In static mode "
                "quantization params for inputs and outputs of nodes to be quantized are required."
            )
        codes = name + "_quantized"
        self.add(
            helper.make_node(QUANT_OP_NAME, [name, *params], [codes], add_quant_suffix(name))
        )
        self.set_codes(name, codes, *params)
        return self._codes[name]

    def _quantized_dynamic(self, name: str) -> QuantizedValue:
        """Writes a DynamicQuantizeLinear, which takes float32 only."""
        source = name
        if self.type_of(name) == TensorProto.FLOAT16:
            source = name + "_cast_to_fp32"
            self.add(
                helper.make_node("Cast", [name], [source], source + "_node", to=TensorProto.FLOAT)
            )
        names = [f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"]
        self.add(
            helper.make_node("DynamicQuantizeLinear", [source], names, add_quant_suffix(name))
        )
        self.set_codes(name, *names)
        return self._codes[name]

    def output_params(
        self, name: str, scale: float | None = None, zero_point: int | None = None
    ) -> tuple[str, str] | None:
        """Returns the names of a value's scale and zero point, None if its range is not known."""
        names = f"{name}_scale", f"{name}_zero_point"
        if self.model.get_initializer(names[0]) is not None:
            return names
        override = self.tensor_quant_overrides.get_per_tensor_overrides(name) or {}
        if name not in self.tensors_range and "scale" not in override:
            return None
        params = self.activation_params(name, override, self.activation_qType)
        if scale is not None:
            params["scale"] = np.asarray(scale, params["scale"].dtype)
            params["zero_point"] = np.asarray(zero_point, params["zero_point"].dtype)
        self._add_params(names, params)
        return names

    def _add_params(self, names: tuple[str, str], params: Mapping[str, Any]) -> None:
        """Adds the initializers of scale and zero point."""
        for name, key in zip(names, ("scale", "zero_point")):
            self._graph.initializer.append(scalar_tensor(params[key], name))

    def code_of_fill(self, fill: str, value: QuantizedValue) -> str | None:
        """Returns the name of the code of what Pad fills in, with the parameters of its input.

        None if it is out of the range of the codes.
        """
        if not fill:
            return value.zp_name
        scale, zero = (self._initializer(n) for n in (value.scale_name, value.zp_name))
        data = numpy_helper.to_array(self.initializers[fill]).reshape(())
        step, middle = (numpy_helper.to_array(tensor) for tensor in (scale, zero))
        codes = quantize_nparray(zero.data_type, data, step, middle)
        back = (float(codes) - float(middle)) * float(step)
        if abs(back - float(data)) > 0.51 * float(step):
            return None
        tensor = codes_to_tensor(codes, zero.data_type, fill + "_quantized")
        known = self.model.get_initializer(tensor.name)
        if known is not None and known.raw_data != tensor.raw_data:
            tensor.name += f"_{value.q_name}"
            known = self.model.get_initializer(tensor.name)
        if known is None:
            self.add_initializer(tensor)
        return tensor.name

    # Weights.

    def weight_codes_of(
        self, name: str, axis: int | None = None, as_activation: bool = False
    ) -> QuantizedValue | None:
        """Returns the codes of a weight.

        Args:
            name: the weight.
            axis: the axis of channels, if the options ask for a scale for each.
            as_activation: codes are those of activations.

        Returns:
            None if the weight has codes with scales along another axis.
        """
        holder = self._holder(name)
        assert holder is not None
        weight = holder.initializers[name]
        if axis is not None and axis < 0:
            axis += len(weight.dims)
        if not self.per_channel or axis is None or not 0 <= axis < len(weight.dims):
            axis = None
        known = self.find_quantized_value(name)
        if known is not None:
            return known if known.axis in (None, axis) else None
        kind = self.activation_qType if as_activation else self.weight_qType
        params = self.weight_params(weight, kind, axis, self.reduce_range and not as_activation)
        return holder._add_codes(name, weight, params)

    def turned_codes_of(self, name: str) -> QuantizedValue:
        """Returns the codes of the weight of an LSTM, whose last two axes are exchanged."""
        known = self.find_quantized_value(name)
        if known is not None:
            return known
        holder = self._holder(name)
        assert holder is not None
        data = np.ascontiguousarray(
            numpy_helper.to_array(holder.initializers[name]).transpose(0, 2, 1)
        )
        # A scale for each direction, or for each of its rows.
        axes = (1,) if self.per_channel else (1, 2)
        params = self.params_over(data, TensorProto.INT8, axes)
        value = holder._value_of_weight(name, None)
        scale = np.expand_dims(params["scale"], axes)
        zero = np.expand_dims(params["zero_point"], axes)
        codes = quantize_nparray(params["quant_type"], data, scale, zero)
        holder._add_params((value.scale_name, value.zp_name), params)
        holder.add_initializer(codes_to_tensor(codes, params["quant_type"], value.q_name))
        holder._codes[name] = value
        return value

    def _value_of_weight(self, name: str, axis: int | None) -> QuantizedValue:
        """Returns the names of a weight's codes."""
        names = f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"
        return QuantizedValue(name, *names, QuantizedValueType.Initializer, axis)

    def _add_codes(self, name: str, weight: Any, params: QuantizationParams) -> QuantizedValue:
        """Adds the initializers of a weight's codes."""
        value = self._value_of_weight(name, params.get("axis"))
        codes = self.weight_codes(weight, params, value.q_name)
        if not self.static and params["scale"].dtype == np.float16:
            # The scale is multiplied with that of DynamicQuantizeLinear.
            params["scale"] = params["scale"].astype(np.float32)
        self._add_params((value.scale_name, value.zp_name), params)
        self._graph.initializer.append(codes)
        self._codes[name] = value
        return value

    def _initializer(self, name: str) -> Any:
        """Returns an initializer of this graph, those that were added too."""
        return next(w for w in self._graph.initializer if w.name == name)

    # Biases.

    def quantize_bias_static(
        self, bias_name: str, input_name: str, weight_name: str, factor: float = 1.0
    ) -> str | None:
        """Returns the name of a bias's codes of 32 bits.

        Args:
            bias_name: the bias.
            input_name: the input of its node, with codes.
            weight_name: the weight of its node, with codes.
            factor: of the bias, before it is added to the product of codes.

        Returns:
            None if the bias is no weight, or the weight has no constant scale.
        """
        bias, weight = self.weight(bias_name), self.find_quantized_value(weight_name)
        source = self.find_quantized_value(input_name)
        if bias is None or weight is None or source is None or weight_name not in self.initializers:
            return None
        values = numpy_helper.to_array(bias).astype(np.float64) * factor
        source_scale = numpy_helper.to_array(self._initializer(source.scale_name))
        weight_scale = numpy_helper.to_array(self._initializer(weight.scale_name))
        if not self.option("QDQDisableWeightAdjustForInt32Bias"):
            weight_scale = self._widened(values, source_scale, weight, weight_scale)
        scale = np.asarray(source_scale * weight_scale)
        name = bias_name
        known = self._biases.get(bias_name)
        if known is not None and not np.array_equal(known[1], scale):
            name = bias_name + str(self.model.get_largest_initializer_name_suffix(bias_name) + 1)
            known = None
        codes = f"{name}_quantized"
        if known is None:
            self._biases[name] = (codes, scale)
            tensor = numpy_helper.from_array(bias_codes(values, scale), codes)
            self._graph.initializer.append(tensor)
        return codes

    def _widened(
        self, bias: np.ndarray, source: np.ndarray, weight: QuantizedValue, scale: np.ndarray
    ) -> np.ndarray:
        """Returns the scale of a weight, widened for its bias."""
        tensor = self._initializer(weight.q_name)
        wider = widened_for_bias(bias.ravel(), source, scale, tensor.data_type)
        zeros = numpy_helper.to_array(self._initializer(weight.zp_name))
        if wider is None or zeros.any() or self.reader_counts[weight.original_name] > 1:
            return scale
        params = QuantizationParams(
            scale=wider, zero_point=zeros, quant_type=tensor.data_type, axis=weight.axis
        )
        codes = self.weight_codes(
            self.initializers[weight.original_name], params, weight.q_name
        )
        tensor.CopyFrom(codes)
        self._initializer(weight.scale_name).CopyFrom(scalar_tensor(wider, weight.scale_name))
        return wider

