"""Quantization of models, with the names of `onnxruntime.quantization`.

Needs the package `onnx`.
"""

from .quant_utils import QuantFormat as QuantFormat
from .quant_utils import QuantizationMode as QuantizationMode
from .quant_utils import QuantType as QuantType
from .quantize import *
from .calibrate import CalibrationDataReader
from .quantize import quantize
