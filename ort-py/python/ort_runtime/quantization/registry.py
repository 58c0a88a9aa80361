"""The operators that can be quantized, and the rule of each.

A rule is called with a quantizer and a node, and returns an object with the method `quantize`.
"""

from __future__ import annotations

from typing import Any

from . import _operator_rules, _qdq_rules
from .quant_utils import QuantizationMode

QDQRegistry: dict[str, Any] = dict(_qdq_rules.RULES)
CommonOpsRegistry: dict[str, Any] = dict(_operator_rules.COMMON)
IntegerOpsRegistry: dict[str, Any] = dict(_operator_rules.INTEGER)
QLinearOpsRegistry: dict[str, Any] = dict(_operator_rules.QLINEAR)


class _Kept:
    """The rule of operators without one: the node computes in floats."""

    def __init__(self, onnx_quantizer: Any, node: Any) -> None:
        pass

    def quantize(self) -> bool:
        """Writes nothing."""
        return False


def CreateDefaultOpQuantizer(onnx_quantizer: Any, node: Any) -> Any:
    """Returns the rule of a node that stays as it is."""
    return _Kept(onnx_quantizer, node)


def CreateOpQuantizer(onnx_quantizer: Any, node: Any) -> Any:
    """Returns the rule of a node for `ONNXQuantizer`."""
    integer = onnx_quantizer.mode == QuantizationMode.IntegerOps
    rules = IntegerOpsRegistry if integer else QLinearOpsRegistry
    return rules.get(node.op_type, _Kept)(onnx_quantizer, node)


def CreateQDQQuantizer(onnx_quantizer: Any, node: Any) -> Any:
    """Returns the rule of a node for `QDQQuantizer`."""
    return QDQRegistry.get(node.op_type, _qdq_rules.DEFAULT)(onnx_quantizer, node)
