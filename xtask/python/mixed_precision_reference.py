"""Writes what precisions of weights do to the outputs of a network, in NumPy, for the tests of ort-quant.

usage: python mixed_precision_reference.py ort-quant/tests/data

Needs NumPy. The network is h = x + relu(x A) B, y = h + relu(h C) D, in float64. Weights are quantized in blocks by the
least squared error. mixed.json has an object:

  errors    for each weight the squared relative errors of y with 2, 4 and 8 bits, if no other weight changes
  together  the same with all weights in 2, 4 and 8 bits
  budgets   for some numbers of bytes the least sum of errors of all assignments that fit, of 2, 4, 8 bits and float32, by
            trying each of them
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np

from block_quantization_reference import mse, single, unit

CHANNELS, HIDDEN, BLOCK, ROWS = 64, 96, 32, 144
WEIGHTS = {
    "A": (CHANNELS, HIDDEN, 100, 1.0),
    "B": (HIDDEN, CHANNELS, 9000, 0.25),
    "C": (CHANNELS, HIDDEN, 20000, 0.5),
    "D": (HIDDEN, CHANNELS, 30000, 0.0625),
}
BITS = (2, 4, 8)


def weight(k, n, start, factor):
    return (single(factor) * unit(np.arange(start, start + k * n, dtype=np.int64))).reshape(k, n).astype(np.float64)


def samples():
    noise = unit(np.arange(ROWS * CHANNELS, dtype=np.int64) + 31).reshape(ROWS, CHANNELS)
    values, last = np.zeros((ROWS, CHANNELS), single), np.zeros(ROWS, single)
    for channel in range(CHANNELS):
        last = single(0.875) * last + noise[:, channel]
        values[:, channel] = last
    return values.astype(np.float64)


def outputs(x, weights):
    h = x + np.maximum(x @ weights["A"], 0.0) @ weights["B"]
    return h + np.maximum(h @ weights["C"], 0.0) @ weights["D"]


def quantized(values, bits):
    k, n = values.shape
    blocks = values.T.reshape(n * k // BLOCK, BLOCK)
    return mse(blocks, bits, False).values(blocks).reshape(n, k).T


def size(values, bits):
    k, n = values.shape
    blocks = k // BLOCK
    return n * (blocks * BLOCK * bits // 8 + 4 * blocks + -(-blocks * bits // 8))


if __name__ == "__main__":
    weights = {name: weight(*shape) for name, shape in WEIGHTS.items()}
    x = samples()
    expected = outputs(x, weights)

    def error(changed):
        return float(np.sum((outputs(x, {**weights, **changed}) - expected) ** 2) / np.sum(expected**2))

    codes = {name: {bits: quantized(values, bits) for bits in BITS} for name, values in weights.items()}
    errors = {name: [error({name: codes[name][bits]}) for bits in BITS] for name in weights}
    together = [error({name: codes[name][bits] for name in weights}) for bits in BITS]
    choices = [
        [(size(weights[name], bits), one) for bits, one in zip(BITS, errors[name])] + [(4 * weights[name].size, 0.0)]
        for name in weights
    ]
    sums = [tuple(map(sum, zip(*chosen))) for chosen in itertools.product(*choices)]
    least, most = min(sums)[0], 4 * sum(values.size for values in weights.values())
    budgets = []
    for part in range(0, 41):
        budget = least + (most - least) * part // 40
        budgets.append([budget, min(one for taken, one in sums if taken <= budget)])
    text = json.dumps({"errors": errors, "together": together, "budgets": budgets})
    Path(sys.argv[1], "mixed.json").write_text(text.replace("], ", "],\n") + "\n")
