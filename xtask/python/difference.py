"""Measures how far our outputs are from the reference's.

usage: python difference.py < [{"case", "reference", "ours": [FILE, ...]}, ...]

`reference` and `ours` are npz files; each of `ours` is the same case run another way (number of threads).
Prints a JSON array with, per case, `case` and `outputs`: {name, elements, absolute, relative, same_bits, problem}.
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


def measure(name: str, reference: np.ndarray, ours: list[np.ndarray | None]) -> dict:
    row = {"name": name, "elements": reference.size, "absolute": None, "relative": None, "same_bits": None}
    if any(array is None for array in ours):
        return {**row, "problem": "output is missing"}
    found = [difference(reference, array) for array in ours]
    problem = next((item for item in found if isinstance(item, str)), None)
    if problem:
        return {**row, "problem": problem}
    row["absolute"] = max(item[0] for item in found)
    row["relative"] = max(item[1] for item in found)
    row["same_bits"] = all(array.tobytes() == ours[0].tobytes() for array in ours)
    return {**row, "problem": None}


def main() -> None:
    rows = []
    for case in json.load(sys.stdin):
        reference = np.load(case["reference"])
        ours = [np.load(path) for path in case["ours"]]
        outputs = [
            measure(name, reference[name], [file[name] if name in file else None for file in ours])
            for name in reference.files
        ]
        rows.append({"case": case["case"], "outputs": outputs})
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
