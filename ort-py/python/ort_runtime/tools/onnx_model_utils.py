"""Functions over ONNX models: fixed shapes, opsets, optimized copies, inferred shapes.

They need the package `onnx`, which each imports when it is called.
"""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions

if TYPE_CHECKING:
    import onnx

#: Models from this size on cannot be one protobuf message; shape inference goes by files.
_PROTOBUF_LIMIT = 2**31 - 1


def iterate_graph_per_node_func(
    graph: onnx.GraphProto, per_node_func: Callable[..., Any], **func_args: Any
) -> None:
    """Calls `per_node_func(node, **func_args)` for each node of `graph` and of its subgraphs."""
    for node in graph.node:
        per_node_func(node, **func_args)
        for subgraph in _subgraphs(node):
            iterate_graph_per_node_func(subgraph, per_node_func, **func_args)


def iterate_graph_per_graph_func(
    graph: onnx.GraphProto, per_graph_func: Callable[..., Any], **func_args: Any
) -> None:
    """Calls `per_graph_func(graph, **func_args)` for `graph` and each of its subgraphs."""
    per_graph_func(graph, **func_args)
    for node in graph.node:
        for subgraph in _subgraphs(node):
            iterate_graph_per_graph_func(subgraph, per_graph_func, **func_args)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the bodies of a control-flow node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def get_opsets_imported(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the opset version of each domain; the default domain is named `ai.onnx`."""
    return {opset.domain or "ai.onnx": opset.version for opset in model.opset_import}


def update_onnx_opset(
    model_path: str | os.PathLike[str],
    opset: int,
    out_path: str | os.PathLike[str] | None = None,
    logger: logging.Logger | None = None,
) -> onnx.ModelProto:
    """Returns the model at `model_path` converted to `opset`, and saves it to `out_path` if given.

    Raises:
        FileNotFoundError: there is no such model.
        RuntimeError: onnx has no conversion for a node of the model.
    """
    import onnx
    from onnx import version_converter

    path = pathlib.Path(model_path).resolve(strict=True)
    if logger:
        logger.info("Updating %s to opset %d", path, opset)
    model = version_converter.convert_version(onnx.load(str(path)), opset)
    if out_path is not None:
        onnx.save(model, os.fspath(out_path))
        if logger:
            logger.info("Saved the updated model to %s", out_path)
    return model


def optimize_model(
    model_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_BASIC,
    log_level: int = 3,
    use_external_initializers: bool = False,
) -> None:
    """Saves what the session's rewrites make of a model.

    Args:
        model_path: the model.
        output_path: where the optimized model goes.
        level: which rewrites run.
        log_level: severity of the session's messages, 3 for errors alone.
        use_external_initializers: writes the weights to `<output name>.data` beside the output,
            which models of 2 GiB and more need.

    Raises:
        FileNotFoundError: there is no such model.

    Example:
        >>> from ort_runtime.datasets import get_example
        >>> optimize_model(get_example("mul_1.onnx"), "mul_1.optimized.onnx")
    """
    path = pathlib.Path(model_path).resolve(strict=True)
    output = os.fspath(output_path)
    options = SessionOptions()
    options.optimized_model_filepath = output
    options.graph_optimization_level = level
    options.log_severity_level = log_level
    if use_external_initializers:
        entries = {
            "session.optimized_model_external_initializers_file_name": os.path.basename(output)
            + ".data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
    InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def get_optimization_level(level: str) -> GraphOptimizationLevel:
    """Returns the level named `disable`, `basic`, `extended`, `layout` or `all`.

    Raises:
        ValueError: another name.
    """
    levels = {
        "disable": GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "layout": GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
        "all": GraphOptimizationLevel.ORT_ENABLE_ALL,
    }
    if level not in levels:
        raise ValueError(f"Invalid optimization level of {level}; there are {', '.join(levels)}")
    return levels[level]


def _dimensions(graph: onnx.GraphProto) -> Iterator[Any]:
    """Yields the dimensions of all tensor inputs, outputs and values of one graph."""
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            if value.type.HasField("tensor_type"):
                yield from value.type.tensor_type.shape.dim


def remove_invalid_dim_values(graph: onnx.GraphProto) -> None:
    """Clears dimensions below 1 in `graph` and its subgraphs.

    Converters write 0 or -1 where they mean an unknown size.
    """

    def clear(inner: onnx.GraphProto) -> None:
        for dim in _dimensions(inner):
            if dim.HasField("dim_value") and dim.dim_value < 1:
                dim.Clear()

    iterate_graph_per_graph_func(graph, clear)


def make_dim_param_fixed(graph: onnx.GraphProto, param_name: str, value: int) -> None:
    """Gives every dimension named `param_name` in `graph` and its subgraphs the size `value`.

    Example:
        >>> model = onnx.load("model.onnx")
        >>> make_dim_param_fixed(model.graph, "batch", 1)
    """

    def replace(inner: onnx.GraphProto) -> None:
        for dim in _dimensions(inner):
            if dim.dim_param == param_name:
                dim.dim_value = value

    remove_invalid_dim_values(graph)
    iterate_graph_per_graph_func(graph, replace)


def make_input_shape_fixed(
    graph: onnx.GraphProto, input_name: str, fixed_shape: Sequence[int]
) -> None:
    """Gives a graph input the shape `fixed_shape`.

    A symbolic dimension that gets a number gets it everywhere in the graph.

    Raises:
        ValueError: there is no such input, the rank differs, or a fixed dimension would change.
    """
    remove_invalid_dim_values(graph)
    found = next((value for value in graph.input if value.name == input_name), None)
    if found is None:
        names = ",".join(value.name for value in graph.input)
        raise ValueError(
            f"Input {input_name} was not found in graph inputs. Valid input names are: {names}"
        )
    dims = found.type.tensor_type.shape.dim
    if len(dims) != len(fixed_shape):
        raise ValueError(f"Rank mismatch. Existing:{len(dims)} Replacement:{len(fixed_shape)}")
    for position, (dim, size) in enumerate(zip(dims, fixed_shape, strict=True), 1):
        if dim.HasField("dim_value") and dim.dim_value != size:
            raise ValueError(
                f"Can't replace existing fixed size of {dim.dim_value} with {size} "
                f"for dimension {position}"
            )
        if dim.dim_param:
            make_dim_param_fixed(graph, dim.dim_param, size)
        dim.dim_value = size


def fix_output_shapes(model: onnx.ModelProto) -> None:
    """Replaces unknown dimensions of the outputs by what shape inference finds.

    For models whose input shapes were made fixed.
    """
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model)
    for output, known in zip(model.graph.output, inferred.graph.output, strict=True):
        if not known.type.tensor_type.HasField("shape"):
            continue
        if not output.type.tensor_type.HasField("shape"):
            output.CopyFrom(known)
            continue
        shapes = (output.type.tensor_type.shape.dim, known.type.tensor_type.shape.dim)
        for dim, size in zip(*shapes, strict=True):
            if size.HasField("dim_value"):
                dim.CopyFrom(size)


def is_fixed_size_tensor(value: onnx.ValueInfoProto) -> bool:
    """Returns whether `value` is a tensor whose dimensions are all positive numbers."""
    tensor = value.type.tensor_type
    return (
        value.type.HasField("tensor_type")
        and tensor.HasField("shape")
        and all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in tensor.shape.dim)
    )


class ModelProtoWithShapeInfo:
    """A model whose `value_info` has the inferred shapes.

    Args:
        model_path: the model. One of 2 GiB and more is inferred through a temporary file.

    Attributes:
        model_path: the path given.
        model_with_shape_info: the `onnx.ModelProto`; without its external weights if it went
            through a file.

    Example:
        >>> from ort_runtime.datasets import get_example
        >>> info = ModelProtoWithShapeInfo(get_example("mul_1.onnx"))
        >>> info.model_with_shape_info.graph.output[0].name
        'Y'
    """

    def __init__(self, model_path: str | os.PathLike[str]) -> None:
        import onnx

        self.model_path = model_path
        path = os.fspath(pathlib.Path(model_path).resolve(strict=True))
        model = onnx.load(path, load_external_data=False)
        if model.ByteSize() < _PROTOBUF_LIMIT:
            self.model_with_shape_info = onnx.shape_inference.infer_shapes(model)
            return
        with tempfile.TemporaryDirectory() as folder:
            inferred = os.path.join(folder, "inferred.onnx")
            onnx.shape_inference.infer_shapes_path(path, inferred)
            self.model_with_shape_info = onnx.load(inferred, load_external_data=False)
