"""Errors of a quantized model: its weights and values beside those of the float model.

A model that shows its values is written, run on the same samples, and the results are compared.

Needs the package `onnx`.

Example::

    modify_model_output_intermediate_tensors("model_qdq.onnx", "shown.onnx")
    values = collect_activations("shown.onnx", reader)
    print(compute_activation_error(create_activation_matching(values)))
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions
from .calibrate import CalibraterBase, CalibrationDataReader
from .quant_utils import (
    DEQUANT_OP_NAME,
    DEQUANT_OUTPUT_SUFFIX,
    QUANT_INPUT_SUFFIX,
    TENSOR_NAME_QUANT_SUFFIX,
)

logger = logging.getLogger(__name__)

_TENSOR_SAVE_POSTFIX = "_ReshapedSavedOutput"
_FLAT_SHAPE = "LinearReshape_FlatShape"

Arrays = Sequence[np.ndarray] | np.ndarray
Errors = Callable[[Any, Any], float]


def modify_model_output_intermediate_tensors(
    input_model_path: str | os.PathLike[str],
    output_model_path: str | os.PathLike[str],
    op_types_for_saving: Sequence[str] | None = None,
    save_as_external_data: bool = False,
) -> None:
    """Writes a model that also returns its float values, each as a vector.

    Args:
        input_model_path: the model to read.
        output_model_path: the model to write.
        op_types_for_saving: the operators whose inputs and outputs are returned, all if None.
        save_as_external_data: weights go to a file of their own.
    """
    selection = CalibraterBase(input_model_path, op_types_for_saving)
    names = selection.observed_types()
    model = onnx.load(os.fspath(input_model_path))
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), _FLAT_SHAPE))
    for name, dtype in names.items():
        shown = name + _TENSOR_SAVE_POSTFIX
        graph.node.append(helper.make_node("Reshape", [name, _FLAT_SHAPE], [shown], shown))
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        graph.output.append(helper.make_tensor_value_info(shown, kind, [None]))
    path = os.fspath(output_model_path)
    onnx.save(model, path, save_as_external_data=save_as_external_data)


def collect_activations(
    augmented_model: str | os.PathLike[str],
    input_reader: CalibrationDataReader,
    session_options: SessionOptions | None = None,
    execution_providers: Sequence[str] | None = None,
) -> dict[str, list[np.ndarray]]:
    """Returns the values of each run by name, which takes the memory of all of them.

    Args:
        augmented_model: a model of `modify_model_output_intermediate_tensors`, or its path.
        input_reader: the samples.
        session_options: options of the session; without optimizations if None.
        execution_providers: the providers, that of the CPU if None.

    Raises:
        RuntimeError: there were no samples.
    """
    if session_options is None:
        session_options = SessionOptions()
        session_options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = list(execution_providers or ["CPUExecutionProvider"])
    source: Any = augmented_model
    if isinstance(augmented_model, ModelProto):
        source = augmented_model.SerializeToString()
    session = InferenceSession(source, session_options, providers=providers)
    shown = [o.name for o in session.get_outputs() if o.name.endswith(_TENSOR_SAVE_POSTFIX)]
    collected: dict[str, list[np.ndarray]] = {
        name.removesuffix(_TENSOR_SAVE_POSTFIX): [] for name in shown
    }
    count = 0
    while sample := input_reader.get_next():
        count += 1
        for values, array in zip(collected.values(), session.run(shown, sample)):
            values.append(array)
    if not count:
        raise RuntimeError("No data is collected while running augmented model!")
    return collected


def create_activation_matching(
    qdq_activations: Mapping[str, Sequence[np.ndarray]],
    float_activations: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> dict[str, dict[str, Sequence[np.ndarray]]]:
    """Returns each quantized value before and after its pair of nodes, and in the float model.

    Args:
        qdq_activations: what `collect_activations` has of the quantized model.
        float_activations: what it has of the float model.

    Returns:
        By the name of the value: `pre_qdq`, `post_qdq`, and `float` if that is known.
    """
    matched: dict[str, dict[str, Sequence[np.ndarray]]] = {}
    for name, values in qdq_activations.items():
        # A pair for one reader alone has a number behind its names.
        for suffix in (DEQUANT_OUTPUT_SUFFIX, f"{DEQUANT_OUTPUT_SUFFIX}_1"):
            if name.endswith(suffix):
                value = name.removesuffix(suffix)
                before, after = qdq_activations.get(value), values
                break
        else:
            # A graph output keeps its name behind the pair.
            if not name.endswith(QUANT_INPUT_SUFFIX):
                continue
            value = name.removesuffix(QUANT_INPUT_SUFFIX)
            found = qdq_activations.get(value)
            if found is None:
                continue
            before, after = values, found
        if before is not None:
            matched[value] = {"pre_qdq": before, "post_qdq": after}
    for value, pair in matched.items():
        exact = None if float_activations is None else float_activations.get(value)
        if exact is not None:
            pair["float"] = exact
        elif float_activations is not None:
            logger.warning("value '%s' is not among those of the float model", value)
    return matched


def create_weight_matching(
    float_model_path: str | os.PathLike[str], qdq_model_path: str | os.PathLike[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns each quantized weight as it was and as its codes stand for.

    Args:
        float_model_path: the float model.
        qdq_model_path: the model of codes, whose weights are named `<weight>_quantized`.

    Returns:
        By the name of the weight: `float` and `dequantized`.
    """
    exact = {w.name: w for w in onnx.load(os.fspath(float_model_path)).graph.initializer}
    graph = onnx.load(os.fspath(qdq_model_path)).graph
    constants = {weight.name: weight for weight in graph.initializer}
    matched = {}
    for node in graph.node:
        if node.op_type != DEQUANT_OP_NAME or node.input[0] not in constants:
            continue
        name = node.input[0].removesuffix(TENSOR_NAME_QUANT_SUFFIX)
        if name == node.input[0] or name not in exact or name in matched:
            continue
        if any(value and value not in constants for value in node.input):
            logger.warning("weight '%s': its scale or zero point is no constant", name)
            continue
        parts = [numpy_helper.to_array(constants[value]) for value in node.input if value]
        weight = numpy_helper.to_array(exact[name])
        decoded = _dequantized(node, *parts).reshape(weight.shape)
        matched[name] = {"float": weight, "dequantized": decoded}
    return matched


