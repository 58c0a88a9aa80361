"""Measures what one run takes in ONNX Runtime beside model and inputs: values, workspaces and outputs.

usage: python activations_reference.py MODEL INPUTS.npz

Arena and memory pattern are off, so that each value is an allocation of its own, and with MALLOC_MMAP_THRESHOLD_=65536 in the
environment all but small ones go back to the system at once: the growth of the resident size over a second run is then the most that
was alive together, pages rounded up. What it holds by default cannot be told from that of its weights: both are in one arena.

Prints the bytes.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from time_reference import forget_peak, peak, status


def main() -> None:
    model, inputs = map(Path, sys.argv[1:])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = dict(np.load(inputs))
    session.run(None, feeds)
    forget_peak()
    before, files = status("VmRSS"), status("RssFile")
    session.run(None, feeds)
    print(max(peak() - before - (status("RssFile") - files), 0))


main()
