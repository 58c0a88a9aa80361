"""Measures how far our outputs are from the reference's.

usage: python difference.py < [{"case", "reference", "ours": [FILE, ...], "disabled", "optimized"}, ...]

All are npz files; each of `ours` is the same case run another way (number of threads), `disabled` is ours without
rewrites, `optimized` the reference's of the model that we rewrote, or null.
Prints a JSON array with, per case, `case` and `outputs`: {name, elements, absolute, relative, same_bits, disabled,
optimized, problem}. `disabled` is how far ours with rewrites are from ours without, `optimized` how far the reference's of
the rewritten model are from those of the model, both as `relative` is.
`absolute` is the largest |ours - reference|, `relative` that over the largest |reference| of the output,
`same_bits` whether all of `ours` agree in every bit. They are null where `problem` says why.
"""

import json
import sys

import numpy as np


def exact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def difference(expected: np.ndarray, actual: np.ndarray) -> tuple[float, float] | str:
    if expected.shape != actual.shape:
        return f"shape {actual.shape} instead of {expected.shape}"
    if expected.dtype != actual.dtype:
        return f"type {actual.dtype} instead of {expected.dtype}"
    if expected.size == 0:
        return 0.0, 0.0
    wanted, found = exact(expected), exact(actual)
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], found[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return "infinities or NaN differ"
    if not finite.any():
        return 0.0, 0.0
    absolute = float(np.abs(wanted[finite] - found[finite]).max())
    scale = float(np.abs(wanted[finite]).max())
    return absolute, absolute / scale if scale else absolute


EMPTY = dict.fromkeys(["absolute", "relative", "same_bits", "disabled", "optimized", "problem"])


def measure(name: str, files: dict) -> dict:
    reference, ours = files["reference"][name], [file.get(name) for file in files["ours"]]
    row = {**EMPTY, "name": name, "elements": reference.size}
    pairs = [("ours", reference, array) for array in ours]
    pairs.append(("ours without rewrites", files["disabled"].get(name), ours[0]))
    if files["optimized"] is not None:
        pairs.append(("the optimized model in ONNX Runtime", reference, files["optimized"].get(name)))
    found = []
    for what, expected, actual in pairs:
        missing = expected is None or actual is None
        result = "output is missing" if missing else difference(expected, actual)
        if isinstance(result, str):
            return {**row, "problem": f"{what}: {result}"}
        found.append(result)
    row["absolute"] = max(item[0] for item in found[: len(ours)])
    row["relative"] = max(item[1] for item in found[: len(ours)])
    row["same_bits"] = all(array.tobytes() == ours[0].tobytes() for array in ours)
    row["disabled"] = found[len(ours)][1]
    row["optimized"] = found[-1][1] if files["optimized"] is not None else None
    return row


def main() -> None:
    rows = []
    for case in json.load(sys.stdin):
        files = {
            "reference": np.load(case["reference"]),
            "ours": [np.load(path) for path in case["ours"]],
            "disabled": np.load(case["disabled"]),
            "optimized": np.load(case["optimized"]) if case["optimized"] else None,
        }
        outputs = [measure(name, files) for name in files["reference"].files]
        rows.append({"case": case["case"], "outputs": outputs})
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
