"""Configurations of weight-only quantization: how the blocks of weights become codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .quant_utils import QuantFormat

_QUANTIZED_OPS = ("MatMul",)
_AXES = (("MatMul", 0), ("Gather", 1))


class InvalidQuantization(ValueError, AssertionError):
    """Options that do not fit together. The original raises AssertionError."""


def require(holds: bool, text: str) -> None:
    """Raises InvalidQuantization with the text unless the condition holds."""
    if not holds:
        raise InvalidQuantization(text)


class WeightOnlyQuantConfig:
    """What all configurations share.

    Args:
        algorithm: `DEFAULT`, `RTN`, `k_quant`, `HQQ`, `GPTQ` or `nvidia_awq`.
        quant_format: operators on codes, or floats behind `DequantizeLinear`.
        op_types_to_quantize: the operators whose weights are quantized, `MatMul` if None.
        quant_axes: the axis of blocks by operator, `MatMul` 0 and `Gather` 1 if None.
        customized_weight_config: `bits`, `group_size` and `scheme` (`sym` or `asym`) for nodes by
            name, where they differ.
    """

    def __init__(
        self,
        algorithm: str,
        quant_format: QuantFormat,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        customized_weight_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.quant_format = quant_format
        self.op_types_to_quantize = set(op_types_to_quantize or _QUANTIZED_OPS)
        self.quant_axes = dict(quant_axes or _AXES)
        self.customized_weight_config = customized_weight_config


def _operators_only(quant_format: QuantFormat, method: str) -> None:
    require(quant_format == QuantFormat.QOperator, f"{method} only supports QOperator format")


class DefaultWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """All values of a block are in its range, and rounded to the nearest code.

    Args:
        block_size: the rows that share a scale: 16, 32, 64, 128 or 256.
        is_symmetric: blocks have no zero point.
        accuracy_level: the precision in which `MatMulNBits` takes its other input.
        quant_format: `QDQ` has 4 bits alone.
        op_types_to_quantize: `MatMul`, `Gather` or both.
        quant_axes: see `WeightOnlyQuantConfig`.
        bits: 2, 4 or 8.
        channel_wised_quantize: whole columns share a scale, for `QDQ` alone.
    """

    def __init__(
        self,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        bits: int = 4,
        channel_wised_quantize: bool = False,
    ) -> None:
        super().__init__("DEFAULT", quant_format, op_types_to_quantize, quant_axes)
        require(bits in (2, 4, 8), f"Only support 2, 4 or 8 bits quantization, not {bits!r}")
        if channel_wised_quantize and quant_format == QuantFormat.QOperator:
            raise NotImplementedError(
                "QuantFormat.QOperator is not supported channel_wised_quantize yet"
            )
        self.block_size = block_size
        self.is_symmetric = is_symmetric
        self.bits = bits
        self.accuracy_level = accuracy_level
        self.channel_wised_quantize = channel_wised_quantize


class _RatioConfig(WeightOnlyQuantConfig):
    """What rounding to nearest and the weighted fit are set with."""

    # The algorithm's name here, and in messages.
    _ALGORITHM: str
    _TITLE: str

    def __init__(
        self,
        ratios: Mapping[str, float] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        customized_weight_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        _operators_only(quant_format, self._TITLE)
        super().__init__(
            self._ALGORITHM,
            quant_format,
            op_types_to_quantize,
            customized_weight_config=customized_weight_config,
        )
        self.ratios = dict(ratios or {})


class RTNWeightOnlyQuantConfig(_RatioConfig):
    """Rounding to nearest, with ranges that may be narrower than the values.

    Args:
        ratios: by the name of a weight, the part of its range that codes cover.
        quant_format: `QOperator`.
        op_types_to_quantize: `MatMul`.
        customized_weight_config: see `WeightOnlyQuantConfig`.
    """

    _ALGORITHM = _TITLE = "RTN"


class KQuantWeightOnlyQuantConfig(_RatioConfig):
    """Scale and zero point fit the values best by weighted least squares. Blocks are asymmetric.

    Args:
        ratios: accepted; the fit chooses the range.
        quant_format: `QOperator`.
        op_types_to_quantize: `MatMul`.
        customized_weight_config: see `WeightOnlyQuantConfig`.
    """

    _ALGORITHM, _TITLE = "k_quant", "k-quant"


class GPTQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Rows that are not rounded yet make up for the errors of those that are, on samples.

    Args:
        calibration_data_reader: the samples.
        percdamp: what is added to the diagonal of the Hessian, as a share of its mean.
        block_size: accepted; how many rows are taken at a time changes nothing but the speed.
        actorder: rows of the largest inputs come first.
        mse: blocks get the range of least squared error.
        perchannel: has to be True, because blocks always have scales of their own.
        quant_format: `QOperator`.
        op_types_to_quantize: `MatMul`.
    """

    def __init__(
        self,
        calibration_data_reader: Any = None,
        percdamp: float = 0.01,
        block_size: int = 128,
        actorder: bool = False,
        mse: bool = False,
        perchannel: bool = True,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
    ) -> None:
        _operators_only(quant_format, "GPTQ")
        super().__init__("GPTQ", quant_format, op_types_to_quantize)
        require(bool(perchannel), "perchannel has to be True: blocks have scales of their own")
        self.calibration_data_reader = calibration_data_reader
        self.percdamp = percdamp
        self.block_size = block_size
        self.actorder = actorder
        self.mse = mse
        self.perchannel = perchannel


class HQQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Zero points are numbers that minimize a norm which hardly counts outliers.

    Args:
        block_size: the rows that share a scale.
        bits: 2, 4 or 8.
        axis: has to be 1, the blocks that `MatMulNBits` reads.
        quant_format: `QOperator`.
        op_types_to_quantize: `MatMul`.
        quant_axes: see `WeightOnlyQuantConfig`.
    """

    def __init__(
        self,
        block_size: int = 128,
        bits: int = 4,
        axis: int = 1,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        _operators_only(quant_format, "HQQ")
        super().__init__("HQQ", quant_format, op_types_to_quantize, quant_axes)
        require(bits in (2, 4, 8), f"Only support 2, 4 or 8 bits quantization, not {bits!r}")
        require(axis == 1, f"axis has to be 1, not {axis!r}: MatMulNBits has blocks of columns")
        self.block_size = block_size
        self.bits = bits
        self.axis = axis


class NVAWQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """AWQ by `nvidia-modelopt`, which downloads data; there is nothing of it here.

    Raises:
        NotImplementedError: always. `ort quantize --method awq` does AWQ on given samples.
    """

    def __init__(
        self,
        tokenizer_dir: Any,
        dataset_name: str = "cnn",
        cache_dir: str = "./cache",
        calibration_method: str = "awq_lite",
    ) -> None:
        raise NotImplementedError(
            "nvidia_awq needs the package nvidia-modelopt and its data sets; run "
            "`ort quantize --mode int4 --method awq --data SAMPLES`, or take "
            "GPTQWeightOnlyQuantConfig"
        )
