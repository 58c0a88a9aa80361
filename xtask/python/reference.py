"""Runs ONNX Runtime on the comparison cases and keeps inputs and outputs.

usage: python reference.py CASES.json MODELS OUT [NAME...]

Writes OUT/CASE/inputs.npz and OUT/CASE/reference.npz; a case whose description, model and ONNX Runtime
are unchanged is left alone. The shape of an input comes from the model, with `dims` of the case for its
symbols, unless `shapes` gives it whole; its values come from the first of the `fills` whose patterns
match its name and the model's, drawn with a seed made of the case's and the input's names. Prints one line per case made.
"""

import fnmatch
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import onnxruntime

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def open_session(model: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def shape_of(info, case: dict) -> list[int]:
    if info.name in case.get("shapes", {}):
        return case["shapes"][info.name]
    dims = case.get("dims", {})
    return [dim if isinstance(dim, int) else dims[dim] for dim in info.shape]


def page_of_text(shape: list[int], paper: float, ink: float, rng: np.random.Generator) -> np.ndarray:
    """Grey pictures [n,3,h,w] with lines of words made of random dots.

    A text detector answers noise with next to nothing, and then there is nothing to compare.
    """
    count, channels, height, width = shape
    pages = np.full((count, 1, height, width), paper, np.float32)
    for page in pages[:, 0]:
        for top in range(20, height - 30, 60):
            left = 20
            while left < width - 40:
                dots = np.kron(rng.random((8, 5)) < 0.45, np.ones((3, 3), bool))
                page[top : top + 24, left : left + 15][dots] = ink
                left += 18 if rng.random() < 0.85 else 36
    return np.repeat(pages, channels, axis=1)


def matches(rule: dict, case: dict, name: str) -> bool:
    of_model = fnmatch.fnmatchcase(case["model"], rule.get("model", "*"))
    return of_model and fnmatch.fnmatchcase(name, rule["input"])


def values(info, case: dict, fills: list[dict]) -> np.ndarray:
    shape = shape_of(info, case)
    dtype = DTYPES[info.type]
    rule = next(rule for rule in fills if matches(rule, case, info.name))
    rng = np.random.default_rng(zlib.crc32(f"{case['name']}/{info.name}".encode()))
    if "constant" in rule:
        return np.full(shape, rule["constant"], dtype)
    if "integers" in rule:
        return rng.integers(*rule["integers"], shape).astype(dtype)
    if "count_from" in rule:
        start = case.get("dims", {}).get(rule["count_from"], 0)
        return np.broadcast_to(np.arange(start, start + shape[-1]), shape).astype(dtype)
    if "page_of_text" in rule:
        return page_of_text(shape, *rule["page_of_text"], rng).astype(dtype)
    mean, deviation = rule["normal"]
    return (rng.standard_normal(shape) * deviation + mean).astype(dtype)


def key_of(case: dict, fills: list[dict], model: Path) -> str:
    stat = model.stat()
    return json.dumps([case, fills, onnxruntime.__version__, stat.st_size, stat.st_mtime_ns])


def make(case: dict, fills: list[dict], model: Path, folder: Path) -> None:
    session = open_session(model, threads=1)
    inputs = {info.name: values(info, case, fills) for info in session.get_inputs()}
    names = [info.name for info in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, inputs), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "reference.npz", **outputs)


def main() -> None:
    table, models, out = (Path(argument) for argument in sys.argv[1:4])
    names = set(sys.argv[4:])
    data = json.loads(table.read_text())
    for case in data["cases"]:
        if names and case["name"] not in names:
            continue
        model, folder = models / f"{case['model']}.onnx", out / case["name"]
        key, key_file = key_of(case, data["fills"], model), folder / "key.json"
        if key_file.exists() and key_file.read_text() == key:
            continue
        make(case, data["fills"], model, folder)
        key_file.write_text(key)
        print(f"{case['name']}: made", flush=True)


if __name__ == "__main__":
    main()
