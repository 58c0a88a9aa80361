"""ONNX's backend interface."""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

PACKAGE = os.environ.get("ORT_PACKAGE", "ort_runtime")
OURS = PACKAGE == "ort_runtime"
ort = importlib.import_module(PACKAGE)
backend = importlib.import_module(f"{PACKAGE}.backend")
Backend = importlib.import_module(f"{PACKAGE}.backend.backend").OnnxRuntimeBackend
Rep = importlib.import_module(f"{PACKAGE}.backend.backend_rep").OnnxRuntimeBackendRep
get_example = importlib.import_module(f"{PACKAGE}.datasets").get_example

SIGMOID = get_example("sigmoid.onnx")
X = np.linspace(-4, 4, 60, dtype=np.float32).reshape(3, 4, 5)
Y = 1 / (1 + np.exp(-X))


def data() -> bytes:
    """Returns the serialized sigmoid model."""
    with open(SIGMOID, "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SIGMOID,
        data,
        lambda: onnx.load(SIGMOID),
        lambda: ort.InferenceSession(SIGMOID),
        lambda: backend.prepare(SIGMOID),
    ],
    ids=["path", "bytes", "proto", "session", "rep"],
)
def test_every_form_of_a_model_runs(make: Callable[[], Any]):
    rep = backend.prepare(make(), intra_op_num_threads=1)
    assert isinstance(rep, Rep)
    for inputs in ([X], X):
        outputs = rep.run(inputs, logid="test", unknown=1)
        assert isinstance(outputs, list) and len(outputs) == 1
        np.testing.assert_allclose(outputs[0], Y, rtol=1e-5)
    np.testing.assert_allclose(backend.run(make(), X)[0], Y, rtol=1e-5)


def test_a_rep_is_returned_as_it_is():
    rep = backend.prepare(SIGMOID)
    assert backend.prepare(rep) is rep


def test_devices():
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU")
    assert backend.is_compatible(SIGMOID)
    assert backend.is_compatible(SIGMOID, "CPU")
    assert not backend.is_compatible(SIGMOID, "TPU")
    backend.prepare(SIGMOID, "CPU")
    with pytest.raises(RuntimeError, match="Incompatible device expected 'TPU', got '"):
        backend.prepare(SIGMOID, "TPU")
    if OURS:
        assert backend.supports_device("CPU:0")


def test_options_that_are_not_permitted():
    with pytest.raises(RuntimeError, match="SessionOptions attribute 'enable_profiling' is not"):
        backend.prepare(SIGMOID, enable_profiling=True)
    with pytest.raises(RuntimeError, match="RunOptions attribute 'terminate' is not permitted"):
        backend.prepare(SIGMOID).run(X, terminate=True)
    backend.prepare(SIGMOID, no_such_option=1)


def test_opsets_that_are_not_released():
    model = onnx.load(SIGMOID)
    assert Backend.is_opset_supported(model) == (True, "")
    model.opset_import[0].version = 99
    supported, reason = Backend.is_opset_supported(model)
    assert not supported and "Got Domain 'ai.onnx' version '99'." in reason
    model = onnx.load(SIGMOID)
    model.opset_import.add(domain="com.microsoft", version=1)
    with pytest.raises(unittest.SkipTest, match="Got Domain 'com.microsoft' version '1'."):
        backend.prepare(model)


def test_opset_check_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Backend, "allowReleasedOpsetsOnly", False)
    model = onnx.load(SIGMOID)
    model.opset_import.add(domain="com.microsoft", version=1)
    np.testing.assert_allclose(backend.run(model, X)[0], Y, rtol=1e-5)


def test_invalid_models():
    with pytest.raises(onnx.checker.ValidationError):
        backend.prepare(onnx.ModelProto())
    with pytest.raises(TypeError if OURS else AttributeError):
        backend.prepare(None)


@pytest.mark.skipif(not OURS, reason="the original drops them silently")
def test_too_many_inputs():
    with pytest.raises(ValueError, match="1 inputs"):
        backend.prepare(SIGMOID).run([X, X])


def test_missing_input():
    with pytest.raises(ValueError if OURS else IndexError):
        backend.prepare(SIGMOID).run([])


def test_nodes_are_not_run_alone():
    with pytest.raises(NotImplementedError):
        Backend.run_node(onnx.load(SIGMOID).graph.node[0], [X])


def test_excluded_providers(monkeypatch: pytest.MonkeyPatch):
    names = [name for name in ort.get_available_providers() if name != "CPUExecutionProvider"]
    monkeypatch.setenv("ORT_ONNX_BACKEND_EXCLUDE_PROVIDERS", ",".join(names))
    rep = backend.prepare(SIGMOID)
    assert rep._session.get_providers() == ["CPUExecutionProvider"]
