"""Quantization of models, with the names of `onnxruntime.quantization`.

- `quantize_dynamic`: weights in 8 bits, activations at run time.
- `quantize_static`: both, with ranges that samples have; `create_calibrator` finds these.
- `quantize`, with a configuration of either, of `get_qdq_config` or of weights alone.
- `quant_pre_process`: what should be done to a model before.
- `matmul_nbits_quantizer`, `matmul_bnb4_quantizer`: blocks of weights in 2, 4 or 8 bits.
- `qdq_loss_debug`: what quantization costs in accuracy, tensor by tensor.

Needs the package `onnx`.
"""

from .calibrate import (
    CalibraterBase,
    CalibrationDataReader,
    CalibrationMethod,
    MinMaxCalibrater,
    TensorData,
    TensorsData,
    create_calibrator,
    load_tensors_data,
    save_tensors_data,
)
from .cuda_quantizer import CudaQuantizer
from .qdq_quantizer import QDQQuantizer
from .quant_utils import QuantFormat, QuantizationMode, QuantType, write_calibration_table
from .quantize import (
    DynamicQuantConfig,
    StaticQuantConfig,
    get_qdq_config,
    quantize,
    quantize_dynamic,
    quantize_static,
)
from .shape_inference import quant_pre_process

__all__ = [
    "CalibraterBase",
    "CalibrationDataReader",
    "CalibrationMethod",
    "CudaQuantizer",
    "DynamicQuantConfig",
    "MinMaxCalibrater",
    "QDQQuantizer",
    "QuantFormat",
    "QuantType",
    "QuantizationMode",
    "StaticQuantConfig",
    "TensorData",
    "TensorsData",
    "create_calibrator",
    "get_qdq_config",
    "load_tensors_data",
    "quant_pre_process",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
    "save_tensors_data",
    "write_calibration_table",
]
