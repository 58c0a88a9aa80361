"""Writes which elements of weights pruning removes, by prototypes in NumPy, for the tests of ort-quant.

usage: python pruning_reference.py ort-quant/tests/data

Needs NumPy. pruning.json has a list of cases; `zeros` is a bit for each element of the weight in hexadecimal, and
`values` has every eleventh element after the pruning. Magnitude follows torch.nn.utils.prune.l1_unstructured, whose number of removed
elements is `round(amount * count)`; of equal elements the first are removed, as by `argsort(kind="stable")`. Wanda
follows arXiv:2306.11695, and SparseGPT arXiv:2301.00774, in float64 with a dense inverse of the Hessian. Weights and
inputs follow from `unit`, which the test has, too.
"""

import json
import sys
from pathlib import Path

import numpy as np

BLOCK = 128
DAMPING = 0.01


def unit(start, count):
    steps = np.arange(start, start + count, dtype=np.uint32)
    hashed = steps * np.uint32(0x9E3779B1)
    hashed = (hashed ^ (hashed >> np.uint32(15))) * np.uint32(0x85EBCA77)
    hashed = (hashed ^ (hashed >> np.uint32(13))) >> np.uint32(8)
    return hashed.astype(np.float32) / np.float32(16777216) - np.float32(0.5)


def weights_of(case):
    values = unit(7, int(np.prod(case["shape"])))
    if case["method"] == "magnitude":
        # Few different magnitudes, so that there are ties.
        values = np.round(values * np.float32(16)) / np.float32(8)
    return values


def input_of(case):
    shape = case["input"]
    values = unit(100_000, int(np.prod(shape))).reshape(shape)
    # Neighbouring channels are alike, and some are larger.
    axis = 1 if "kernel" in case else len(shape) - 1
    values = np.moveaxis(values, axis, -1).astype(np.float32)
    mixed = values.copy()
    for channel in range(1, values.shape[-1]):
        mixed[..., channel] = np.float32(0.5) * mixed[..., channel - 1] + values[..., channel]
    mixed[..., ::3] *= np.float32(4)
    return np.moveaxis(mixed, -1, axis)


def places(case):
    """The place in the file of each element of the matrix: rows are outputs. And the groups."""
    index = np.arange(np.prod(case["shape"])).reshape(case["shape"])
    operator, group = case["operator"], case.get("group", 1)
    if operator == "MatMul":
        return np.swapaxes(index, -1, -2).reshape(-1, index.shape[-2]), 1
    if operator == "Gemm":
        return (index if case["transB"] else index.T), 1
    if operator == "Conv":
        outputs, channels = index.shape[:2]
        return np.moveaxis(index, 1, -1).reshape(outputs, -1), group
    channels, outputs = index.shape[:2]
    grouped = index.reshape(group, channels // group, outputs, -1)
    return grouped.transpose(0, 2, 3, 1).reshape(group * outputs, -1), group


def rows_of(case):
    """The rows of the input of each group."""
    values = input_of(case).astype(np.float64)
    if "kernel" not in case:
        return [values.reshape(-1, values.shape[-1])]
    kernel, group = case["kernel"], case.get("group", 1)
    strides, dilations, pads = case["strides"], case["dilations"], case["pads"]
    values = np.pad(values, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    batch, channels, height, width = values.shape
    extent = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations)]
    all_rows = []
    for part in np.split(values, group, axis=1):
        rows = []
        for image in part:
            for y in range(0, height - extent[0] + 1, strides[0]):
                for x in range(0, width - extent[1] + 1, strides[1]):
                    patch = image[:, y:y + extent[0]:dilations[0], x:x + extent[1]:dilations[1]]
                    rows.append(np.moveaxis(patch, 0, -1).reshape(-1))
        all_rows.append(np.array(rows))
    return all_rows


def count_of(share, count):
    return round(share * count)


def least(scores, count):
    """The places of the least scores, of ties the first."""
    return np.argsort(scores, kind="stable")[:count]


def is_removed(scores, case, place):
    """Which elements of a matrix are removed; `place` has their order in the file."""
    mask = np.zeros(scores.shape, bool)
    if "pattern" in case:
        kept, of = case["pattern"]
        for row, scored in enumerate(scores):
            for first in range(0, len(scored), of):
                mask[row, first + least(scored[first:first + of], of - kept)] = True
    elif case["scope"] == "row":
        for row, scored in enumerate(scores):
            mask[row, least(scored, count_of(case["share"], len(scored)))] = True
    else:
        in_file_order = np.empty(scores.size)
        in_file_order[place.reshape(-1)] = scores.reshape(-1)
        chosen = least(in_file_order, count_of(case["share"], scores.size))
        mask = np.isin(place, chosen)
    return mask


