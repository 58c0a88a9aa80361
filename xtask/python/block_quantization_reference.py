"""Writes the errors of weights in blocks, by prototypes in NumPy, for the tests of ort-quant.

usage: python block_quantization_reference.py ort-quant/tests/data

Needs NumPy. blocks.json has an object with two lists:

  methods   the error that a method minimizes, over all blocks of a matrix: squares (rtn, mse), squares that weigh more for
            large values (k-quant), magnitudes (hqq)
  gptq      the squared change of the outputs of a product with GPTQ, and with plain rounding on the grids of least squared
            error, where errors count as much as the energy of their channel

The prototypes compute in float64, straight from the formulas: llama.cpp's k-quants as a weighted least-squares fit,
half-quadratic quantization (Badri and Shaji, 2023), and GPTQ (arXiv:2210.17323) with the inverse of the Hessian.
"""

import json
import sys
from pathlib import Path

import numpy as np

single = np.float32
SHARES = [1.0] + [step * 0.02 for step in range(30, 56)]


def unit(step):
    """Random numbers that Rust can make with the same roundings."""
    hashes = step.astype(np.uint32) * np.uint32(0x9E3779B1)
    hashes = (hashes ^ hashes >> np.uint32(15)) * np.uint32(0x85EBCA77)
    return ((hashes ^ hashes >> np.uint32(13)) >> np.uint32(8)).astype(single) / single(16777216.0) - single(0.5)


def weights(k, n):
    numbers = unit(np.arange(k * n, dtype=np.int64))
    return (numbers * numbers * numbers).reshape(k, n).astype(np.float64)


def inputs(rows, channels):
    steps = np.arange(rows * channels, dtype=np.int64).reshape(rows, channels)
    noise = unit(steps + 31)
    values = np.zeros((rows, channels), single)
    last = np.zeros(rows, single)
    for channel in range(channels):
        last = single(0.875) * last + noise[:, channel]
        values[:, channel] = single(8.0) * last if channel % 16 == 3 else last
    return values.astype(np.float64)


def rounded(values):
    """Half away from zero, for numbers that are not negative."""
    return np.floor(values + 0.5)


class Grid:
    """A scale and a zero point for each row of an array."""

    def __init__(self, scale, zero, largest):
        self.scale, self.zero, self.largest = scale[:, None], zero[:, None], largest

    def codes(self, values):
        inverse = np.where(self.scale == 0, 0.0, 1.0 / np.where(self.scale == 0, 1.0, self.scale))
        return rounded(np.clip(values * inverse + self.zero, 0, self.largest))

    def values(self, values):
        return (self.codes(values) - self.zero) * self.scale

    def take(self, other, chosen):
        self.scale = np.where(chosen[:, None], other.scale, self.scale)
        self.zero = np.where(chosen[:, None], other.zero, self.zero)


def covering(low, high, bits, symmetric):
    largest, middle = 2.0**bits - 1, 2.0 ** (bits - 1)
    if symmetric:
        extreme = np.where(np.abs(high) > np.abs(low), high, low)
        return Grid(extreme / -middle, np.full_like(low, middle), largest)
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    scale = (high - low) / largest
    zero = rounded(np.clip(-low / np.where(scale == 0, 1.0, scale), 0, largest))
    return Grid(scale, zero, largest)


def best_of(candidates, values, error):
    best = next(candidates)
    least = error(values, best.values(values))
    for grid in candidates:
        errors = error(values, grid.values(values))
        best.take(grid, errors < least)
        least = np.minimum(errors, least)
    return best


def squares(values, became):
    return np.sum((values - became) ** 2, axis=1)


def magnitudes(values, became):
    return np.sum(np.abs(values - became), axis=1)


def importance(values):
    return np.sqrt(np.mean(values**2, axis=1, keepdims=True)) + np.abs(values)


def weighted(values, became):
    return np.sum(importance(values) * (values - became) ** 2, axis=1)


def rtn(values, bits, symmetric):
    return covering(values.min(axis=1), values.max(axis=1), bits, symmetric)


def mse(values, bits, symmetric, error=squares):
    low, high = values.min(axis=1), values.max(axis=1)
    return best_of((covering(low * share, high * share, bits, symmetric) for share in SHARES), values, error)


