"""Writes cast.txt: what numpy and ml_dtypes give for every pair of numeric types.

Needs numpy, ml_dtypes and onnx. Lines: FROM TO COUNT then source and result bytes in hexadecimal. Floats go to
integers only where they fit, except the lines that start with `range`, which hold x86's results for those that do not.
"""
import pathlib
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper as helper

warnings.simplefilter("ignore")
SKIPPED = {"STRING", "UNDEFINED", "COMPLEX64", "COMPLEX128", "FLOAT8E8M0"}
CODES = {code: name for name, code in onnx.TensorProto.DataType.items() if name not in SKIPPED}
ONNX_NAMES = {"FLOAT": "float", "DOUBLE": "double"}
SUB_BYTE = {4: {21, 22, 23}, 2: {25, 26}, 6: {27, 28}}
VALUES = [0, 1, -1, 2, 3, 5, 7, 0.4, 0.5, 1.5, 2.5, -2.5, 3.49, 6, 8, -8, 15, 100, 127, 128, 200, 255, 256, -129,
          300.7, 448, 57344, 65504, 65535, 70000, -70000, 1e6, 123456789, 2147483520, 3e9, -3e9, 1e-3, 1e-7, 3e-8,
          1.00048828125, 1.0004882814, 1.0004882812, 1.00390625, 1.0039064, 16777217, 2.0**53 + 1, 4e18, 1.2e19]


def raw(array, code):
    for bits, codes in SUB_BYTE.items():
        if code in codes:
            pack = {4: helper._pack_4bitx2, 2: helper._pack_2bitx4, 6: lambda a: helper._pack_6bit(a.view(np.uint8))}
            return pack[bits](array).tobytes().hex()
    return array.tobytes().hex()


def cast(array, dtype):
    try:
        return array.astype(dtype)
    except TypeError:  # ml_dtypes has no direct cast between its narrow types
        wide = np.float64 if array.dtype.kind in "Vf" and array.dtype.name.startswith("float") else np.int64
        return array.astype(wide).astype(dtype)


def main():
    lines = []
    dtype = {code: onnx.helper.tensor_dtype_to_np_dtype(code) for code in CODES}
    is_float = {code: "FLOAT" in name or name == "DOUBLE" for code, name in CODES.items()}
    doubles = np.array(VALUES, np.float64)
    for source in CODES:
        if is_float[source]:
            values = np.concatenate([doubles, [-0.0, np.inf, -np.inf, np.nan]]).astype(dtype[source])
        elif source in (12, 13):
            values = np.array([int(v) for v in VALUES if 0 <= v < (2**32 if source == 12 else 2**64)], dtype[source])
        else:
            values = np.array([int(v) if abs(v) < 2**63 else -1 for v in VALUES], np.int64).astype(dtype[source])
        for target in CODES:
            if source == target:
                continue
            chosen = values
            if is_float[source] and not is_float[target] and target != 9:
                wide = values.astype(np.float64)
                low, high = (0, 3) if target == 25 else (-2, 1) if target == 26 else (0, 15) if target == 21 else (
                    -8, 7) if target == 22 else (np.iinfo(dtype[target]).min, np.iinfo(dtype[target]).max)
                chosen = values[(wide >= low) & (wide < float(high) + (high < 2**31))]
            middle = chosen
            if target >= 17 and is_float[target] and not is_float[source]:
                middle = chosen.astype(np.float64)
            if target in (17, 18, 19, 20):
                with_wide = middle.astype(np.float64) if middle.dtype != np.float64 else middle
                result = helper.saturate_cast(with_wide, dtype[target])
            else:
                result = cast(middle, dtype[target])
            lines.append(f"{source} {target} {chosen.size} {raw(chosen, source)} {raw(result, target)}")
    out = np.array([1e10, -1e10, np.nan, np.inf, -np.inf, 300.7, -1.5, -300, 3e9, 1e19, 1.8e19, -1e19, 70000])
    for source in (1, 11):
        for target in (3, 2, 5, 4, 6, 7, 13, 21, 22, 25, 26):
            chosen = out.astype(dtype[source])
            lines.append(f"range {source} {target} {chosen.size} {raw(chosen, source)} {raw(chosen.astype(dtype[target]), target)}")
    pathlib.Path(__file__).with_name("cast.txt").write_text("\n".join(lines) + "\n")


main()