def sparse_gpt(matrix, rows, case, before):
    """The pruned matrix, and the number of elements of the layer so far."""
    matrix = matrix.astype(np.float64).copy()
    columns = matrix.shape[1]
    hessian = rows.T @ rows
    mean = np.mean(np.diag(hessian))
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = mean
    hessian += DAMPING * mean * np.eye(columns)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    pivots = np.diag(upper)
    kept, of = case.get("pattern", (0, BLOCK))
    width = BLOCK // of * of

    def cost(part, first):
        costs = (part / pivots[first:first + part.shape[1]]) ** 2
        costs[:, dead[first:first + part.shape[1]]] = 0
        return costs

    for start in range(0, columns, width):
        end = min(columns, start + width)
        costs = cost(matrix[:, start:end], start)
        mask = np.zeros(costs.shape, bool)
        if "pattern" not in case and case["scope"] == "row":
            count = count_of(case["share"], end) - count_of(case["share"], start)
            for row, scored in enumerate(costs):
                mask[row, least(scored, count)] = True
        elif "pattern" not in case:
            count = count_of(case["share"], before + costs.size) - count_of(case["share"], before)
            mask.reshape(-1)[least(costs.reshape(-1), count)] = True
        before += costs.size
        for column in range(start, end):
            if "pattern" in case and column % of == 0:
                costs = cost(matrix[:, column:column + of], column)
                for row, scored in enumerate(costs):
                    mask[row, column - start + least(scored, of - kept)] = True
            removed = mask[:, column - start]
            error = np.where(removed, matrix[:, column], 0) / pivots[column]
            matrix[:, column + 1:] -= np.outer(error, upper[column, column + 1:])
            matrix[removed, column] = 0
    return matrix, before


def solve(case):
    flat = weights_of(case)
    place, group = places(case)
    matrix = flat[place].astype(np.float64)
    result = flat.astype(np.float64)
    if case["method"] == "magnitude":
        result[place[is_removed(np.abs(matrix), case, place)]] = 0
    elif case["method"] == "wanda":
        rows = rows_of(case)
        norms = [np.sqrt(np.mean(part ** 2, axis=0)) for part in rows]
        parts = np.split(matrix, group, axis=0)
        scores = np.concatenate([np.abs(part) * norm for part, norm in zip(parts, norms)])
        result[place[is_removed(scores, case, place)]] = 0
    else:
        before = 0
        for part, index, rows in zip(np.split(matrix, group), np.split(place, group), rows_of(case)):
            pruned, before = sparse_gpt(part, rows, case, before)
            result[index] = pruned
    case["zeros"] = np.packbits(result == 0).tobytes().hex()
    case["values"] = [float(f"{value:.7g}") for value in result[::11]]


def conv(shape, size, batch=3, group=1, stride=1, dilation=1, pads=(1, 1, 1, 1)):
    channels = shape[1] * group
    return {
        "operator": "Conv", "shape": shape, "input": [batch, channels, size, size], "group": group,
        "kernel": shape[2:], "strides": [stride, stride], "dilations": [dilation, dilation], "pads": list(pads),
    }


def main():
    layer, row = {"share": 0.5, "scope": "layer"}, {"share": 0.3, "scope": "row"}
    two_four, one_four = {"pattern": [2, 4]}, {"pattern": [1, 4]}
    matmul = {"operator": "MatMul", "shape": [24, 10], "input": [40, 24]}
    gemm = {"operator": "Gemm", "shape": [10, 24], "input": [40, 24], "transB": 1}
    plain_gemm = {"operator": "Gemm", "shape": [24, 10], "input": [40, 24], "transB": 0}
    large = {"operator": "MatMul", "shape": [150, 70], "input": [200, 150]}
    batched = {"operator": "MatMul", "shape": [3, 8, 5], "input": [3, 2, 8]}
    filters = conv([6, 4, 3, 3], 7)
    grouped = conv([6, 4, 3, 3], 9, group=2, stride=2, pads=(0, 1, 2, 0))
    depthwise = conv([5, 1, 3, 3], 8, group=5, dilation=2)
    transposed = {
        "operator": "ConvTranspose", "shape": [8, 3, 2, 2], "group": 2, "input": [1, 8, 4, 4], "kernel": [2, 2],
        "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0],
    }
    table = [
        ("magnitude", [matmul, gemm, plain_gemm, batched, filters, grouped, transposed],
         [layer, row, two_four, one_four]),
        ("magnitude", [depthwise, large], [layer, row]),
        ("wanda", [matmul, gemm, filters, grouped, large], [layer, row]),
        ("wanda", [matmul, plain_gemm, filters, grouped], [two_four]),
        ("wanda", [depthwise], [layer, row]),
        ("sparsegpt", [matmul, gemm, filters, grouped, large, depthwise], [layer, row]),
        ("sparsegpt", [matmul, filters, grouped], [two_four, one_four]),
        ("sparsegpt", [large], [{"pattern": [1, 3]}]),
    ]
    cases = []
    for method, layers, sparsities in table:
        for layer_of in layers:
            for sparsity in sparsities:
                case = {"method": method, **layer_of, **sparsity}
                solve(case)
                cases.append(case)
    path = Path(sys.argv[1]) / "pruning.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
