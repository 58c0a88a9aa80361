"""What takes the place of a node whose inputs are codes: one row for each operator.

A rule writes nodes and returns True, or writes nothing and returns False; the node then computes in
floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .quant_utils import FLOAT8_TYPES, QuantizedValue, QuantizedValueType, ms_domain


@dataclass(frozen=True)
class OperatorRule:
    """What a quantizer does at a node of an operator."""

    apply: Callable[[Any, Any, OperatorRule], bool]
    #: The operator on codes.
    op_type: str = ""
    domain: str = ms_domain
    #: The first opset whose operator takes 8-bit codes.
    opset: int = 0
    #: Attributes that the operator on codes has besides those of the original.
    more: tuple[tuple[str, int], ...] = ()

    def __call__(self, quantizer: Any, node: Any) -> OperatorNode:
        """Returns the rule with the node to apply it to."""
        return OperatorNode(self, quantizer, node)


@dataclass(frozen=True)
class OperatorNode:
    """A rule at a node."""

    rule: OperatorRule
    quantizer: Any
    node: Any

    def quantize(self) -> bool:
        """Returns whether nodes were written."""
        return self.rule.apply(self.quantizer, self.node, self.rule)


def parameters(*values: QuantizedValue) -> list[str]:
    """Returns codes, scale and zero point of each value."""
    return [name for value in values for name in (value.q_name, value.scale_name, value.zp_name)]


def attributes(node: Any, *without: str) -> dict[str, Any]:
    """Returns the attributes of a node by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name not in without}


def _codes(quantizer: Any, names: Sequence[str]) -> list[QuantizedValue] | None:
    """Returns the codes of all inputs, None if one has none."""
    if not all(quantizer.is_float_tensor(n) or quantizer.find_quantized_value(n) for n in names):
        return None
    return [quantizer.codes_of(name) for name in names]


def _right(quantizer: Any, name: str, axis: int | None) -> QuantizedValue | None:
    """Returns the codes of a second factor, which is a weight or not."""
    weight = quantizer.weight(name)
    if weight is not None:
        # The only axis of a vector is summed over, and batches of matrices have one scale.
        batched = axis == -1 and len(weight.dims) != 2
        return quantizer.weight_codes_of(name, axis=None if batched else axis)
    found = _codes(quantizer, [name])
    return found[0] if found else None


def _write(
    quantizer: Any,
    node: Any,
    rule: OperatorRule,
    inputs: list[str],
    params: tuple[str, str],
    given: dict[str, Any] | None = None,
) -> bool:
    """Writes the operator on codes, whose output has codes."""
    result = node.output[0] + "_quantized"
    name = node.name + "_quant" if node.name else ""
    if given is None:
        given = attributes(node) | dict(rule.more)
    quantizer.add(
        helper.make_node(rule.op_type, inputs, [result], name, domain=rule.domain, **given)
    )
    quantizer.set_codes(node.output[0], result, *params)
    return True


