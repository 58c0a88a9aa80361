"""`QDQQuantizer`: a model whose tensors go through QuantizeLinear and DequantizeLinear nodes.

Operators stay float; a runtime finds those between a DequantizeLinear and a QuantizeLinear and
computes them on codes. First the rule of each node (`_qdq_rules.py`) notes which tensors it wants
quantized and how; then all parameters are computed, and nodes and initializers are written.

Needs the package `onnx`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .base_quantizer import (
    FLOATS,
    BaseQuantizer,
    QuantizationParams,
    bias_codes,
    scalar_tensor,
    widened_for_bias,
)
from .onnx_model import _keep, _remove
from .quant_utils import (
    DEQUANT_OP_NAME,
    QUANT_OP_NAME,
    add_dequant_output_suffix,
    add_dequant_suffix,
    add_quant_input_suffix,
    add_quant_output_suffix,
    add_quant_suffix,
    compute_scale_zp_blocked,
    ms_domain,
    normalize_axis,
    quantize_onnx_initializer,
)
from .registry import CreateQDQQuantizer

logger = logging.getLogger(__name__)

_FOUR_OR_SIXTEEN_BITS = {
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.INT16,
    TensorProto.UINT16,
}


@dataclass
class _Tensor:
    """How a tensor is to be quantized."""

    is_weight: bool = False
    axis: int | None = None
    #: The tensor whose parameters it has.
    provider: str | None = None


@dataclass
class _Bias:
    """What the scale of a bias is made of."""

    node_name: str
    input_name: str
    weight_name: str
    beta: float = 1.0


@dataclass
class _Written:
    """The names of a tensor's scale and zero point, and its parameters."""

    scale: str
    zero_point: str
    params: QuantizationParams
    converted: _Written | None = None
    receivers: set[str] = field(default_factory=set)

    def for_reader(self, node_name: str) -> _Written:
        """Returns what a node that reads the tensor gets."""
        if self.converted is not None and node_name in self.receivers:
            return self.converted
        return self


