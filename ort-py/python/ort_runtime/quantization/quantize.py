"""`quantize_static`, `quantize_dynamic`, `quantize`, and the configurations that they take.

Needs the package `onnx`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import onnx

from ._options import CALIBRATOR_OPTIONS, check_options
from .calibrate import (
    CalibrationDataReader,
    CalibrationMethod,
    TensorsData,
    create_calibrator,
    load_tensors_data,
    save_tensors_data,
)
from .onnx_model import ONNXModel
from .onnx_quantizer import ONNXQuantizer
from .qdq_quantizer import QDQQuantizer
from .quant_utils import MODEL_SIZE_THRESHOLD as MODEL_SIZE_THRESHOLD
from .quant_utils import (
    QuantFormat,
    QuantizationMode,
    QuantType,
    load_model_with_shape_infer,
    model_has_pre_process_metadata,
    save_and_reload_model_with_shape_infer,
    update_opset_version,
)
from .registry import IntegerOpsRegistry, QDQRegistry, QLinearOpsRegistry

Model = str | os.PathLike[str] | onnx.ModelProto
Names = Collection[str] | None

_SIXTEEN_BITS = (QuantType.QInt16, QuantType.QUInt16)
_FOUR_BITS = (QuantType.QInt4, QuantType.QUInt4)
_FLOAT8 = QuantType.QFLOAT8E4M3FN


class QuantConfig:
    """What all kinds of quantization have in common."""

    def __init__(
        self,
        activation_type: QuantType = QuantType.QUInt8,
        weight_type: QuantType = QuantType.QInt8,
        op_types_to_quantize: Names = None,
        nodes_to_quantize: Names = None,
        nodes_to_exclude: Names = None,
        per_channel: bool = False,
        reduce_range: bool = False,
        use_external_data_format: bool = False,
    ) -> None:
        self.op_types_to_quantize = op_types_to_quantize or []
        self.per_channel = per_channel
        self.reduce_range = reduce_range
        self.weight_type = weight_type
        self.activation_type = activation_type
        self.nodes_to_quantize = nodes_to_quantize or []
        self.nodes_to_exclude = nodes_to_exclude or []
        self.use_external_data_format = use_external_data_format


class StaticQuantConfig(QuantConfig):
    """The arguments of `quantize_static`, for `quantize`."""

    def __init__(
        self,
        calibration_data_reader: CalibrationDataReader,
        calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
        quant_format: QuantFormat = QuantFormat.QDQ,
        activation_type: QuantType = QuantType.QInt8,
        weight_type: QuantType = QuantType.QInt8,
        op_types_to_quantize: Names = None,
        nodes_to_quantize: Names = None,
        nodes_to_exclude: Names = None,
        per_channel: bool = False,
        reduce_range: bool = False,
        use_external_data_format: bool = False,
        calibration_providers: Sequence[str] | None = None,
        extra_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            activation_type,
            weight_type,
            op_types_to_quantize,
            nodes_to_quantize,
            nodes_to_exclude,
            per_channel,
            reduce_range,
            use_external_data_format,
        )
        self.calibration_data_reader = calibration_data_reader
        self.calibrate_method = calibrate_method
        self.quant_format = quant_format
        self.calibration_providers = calibration_providers
        self.extra_options = extra_options or {}


class DynamicQuantConfig(QuantConfig):
    """The arguments of `quantize_dynamic`, for `quantize`."""

    def __init__(
        self,
        weight_type: QuantType = QuantType.QInt8,
        op_types_to_quantize: Names = None,
        nodes_to_quantize: Names = None,
        nodes_to_exclude: Names = None,
        per_channel: bool = False,
        reduce_range: bool = False,
        use_external_data_format: bool = False,
        extra_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            QuantType.QUInt8,
            weight_type,
            op_types_to_quantize,
            nodes_to_quantize,
            nodes_to_exclude,
            per_channel,
            reduce_range,
            use_external_data_format,
        )
        self.extra_options = extra_options or {}


def get_qdq_config(
    model_input: Model,
    calibration_data_reader: CalibrationDataReader,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibrate_args: dict[str, Any] | None = None,
    activation_type: QuantType = QuantType.QUInt8,
    weight_type: QuantType = QuantType.QInt8,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    keep_removable_activations: bool = False,
    min_real_range: float | None = None,
    tensor_quant_overrides: dict[str, list[dict[str, Any]]] | None = None,
    calibration_providers: list[str] | None = None,
    op_types_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | Callable[[Any, Any], bool] | None = None,
    extra_options: dict[str, Any] | None = None,
) -> StaticQuantConfig:
    """Returns a configuration that quantizes each operator of a model, with Q and DQ nodes.

    Args:
        model_input: the model or its path.
        calibration_data_reader: the samples.
        calibrate_method: how ranges follow from them.
        calibrate_args: `symmetric`, `moving_average`, `averaging_constant`,
            `max_intermediate_outputs` and `percentile` of the calibrator.
        activation_type: the type of codes of activations.
        weight_type: the type of codes of weights.
        activation_symmetric: the zero point of activations is in the middle.
        weight_symmetric: that of weights is; so for signed types if None.
        per_channel: weights have a scale for each channel.
        reduce_range: weights have codes of 7 bits.
        keep_removable_activations: Clip and Relu nodes stay.
        min_real_range: the least extent of a range.
        tensor_quant_overrides: parameters of single tensors.
        calibration_providers: where calibration runs.
        op_types_to_quantize: operators, those of the model if None.
        nodes_to_exclude: names of nodes, or a function of the model and a node.
        extra_options: further options, which win over these arguments.

    Raises:
        ValueError: an argument of the calibrator or an option is unknown.
    """
    model = model_input
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model), load_external_data=False)
    if callable(nodes_to_exclude):
        excluded = [node.name for node in model.graph.node if nodes_to_exclude(model, node)]
    else:
        excluded = list(nodes_to_exclude or [])
    kept = (node for node in model.graph.node if node.name not in excluded)
    types = {node.op_type for node in kept if node.op_type not in _NEVER_QUANTIZED}
    types = set(op_types_to_quantize or types)
    names = {argument: option for option, argument in CALIBRATOR_OPTIONS.items()}
    for argument in calibrate_args or {}:
        if argument not in names:
            raise ValueError(f"unknown argument of calibration {argument!r}: {', '.join(names)}")
    options: dict[str, Any] = {
        "MinimumRealRange": min_real_range,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "ActivationSymmetric": activation_symmetric,
        "WeightSymmetric": weight_symmetric,
        "ForceQuantizeNoInputCheck": True,
        "TensorQuantOverrides": copy.deepcopy(tensor_quant_overrides or {}),
    }
    options.update((names[key], value) for key, value in (calibrate_args or {}).items())
    options.update(check_options(extra_options))
    large = not isinstance(model_input, onnx.ModelProto) and (
        _stored_bytes(Path(model_input), model) >= MODEL_SIZE_THRESHOLD
    )
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method,
        QuantFormat.QDQ,
        activation_type,
        weight_type,
        sorted(types),
        None,
        excluded,
        per_channel,
        reduce_range,
        large,
        calibration_providers,
        options,
    )


_NEVER_QUANTIZED = ("Cast", "QuantizeLinear", "DequantizeLinear")


def _stored_bytes(path: Path, model: onnx.ModelProto) -> int:
    """Returns the size of a model's file with those of its weights."""
    entries = (entry for weight in model.graph.initializer for entry in weight.external_data)
    files = {entry.value for entry in entries if entry.key == "location"}
    return path.stat().st_size + sum((path.parent / file).stat().st_size for file in files)


