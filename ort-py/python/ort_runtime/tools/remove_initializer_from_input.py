"""Takes the weights out of a model's inputs.

An initializer that is also an input may be overridden by a caller, so it is no constant and nothing
that depends on it is folded. Models of IR version 3 and older list all of them.

`python -m ort_runtime.tools.remove_initializer_from_input --input in.onnx --output out.onnx`
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def remove_initializer_from_input(model: onnx.ModelProto) -> bool:
    """Removes inputs that are initializers from `model`; returns whether there were any.

    A model of an IR version below 4 has to list them: it stays as it is, with a message.
    """
    if model.ir_version < 4:
        print("Model with ir_version below 4 requires to include initializer in graph input")
        return False
    weights = {tensor.name for tensor in model.graph.initializer}
    weights |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    changed = len(kept) < len(model.graph.input)
    if changed:
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return changed


def get_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        "remove_initializer_from_input", description="Takes the weights out of a model's inputs."
    )
    parser.add_argument("--input", required=True, help="input model")
    parser.add_argument("--output", required=True, help="output model")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the tool on `arguments`, the command line if None."""
    import onnx

    args = get_args(arguments)
    model = onnx.load(args.input)
    remove_initializer_from_input(model)
    onnx.save(model, args.output)


if __name__ == "__main__":
    main()