class QDQQuantizer(BaseQuantizer):
    """Writes QuantizeLinear and DequantizeLinear nodes into a model.

    Example::

        quantizer = QDQQuantizer(
            model, False, False, QuantType.QInt8, QuantType.QInt8, ranges, [], [], ["Conv"]
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file("quantized.onnx")
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        weight_qType: Any,
        activation_qType: Any,
        tensors_range: Mapping[str, Any] | None,
        nodes_to_quantize: Any,
        nodes_to_exclude: Any,
        op_types_to_quantize: Any,
        extra_options: dict[str, Any] | None = None,
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
        excluded = self.option("OpTypesToExcludeOutputQuantization")
        self.op_types_to_exclude_output_quantization = frozenset(excluded or ())
        self.keep_removable = bool(self.option("QDQKeepRemovableActivations"))
        self.block_size = int(self.option("BlockSize") or 0)
        overrides = (e for entries in self.tensor_quant_overrides.values() for e in entries)
        if self.option("DedicatedQDQPair") and any("convert" in entry for entry in overrides):
            raise ValueError("'convert' in TensorQuantOverrides does not go with DedicatedQDQPair")
        self.axis_by_operator = dict(self.option("QDQOpTypePerChannelSupportToAxis") or {})
        self.qdq_op_domain = self._domain()
        if self.option("MatMulConstBOnly"):
            logger.warning("MatMulConstBOnly has no effect on QDQ models")
        self._tensors: dict[str, _Tensor] = {}
        self._biases: dict[str, _Bias] = {}
        self._written: dict[str, _Written] = {}
        self._removed: list[Any] = []
        self._new_nodes: list[Any] = []
        self._weight_scales: dict[str, np.ndarray] = {}

    def _domain(self) -> str:
        """Returns the domain of the nodes: below opset 21 the standard lacks some types."""
        if self.option("UseQDQContribOps"):
            return ms_domain
        kinds = {self.weight_qType, self.activation_qType}
        kinds |= {t.tensor_type for t in self.tensor_quant_overrides.get_quant_types()}
        if self.opset_version < 21 and kinds & _FOUR_OR_SIXTEEN_BITS:
            logger.warning("codes of 4 and 16 bits: nodes of com.microsoft, as opset 21 has")
            return ms_domain
        return ""

    # What rules ask for.

    def is_tensor_quantized(self, tensor_name: str) -> bool:
        """Returns whether a rule asked for a tensor."""
        return tensor_name in self._tensors or tensor_name in self._biases

    def is_tensor_per_channel(
        self, tensor_name: str, default_axis: int, op_type: str | None = None
    ) -> tuple[bool, int | None]:
        """Returns whether a weight gets a scale for each channel, and the axis of channels."""
        weight = self.initializers.get(tensor_name)
        if weight is None:
            return False, None
        overrides = self.tensor_quant_overrides
        if overrides.has_per_tensor_overrides(tensor_name):
            return False, None
        if overrides.has_per_channel_overrides(tensor_name):
            default_axis = (overrides.get_per_channel_overrides(tensor_name) or [{}])[0]["axis"]
        elif not self.per_channel:
            return False, None
        else:
            default_axis = self.axis_by_operator.get(op_type, default_axis)
        exists, axis = normalize_axis(default_axis, len(weight.dims))
        if not exists:
            logger.warning("%s has no axis %d: one scale for all of it", tensor_name, default_axis)
            return False, None
        return True, axis

    def _is_float(self, name: str) -> bool:
        return bool(name) and self.element_type(name) in FLOATS

    def _ask(self, name: str, tensor: _Tensor) -> None:
        """Notes a tensor of floats, unless a rule asked for it before."""
        if self._is_float(name) and not self.is_tensor_quantized(name):
            self._tensors[name] = tensor

    def quantize_activation_tensor(self, tensor_name: str) -> None:
        """Asks for a tensor, with the type of activations also if it is a weight."""
        self._ask(tensor_name, _Tensor())

    def quantize_output_same_as_input(
        self, output_name: str, input_name: str, node_name: str
    ) -> None:
        """Asks for an output with the parameters of an input."""
        self._ask(output_name, _Tensor(provider=input_name))

    def quantize_weight_tensor(self, tensor_name: str) -> None:
        """Asks for a weight with one scale; for what is no weight as an activation."""
        self._ask(tensor_name, _Tensor(is_weight=tensor_name in self.initializers))

    def quantize_weight_tensor_per_channel(self, tensor_name: str, axis: int) -> None:
        """Asks for a weight with a scale for each channel."""
        if tensor_name not in self.initializers:
            logger.warning("%s is no weight: one scale for all of it", tensor_name)
            self.quantize_activation_tensor(tensor_name)
            return
        self._tensors.pop(tensor_name, None)
        self._ask(tensor_name, _Tensor(is_weight=True, axis=axis))

    def quantize_bias_tensor(
        self, node_name: str, bias_name: str, input_name: str, weight_name: str, beta: float = 1.0
    ) -> None:
        """Asks for a bias in 32 bits, a copy if another node has it; other values are left."""
        bias = self.initializers.get(bias_name)
        if bias is None or bias.data_type not in FLOATS:
            logger.warning("the bias %s of %s is no weight of floats", bias_name, node_name)
            return
        if self.is_tensor_quantized(bias_name):
            copy = onnx.TensorProto()
            copy.CopyFrom(bias)
            copy.name = self._free_name(bias_name)
            self.model.initializer().append(copy)
            self.initializers[copy.name] = self.model.initializer()[-1]
            self.model.replace_input_of_nodes(bias_name, copy.name, {node_name})
            bias_name = copy.name
        self._biases[bias_name] = _Bias(node_name, input_name, weight_name, beta)

    def _free_name(self, name: str) -> str:
        """Returns the name with the next number after it."""
        return name + str(self.model.get_largest_initializer_name_suffix(name) + 1)

    def try_replacing_upstream_output(self, upstream_output_name: str, output_name: str) -> bool:
        """Lets the producer of a value write another one, without the node between."""
        producer = self._producers.get(upstream_output_name)
        if (
            producer is None
            or upstream_output_name not in self._tensors
            or self.reader_counts[upstream_output_name] != 1
            or upstream_output_name in self.graph_outputs
        ):
            return False
        self.model.replace_node_output(producer, upstream_output_name, output_name)
        self._producers[output_name] = producer
        del self._tensors[upstream_output_name]
        return True

    def remove_node(self, node: Any) -> None:
        """Takes a node out when the model is written."""
        self._removed.append(node)

    # The model.

    def quantize_model(self) -> Any:
        """Quantizes the model. Returns it as a message."""
        self.adjust_tensor_ranges()
        self._producers = {n: node for node in self.model.nodes() for n in node.output if n}
        for node in self.model.nodes():
            if self.should_quantize_node(node):
                CreateQDQQuantizer(self, node).quantize()
        self._adjust_weight_scales()
        if self._removed:
            removed = {node.output[0] for node in self._removed}
            kept = [n for n in self.model.nodes() if not self._is_removed(n, removed)]
            _keep(self.model.nodes(), kept)
        self._readers = self.model.input_name_to_nodes()
        self._producers = self.model.output_name_to_node()
        for name, tensor in self._tensors.items():
            if name in self.initializers:
                self._write_weight(name, tensor)
            elif tensor.provider is None:
                self._write_activation(name, self._own_parameters(name))
        for name, tensor in self._tensors.items():
            if name not in self.initializers and tensor.provider is not None:
                self._write_activation(name, self._shared_parameters(name, set()))
        if self.option("QuantizeBias"):
            for name, bias in self._biases.items():
                self._write_bias(name, bias)
        self._finish()
        return self.model.model

    def _is_removed(self, node: Any, results: set[str]) -> bool:
        """Returns whether a node is one whose output its source's producer writes now."""
        return node.op_type in ("Clip", "Relu") and node.output[0] in results

    def _finish(self) -> None:
        """Adds the new nodes, takes out what no one reads, signs the model."""
        self.model.add_nodes(self._new_nodes)
        if not self.option("AddQDQPairToWeight"):
            self.model.clean_initializers()
        self.model.topological_sort()
        self.model.model.producer_name = "onnx.quantize"
        self.model.model.producer_version = "0.1.0"
        if self.qdq_op_domain == ms_domain:
            self.model.set_opset_import(ms_domain, 1)

    # Parameters.

    def _override(self, name: str) -> dict[str, Any]:
        return self.tensor_quant_overrides.get_per_tensor_overrides(name) or {}

    def _own_parameters(self, name: str) -> _Written:
        """Returns the parameters of an activation, whose initializers are written."""
        override = self._override(name)
        params = self.activation_params(name, override, self.activation_qType)
        written = self._parameters(name, params, "")
        if "convert" in override:
            convert = override["convert"]
            second = self.activation_params(name, convert, self.activation_qType)
            written.converted = self._parameters(name, second, "_convert")
            readers = {node.name for node in self._readers.get(name, ())}
            written.receivers = set(convert.get("recv_nodes", readers))
        return written

    def _shared_parameters(self, name: str, seen: set[str]) -> _Written:
        """Returns the parameters of the tensor that a chain of nodes only moves."""
        tensor = self._tensors.get(name)
        if name in self._written:
            return self._written[name]
        if tensor is None or tensor.provider is None or name in seen:
            raise ValueError(f"no parameters for {name}: its source is not quantized")
        producer = self._producers[name]
        source = self._shared_parameters(tensor.provider, seen | {name})
        return source.for_reader(producer.name)

    def _parameters(self, name: str, params: QuantizationParams, suffix: str) -> _Written:
        """Writes the initializers of scale and zero point."""
        written = _Written(f"{name}_scale{suffix}", f"{name}_zero_point{suffix}", params)
        for key, tensor in ((written.scale, "scale"), (written.zero_point, "zero_point")):
            self._add_weight(scalar_tensor(params[tensor], key))
        return written

    def _add_weight(self, tensor: Any) -> None:
        self.model.initializer().append(tensor)

    # Weights.

    def _weight_parameters(self, name: str) -> QuantizationParams:
        """Returns the parameters of a weight, or of a weight that is quantized as an activation."""
        tensor, weight = self._tensors[name], self.initializers[name]
        kind = self.weight_qType if tensor.is_weight else self.activation_qType
        if self.block_size and tensor.is_weight:
            return self._block_parameters(weight, kind, tensor.axis)
        symmetric = None if tensor.is_weight else self.is_activation_symmetric
        params = self.weight_params(weight, kind, tensor.axis, self.reduce_range, symmetric)
        if name in self._weight_scales:
            params["scale"] = self._weight_scales[name]
        return params

    def _block_parameters(self, weight: Any, kind: int, axis: int | None) -> QuantizationParams:
        """Returns the parameters of blocks along an axis.

        Raises:
            NotImplementedError: the weight is no matrix.
        """
        data = numpy_helper.to_array(weight)
        if data.ndim != 2:
            raise NotImplementedError(
                "Per-block (opset-21) quantization is only supported for rank-2 weight tensors. "
                f"{weight.name} has the shape {data.shape}"
            )
        axis = 0 if axis is None else axis
        zero, scale = compute_scale_zp_blocked(
            data, kind, axis, self.block_size, self.is_weight_symmetric(kind)
        )
        return QuantizationParams(zero_point=zero, scale=scale, quant_type=kind, axis=axis)

    def _write_weight(self, name: str, tensor: _Tensor) -> None:
        """Writes the codes of a weight, or Q and DQ nodes behind the float weight."""
        weight, params = self.initializers[name], self._weight_parameters(name)
        written = self._written[name] = self._parameters(name, params, "")
        axis, block = params.get("axis"), self.block_size if tensor.is_weight else 0
        result = add_dequant_output_suffix(name)
        if self.option("AddQDQPairToWeight"):
            codes = add_quant_output_suffix(name)
            self._add_q(name, codes, add_quant_suffix(name), written, axis, block)
            self._replace_readers(name, result)
        else:
            codes = f"{name}_quantized"
            kind, zero, scale = (params[key] for key in ("quant_type", "zero_point", "scale"))
            self._add_weight(
                quantize_onnx_initializer(weight, kind, zero, scale, axis, codes, block)
            )
            self._replace_readers(name, result)
        self._add_dq(codes, result, add_dequant_suffix(name), written, axis, block)

    def _adjust_weight_scales(self) -> None:
        """Widens the scales of weights with a bias that needs more than 32 bits."""
        if self.option("QDQDisableWeightAdjustForInt32Bias") or not self.option("QuantizeBias"):
            return
        for name, bias in self._biases.items():
            weight = self._tensors.get(bias.weight_name)
            if weight is None or not weight.is_weight or self.block_size:
                continue
            if self.tensor_quant_overrides.overrides_scale_zp(bias.weight_name):
                continue
            source = self._scale_for(bias.input_name, bias.node_name)
            if source is None:
                continue
            params = self._weight_parameters(bias.weight_name)
            if np.any(params["zero_point"]):
                continue
            values = numpy_helper.to_array(self.initializers[name]).ravel()
            if values.size % params["scale"].size:
                continue
            wider = widened_for_bias(values, source, params["scale"], params["quant_type"])
            if wider is not None:
                logger.info("scale of %s widened for the bias %s", bias.weight_name, name)
                self._weight_scales[bias.weight_name] = wider

    def _scale_for(self, name: str, node_name: str) -> np.ndarray | None:
        """Returns the scale that a node reads a tensor with, None if it is not quantized."""
        seen = set()
        while True:
            tensor = self._tensors.get(name)
            if tensor is None or name in seen:
                return None
            if name in self.initializers:
                return self._weight_parameters(name)["scale"]
            if tensor.provider is None:
                break
            seen.add(name)
            node_name, name = self._producers[name].name, tensor.provider
        override = self._override(name)
        convert = override.get("convert")
        if convert is not None and node_name in convert.get("recv_nodes", (node_name,)):
            override = convert
        return self.activation_params(name, override, self.activation_qType)["scale"]

    # Biases.

    def _write_bias(self, name: str, bias: _Bias) -> None:
        """Writes the codes of a bias, and a node that makes the value of its name of them."""
        source = self._scale_for(bias.input_name, bias.node_name)
        weight = self._written.get(bias.weight_name)
        if source is None or weight is None:
            logger.warning("the bias %s stays float, as its node's inputs do", name)
            return
        values = numpy_helper.to_array(self.initializers[name])
        if weight.params["quant_type"] == TensorProto.FLOAT8E4M3FN:
            self._write_wide_bias(name)
            return
        steps = weight.params["scale"]
        if self.block_size and steps.ndim > 1:
            if steps.shape[weight.params["axis"]] > 1:
                logger.warning("the bias %s stays float, behind weights in blocks", name)
                return
            steps = steps.ravel()
        scale = np.atleast_1d(np.asarray(source * steps, values.dtype))
        exact = np.atleast_1d(source.astype(np.float64) * steps.astype(np.float64))
        if values.size % scale.size or (np.abs(scale - exact) > 0.01 * exact).any():
            # Products of two scales in float16 may be less than it has digits for.
            logger.warning("the bias %s stays float: no scale fits its layer", name)
            return
        if 1 < scale.size < values.size:
            # The groups of a transposed convolution share the scales of their channels.
            scale = np.tile(scale, values.size // scale.size)
        codes = bias_codes(values.astype(np.float64) * bias.beta, scale)
        # A Gemm may have a bias of one row.
        axis = values.ndim - 1 if scale.size > 1 else None
        zero = np.zeros(() if axis is None else scale.shape, np.int32)
        _remove(self.model.initializer(), {name})
        base = f"{name}_quantized"
        for suffix, array in (("", codes), ("_scale", scale), ("_zero_point", zero)):
            self._add_weight(numpy_helper.from_array(array, base + suffix))
        names = _Written(base + "_scale", base + "_zero_point", QuantizationParams())
        self._add_dq(base, name, add_dequant_suffix(name), names, axis)

    def _write_wide_bias(self, name: str) -> None:
        """Keeps the floats of a bias of a layer in float8, behind a Cast."""
        weight = self.initializers[name]
        kind, codes = weight.data_type, f"{name}_quantized"
        copy = numpy_helper.from_array(numpy_helper.to_array(weight), codes)
        _remove(self.model.initializer(), {name})
        self._add_weight(copy)
        node = helper.make_node("Cast", [codes], [name], add_dequant_suffix(name), to=kind)
        self._new_nodes.append(node)

    # Nodes.

    def _write_activation(self, name: str, written: _Written) -> None:
        """Writes the pairs of an activation."""
        self._written[name] = written
        readers = self._readers.get(name, [])
        if written.converted is not None and self._tensors[name].provider is None:
            self._write_converted(name, written, readers)
            return
        dedicated = self.option("DedicatedQDQPair") and len(readers) > 1
        if name in self.graph_outputs and name in self._producers and not dedicated:
            source = add_quant_input_suffix(name)
            self.model.replace_node_output(self._producers[name], name, source)
            self._add_pair(source, name, name, written)
            return
        if not dedicated:
            result = add_dequant_output_suffix(name)
            self._replace_readers(name, result)
            self._add_pair(name, result, name, written)
            return
        for number, reader in enumerate(readers, 1):
            result = f"{add_dequant_output_suffix(name)}_{number}"
            self.model.replace_node_input(reader, name, result)
            self._add_pair(name, result, name, written, f"_{number}")

    def _write_converted(self, name: str, written: _Written, readers: list[Any]) -> None:
        """Writes the pair of an activation, and a second pair that converts it for some readers."""
        convert = written.converted
        assert convert is not None
        source, first = name, add_dequant_output_suffix(name)
        last = add_dequant_output_suffix(name + "_convert")
        others = [reader for reader in readers if reader.name not in written.receivers]
        if name in self.graph_outputs and name in self._producers:
            source = add_quant_input_suffix(name)
            self.model.replace_node_output(self._producers[name], name, source)
            # The output has the last type that all of its readers have.
            first, last = (name, last) if others else (first, name)
        for reader in readers:
            result = first if reader in others else last
            self.model.replace_node_input(reader, name, result)
        self._add_pair(source, first, name, written)
        middle = first
        if others:
            # Two nodes of its own keep the pattern Q, DQ, Q that conversions are known by.
            middle = add_quant_input_suffix(name + "_convert")
            clone = add_dequant_suffix(name + "_convert_clone")
            self._add_dq(add_quant_output_suffix(name), middle, clone, written)
        self._add_pair(middle, last, name + "_convert", convert)

    def _replace_readers(self, name: str, new: str) -> None:
        for reader in self._readers.get(name, ()):
            self.model.replace_node_input(reader, name, new)

    def _add_pair(
        self, source: str, result: str, name: str, written: _Written, suffix: str = ""
    ) -> None:
        """Adds a QuantizeLinear and a DequantizeLinear node."""
        codes = add_quant_output_suffix(name) + suffix
        self._add_q(source, codes, add_quant_suffix(name) + suffix, written)
        self._add_dq(codes, result, add_dequant_suffix(name) + suffix, written)

    def _add_q(
        self,
        source: str,
        codes: str,
        node_name: str,
        written: _Written,
        axis: int | None = None,
        block: int = 0,
    ) -> None:
        self._add(QUANT_OP_NAME, source, codes, node_name, written, axis, block)

    def _add_dq(
        self,
        codes: str,
        result: str,
        node_name: str,
        written: _Written,
        axis: int | None = None,
        block: int = 0,
    ) -> None:
        self._add(DEQUANT_OP_NAME, codes, result, node_name, written, axis, block)

    def _add(
        self,
        op_type: str,
        source: str,
        result: str,
        name: str,
        written: _Written,
        axis: int | None,
        block: int,
    ) -> None:
        attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
        if block:
            attributes["block_size"] = block
        inputs = [source, written.scale, written.zero_point]
        node = helper.make_node(
            op_type, inputs, [result], name, domain=self.qdq_op_domain, **attributes
        )
        self._new_nodes.append(node)
