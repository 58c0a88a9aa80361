"""What quantization asks of models and does to them: opsets, marks, shapes, weights as arrays.

Needs the package `onnx`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from ._types import QuantType
from .calibrate import inferred_skeleton

#: Larger models keep their weights in a file of their own: a protobuf message ends at 2 GiB.
MODEL_SIZE_THRESHOLD = 2147483648


def tensor_proto_to_array(initializer: TensorProto) -> np.ndarray:
    """Returns a float weight as an array.

    Raises:
        ValueError: it is neither float32 nor float16.
    """
    if initializer.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return numpy_helper.to_array(initializer)
    kind = TensorProto.DataType.Name(initializer.data_type)
    raise ValueError(
        f"only float type is supported. Weights {initializer.name} is {kind}, which is neither "
        "FLOAT nor FLOAT16"
    )


def attribute_to_kwarg(attribute: onnx.AttributeProto) -> dict[str, Any]:
    """Returns the attribute as a keyword argument of `onnx.helper.make_node`."""
    return {attribute.name: helper.get_attribute_value(attribute)}


def find_by_name(item_name: str, item_list: Any) -> Any:
    """Returns the first item of that name, None if there is no such."""
    return next((item for item in item_list if item.name == item_name), None)


def get_elem_index(elem_name: str, elem_list: Any) -> int:
    """Returns the place of the last equal element, -1 if there is no such."""
    return max((place for place, elem in enumerate(elem_list) if elem == elem_name), default=-1)


def get_mul_node(inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    """Returns a node `Mul`."""
    return helper.make_node("Mul", inputs, [output], name)


def generate_identified_filename(filename: Path, identifier: str) -> Path:
    """Returns the path with the identifier before its extension."""
    path = Path(filename)
    return path.with_name(path.stem + identifier + path.suffix)


def model_has_external_data(model_path: str | Path) -> bool:
    """Returns whether weights of the model are in other files."""
    model = onnx.load(Path(model_path).as_posix(), load_external_data=False)
    return any(external_data_helper.uses_external_data(w) for w in model.graph.initializer)


def get_opset_version(model: ModelProto) -> int:
    """Returns the version of the standard operators.

    Raises:
        ValueError: the model imports it not once.
    """
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(versions) != 1:
        raise ValueError("Failed to find proper ai.onnx domain")
    return versions[0]


def update_opset_version(
    model: ModelProto,
    weight_type: QuantType,
    activation_type: QuantType | None = None,
    tensor_quant_overrides: dict[str, Any] | None = None,
    block_size: int = 0,
    per_channel: bool = False,
    least: int = 10,
) -> ModelProto:
    """Returns the model in an opset that has what its quantized form needs.

    Args:
        model: the model, which is returned itself if its opset will do.
        weight_type: the type of codes of weights.
        activation_type: that of activations.
        tensor_quant_overrides: overrides, which may have further types.
        block_size: whether weights have blocks.
        per_channel: whether DequantizeLinear needs an axis, which it has from opset 13 on.
        least: the least opset.
    """
    given = [entry for entries in (tensor_quant_overrides or {}).values() for entry in entries]
    given += [entry["convert"] for entry in given if "convert" in entry]
    kinds = {entry.get("quant_type") for entry in given} | {weight_type, activation_type}
    opset = get_opset_version(model)
    if opset < 10:
        least = max(least, 11)
    if per_channel or any("axis" in entry for entry in given):
        least = max(least, 13)
    halves = any(weight.data_type == TensorProto.FLOAT16 for weight in model.graph.initializer)
    # QuantizeLinear takes float16 and gives float8 from opset 19 on.
    if QuantType.QFLOAT8E4M3FN in kinds or (halves and activation_type is not None):
        least = max(least, 19)
    if block_size or kinds & {QuantType.QInt16, QuantType.QUInt16}:
        least = max(least, 21)
    if opset >= least:
        return model
    logging.warning("the model goes from opset %d to opset %d", opset, least)
    converted = onnx.version_converter.convert_version(model, least)
    return save_and_reload_model_with_shape_infer(converted)


_INFER = ("onnx.infer", "onnxruntime.quant")
_PRE_PROCESS = ("onnx.quant.pre_process", "onnxruntime.quant")


def _mark(model: ModelProto, entry: tuple[str, str]) -> None:
    helper.set_model_props(model, {p.key: p.value for p in model.metadata_props} | dict([entry]))


def _is_marked(model: ModelProto, entry: tuple[str, str]) -> bool:
    return any((prop.key, prop.value) == entry for prop in model.metadata_props)


def add_infer_metadata(model: ModelProto) -> None:
    """Marks a model whose shapes are inferred."""
    _mark(model, _INFER)


def model_has_infer_metadata(model: ModelProto) -> bool:
    """Returns whether `add_infer_metadata` marked the model."""
    return _is_marked(model, _INFER)


def add_pre_process_metadata(model: ModelProto) -> None:
    """Marks a model that went through `quant_pre_process`."""
    _mark(model, _PRE_PROCESS)


def model_has_pre_process_metadata(model: ModelProto) -> bool:
    """Returns whether `add_pre_process_metadata` marked the model."""
    return _is_marked(model, _PRE_PROCESS)


def save_and_reload_model_with_shape_infer(model: ModelProto) -> ModelProto:
    """Returns a marked copy of the model with the types and shapes of its values; saves nothing."""
    if model.ByteSize() < MODEL_SIZE_THRESHOLD:
        inferred = onnx.shape_inference.infer_shapes(model)
    else:
        inferred = ModelProto()
        inferred.CopyFrom(model)
        del inferred.graph.value_info[:]
        inferred.graph.value_info.extend(inferred_skeleton(model).graph.value_info)
    add_infer_metadata(inferred)
    return inferred


def load_model_with_shape_infer(model_path: str | os.PathLike[str]) -> ModelProto:
    """Returns the model of a file with the types and shapes of its values; writes nothing."""
    return save_and_reload_model_with_shape_infer(onnx.load(Path(model_path).as_posix()))


def optimize_model(
    model_path: str | os.PathLike[str], opt_model_path: str | os.PathLike[str]
) -> None:
    """Writes a model as the basic rewrites of a session leave it."""
    from .. import GraphOptimizationLevel, InferenceSession, SessionOptions

    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = os.fspath(opt_model_path)
    InferenceSession(os.fspath(model_path), options, providers=["CPUExecutionProvider"])
