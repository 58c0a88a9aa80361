"""`quantization`: quantized models have the names, scales and codes of onnxruntime's, and run.

Both quantize with the ranges that onnxruntime has found and written to a cache: those of another
engine differ in the last bit of a sum.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import CPU, IS_ORIGINAL, PACKAGE, ort

onnx = pytest.importorskip("onnx")
from onnx import helper, numpy_helper  # noqa: E402
from quantization_models import MODELS, samples  # noqa: E402
from quantization_options import DIFFERENCES, DYNAMIC, OPTIONS, QDQ, REFUSED  # noqa: E402

quantization = importlib.import_module(f"{PACKAGE}.quantization")
QuantType, QuantFormat = quantization.QuantType, quantization.QuantFormat
ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="it compares with the original")
PAIRS = [pytest.param(model, name, id=f"{model}-{name}") for model in MODELS for name in OPTIONS]


class Samples:
    """A reader of a model's samples."""

    def __init__(self, model: Any) -> None:
        self.feeds = iter(samples(model))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def quantized(package: Any, name: str, options: str, cache: Path) -> Any:
    """Returns a quantized model, with the ranges of the cache, which is written if absent."""
    keywords = dict(OPTIONS[options])
    for key in ("activation_type", "weight_type"):
        if key in keywords:
            keywords[key] = package.QuantType[keywords[key]]
    if "quant_format" in keywords:
        keywords["quant_format"] = package.QuantFormat[keywords["quant_format"]]
    model = MODELS[name]()
    output = cache.parent / "quantized.onnx"
    if options in DYNAMIC:
        package.quantize_dynamic(model, str(output), **keywords)
    else:
        reader = Samples(MODELS[name]())
        package.quantize_static(
            model, str(output), reader, calibration_cache_path=str(cache), **keywords
        )
    return onnx.load(str(output))


@functools.cache
def both(name: str, options: str) -> tuple[Any, Any]:
    """Returns what ours and the original make of a model, or the exception that one raises."""
    original = pytest.importorskip("onnxruntime.quantization")
    made: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for package in (original, quantization):
            try:
                made.append(quantized(package, name, options, Path(folder) / "ranges.json"))
            except Exception as error:
                made.append(error)
    return made[1], made[0]


def nodes_of(graph: Any) -> dict[tuple[str, ...], Any]:
    """Returns the nodes of a graph by what they make: operator, name, inputs, attributes."""
    found = {}
    for node in graph.node:
        attributes: dict[str, Any] = {}
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            if attribute.type == onnx.AttributeProto.GRAPH:
                value = dict(contents(value))
            elif hasattr(value, "SerializeToString"):
                value = value.SerializeToString()
            attributes[attribute.name] = value
        operator = node.domain, node.op_type, node.name
        found[tuple(node.output)] = operator, tuple(node.input), attributes
    return found


def contents(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yields all that a graph has, each under a key."""
    yield from nodes_of(graph).items()
    for weight in graph.initializer:
        array = numpy_helper.to_array(weight)
        yield weight.name, (weight.data_type, tuple(weight.dims), array.tobytes())
    for kind in ("input", "output"):
        for value in getattr(graph, kind):
            yield (kind, value.name), value.SerializeToString()


def facts(model: Any) -> dict[Any, Any]:
    """Returns all that a model says, by name."""
    opsets = sorted((opset.domain, opset.version) for opset in model.opset_import)
    about = opsets, model.ir_version, model.producer_name, model.producer_version
    properties = sorted((entry.key, entry.value) for entry in model.metadata_props)
    return dict(contents(model.graph)) | {"about": about, "properties": properties}


def check_same(name: str, options: str, ours: Any, theirs: Any) -> None:
    """Fails unless the models are equal, or differ if they are listed."""
    differs = True
    if not isinstance(theirs, Exception):
        left, right = facts(ours), facts(theirs)
        apart = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
        differs = bool(apart)
        if (name, options) not in DIFFERENCES:
            assert not apart, {key: (left.get(key), right.get(key)) for key in apart[:3]}
    assert differs == ((name, options) in DIFFERENCES), repr(theirs)


def steps_of(model: Any) -> dict[str, float]:
    """Returns the step of the codes behind each output."""
    weights = {weight.name: weight for weight in model.graph.initializer}
    return {
        node.output[0]: float(numpy_helper.to_array(weights[node.input[1]]).max())
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[1] in weights
    }


def check_runs(name: str, options: str, ours: Any) -> None:
    """Fails unless the model is valid, and loads and runs alike in both engines."""
    # onnx knows no operators of com.microsoft, so what follows one has no type.
    onnx.checker.check_model(ours, full_check=name != "bert_operators")
    original = pytest.importorskip("onnxruntime")
    feed, found = samples(MODELS[name]())[0], []
    for package in (ort, original):
        if package is original and name == "lstm_batch_first":
            found.append(found[0])  # It has no such LSTM at all.
            continue
        settings = package.SessionOptions()
        settings.graph_optimization_level = package.GraphOptimizationLevel.ORT_DISABLE_ALL
        run = package.InferenceSession(ours.SerializeToString(), settings, providers=[CPU])
        found.append(run.run(None, feed))
    # Products of int8 weights saturate in the original on processors without VNNI.
    if options not in QDQ:
        return
    steps = steps_of(ours)
    for value, left, right in zip(ours.graph.output, *found):
        apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
        largest = float(np.abs(right.astype(np.float64)).max(initial=0.0))
        near = (1e-3 if right.dtype == np.float16 else 2e-5) * largest
        # A sum at the edge of two codes may get either one, which is rare.
        step = steps.get(value.name, 0.0)
        assert (apart <= near + 1.01 * step).all(), (value.name, apart.max(), step)
        assert apart.mean() <= near + 0.3 * step, (value.name, apart.mean(), step)


@ours_only
@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_model(name: str, options: str):
    ours, theirs = both(name, options)
    if (name, options) in REFUSED:
        assert isinstance(ours, NotImplementedError | ValueError)
        return
    if isinstance(ours, Exception):
        raise ours
    check_same(name, options, ours, theirs)
    check_runs(name, options, ours)


#: The share of an output that may be lost with 16-bit activations, 8-bit codes, run-time ranges.
LOSSES = {"u16": 0.03, "ops_u8u8": 0.12, "dynamic": 0.12, "dynamic_bodies": 0.12}


@ours_only
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "residual"])
def test_close_to_floats(name: str, options: str):
    if (name, options) in REFUSED:
        return
    ours, _ = both(name, options)
    model, feed = MODELS[name](), samples(MODELS[name]())[0]
    wants = ort.InferenceSession(model.SerializeToString(), providers=[CPU]).run(None, feed)
    gets = ort.InferenceSession(ours.SerializeToString(), providers=[CPU]).run(None, feed)
    for want, got in zip(wants, gets):
        if want.dtype.kind == "f":
            lost = np.linalg.norm((want - got).astype(np.float64))
            assert lost <= LOSSES[options] * np.linalg.norm(want.astype(np.float64)) + 1e-6
