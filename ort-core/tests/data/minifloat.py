"""Writes minifloat.txt: how ml_dtypes and onnx decode and encode each narrow float.

Needs onnx with ml_dtypes. Lines, all numbers in hexadecimal:
  decode NAME BITS...     the float32 bits of every code in order (NaN as 7fc00000)
  encode NAME SATURATE    then one code per value of the `values` line
  e8m0 SATURATE MODE      likewise, from onnx.numpy_helper.to_float8e8m0, for the values of `scales`
"""
import pathlib

import ml_dtypes
import numpy as np
import onnx.numpy_helper as helper

FORMATS = {
    "float8e4m3fn": ("float8_e4m3fn", 8), "float8e4m3fnuz": ("float8_e4m3fnuz", 8),
    "float8e5m2": ("float8_e5m2", 8), "float8e5m2fnuz": ("float8_e5m2fnuz", 8),
    "float8e8m0": ("float8_e8m0fnu", 8), "float4e2m1": ("float4_e2m1fn", 4),
    "float6e2m3": ("float6_e2m3fn", 6), "float6e3m2": ("float6_e3m2fn", 6),
}


def bits_of(values):
    bits = values.astype(np.float32).view(np.uint32).copy()
    bits[np.isnan(values.astype(np.float32))] = 0x7FC00000
    return " ".join(f"{b:x}" for b in bits)


def main():
    lines, probes = [], [0.0, -0.0, np.inf, -np.inf, np.nan, 1e10, -1e10, 1e-10, -1e-10, 1e-40]
    decoded = {}
    for name, (ml_name, bits) in FORMATS.items():
        dtype = getattr(ml_dtypes, ml_name)
        values = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
        decoded[name] = values
        lines.append(f"decode {name} {bits_of(values)}")
        if name == "float8e8m0":
            continue
        finite = np.sort(values[np.isfinite(values)])
        middles = (finite[1:] + finite[:-1]) / 2
        for exact in (finite, middles):
            probes += [*exact, *np.nextafter(exact, np.float32(np.inf)), *np.nextafter(exact, np.float32(-np.inf))]
        top = finite[-1] + (finite[-1] - finite[-2]) * np.array([0.25, 0.5, 0.75, 1, 2], np.float32)
        probes += [*top, *-top]
    probes = np.unique(np.array(probes, np.float32).view(np.uint32)).view(np.float32)
    rng = np.random.default_rng(1)
    probes = np.concatenate([probes, rng.normal(0, 50, 300).astype(np.float32)])
    probes = probes[~(np.isnan(probes) & (probes.view(np.uint32) != 0x7FC00000))]
    lines.append(f"values {bits_of(probes)}")
    for name, (ml_name, bits) in FORMATS.items():
        if name == "float8e8m0":
            continue
        dtype = getattr(ml_dtypes, ml_name)
        plain = probes.astype(dtype).view(np.uint8)
        lines.append(f"encode {name} 0 " + " ".join(f"{c:x}" for c in plain))
        saturated = helper.saturate_cast(probes, np.dtype(dtype)).view(np.uint8)
        lines.append(f"encode {name} 1 " + " ".join(f"{c:x}" for c in saturated))
    # Normal numbers below the largest power only: onnx's function and the Cast specification agree there.
    scales = np.abs(np.concatenate([probes, 2.0 ** rng.uniform(-120, 120, 300)])).astype(np.float32)
    scales = np.unique(scales[np.isfinite(scales) & (scales >= np.float32(2.0**-126))])
    lines.append(f"scales {bits_of(scales)}")
    for mode in ("up", "down", "nearest"):
        codes = helper.to_float8e8m0(scales, True, mode).view(np.uint8)
        lines.append(f"e8m0 {mode} " + " ".join(f"{c:x}" for c in codes))
    text = "\n".join(lines) + "\n"
    pathlib.Path(__file__).with_name("minifloat.txt").write_text(text)


main()
