"""Blocks to make losses and training models of one's own. Needs the package `onnx`."""

from . import blocks, loss, optim
from ._model import base, empty_base, with_first_output
from .blocks import Block
from .onnxblock import ForwardBlock, TrainingBlock, load_checkpoint_to_model, save_checkpoint

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
    "with_first_output",
]