def check_static_quant_arguments(
    quant_format: QuantFormat, activation_type: QuantType, weight_type: QuantType
) -> None:
    """Raises ValueError where no runtime computes with these types.

    Raises:
        ValueError: int8 activations with uint8 weights, float8 with integers, 16 bits without Q
            and DQ nodes.
    """
    pair = f"activation_type={activation_type!s}, weight_type={weight_type!s}"
    if (activation_type == _FLOAT8) != (weight_type == _FLOAT8):
        raise ValueError(f"ONNXRuntime quantization doesn't support data format: {pair}")
    if activation_type == QuantType.QInt8 and weight_type == QuantType.QUInt8:
        raise ValueError(f"ONNXRuntime quantization doesn't support data format: {pair}")
    if quant_format == QuantFormat.QDQ:
        return
    if activation_type in _SIXTEEN_BITS or weight_type in _SIXTEEN_BITS:
        raise ValueError("Only QuantFormat.QDQ supports 16-bit quantization types.")
    if activation_type in _FOUR_BITS or weight_type in _FOUR_BITS:
        raise ValueError("Only QuantFormat.QDQ supports 4-bit quantization types.")
    if (activation_type, weight_type) == (QuantType.QInt8, QuantType.QInt8):
        logging.warning("int8 activations with QuantFormat.QOperator are slow: uint8 is faster")


def _load(model_input: Model) -> onnx.ModelProto:
    """Returns a copy of the model with the types and shapes of its values."""
    if isinstance(model_input, onnx.ModelProto):
        model = save_and_reload_model_with_shape_infer(model_input)
    else:
        model = load_model_with_shape_infer(model_input)
    if not model_has_pre_process_metadata(model):
        logging.warning(
            "the model is not pre-processed: quant_pre_process folds batch normalizations and "
            "infers more shapes"
        )
    return model


