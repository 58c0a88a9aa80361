"""Converts models with ONNX Runtime's own tools.

usage: python convert_models.py TABLE.json MODELS OUT [NAME...]

TABLE.json lists under `models` {name, from, method}: static (Q/DQ around float operators, 8-bit activations, 8-bit weights by channel),
dynamic (8-bit weights, activations quantized as they come), nbits (4-bit weights in blocks) or float16 (all but inputs and outputs in float16). Writes OUT/NAME.onnx. A model that is there and
was made from the same source in the same way is left alone.
"""

import json
import logging
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16

CALIBRATION_PICTURES = 8


class Noise(CalibrationDataReader):
    """Random pictures: the ranges matter to accuracy, not to speed."""

    def __init__(self, model: Path):
        (info,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).get_inputs()
        shape = [size if isinstance(size, int) else 1 for size in info.shape]
        rng = np.random.default_rng(0)
        pictures = (rng.standard_normal(shape).astype(np.float32) for _ in range(CALIBRATION_PICTURES))
        self.feeds = ({info.name: picture} for picture in pictures)

    def get_next(self):
        return next(self.feeds, None)


def static(source: Path, out: Path, options: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # As the tool's documentation asks for: biases that nodes share through Identity would stay in float.
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            out,
            Noise(source),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )


def dynamic(source: Path, out: Path, options: dict) -> None:
    quantize_dynamic(source, out, weight_type=QuantType.QInt8)


def nbits(source: Path, out: Path, options: dict) -> None:
    model = ONNXModel(onnx.load(source))
    # The tool takes MatMul only.
    model.replace_gemm_with_matmul()
    quantizer = MatMulNBitsQuantizer(model.model, bits=4, is_symmetric=True, **options)
    quantizer.process()
    onnx.save(quantizer.model.model, out)


def float16(source: Path, out: Path, options: dict) -> None:
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True, **options), out)


METHODS = {"static": static, "dynamic": dynamic, "nbits": nbits, "float16": float16}


def main() -> None:
    table, models, out = (Path(argument) for argument in sys.argv[1:4])
    names = set(sys.argv[4:])
    out.mkdir(parents=True, exist_ok=True)
    # Thousands of lines on what is not quantized.
    logging.disable(logging.WARNING)
    for entry in json.loads(table.read_text())["models"]:
        if names and entry["name"] not in names:
            continue
        source = models / f"{entry['from']}.onnx"
        stat = source.stat()
        versions = [onnxruntime.__version__, onnx.__version__, zlib.crc32(Path(__file__).read_bytes())]
        key = json.dumps([entry, versions, stat.st_size, stat.st_mtime_ns])
        model, key_file = out / f"{entry['name']}.onnx", out / f"{entry['name']}.source"
        if model.exists() and key_file.exists() and key_file.read_text() == key:
            continue
        partial = model.with_suffix(".partial.onnx")
        METHODS[entry["method"]](source, partial, entry.get("options", {}))
        partial.replace(model)
        key_file.write_text(key)
        print(f"{entry['name']}: made, {model.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