def _elementwise(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Inputs, then the parameters of the output."""
    params = quantizer.output_params(node.output[0])
    values = _codes(quantizer, node.input) if params else None
    if not values:
        return False
    return _write(quantizer, node, rule, [*parameters(*values), *params], params)


def _follows(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """As others, if the input has codes already."""
    if quantizer.find_quantized_value(node.input[0]) is None:
        return False
    return _elementwise(quantizer, node, rule)


def _sigmoid(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """As others, or with the fixed output range of Android's NNAPI."""
    if quantizer.option("extra.Sigmoid.nnapi"):
        quantizer.output_params(node.output[0], 1 / 256, 0)
    return _elementwise(quantizer, node, rule)


def _softmax(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The output's range is fixed; the axis has another default from opset 13 on."""
    signed = quantizer.activation_qType == TensorProto.INT8
    params = quantizer.output_params(node.output[0], 1 / 256, -128 if signed else 0)
    values = _codes(quantizer, node.input) if params else None
    if not values:
        return False
    given = attributes(node) | {"opset": quantizer.opset_version}
    inputs = [*parameters(*values), *params]
    return _write(quantizer, node, rule, inputs, params, given)


def _concat(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The parameters of the output, then the inputs."""
    params = quantizer.output_params(node.output[0])
    values = _codes(quantizer, node.input) if params else None
    if not values:
        return False
    return _write(quantizer, node, rule, [*params, *parameters(*values)], params)


def _where(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """A condition, and two branches; only if the options say so."""
    if not quantizer.force_quantize_no_input_check:
        return False
    params = quantizer.output_params(node.output[0])
    values = _codes(quantizer, node.input[1:]) if params else None
    if not values:
        return False
    inputs = [node.input[0], *parameters(*values), *params]
    return _write(quantizer, node, rule, inputs, params)


def _conv(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Input, weight, output, and a bias of 32 bits.

    Raises:
        RuntimeError: codes are float8.
    """
    if quantizer.weight_qType in FLOAT8_TYPES:
        raise RuntimeError("Quantization to FLOAT8E4M3FN for operator Conv is not supported.")
    params = quantizer.output_params(node.output[0])
    if not params or not _layer_fits(quantizer, node):
        return False
    left = quantizer.codes_of(node.input[0])
    right = _right(quantizer, node.input[1], 0)
    if left is None or right is None:
        return False
    inputs = [*parameters(left, right), *params]
    if len(node.input) > 2 and node.input[2]:
        inputs.append(quantizer.quantize_bias_static(node.input[2], node.input[0], node.input[1]))
    return _write(quantizer, node, rule, inputs, params)


def _layer_fits(quantizer: Any, node: Any) -> bool:
    """Returns whether input, weight and bias can have codes."""
    biased = len(node.input) > 2 and bool(node.input[2])
    known = all(
        quantizer.is_float_tensor(name) or quantizer.find_quantized_value(name)
        for name in node.input[:2]
    )
    weights = quantizer.weight(node.input[1]) and quantizer.weight(node.input[2] if biased else "")
    return known and (not biased or weights is not None)


def _gemm(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Input, weight, bias, output. `beta` goes into the codes of the bias."""
    params = quantizer.output_params(node.output[0])
    if not params or not _layer_fits(quantizer, node):
        return False
    given = attributes(node)
    left = quantizer.codes_of(node.input[0])
    right = _right(quantizer, node.input[1], 0 if given.get("transB", 0) else 1)
    if left is None or right is None:
        return False
    bias = ""
    if len(node.input) > 2 and node.input[2]:
        # The accumulator has the product without alpha, and is scaled by it with the bias.
        factor = given.get("beta", 1.0) / given.get("alpha", 1.0)
        bias = quantizer.quantize_bias_static(
            node.input[2], node.input[0], node.input[1], factor
        )
    given.pop("beta", None)
    inputs = [*parameters(left, right), bias, *params]
    return _write(quantizer, node, rule, inputs, params, given)


def _matmul(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Two factors and the output."""
    params = quantizer.output_params(node.output[0])
    if not params or not all(quantizer.is_float_tensor(name) for name in node.input):
        return False
    left = quantizer.codes_of(node.input[0])
    right = _right(quantizer, node.input[1], -1)
    if left is None or right is None:
        return False
    return _write(quantizer, node, rule, [*parameters(left, right), *params], params)


def _shares(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """An activation that the range of the input's codes implies."""
    source, result = node.input[0], node.output[0]
    value, ranges = quantizer.find_quantized_value(source), quantizer.tensors_range
    if value is None or source not in ranges or ranges[source] is not ranges.get(result):
        return False
    if value.scale_name != source + "_scale":
        # Codes that were only moved have the range of what they were moved from.
        return False
    quantizer.set_codes(result, value.q_name, value.scale_name, value.zp_name)
    return True


def _moves(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The same node on codes, if the input has some and no node is to be quantized regardless."""
    value = quantizer.find_quantized_value(node.input[0])
    if value is None or quantizer.opset_version < rule.opset or value.axis is not None:
        return False
    if quantizer.force_quantize_no_input_check and node.op_type != "Pad":
        if value.value_type != QuantizedValueType.Initializer:
            return False
    _move(quantizer, node, value, [node.output[0] + "_quantized"])
    return True


def _move(
    quantizer: Any, node: Any, value: QuantizedValue, results: list[str], name: str | None = None
) -> None:
    """Writes the same node on codes; all outputs have the parameters of the input."""
    moved = onnx.NodeProto()
    moved.CopyFrom(node)
    moved.name = node.name if name is None else name
    moved.input[0] = value.q_name
    del moved.output[:]
    moved.output.extend(results)
    quantizer.add(moved)
    for output, result in zip(node.output, results):
        quantizer.set_codes(output, result, value.scale_name, value.zp_name)


def _split(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The same node on codes."""
    values = _codes(quantizer, node.input[:1])
    if not values:
        return False
    name = node.name + "_quant" if node.name else ""
    _move(quantizer, node, values[0], [output + "quantized" for output in node.output], name)
    return True


def _argmax(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The same node on codes, whose order is that of the floats."""
    value = quantizer.find_quantized_value(node.input[0])
    if value is None:
        return False
    moved = onnx.NodeProto()
    moved.CopyFrom(node)
    moved.input[0] = value.q_name
    quantizer.add(moved)
    return True


def _pad(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The same node on codes, with the code of what is filled in."""
    value = quantizer.find_quantized_value(node.input[0])
    constant = attributes(node).get("mode", b"constant") == b"constant"
    if value is None or not constant or value.axis is not None:
        return value is not None and _moves(quantizer, node, rule)
    fill = node.input[2] if len(node.input) > 2 else ""
    if len(node.input) < 2 or (fill and fill not in quantizer.initializers):
        return False
    codes = quantizer.code_of_fill(fill, value)
    if codes is None:
        return False
    moved = onnx.NodeProto()
    moved.CopyFrom(node)
    moved.input.extend([""] * (3 - len(moved.input)))
    moved.input[2] = codes
    _move(quantizer, moved, value, [node.output[0] + "_quantized"])
    return True


def _gather(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Rows of a table of codes."""
    if quantizer.weight(node.input[0]) is None:
        return False
    value = quantizer.weight_codes_of(node.input[0], as_activation=True)
    if value is None or value.axis is not None:
        return False
    _move(quantizer, node, value, [node.output[0] + "_quantized"])
    return True


def _kept(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """The node computes in floats."""
    return False


def _attention(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Input and weight of the projections."""
    if any(node.input[5:]) or quantizer.weight(node.input[1]) is None:
        return False
    left, right = quantizer.codes_of(node.input[0]), _right(quantizer, node.input[1], 1)
    if left is None or right is None:
        return False
    rest = [*node.input[2:5], "", "", ""][:3]
    inputs = [left.q_name, right.q_name, rest[0], left.scale_name, right.scale_name, rest[1]]
    inputs += [left.zp_name, right.zp_name, rest[2]]
    name = node.name + "_quant" if node.name else ""
    for bare in filter(None, rest):
        quantizer.float_of(bare)
    quantizer.add_float(
        helper.make_node(
            rule.op_type, inputs, node.output, name, domain=rule.domain, **attributes(node)
        )
    )
    return True


# Ranges that are known at run time only.


def _scaled(
    quantizer: Any, node: Any, codes: str, left: QuantizedValue, right: QuantizedValue, result: str
) -> None:
    """Writes the product of 32-bit codes with both scales, as floats."""
    cast = codes + "_cast_output"
    factor = f"{node.name}_quant_scales_mul:0"
    half = quantizer.type_of(node.input[0]) == TensorProto.FLOAT16
    wide = result + "_float32" if half else result
    quantizer.add(
        helper.make_node("Cast", [codes], [cast], codes + "_cast", to=TensorProto.FLOAT)
    )
    scales = [left.scale_name, right.scale_name]
    quantizer.add(helper.make_node("Mul", scales, [factor], f"{node.name}_quant_scales_mul"))
    name = f"{node.name}_quant_output_scale_mul"
    quantizer.add(helper.make_node("Mul", [cast, factor], [wide], name))
    if half:
        name = result + "_cast_to_fp16_node"
        quantizer.add(helper.make_node("Cast", [wide], [result], name, to=TensorProto.FLOAT16))


def _integer_operands(
    quantizer: Any, node: Any, axis: int | None
) -> tuple[QuantizedValue, QuantizedValue] | None:
    """Returns the codes of both factors."""
    if not all(quantizer.is_float_tensor(name) for name in node.input[:2]):
        return None
    right = _right(quantizer, node.input[1], axis)
    left = quantizer.codes_of(node.input[0]) if right is not None else None
    return (left, right) if left is not None and right is not None else None


def _integer_matmul(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Integers, which are scaled afterwards."""
    if quantizer.const_right_only and quantizer.weight(node.input[1]) is None:
        return False
    operands = _integer_operands(quantizer, node, -1)
    if operands is None:
        return False
    left, right = operands
    codes = node.output[0] + "_output_quantized"
    inputs = [left.q_name, right.q_name, left.zp_name, right.zp_name]
    name = node.name + "_quant" if node.name else ""
    quantizer.add(helper.make_node(rule.op_type, inputs, [codes], name))
    _scaled(quantizer, node, codes, left, right, node.output[0])
    quantizer.note_float(node.output[0])
    return True


def _integer_conv(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Integers, which are scaled afterwards; the bias is added as floats."""
    biased = len(node.input) > 2 and bool(node.input[2])
    rank = _rank(quantizer, node.input[1])
    operands = _integer_operands(quantizer, node, None) if rank or not biased else None
    if operands is None:
        return False
    left, right = operands
    output = node.output[0]
    codes = output + "_output_quantized"
    inputs = [left.q_name, right.q_name, left.zp_name, right.zp_name]
    name = node.name + "_quant" if node.name else ""
    quantizer.add(helper.make_node(rule.op_type, inputs, [codes], name, **attributes(node)))
    product = output + "quant_scaled_output" if biased else output
    _scaled(quantizer, node, codes, left, right, product)
    if biased:
        shape = np.array([1, -1, *[1] * (rank - 2)], np.int64)
        quantizer.add_initializer(numpy_helper.from_array(shape, output + "_bias_reshape_shape"))
        reshaped = output + "_bias_reshape_output"
        quantizer.add(
            helper.make_node("Reshape", [node.input[2], output + "_bias_reshape_shape"], [reshaped])
        )
        quantizer.add(
            helper.make_node("Add", [product, reshaped], [output], output + "_bias_add")
        )
    quantizer.note_float(output)
    return True


def _rank(quantizer: Any, name: str) -> int:
    """Returns the rank of a weight, 0 for other values."""
    weight = quantizer.weight(name)
    return len(weight.dims) if weight is not None else 0


def _lstm(quantizer: Any, node: Any, rule: OperatorRule) -> bool:
    """Weights are stored transposed. The operator on codes has no batch-first layout."""
    weights = [quantizer.weight(name) for name in node.input[1:3]]
    given = attributes(node)
    if any(weight is None or len(weight.dims) != 3 for weight in weights) or given.get("layout", 0):
        return False
    values = [quantizer.turned_codes_of(name) for name in node.input[1:3]]
    given.pop("layout", None)
    inputs = [node.input[0], *(value.q_name for value in values), *node.input[3:8]]
    inputs += [""] * (8 - len(inputs))
    for value in values:
        inputs += [value.scale_name, value.zp_name]
    for name in filter(None, (node.input[0], *node.input[3:8])):
        quantizer.float_of(name)
    name = node.name + "_quant" if node.name else ""
    quantizer.add_float(
        helper.make_node(rule.op_type, inputs, node.output, name, domain=rule.domain, **given)
    )
    return True


_MOVES, _SHARES = OperatorRule(_moves), OperatorRule(_shares)

#: Operators of both modes.
COMMON: dict[str, OperatorRule] = {
    "Gather": OperatorRule(_gather),
    "Transpose": _MOVES,
    # The engine has no such operator on codes.
    "EmbedLayerNormalization": OperatorRule(_kept),
}
#: Ranges are known at run time only.
INTEGER: dict[str, OperatorRule] = {
    "Conv": OperatorRule(_integer_conv, "ConvInteger"),
    "MatMul": OperatorRule(_integer_matmul, "MatMulInteger"),
    "Attention": OperatorRule(_attention, "QAttention"),
    "LSTM": OperatorRule(_lstm, "DynamicQuantizeLSTM"),
    **COMMON,
}
#: Ranges are known before the run.
QLINEAR: dict[str, OperatorRule] = {
    "ArgMax": OperatorRule(_argmax),
    "Conv": OperatorRule(_conv, "QLinearConv", ""),
    "Gemm": OperatorRule(_gemm, "QGemm"),
    "MatMul": OperatorRule(_matmul, "QLinearMatMul", ""),
    "Add": OperatorRule(_elementwise, "QLinearAdd"),
    "Mul": OperatorRule(_elementwise, "QLinearMul"),
    "Relu": _SHARES,
    "Clip": _SHARES,
    "LeakyRelu": OperatorRule(_elementwise, "QLinearLeakyRelu"),
    "Sigmoid": OperatorRule(_sigmoid, "QLinearSigmoid"),
    "MaxPool": OperatorRule(_moves, opset=12),
    "GlobalAveragePool": OperatorRule(
        _follows, "QLinearGlobalAveragePool", more=(("channels_last", 0),)
    ),
    "Split": OperatorRule(_split),
    "Pad": OperatorRule(_pad),
    "Reshape": _MOVES,
    "Squeeze": _MOVES,
    "Unsqueeze": _MOVES,
    "Flatten": _MOVES,
    "Resize": OperatorRule(_moves, opset=11),
    "AveragePool": OperatorRule(_elementwise, "QLinearAveragePool"),
    "Concat": OperatorRule(_concat, "QLinearConcat"),
    "Softmax": OperatorRule(_softmax, "QLinearSoftmax"),
    "Where": OperatorRule(_where, "QLinearWhere"),
    **COMMON,
}
