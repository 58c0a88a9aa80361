"""The command line of `quant_pre_process`.

`python -m ort_runtime.quantization.preprocess --input in.onnx --output out.onnx`
"""

from __future__ import annotations

import argparse
import logging

from .shape_inference import quant_pre_process as quant_pre_process


def _boolean(text: str) -> bool:
    """Returns what a flag with a value says."""
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not True or False")
    return text.lower() in ("true", "1", "yes")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments, those of the command line if None."""
    parser = argparse.ArgumentParser(
        "preprocess",
        description="Prepares a model for quantization: basic rewrites, and shapes of all values.",
    )
    add = parser.add_argument
    add("--input", required=True, help="model to read")
    add("--output", required=True, help="model to write")
    for name, what in (
        ("optimization", "rewrites"),
        ("onnx_shape", "shape inference of the package onnx"),
        ("symbolic_shape", "inference of shapes with names"),
    ):
        add(
            f"--skip_{name}",
            type=_boolean,
            nargs="?",
            const=True,
            default=False,
            help=f"makes no {what}: True or False, default False",
        )
    add("--auto_merge", action="store_true", help="two names for the same dimension become one")
    add("--int_max", type=int, default=2**31 - 1, help="number that stands for no bound")
    add("--guess_output_rank", action="store_true", help="for unknown operators")
    add("--verbose", type=int, default=0, help="how much is logged, 0 to 3")
    add("--save_as_external_data", action="store_true", help="weights go to files of their own")
    add("--all_tensors_to_one_file", action="store_true", help="they go to one file")
    add("--external_data_location", help="name of that file")
    add(
        "--external_data_size_threshold",
        type=int,
        default=1024,
        help="bytes of a weight from which on it goes there",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, that of the process if None."""
    args = vars(parse_arguments(arguments))
    logging.basicConfig(level=logging.INFO if args["verbose"] else logging.WARNING)
    quant_pre_process(args.pop("input"), args.pop("output"), **args)


if __name__ == "__main__":
    main()