def _named_nodes(model: onnx.ModelProto, *lists: Names) -> list[list[str]]:
    """Returns names of nodes; `#3` is the fourth node, which gets that name if it has none."""
    for index, node in enumerate(model.graph.node):
        if not node.name and any(f"#{index}" in (names or ()) for names in lists):
            node.name = f"#{index}"
    named = []
    for names in lists:
        by_index = {f"#{index}": node.name for index, node in enumerate(model.graph.node)}
        named.append([by_index.get(name, name) for name in names or ()])
    return named


def quantize_static(
    model_input: Model,
    model_output: str | os.PathLike[str],
    calibration_data_reader: CalibrationDataReader | None = None,
    quant_format: QuantFormat = QuantFormat.QDQ,
    op_types_to_quantize: Names = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: QuantType = QuantType.QInt8,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Names = None,
    nodes_to_exclude: Names = None,
    use_external_data_format: bool = False,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibration_providers: Sequence[str] | None = None,
    extra_options: dict[str, Any] | None = None,
    calibration_cache_path: str | os.PathLike[str] | None = None,
) -> None:
    """Quantizes weights, and activations with the ranges that they have over samples.

    Args:
        model_input: the model or its path.
        model_output: the path of the quantized model.
        calibration_data_reader: the samples.
        quant_format: the form of the quantized graph.
        op_types_to_quantize: operators, all that have a rule if None.
        per_channel: weights have a scale for each channel.
        reduce_range: weights have codes of 7 bits.
        activation_type: the type of codes of activations.
        weight_type: the type of codes of weights.
        nodes_to_quantize: names of nodes, all if None. `#3` is the fourth node.
        nodes_to_exclude: names of nodes that stay float.
        use_external_data_format: writes weights to a file beside the model.
        calibrate_method: how ranges follow from the samples.
        calibration_providers: where calibration runs.
        extra_options: further options by name.
        calibration_cache_path: a file of ranges, which is read if it is there, else written.

    Raises:
        ValueError: the types do not go together, an option is unknown, there are no samples.

    Example::

        quantize_static("model.onnx", "quantized.onnx", reader, per_channel=True)
    """
    options = check_options(extra_options)
    check_static_quant_arguments(quant_format, activation_type, weight_type)
    if activation_type == _FLOAT8 and calibrate_method != CalibrationMethod.Distribution:
        raise ValueError(
            "Only Distribution calibration method is supported for float quantization."
        )
    if options.get("SmoothQuant"):
        raise RuntimeError("SmoothQuant is an option of `ort quantize --smooth`, not of this one")
    cached = calibration_cache_path is not None and Path(calibration_cache_path).is_file()
    if calibration_data_reader is None and not cached:
        raise ValueError(
            "Either calibration_data_reader or an existing calibration_cache_path must be provided."
        )
    operators = op_types_to_quantize or sorted({*QLinearOpsRegistry, *QDQRegistry})
    model = _load(model_input)
    included, excluded = _named_nodes(model, nodes_to_quantize, nodes_to_exclude)
    overrides = options.get("TensorQuantOverrides") or {}
    model = update_opset_version(
        model, weight_type, activation_type, overrides, options.get("BlockSize") or 0, per_channel
    )
    ranges = _calibrated(
        model,
        operators,
        calibration_data_reader,
        calibrate_method,
        calibration_providers,
        options,
        calibration_cache_path if cached else None,
    )
    if calibration_cache_path is not None and not cached:
        save_tensors_data(ranges, calibration_cache_path)
    shared: tuple[Any, ...] = (ranges, included, excluded, operators, options)
    quantizer: Any
    if quant_format == QuantFormat.QOperator:
        _require_float32(model)
        mode = QuantizationMode.QLinearOps
        kinds = weight_type, activation_type
        quantizer = ONNXQuantizer(model, per_channel, reduce_range, mode, True, *kinds, *shared)
    else:
        kinds = weight_type, activation_type
        quantizer = QDQQuantizer(model, per_channel, reduce_range, *kinds, *shared)
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(model_output, use_external_data_format)


def _require_float32(model: onnx.ModelProto) -> None:
    """Raises ValueError for a model in half precision: operators on codes have float32 scales."""
    halves = (w.name for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT16)
    name = next(halves, None)
    if name is not None:
        raise ValueError(f"{name} is float16, and QuantFormat.QOperator takes float32: use QDQ")


