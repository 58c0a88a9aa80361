"""Runs models that `ort optimize` wrote in ONNX Runtime.

usage: python run_optimized.py < [{"model", "inputs", "outputs"}, ...]

All are files: a model, the npz file of its inputs, and the npz file to write its outputs to. Prints a JSON array with
an entry for each: null, or what went wrong.
"""

import json
import sys
from pathlib import Path

import numpy as np
from reference import open_session


def run(item: dict) -> str | None:
    try:
        session = open_session(Path(item["model"]), threads=1)
        names = [info.name for info in session.get_outputs()]
        outputs = session.run(names, dict(np.load(item["inputs"])))
    except Exception as problem:  # ONNX Runtime's own errors have no common class but this.
        return str(problem)
    np.savez(item["outputs"], **dict(zip(names, outputs, strict=True)))
    return None


def main() -> None:
    json.dump([run(item) for item in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
