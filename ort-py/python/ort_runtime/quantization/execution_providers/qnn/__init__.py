"""Quantization for Qualcomm's AI Engine Direct (QNN)."""

from .quant_config import get_qnn_qdq_config

__all__ = ["get_qnn_qdq_config"]
