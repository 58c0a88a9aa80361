"""Writes what AdamW with moments of 8 bits gives, straight from the papers, for our operator to be held against.

usage: python dynamic_code_reference.py ort-runtime/tests/data/dynamic_codes.json

Needs NumPy alone. Codes are found by comparing a number with all of the middles between neighbours, in float32 and in the
order of our operations, so that codes, scales and parameters are the same in every bit.

The file has

  rate, attrs        of all steps
  initial            the parameter
  steps              gradient, and parameter, first_codes, first_scales, second_codes, second_scales after the step
"""

import json
import sys
from pathlib import Path

import numpy as np

BLOCK = 256
STEPS = 6
single = np.float32


def numbers(signed):
    """The 256 numbers: 0, 1, and for each decade the middles of equal parts of 0.1 to 1 of it, half of them negative."""
    made = [0.0, 1.0]
    for exponent in range(7):
        parts = 2 ** (exponent + (0 if signed else 1))
        edges = np.linspace(0.1, 1.0, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        made += list(middles) + (list(-middles) if signed else [])
    assert len(made) == 256
    return np.sort(np.array(made)).astype(single)


def encode(values, table):
    middles = (table[:-1] + table[1:]) / single(2)
    codes, scales = [], []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = np.abs(block).max()
        parts = block / (scale if scale > 0 else single(1))
        codes += [int((middles < part).sum()) for part in parts]
        scales.append(scale)
    return np.array(codes, np.uint8), np.array(scales, single)


def decode(codes, scales, table):
    return table[codes] * np.repeat(scales, BLOCK)[: len(codes)]


def main():
    random = np.random.default_rng(5)
    count, rate, beta1, beta2, epsilon, decay = 600, float(single(0.01)), 0.9, 0.999, 1e-8, 0.01
    x = random.standard_normal(count).astype(single)
    initial = x.copy()
    tables = numbers(True), numbers(False)
    blocks = -(-count // BLOCK)
    states = [(np.zeros(count, np.uint8), np.zeros(blocks, single)) for _ in tables]
    steps = []
    for number in range(1, STEPS + 1):
        sizes = 10.0 ** random.integers(-4, 2, count)
        g = (random.standard_normal(count) * sizes).astype(single)
        g[256:300] = 0.0
        m, v = (decode(*state, table) for state, table in zip(states, tables))
        m = m + single(1 - beta1) * (g - m)
        v = v * single(beta2) + single(1 - beta2) * g * g
        root = single(np.sqrt(1 - beta2**number))
        size = single(rate / (1 - beta1**number))
        x = x * single(1 - rate * decay) - size * m / (np.sqrt(v) / root + single(epsilon))
        states = [encode(values, table) for values, table in zip((m, v), tables)]
        entry = {"gradient": g, "parameter": x}
        for name, (codes, scales) in zip(("first", "second"), states):
            entry |= {f"{name}_codes": codes, f"{name}_scales": scales}
        assert all(values.dtype in (single, np.uint8) for values in entry.values())
        steps.append({name: values.tolist() for name, values in entry.items()})
    attrs = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": decay}
    head = {"rate": rate, "attrs": attrs, "initial": initial.tolist()}
    lines = ",\n".join(json.dumps(step) for step in steps)
    Path(sys.argv[1]).write_text(json.dumps(head)[:-1] + f',\n"steps": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
