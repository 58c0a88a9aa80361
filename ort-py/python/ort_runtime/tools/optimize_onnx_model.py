"""Saves what the session's rewrites make of a model.

`python -m ort_runtime.tools.optimize_onnx_model --opt_level extended in.onnx out.onnx`
"""

from __future__ import annotations

import argparse
import pathlib

from .onnx_model_utils import get_optimization_level, optimize_model

_LOG_LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3}


def optimize_model_helper(arguments: list[str] | None = None) -> None:
    """Runs the tool on `arguments`, the command line if None.

    Raises:
        FileNotFoundError: the model does not exist.
    """
    parser = argparse.ArgumentParser(
        "optimize_onnx_model", description="Saves what the session's rewrites make of a model."
    )
    parser.add_argument(
        "--opt_level",
        choices=["disable", "basic", "extended", "layout", "all"],
        default="basic",
        help="which rewrites run, default basic",
    )
    parser.add_argument(
        "--log_level", choices=list(_LOG_LEVELS), default="error", help="messages to print"
    )
    parser.add_argument("input_model", type=pathlib.Path, help="model to read")
    parser.add_argument("output_model", type=pathlib.Path, help="model to write")
    args = parser.parse_args(arguments)
    if args.output_model.is_dir():
        args.output_model = args.output_model / args.input_model.name
    level = get_optimization_level(args.opt_level)
    optimize_model(args.input_model, args.output_model, level, _LOG_LEVELS[args.log_level])


if __name__ == "__main__":
    optimize_model_helper()
