"""Enumerations of quantization."""

from __future__ import annotations

from enum import Enum
from typing import Any

from onnx import TensorProto


class _NamedEnum(Enum):
    """Members print as their names, which `argparse` shows in its help."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def _find(cls, name: str) -> Any:
        try:
            return cls[name]
        except KeyError:
            known = ", ".join(member.name for member in cls)
            raise ValueError(f"{name!r} is no {cls.__name__}: {known}") from None


class QuantizationMode(_NamedEnum):
    """Which operators compute on codes: with ranges known at run time only, or before."""

    IntegerOps = 0
    QLinearOps = 1

    @staticmethod
    def from_string(mode: str) -> QuantizationMode:
        """Returns the member of that name, ValueError if there is no such."""
        return QuantizationMode._find(mode)


class QuantizedValueType(_NamedEnum):
    """Whether a quantized value is a weight."""

    Input = 0
    Initializer = 1

    @staticmethod
    def from_string(v: str) -> QuantizedValueType:
        """Returns the member of that name, ValueError if there is no such."""
        return QuantizedValueType._find(v)


class QuantFormat(_NamedEnum):
    """The form of a quantized graph: operators on codes, or floats between Q and DQ nodes."""

    QOperator = 0
    QDQ = 1

    @staticmethod
    def from_string(format: str) -> QuantFormat:
        """Returns the member of that name, ValueError if there is no such."""
        return QuantFormat._find(format)


class QuantType(_NamedEnum):
    """The element type of codes.

    Example:
        >>> QuantType.QInt8.tensor_type == onnx.TensorProto.INT8
        True
    """

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    @staticmethod
    def from_string(t: str) -> QuantType:
        """Returns the member of that name, ValueError if there is no such."""
        return QuantType._find(t)

    @property
    def tensor_type(self) -> int:
        """The element type's number in ONNX."""
        return _TENSOR_TYPES[self.value]


_TENSOR_TYPES = (
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.INT16,
    TensorProto.UINT16,
    TensorProto.INT4,
    TensorProto.UINT4,
)
