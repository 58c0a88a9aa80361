"""Models in half precision: float32 tensors become float16, where the operators allow it.

Nodes that stay in float32 get Cast nodes around them, in topological order. Needs the package
`onnx`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from ._float16_graph import GraphConverter, Precision

#: Operators that stay in float32: classical models, and those that lose too much.
DEFAULT_OP_BLOCK_LIST = [
    "ArrayFeatureExtractor",
    "Binarizer",
    "CastMap",
    "CategoryMapper",
    "DictVectorizer",
    "FeatureVectorizer",
    "Imputer",
    "LabelEncoder",
    "LinearClassifier",
    "LinearRegressor",
    "Normalizer",
    "OneHotEncoder",
    "RandomUniformLike",
    "SVMClassifier",
    "SVMRegressor",
    "Scaler",
    "TreeEnsembleClassifier",
    "TreeEnsembleRegressor",
    "TreeEnsemble",
    "ZipMap",
    "NonMaxSuppression",
    "TopK",
    "RoiAlign",
    "Range",
    "CumSum",
    "Min",
    "Max",
    "Upsample",
]

#: Inputs that stay in float32 by operator.
ALWAYS_FLOAT_INPUTS = {"Resize": [2], "GroupNorm": [1, 2], "SkipGroupNorm": [1, 2]}


def convert_float_to_float16(
    model: onnx.ModelProto | str | os.PathLike[str],
    min_positive_val: float = 5.96e-08,
    max_finite_val: float = 65504.0,
    keep_io_types: bool | Collection[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Iterable[str] | None = None,
    node_block_list: Iterable[str] | None = None,
    force_fp16_initializers: bool = False,
    force_fp16_inputs: Mapping[str, list[int]] | None = None,
    use_bfloat16_as_blocked_nodes_dtype: bool = False,
) -> onnx.ModelProto:
    """Returns the model in float16.

    Args:
        model: the model or its path. It is changed itself if shapes are not inferred.
        min_positive_val: weights nearer to 0 become this, with their sign. 0 stays.
        max_finite_val: weights farther from 0 become this, with their sign.
        keep_io_types: whether inputs and outputs stay float32, or the names of those that do.
        disable_shape_infer: the types of values are known already.
        op_block_list: operators that stay in float32, `DEFAULT_OP_BLOCK_LIST` if None.
        node_block_list: names of nodes that do.
        force_fp16_initializers: converts weights that only such nodes read, too.
        force_fp16_inputs: inputs by operator that `ALWAYS_FLOAT_INPUTS` lists and are converted.
        use_bfloat16_as_blocked_nodes_dtype: such nodes compute in bfloat16 instead.

    Raises:
        ValueError: the model is something else, or a type cannot be inferred.

    Example:
        >>> half = convert_float_to_float16(onnx.load("model.onnx"), keep_io_types=True)
    """
    if isinstance(model, str | os.PathLike):
        model = onnx.load(os.fspath(model))
    if not isinstance(model, onnx.ModelProto):
        raise ValueError(f"Expected an ONNX ModelProto but got {type(model)}")
    if not disable_shape_infer:
        model = shape_inference.infer_shapes(model)
    always_float = {op: set(places) for op, places in ALWAYS_FLOAT_INPUTS.items()}
    for op, places in (force_fp16_inputs or {}).items():
        always_float.get(op, set()).difference_update(places)
    precision = Precision(
        blocked_ops=frozenset(DEFAULT_OP_BLOCK_LIST if op_block_list is None else op_block_list),
        blocked_nodes=frozenset(node_block_list or ()),
        always_float=always_float,
        unchecked=ALWAYS_FLOAT_INPUTS,
        converts_all_weights=force_fp16_initializers or use_bfloat16_as_blocked_nodes_dtype,
        wide=TensorProto.BFLOAT16 if use_bfloat16_as_blocked_nodes_dtype else TensorProto.FLOAT,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        halve=lambda tensor: convert_tensor_float_to_float16(
            tensor, min_positive_val, max_finite_val
        ),
    )
    GraphConverter(model.graph, precision).convert_main(keep_io_types)
    return model


def convert_np_to_float16(
    np_array: np.ndarray, min_positive_val: float = 5.96e-08, max_finite_val: float = 65504.0
) -> np.ndarray:
    """Returns an array in float16, whose finite numbers are none too small and none too large."""
    sizes = np.abs(np_array)
    limited = np.clip(sizes, min_positive_val, max_finite_val)
    # NaN fails both tests, and an infinity stays one.
    is_changed = (sizes > 0) & (sizes < np.inf)
    return np.where(is_changed, np.copysign(limited, np_array), np_array).astype(np.float16)


def convert_tensor_float_to_float16(
    tensor: onnx.TensorProto, min_positive_val: float = 5.96e-08, max_finite_val: float = 65504.0
) -> onnx.TensorProto:
    """Returns a float32 tensor in float16, and others as they are."""
    if not isinstance(tensor, TensorProto):
        raise ValueError(f"Expected input type is an ONNX TensorProto but got {type(tensor)}")
    if tensor.data_type == TensorProto.FLOAT:
        array = numpy_helper.to_array(tensor)
        half = convert_np_to_float16(array, min_positive_val, max_finite_val)
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(half, name))
    return tensor


def float_to_float16_max_diff(
    tensor: onnx.TensorProto, min_positive_val: float = 5.96e-08, max_finite_val: float = 65504.0
) -> float:
    """Returns the largest difference that a float32 tensor and its form in float16 have."""
    if not isinstance(tensor, TensorProto):
        raise ValueError(f"Expected input type is an ONNX TensorProto but got {type(tensor)}")
    if tensor.data_type != TensorProto.FLOAT:
        raise ValueError("Expected tensor data type is float.")
    array: Any = numpy_helper.to_array(tensor)
    half = convert_np_to_float16(array, min_positive_val, max_finite_val)
    return np.amax(np.abs(array - half.astype(np.float32)))


def make_value_info_from_tensor(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    """Returns the name, type and shape of a tensor."""
    return helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
