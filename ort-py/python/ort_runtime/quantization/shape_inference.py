"""Preparation of models for quantization: rewrites that keep operators standard, and shapes.

BatchNormalization goes into convolutions, and constants are computed, so that fewer values are
quantized.

Needs the package `onnx`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions
from ..capi import _pybind_state as native
from ..tools.symbolic_shape_infer import SymbolicShapeInference
from .quant_utils import add_pre_process_metadata, save_and_reload_model_with_shape_infer

logger = logging.getLogger(__name__)

_LEAST_EXTERNAL = 1024
#: Rules above level basic that leave standard operators, and fewer of them to quantize.
_FOLDING_RULES = ("add_into_conv", "batch_norm_into_conv", "mul_into_conv")


def quant_pre_process(
    input_model: str | os.PathLike[str] | ModelProto | None = None,
    output_model_path: str | os.PathLike[str] | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = 2**31 - 1,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = _LEAST_EXTERNAL,
    **deprecated_kwargs: Any,
) -> None:
    """Writes a model that quantizes well: with basic rewrites made, and with shapes.

    Args:
        input_model: the model, or its path; the old keyword is `input_model_path`.
        output_model_path: the file to write.
        skip_optimization: makes no rewrites.
        skip_onnx_shape: no shape inference of the package `onnx`.
        skip_symbolic_shape: no inference of shapes with names.
        auto_merge: two names for the same dimension become one.
        int_max: the number that stands for no bound, as in `Slice`.
        guess_output_rank: unknown operators have the rank of their first input.
        verbose: how much the inference of shapes with names logs, 0 to 3.
        save_as_external_data: weights go to files of their own.
        all_tensors_to_one_file: they go to one file.
        external_data_location: the name of that file.
        external_data_size_threshold: the bytes of a weight from which on it goes there.

    Raises:
        AssertionError: there is no model or no output, or another argument is given.

    Example:
        >>> quant_pre_process("model.onnx", "prepared.onnx")
    """
    source = deprecated_kwargs.pop("input_model_path", input_model)
    if deprecated_kwargs:
        raise AssertionError(f"there are no arguments {', '.join(deprecated_kwargs)}")
    if source is None:
        raise AssertionError("input_model is required.")
    if output_model_path is None:
        raise AssertionError("output_model_path is required.")
    model = _loaded(source) if skip_optimization else _optimized(source)
    if not skip_symbolic_shape:
        # What inference of shapes with names does not know is no reason to write nothing.
        try:
            model = (
                SymbolicShapeInference.infer_shapes(
                    model, int_max, auto_merge, guess_output_rank, verbose
                )
                or model
            )
        except Exception as problem:
            logger.warning("shapes with names could not be inferred: %s", problem)
    if not skip_onnx_shape:
        inferred = save_and_reload_model_with_shape_infer(model)
        del model.graph.value_info[:]
        model.graph.value_info.extend(inferred.graph.value_info)
    add_pre_process_metadata(model)
    location = external_data_location
    if save_as_external_data and all_tensors_to_one_file and location is None:
        location = f"{Path(output_model_path).name}.data"
    onnx.save(
        model,
        os.fspath(output_model_path),
        save_as_external_data=save_as_external_data,
        all_tensors_to_one_file=all_tensors_to_one_file,
        location=location,
        size_threshold=external_data_size_threshold,
    )


def _loaded(source: Any) -> ModelProto:
    """Returns a model, a copy if it is one already."""
    if isinstance(source, ModelProto):
        copy = ModelProto()
        copy.CopyFrom(source)
        return copy
    return onnx.load(os.fspath(source))


def _optimized(source: Any) -> ModelProto:
    """Returns a model after the basic rewrites, or as it is if they fail."""
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    disabled = set(native.get_rewrite_rules_above_basic()).difference(_FOLDING_RULES)
    start = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{start}file_name", "weights")
    options.add_session_config_entry(f"{start}min_size_in_bytes", str(_LEAST_EXTERNAL))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "optimized.onnx")
            options.optimized_model_filepath = path
            given = source
            if isinstance(source, ModelProto):
                if source.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
                    given = source.SerializeToString()
                else:
                    given = os.path.join(folder, "model.onnx")
                    onnx.save(_loaded(source), given, save_as_external_data=True)
            elif not isinstance(source, str):
                given = os.fspath(source)
            InferenceSession(
                given,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=sorted(disabled),
            )
            return onnx.load(path)
    except Exception as problem:
        logger.error("the model could not be optimized: %s", problem)
        return _loaded(source)
