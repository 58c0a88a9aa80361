"""Converts a model to a later opset.

`python -m ort_runtime.tools.update_onnx_opset --opset 21 in.onnx out.onnx`
"""

from __future__ import annotations

import argparse
import pathlib

from .onnx_model_utils import update_onnx_opset


def update_onnx_opset_helper(arguments: list[str] | None = None) -> None:
    """Runs the tool on `arguments`, the command line if None.

    Raises:
        FileNotFoundError: the model does not exist.
        RuntimeError: onnx has no conversion for a node of the model.
    """
    parser = argparse.ArgumentParser(
        "update_onnx_opset", description="Converts a model to a later ONNX opset."
    )
    parser.add_argument("--opset", type=int, default=15, help="opset to convert to, default 15")
    parser.add_argument("input_model", type=pathlib.Path, help="model to read")
    parser.add_argument("output_model", type=pathlib.Path, help="model to write")
    args = parser.parse_args(arguments)
    update_onnx_opset(args.input_model, args.opset, args.output_model)


if __name__ == "__main__":
    update_onnx_opset_helper()