def _calibrated(
    model: onnx.ModelProto,
    operators: Collection[str],
    reader: Any,
    method: CalibrationMethod,
    providers: Sequence[str] | None,
    options: dict[str, Any],
    cache: str | os.PathLike[str] | None,
) -> TensorsData:
    """Returns the ranges of a file, or those of samples.

    Raises:
        ValueError: the file has ranges of another method.
    """
    if cache is not None:
        ranges = load_tensors_data(cache)
        if ranges.calibration_method != method:
            raise ValueError(
                f"Calibration cache at {cache} was produced with {ranges.calibration_method}, but "
                f"quantize_static was called with calibrate_method={method}. Delete the cache or "
                "pass a matching calibrate_method."
            )
        return ranges
    arguments = {
        argument: options[name]
        for name, argument in CALIBRATOR_OPTIONS.items()
        if options.get(name) is not None
    }
    calibrator = create_calibrator(
        model,
        list(operators),
        calibrate_method=method,
        providers=providers,
        extra_options=arguments,
    )
    stride = options.get("CalibStridedMinMax")
    if not stride:
        calibrator.collect_data(reader)
    else:
        total = len(reader)
        if total % stride:
            raise ValueError(f"CalibStridedMinMax: {total} samples are no multiple of {stride}")
        for start in range(0, total, stride):
            reader.set_range(start, start + stride)
            calibrator.collect_data(reader)
    ranges = calibrator.compute_data()
    if ranges is None:
        raise ValueError("calibration gave no ranges")
    return ranges


def quantize_dynamic(
    model_input: Model,
    model_output: str | os.PathLike[str],
    op_types_to_quantize: Names = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Names = None,
    nodes_to_exclude: Names = None,
    use_external_data_format: bool = False,
    extra_options: dict[str, Any] | None = None,
) -> None:
    """Quantizes weights; activations are quantized at run time, to unsigned 8 bits.

    Args:
        model_input: the model or its path.
        model_output: the path of the quantized model.
        op_types_to_quantize: operators, all that have a rule if None.
        per_channel: weights have a scale for each channel.
        reduce_range: weights have codes of 7 bits.
        weight_type: the type of codes of weights.
        nodes_to_quantize: names of nodes, all if None. `#3` is the fourth node.
        nodes_to_exclude: names of nodes that stay float.
        use_external_data_format: writes weights to a file beside the model.
        extra_options: further options by name.

    Raises:
        ValueError: an option is unknown, or weights are not of 8 bits.

    Example::

        quantize_dynamic("model.onnx", "quantized.onnx", per_channel=True)
    """
    options = {"MatMulConstBOnly": True} | check_options(extra_options)
    if weight_type not in (QuantType.QInt8, QuantType.QUInt8):
        raise ValueError(f"operators on integers take 8-bit weights, not {weight_type!s}")
    operators = op_types_to_quantize or list(IntegerOpsRegistry)
    model = _load(model_input)
    included, excluded = _named_nodes(model, nodes_to_quantize, nodes_to_exclude)
    # DynamicQuantizeLinear is of opset 11.
    model = update_opset_version(model, weight_type, least=11)
    products = ONNXModel(model)
    products.replace_gemm_with_matmul()
    quantizer = ONNXQuantizer(
        products.model,
        per_channel,
        reduce_range,
        QuantizationMode.IntegerOps,
        False,
        weight_type,
        QuantType.QUInt8,
        None,
        included,
        excluded,
        operators,
        options,
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(model_output, use_external_data_format)


def quantize(
    model_input: Model, model_output: str | os.PathLike[str], quant_config: Any
) -> None:
    """Quantizes as a configuration says.

    Raises:
        TypeError: it is no configuration.

    Example::

        quantize("model.onnx", "quantized.onnx", DynamicQuantConfig(per_channel=True))
    """
    config = quant_config
    if isinstance(config, StaticQuantConfig):
        quantize_static(
            model_input,
            model_output,
            config.calibration_data_reader,
            config.quant_format,
            config.op_types_to_quantize,
            config.per_channel,
            config.reduce_range,
            config.activation_type,
            config.weight_type,
            config.nodes_to_quantize,
            config.nodes_to_exclude,
            config.use_external_data_format,
            config.calibrate_method,
            config.calibration_providers,
            config.extra_options,
        )
    elif isinstance(config, DynamicQuantConfig):
        quantize_dynamic(
            model_input,
            model_output,
            config.op_types_to_quantize,
            config.per_channel,
            config.reduce_range,
            config.weight_type,
            config.nodes_to_quantize,
            config.nodes_to_exclude,
            config.use_external_data_format,
            config.extra_options,
        )
    else:
        _quantize_weights(model_input, model_output, config)


def _quantize_weights(model_input: Model, model_output: Any, config: Any) -> None:
    """Quantizes blocks of weights, as a configuration of `matmul_nbits_quantizer` says."""
    from .matmul_nbits_quantizer import MatMulNBitsQuantizer, WeightOnlyQuantConfig

    if not isinstance(config, WeightOnlyQuantConfig):
        raise TypeError(
            "Invalid quantization config type, it must be either StaticQuantConfig, "
            f"DynamicQuantConfig, or WeightOnlyQuantConfig, not {type(config).__name__}."
        )
    model = model_input
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model))
    quantizer = MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(os.fspath(model_output), True)
