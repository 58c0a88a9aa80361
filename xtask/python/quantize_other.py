"""Quantizes a model with onnxruntime.quantization, in a process whose memory is measured.

usage: python quantize_other.py MODEL OUT CALIBRATION OPTIONS.json-text

OPTIONS are {"method": "dynamic" | "static" | "int4" | "float16", "samples": N, ...}; the others are arguments of the function. A static
model is prepared first, and its operator set raised to 13, without which scales by channel make files that do not load. "int4" may have
an "algorithm", "RTN" or "k_quant", whose configuration gets the options; GPTQ and HQQ need PyTorch. Prints {seconds, peak}; the peak is over what the
imports took.
"""

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import (
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from time_reference import forget_peak, peak, status

ALGORITHMS = {"RTN": RTNWeightOnlyQuantConfig, "k_quant": KQuantWeightOnlyQuantConfig}


class Samples(CalibrationDataReader):
    def __init__(self, folder: Path, count: int):
        self.feeds = (dict(np.load(path)) for path in sorted(folder.glob("*.npz"))[:count])

    def get_next(self):
        return next(self.feeds, None)


def static(model: Path, out: Path, calibration: Path, samples: int = 64, calibrate_method: str = "MinMax", **options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        loaded = onnx.load(model)
        if next(entry.version for entry in loaded.opset_import if entry.domain == "") < 13:
            loaded = onnx.version_converter.convert_version(loaded, 13)
        quant_pre_process(loaded, prepared, skip_symbolic_shape=True)
        method = CalibrationMethod[calibrate_method]
        quantize_static(
            prepared,
            out,
            Samples(calibration, samples),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=method,
            **{"per_channel": True, **options},
        )


def dynamic(model: Path, out: Path, calibration: Path, **options) -> None:
    quantize_dynamic(model, out, weight_type=QuantType.QInt8, **options)


def int4(model: Path, out: Path, calibration: Path, algorithm: str = "", **options) -> None:
    if algorithm:
        options = {"algo_config": ALGORITHMS[algorithm](**options)}
    quantizer = MatMulNBitsQuantizer(onnx.load(model), bits=4, block_size=32, **options)
    quantizer.process()
    onnx.save(quantizer.model.model, out)


def float16(model: Path, out: Path, calibration: Path, **options) -> None:
    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True, **options), out)


METHODS = {method.__name__: method for method in (static, dynamic, int4, float16)}


def main() -> None:
    model, out, calibration = (Path(argument) for argument in sys.argv[1:4])
    options = json.loads(sys.argv[4])
    # Thousands of lines on what is not quantized.
    logging.disable(logging.WARNING)
    forget_peak()
    before, start = status("VmRSS") or 0, time.perf_counter()
    METHODS[options.pop("method")](model, out, calibration, **options)
    # On a line of its own, after bars of progress.
    print()
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": max(0, peak() - before)}))


if __name__ == "__main__":
    main()
