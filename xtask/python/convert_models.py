"""Converts models with ONNX Runtime's own tools.

usage: python convert_models.py TABLE.json MODELS OUT [NAME...]

TABLE.json lists under `models` {name, from, method, options}: static (Q/DQ around float operators, 8-bit activations, 8-bit weights), dynamic (8-bit
weights, activations quantized as they come), nbits (4- or 8-bit weights in blocks) or float16 (all but inputs and outputs in float16). Options of static:
`shapes` of inputs with unknown sizes, and `per_channel` (true; needs opset 13). Writes OUT/NAME.onnx. A model that is there and was made from the same
source in the same way is left alone.
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

CALIBRATION_SAMPLES = 8


class Noise(CalibrationDataReader):
    """Random pictures or tokens: the ranges matter to accuracy, not to speed."""

    def __init__(self, model: Path, shapes: dict):
        infos = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).get_inputs()
        rng = np.random.default_rng(0)

        def sample(info) -> np.ndarray:
            shape = shapes.get(info.name, [size if isinstance(size, int) else 1 for size in info.shape])
            if info.type == "tensor(float)":
                return rng.standard_normal(shape).astype(np.float32)
            # The second of two token types, or a mask, is 1 at most.
            return rng.integers(1, 1000 if info.name.endswith("input_ids") else 2, shape)

        self.feeds = ({info.name: sample(info) for info in infos} for _ in range(CALIBRATION_SAMPLES))

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
            Noise(source, options.get("shapes", {})),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=options.get("per_channel", True),
        )


def dynamic(source: Path, out: Path, options: dict) -> None:
    quantize_dynamic(source, out, weight_type=QuantType.QInt8)


def nbits(source: Path, out: Path, options: dict) -> None:
    model = ONNXModel(onnx.load(source))
    # The tool takes MatMul only.
    model.replace_gemm_with_matmul()
    quantizer = MatMulNBitsQuantizer(model.model, **{"bits": 4, "is_symmetric": True, **options})
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
