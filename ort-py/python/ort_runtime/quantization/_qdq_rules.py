"""Which tensors of a node go through Q and DQ nodes: one row for each operator.

Operators without a row have all of their inputs and outputs quantized, each with its own range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnx import helper

from .quant_utils import FLOAT8_TYPES

Apply = Callable[[Any, Any, "QDQRule"], None]


@dataclass(frozen=True)
class QDQRule:
    """What a quantizer does at a node of an operator."""

    apply: Apply
    #: The axis of a weight's channels.
    axis: int = 0
    #: The first opset whose operator takes 8-bit codes.
    opset: int = 0

    def __call__(self, quantizer: Any, node: Any) -> QDQNode:
        """Returns the rule with the node to apply it to."""
        return QDQNode(self, quantizer, node)


@dataclass(frozen=True)
class QDQNode:
    """A rule at a node."""

    rule: QDQRule
    quantizer: Any
    node: Any

    def quantize(self) -> None:
        """Asks the quantizer for the tensors of the node."""
        self.rule.apply(self.quantizer, self.node, self.rule)


def _attribute(node: Any, name: str, default: Any) -> Any:
    """Returns the value of an attribute."""
    values = (helper.get_attribute_value(a) for a in node.attribute if a.name == name)
    return next(values, default)


def _taken(node: Any, name: str) -> float:
    """Returns a factor that goes from an attribute, which becomes 1, into a weight."""
    for attribute in node.attribute:
        if attribute.name == name:
            factor, attribute.f = attribute.f, 1.0
            return factor
    return 1.0


def _quantizes_output(quantizer: Any, node: Any) -> bool:
    return node.op_type not in quantizer.op_types_to_exclude_output_quantization


def _each(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """All inputs and outputs, each with its own range."""
    names = [*node.input, *(node.output if _quantizes_output(quantizer, node) else ())]
    for name in names:
        quantizer.quantize_activation_tensor(name)


def _weight(quantizer: Any, node: Any, name: str, axis: int) -> None:
    """A weight, or what stands in its place."""
    weight = quantizer.initializers.get(name)
    if node.op_type == "MatMul" and weight is not None and len(weight.dims) < 2:
        # The only axis of a vector is summed over.
        quantizer.quantize_weight_tensor(name)
        return
    per_channel, place = quantizer.is_tensor_per_channel(name, axis, node.op_type)
    if per_channel:
        quantizer.quantize_weight_tensor_per_channel(name, place)
    else:
        quantizer.quantize_weight_tensor(name)


def _layer(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """Input, weight, output, and a bias whose scale is the product of the first two."""
    source, weight = node.input[:2]
    quantizer.quantize_activation_tensor(source)
    axis = rule.axis
    if node.op_type == "Gemm" and _attribute(node, "transB", 0):
        axis = 0
    _weight(quantizer, node, weight, axis)
    if _quantizes_output(quantizer, node):
        quantizer.quantize_activation_tensor(node.output[0])
    if len(node.input) > 2 and node.input[2]:
        beta = _taken(node, "beta") if node.op_type == "Gemm" else 1.0
        quantizer.quantize_bias_tensor(node.name, node.input[2], source, weight, beta)


def _product(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """Two inputs, each a weight or not, and the output."""
    for name in node.input:
        if name in quantizer.initializers:
            _weight(quantizer, node, name, rule.axis)
        else:
            quantizer.quantize_activation_tensor(name)
    if _quantizes_output(quantizer, node):
        quantizer.quantize_activation_tensor(node.output[0])


def _moves(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """The output with the input's parameters, if something else quantizes the input."""
    source = node.input[0]
    if quantizer.opset_version < rule.opset or (
        node.op_type == "MaxPool" and quantizer.activation_qType in FLOAT8_TYPES
    ):
        return
    if not quantizer.force_quantize_no_input_check and not quantizer.is_tensor_quantized(source):
        return
    quantizer.quantize_activation_tensor(source)
    if _quantizes_output(quantizer, node):
        quantizer.quantize_output_same_as_input(node.output[0], source, node.name)


def _split(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """All outputs with the input's parameters."""
    quantizer.quantize_activation_tensor(node.input[0])
    if _quantizes_output(quantizer, node):
        for name in node.output:
            quantizer.quantize_output_same_as_input(name, node.input[0], node.name)


def _pad(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """As the movers if what is filled in has a code, else with a range of its own."""
    source = node.input[0]
    constant = _attribute(node, "mode", b"constant") == b"constant"
    fill = node.input[2] if constant and len(node.input) > 2 else ""
    value = _attribute(node, "value", 0.0)
    if fill:
        known = quantizer.model.get_constant_value(fill)
        value = None if known is None else known.reshape(())
    quantizer.quantize_activation_tensor(source)
    if fill:
        quantizer.quantize_activation_tensor(fill)
    if not _quantizes_output(quantizer, node):
        return
    if constant and value != 0:
        quantizer.quantize_activation_tensor(node.output[0])
    else:
        quantizer.quantize_output_same_as_input(node.output[0], source, node.name)


def _gather(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """As the movers; a table is quantized anyway."""
    if quantizer.is_valid_quantize_weight(node.input[0]):
        quantizer.quantize_activation_tensor(node.input[0])
    _moves(quantizer, node, rule)


def _removable(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """An activation that the range of the codes implies."""
    source, result = node.input[0], node.output[0]
    if not quantizer.is_tensor_quantized(source):
        return
    implied = not quantizer.is_activation_symmetric and quantizer.is_implied(node)
    if implied and not quantizer.keep_removable:
        if quantizer.try_replacing_upstream_output(source, result):
            quantizer.remove_node(node)
            if _quantizes_output(quantizer, node):
                quantizer.quantize_activation_tensor(result)
            return
    quantizer.quantize_activation_tensor(source)
    if _quantizes_output(quantizer, node):
        quantizer.quantize_activation_tensor(result)


def _where(quantizer: Any, node: Any, rule: QDQRule) -> None:
    """Both branches, if both are quantized anyway."""
    branches = node.input[1:3]
    forced = quantizer.force_quantize_no_input_check
    if not forced and not all(quantizer.is_tensor_quantized(name) for name in branches):
        return
    for name in branches:
        quantizer.quantize_activation_tensor(name)
    if _quantizes_output(quantizer, node):
        quantizer.quantize_activation_tensor(node.output[0])


_MOVES, _REMOVABLE = QDQRule(_moves), QDQRule(_removable)
_NORM = QDQRule(_layer, axis=1)
DEFAULT = QDQRule(_each)

RULES: dict[str, QDQRule] = {
    "Conv": QDQRule(_layer, axis=0),
    "ConvTranspose": QDQRule(_layer, axis=1),
    "Gemm": QDQRule(_layer, axis=1),
    "Clip": _REMOVABLE,
    "Relu": _REMOVABLE,
    "Reshape": _MOVES,
    "Transpose": _MOVES,
    "Squeeze": _MOVES,
    "Unsqueeze": _MOVES,
    "Flatten": _MOVES,
    "Resize": QDQRule(_moves, opset=11),
    "MaxPool": QDQRule(_moves, opset=12),
    "AveragePool": _MOVES,
    "Slice": _MOVES,
    "Pad": QDQRule(_pad),
    "MatMul": QDQRule(_product, axis=-1),
    "Split": QDQRule(_split),
    "Gather": QDQRule(_gather),
    "GatherElements": QDQRule(_gather),
    "Where": QDQRule(_where),
    "InstanceNormalization": _NORM,
    "LayerNormalization": _NORM,
    "BatchNormalization": _NORM,
    "TopK": _MOVES,
    "CumSum": DEFAULT,
}
