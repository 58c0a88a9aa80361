"""Models of transformers, optimized: `optimize_model` and its command line.

It is the rewrites of sessions that fuse; the result is written as ONNX with contrib operators.
Needs the package `onnx`.

`python -m ort_runtime.transformers.optimizer --input in.onnx --output out.onnx --float16`
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import onnx

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions
from .fusion_options import FusionOptions
from .onnx_model import OnnxModel
from .onnx_model_bert import BertOnnxModel

logger = logging.getLogger(__name__)

Model = str | os.PathLike[str] | onnx.ModelProto

#: The kinds of models: class, exporter, and level of rewrites if none is asked for.
MODEL_TYPES = {
    "bart": (BertOnnxModel, "pytorch", 1),
    "bert": (BertOnnxModel, "pytorch", 1),
    "bert_tf": (BertOnnxModel, "tf2onnx", 0),
    "bert_keras": (BertOnnxModel, "keras2onnx", 0),
    "clip": (BertOnnxModel, "pytorch", 1),
    "conformer": (BertOnnxModel, "pytorch", 1),
    "gpt2": (BertOnnxModel, "pytorch", 1),
    "gpt2_tf": (BertOnnxModel, "tf2onnx", 0),
    "gpt_neox": (BertOnnxModel, "pytorch", 0),
    "phi": (BertOnnxModel, "pytorch", 0),
    "qwen3": (BertOnnxModel, "pytorch", 0),
    "sam2": (BertOnnxModel, "pytorch", 1),
    "swin": (BertOnnxModel, "pytorch", 1),
    "tnlr": (BertOnnxModel, "pytorch", 1),
    "t5": (BertOnnxModel, "pytorch", 2),
    "unet": (BertOnnxModel, "pytorch", 1),
    "vae": (BertOnnxModel, "pytorch", 1),
    "vit": (BertOnnxModel, "pytorch", 1),
    "mmdit": (BertOnnxModel, "pytorch", 1),
}

_LEVELS = {
    0: GraphOptimizationLevel.ORT_DISABLE_ALL,
    1: GraphOptimizationLevel.ORT_ENABLE_BASIC,
    2: GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    99: GraphOptimizationLevel.ORT_ENABLE_ALL,
}

#: The rewrites of sessions that a switch of `FusionOptions` turns off.
_RULES = {
    "enable_gelu": (
        "gelu",
        "gelu_half_first",
        "gelu_half_inside",
        "gelu_product",
        "gelu_product_half_first",
        "gelu_product_half_inside",
        "gelu_tanh",
        "gelu_tanh_cube",
        "gelu_tanh_cube_half_last",
        "gelu_tanh_half_inside",
        "gelu_tanh_half_last",
    ),
    "enable_layer_norm": ("layer_norm", "rms_norm", "rms_norm_reciprocal"),
    "enable_attention": ("attention", "attention_in_place", "attention_masked"),
    "enable_bias_gelu": ("fused_activation", "matmul_activation"),
}


def optimize_model(
    input: Model,
    model_type: str = "bert",
    num_heads: int = 0,
    hidden_size: int = 0,
    optimization_options: FusionOptions | None = None,
    opt_level: int | None = None,
    use_gpu: bool = False,
    only_onnxruntime: bool = False,
    verbose: bool = False,
    *,
    provider: str | None = None,
) -> OnnxModel:
    """Returns a model of transformers with its fusions made.

    Args:
        input: the model or its path.
        model_type: the kind of model; of another one than `MODEL_TYPES` lists nothing is fused.
        num_heads, hidden_size: the sizes of attention; both are found in the graph.
        optimization_options: which fusions are made, all if None.
        opt_level: the level of rewrites before the fusions: 0, 1, 2 or 99.
        use_gpu, provider: accepted; the rewrites serve all providers.
        only_onnxruntime: makes the rewrites of `opt_level` alone.
        verbose: logs more.

    Raises:
        ValueError: another level, or sizes that do not fit.
        NoSuchFile: there is no such model.

    Example:
        >>> optimized = optimize_model("bert.onnx", "bert", num_heads=12, hidden_size=768)
        >>> optimized.save_model_to_file("bert_optimized.onnx")
    """
    if opt_level is not None and opt_level not in _LEVELS:
        raise ValueError(f"opt_level must be one of {list(_LEVELS)} or None, not {opt_level}")
    if model_type not in MODEL_TYPES:
        logger.warning("Unsupported model type: %s for optimization, directly return model.", model_type)
        return OnnxModel(_loaded(input))
    made, exporter, default = MODEL_TYPES[model_type]
    level = default if opt_level is None else opt_level
    model: Model = input
    if level:
        model = _rewritten(model, _LEVELS[level], ())
    if not only_onnxruntime:
        model = fuse(model, optimization_options or FusionOptions(model_type))
    result = made(_loaded(model), num_heads, hidden_size)
    logger.debug("optimized a model of %s: %s", exporter, result.get_fused_operator_statistics())
    return result


def optimize_by_fusion(
    model: onnx.ModelProto,
    model_type: str = "bert",
    num_heads: int = 0,
    hidden_size: int = 0,
    optimization_options: FusionOptions | None = None,
) -> OnnxModel:
    """Returns a model with its fusions made, without other rewrites before."""
    return optimize_model(model, model_type, num_heads, hidden_size, optimization_options, 0)


def optimize_by_onnxruntime(
    onnx_model: Model | None = None,
    use_gpu: bool = False,
    optimized_model_path: str | os.PathLike[str] | None = None,
    opt_level: int | None = 99,
    disabled_optimizers: Iterable[str] = (),
    verbose: bool = False,
    save_as_external_data: bool = False,
    external_data_filename: str = "",
    external_data_file_threshold: int = 1024,
    *,
    provider: str | None = None,
    **deprecated_kwargs: Model,
) -> str:
    """Writes what the rewrites of a session make of a model, and returns the path.

    Without a path it is `<model>_o<level>_cpu.onnx` beside the model, or `optimized_model_o..` in
    the current folder.
    """
    source = deprecated_kwargs.pop("onnx_model_path", onnx_model)  # type: ignore[arg-type]
    if source is None or deprecated_kwargs:
        raise TypeError(f"give a model, and no argument {list(deprecated_kwargs)}")
    level = 99 if opt_level is None else opt_level
    if level not in _LEVELS:
        raise ValueError(f"opt_level must be one of {list(_LEVELS)}, not {level}")
    if optimized_model_path is None:
        is_model = isinstance(source, onnx.ModelProto)
        stem = "optimized_model" if is_model else os.fspath(source).removesuffix(".onnx")
        optimized_model_path = f"{stem}_o{level}_cpu.onnx"
    path = os.fspath(optimized_model_path)
    name = external_data_filename or os.path.basename(path) + ".data"
    weights = (name, external_data_file_threshold) if save_as_external_data else None
    _write(source, path, _LEVELS[level], disabled_optimizers, weights)
    return path


def get_fusion_statistics(optimized_model_path: str | os.PathLike[str]) -> dict[str, int]:
    """Returns how many nodes each fused operator has in a file."""
    return BertOnnxModel(_loaded(optimized_model_path)).get_fused_operator_statistics()


def fuse(model: Model, options: FusionOptions | None) -> onnx.ModelProto:
    """Returns a model with the fusions that the options allow."""
    off = [
        rule
        for switch, rules in _RULES.items()
        if options is not None and not getattr(options, switch)
        for rule in rules
    ]
    return _rewritten(model, GraphOptimizationLevel.ORT_ENABLE_EXTENDED, off)


def _loaded(model: Model) -> onnx.ModelProto:
    return model if isinstance(model, onnx.ModelProto) else onnx.load(os.fspath(model))


def _rewritten(
    model: Model, level: GraphOptimizationLevel, disabled: Iterable[str]
) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rewritten.onnx")
        # Apart from the model, weights may have any number of bytes.
        _write(model, path, level, disabled, ("rewritten.data", 1024))
        return onnx.load(path)


def _write(
    model: Model,
    path: str,
    level: GraphOptimizationLevel,
    disabled: Iterable[str],
    weights: tuple[str, int] | None,
) -> None:
    options = SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = path
    if weights is not None:
        start = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{start}file_name", weights[0])
        options.add_session_config_entry(f"{start}min_size_in_bytes", str(weights[1]))
    with tempfile.TemporaryDirectory() as folder:
        source = model
        if isinstance(model, onnx.ModelProto):
            source = Path(folder) / "model.onnx"
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            OnnxModel.save(copy, source, save_as_external_data=True)
        InferenceSession(
            os.fspath(source),  # type: ignore[arg-type]
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(disabled),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("optimizer", description="Optimizes models of transformers.")
    parser.add_argument("--input", required=True, help="model to read")
    parser.add_argument("--output", required=True, help="model to write")
    parser.add_argument(
        "--model_type", default="bert", type=str.lower, choices=list(MODEL_TYPES), help="its kind"
    )
    parser.add_argument("--num_heads", type=int, default=0, help="heads of attention")
    parser.add_argument("--hidden_size", type=int, default=0, help="size of the hidden layers")
    parser.add_argument("--input_int32", action="store_true", help="int64 inputs become int32")
    parser.add_argument("--float16", action="store_true", help="converts to half precision")
    parser.add_argument(
        "--disable_symbolic_shape_infer", action="store_true", help="for --float16: shapes are known"
    )
    parser.add_argument("--keep_io_types", action="store_true", help="for --float16")
    parser.add_argument("--opt_level", type=int, choices=list(_LEVELS), help="level of rewrites")
    parser.add_argument("--only_onnxruntime", action="store_true", help="rewrites of the level alone")
    parser.add_argument("--use_gpu", action="store_true", help="accepted")
    parser.add_argument("--provider", help="accepted")
    parser.add_argument("--verbose", action="store_true", help="logs more")
    parser.add_argument(
        "--use_external_data_format", action="store_true", help="weights go to a file of their own"
    )
    FusionOptions.add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, that of the process if None."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO)
    model = optimize_model(
        args.input,
        args.model_type,
        args.num_heads,
        args.hidden_size,
        FusionOptions.parse(args),
        args.opt_level,
        only_onnxruntime=args.only_onnxruntime,
    )
    if args.float16:
        infers = not args.disable_symbolic_shape_infer
        model.convert_float_to_float16(infers, keep_io_types=args.keep_io_types)
    if args.input_int32 and isinstance(model, BertOnnxModel):
        model.change_graph_inputs_to_int32()
    model.save_model_to_file(args.output, args.use_external_data_format)
    for operator, count in model.get_operator_statistics().items():
        logger.info("%s: %d", operator, count)


if __name__ == "__main__":
    main()