def k_quant(values, bits, symmetric):
    largest, middle = 2.0**bits - 1, 2.0 ** (bits - 1)
    weight = importance(values)
    low, high = np.minimum(values.min(axis=1), 0.0), np.maximum(values.max(axis=1), 0.0)

    def grids():
        yield rtn(values, bits, symmetric)
        for step in range(-10, 11):
            if symmetric:
                extreme = np.where(high > -low, high, low)
                inverse, offset = -(middle + step * 0.1) / extreme, np.full_like(low, middle)
            else:
                inverse = (largest + step * 0.1) / (high - low)
                offset = -low * inverse
            codes = rounded(np.clip(values * inverse[:, None] + offset[:, None], 0, largest))
            zero = np.full_like(low, middle)
            if not symmetric:
                root = np.sqrt(weight)
                for row in range(len(values)):
                    columns = np.stack([codes[row], np.ones_like(codes[row])], axis=1) * root[row][:, None]
                    (scale, offset_of_row), *_ = np.linalg.lstsq(columns, values[row] * root[row], rcond=None)
                    zero[row] = rounded(np.clip(-offset_of_row / scale, 0, largest))
            steps = codes - zero[:, None]
            scale = np.sum(weight * steps * values, axis=1) / np.sum(weight * steps**2, axis=1)
            yield Grid(scale, zero, largest)

    return best_of(grids(), values, weighted)


def hqq(values, bits, symmetric):
    assert not symmetric
    largest, norm = 2.0**bits - 1, 0.7
    low, high = values.min(axis=1), values.max(axis=1)
    scale = (high - low) / largest
    current = Grid(scale, np.round(-low / scale), largest)
    best = rtn(values, bits, False)
    least = magnitudes(values, best.values(values))
    last, beta = np.full(len(values), np.inf), 10.0
    for _ in range(20):
        became = current.values(values)
        errors = magnitudes(values, became)
        best.take(current, errors < least)
        least = np.minimum(errors, least)
        error = values - became
        size = np.abs(error)
        shrunk = np.maximum(size - np.where(size > 0, size, 1.0) ** (norm - 1) / beta, 0.0)
        target = values - np.sign(error) * np.where(size > 0, shrunk, 0.0)
        zero = np.mean(current.codes(values) - target / current.scale, axis=1)
        current.zero = np.where((errors < last)[:, None], zero[:, None], current.zero)
        last = errors
        beta *= 1.01
    return best


METHODS = {"rtn": (rtn, squares), "mse": (mse, squares), "k-quant": (k_quant, weighted), "hqq": (hqq, magnitudes)}


def method_cases():
    k, n, block = 96, 24, 32
    values = weights(k, n).T.reshape(n * k // block, block)
    for bits in (2, 4, 8):
        for symmetric in (False, True):
            for name, (method, error) in METHODS.items():
                if symmetric and name == "hqq":
                    continue
                became = method(values, bits, symmetric).values(values)
                yield {
                    "method": name,
                    "bits": bits,
                    "symmetric": symmetric,
                    "k": k,
                    "n": n,
                    "block": block,
                    "error": float(np.sum(error(values, became))),
                }


def gptq(weight, hessian, block, grid_of, act_order):
    """The weight after GPTQ. `grid_of` has the grids of rows of a block."""
    count = len(weight)
    energies = np.diag(hessian)
    damped = hessian / energies.mean() + 0.01 * np.eye(count)
    order = np.argsort(-energies, kind="stable") if act_order else np.arange(count)
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    weight = weight.copy()
    result = np.zeros_like(weight)
    grids = {}
    if act_order:
        grids = {first: grid_of(first, weight) for first in range(0, count, block)}
    for step, channel in enumerate(order):
        first = channel // block * block
        if first not in grids:
            grids[first] = grid_of(first, weight)
        result[channel] = grids[first].values(weight[channel][:, None])[:, 0]
        error = (weight[channel] - result[channel]) / upper[step, step]
        weight[order[step + 1:]] -= np.outer(upper[step, step + 1:], error)
    return result


def gptq_cases():
    small = [(160, 20, 32, 200, bits) for bits in (2, 4)]
    for k, n, block, rows, bits in small + [(300, 16, 64, 400, 4)]:
        weight, x = weights(k, n), inputs(rows, k)
        hessian = x.T @ x
        importance_of = np.diag(hessian) / np.diag(hessian).mean()
        for symmetric in (False, True):

            def grid_of(first, weight):
                values = weight[first:first + block].T
                counts = importance_of[first:first + block]
                error = lambda values, became: np.sum(counts * (values - became) ** 2, axis=1)
                return mse(values, bits, symmetric, error)

            def loss(became):
                return float(np.sum((x @ (became - weight)) ** 2))

            plain = np.concatenate(
                [grid_of(first, weight).values(weight[first:first + block].T).T for first in range(0, k, block)]
            )
            for act_order in (False, True):
                yield {
                    "bits": bits,
                    "symmetric": symmetric,
                    "act_order": act_order,
                    "k": k,
                    "n": n,
                    "block": block,
                    "rows": rows,
                    "loss": loss(gptq(weight, hessian, block, grid_of, act_order)),
                    "plain": loss(plain),
                }


def lines(cases):
    return "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]"


if __name__ == "__main__":
    text = f'{{"methods": {lines(method_cases())},\n"gptq": {lines(gptq_cases())}}}\n'
    Path(sys.argv[1], "blocks.json").write_text(text)