def _dequantized(
    node: NodeProto, codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None = None
) -> np.ndarray:
    """Returns what codes stand for; differences of codes need more bits than codes."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    axis = attributes.get("axis", 1)
    block = attributes.get("block_size", 0)

    def spread(array: np.ndarray) -> np.ndarray:
        if array.size == 1 and not block:
            return array.reshape(())
        if block:
            return array.repeat(block, axis).take(range(codes.shape[axis]), axis)
        return array.reshape([-1 if place == axis % codes.ndim else 1 for place in range(codes.ndim)])

    differences = codes.astype(np.float64)
    if zero_point is not None:
        differences -= spread(zero_point.astype(np.float64))
    return (differences * spread(scale.astype(np.float64))).astype(scale.dtype)


def compute_signal_to_quantization_noice_ratio(x: Arrays, y: Arrays) -> float:
    """Returns `20 * log10(|x| / |x - y|)` of two arrays, or of lists of them, in decibels.

    Raises:
        RuntimeError: the lists have different lengths.
        ValueError: the lists are empty.

    Example:
        >>> compute_signal_to_quantization_noice_ratio(np.float32([10]), np.float32([9]))
        20.0
    """
    left, right = ([a] if isinstance(a, np.ndarray) else list(a) for a in (x, y))
    if len(left) != len(right):
        raise RuntimeError("Unequal number of tensors to compare!")
    least = float(np.finfo("float").eps)
    one, other = (np.concatenate([np.ravel(array) for array in arrays]) for arrays in (left, right))
    signal = max(float(np.linalg.norm(one)), least)
    noise = max(float(np.linalg.norm(one - other)), least)
    return 20 * math.log10(signal / noise)


def compute_weight_error(
    weights_match: Mapping[str, Mapping[str, np.ndarray]],
    err_func: Errors = compute_signal_to_quantization_noice_ratio,
) -> dict[str, float]:
    """Returns the error of each weight that `create_weight_matching` has matched."""
    return {
        name: err_func(found["float"], found["dequantized"])
        for name, found in weights_match.items()
    }


def compute_activation_error(
    activations_match: Mapping[str, Mapping[str, Sequence[np.ndarray]]],
    err_func: Errors = compute_signal_to_quantization_noice_ratio,
) -> dict[str, dict[str, float]]:
    """Returns the errors of each value that `create_activation_matching` has matched.

    Returns:
        By the name of the value: `qdq_err`, what its own pair of nodes changes, and `xmodel_err`,
        what all of the quantized model changes, if the value is known in the float model.
    """
    errors = {}
    for name, found in activations_match.items():
        errors[name] = {"qdq_err": err_func(found["pre_qdq"], found["post_qdq"])}
        if "float" in found:
            errors[name]["xmodel_err"] = err_func(found["float"], found["post_qdq"])
    return errors
