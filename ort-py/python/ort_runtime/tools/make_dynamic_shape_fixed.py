"""Gives a symbolic dimension or an input's shape numbers.

`python -m ort_runtime.tools.make_dynamic_shape_fixed --dim_param batch --dim_value 1 in.onnx
out.onnx`
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from .onnx_model_utils import fix_output_shapes, make_dim_param_fixed, make_input_shape_fixed


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        "make_dynamic_shape_fixed",
        description="Gives a symbolic dimension or an input fixed sizes. "
        "Needs dim_param and dim_value, or input_name and input_shape.",
    )
    parser.add_argument("--dim_param", help="name of the symbolic dimension")
    parser.add_argument("--dim_value", type=int, help="its size, at least 1")
    parser.add_argument("--input_name", help="name of the model input")
    parser.add_argument(
        "--input_shape",
        type=lambda text: [int(size) for size in text.split(",")],
        help="its sizes, at least 1, separated by commas: 1,3,256,256",
    )
    parser.add_argument("input_model", type=pathlib.Path, help="model to read")
    parser.add_argument("output_model", type=pathlib.Path, help="model to write")
    return parser


def make_dynamic_shape_fixed_helper(arguments: list[str] | None = None) -> None:
    """Runs the tool on `arguments`, the command line if None.

    Raises:
        SystemExit: code 255 if neither pair of options is complete or a size is below 1.
        FileNotFoundError: the model does not exist.
        ValueError: see `make_input_shape_fixed`.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    by_name = args.dim_param and args.dim_value is not None and args.dim_value > 0
    by_shape = args.input_name and args.input_shape and all(size > 0 for size in args.input_shape)
    if not (by_name or by_shape):
        print("Needs dim_param and dim_value, or input_name and input_shape; all sizes at least 1.")
        parser.print_help()
        sys.exit(-1)
    import onnx

    model = onnx.load(str(args.input_model.resolve(strict=True)))
    if by_name:
        make_dim_param_fixed(model.graph, args.dim_param, args.dim_value)
    else:
        make_input_shape_fixed(model.graph, args.input_name, args.input_shape)
    fix_output_shapes(model)
    onnx.save(model, str(args.output_model))


if __name__ == "__main__":
    make_dynamic_shape_fixed_helper()
