"""The example models of `ort_runtime.datasets`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

PACKAGE = os.environ.get("ORT_PACKAGE", "ort_runtime")
ort = importlib.import_module(PACKAGE)
get_example = importlib.import_module(f"{PACKAGE}.datasets").get_example
OURS = PACKAGE == "ort_runtime"


@pytest.mark.parametrize("name", ["sigmoid.onnx", "mul_1.onnx", "logreg_iris.onnx"])
def test_path_is_absolute(name: str):
    path = get_example(name)
    assert os.path.isabs(path) and os.path.isfile(path)
    assert os.path.basename(path) == name


@pytest.mark.parametrize("name", ["nope", "", "__init__.py", "../datasets/sigmoid.onnx"])
def test_unknown_name(name: str):
    if not OURS and name != "nope":
        pytest.skip("the original joins paths")
    with pytest.raises(FileNotFoundError, match="Unable to find example"):
        get_example(name)


@pytest.mark.skipif(not OURS, reason="our own files")
def test_files_are_what_the_script_makes(tmp_path: Path):
    pytest.importorskip("onnx")
    make_datasets = importlib.import_module("make_datasets")
    make_datasets.main(tmp_path)
    for name in make_datasets.MODELS:
        assert (tmp_path / name).read_bytes() == Path(get_example(name)).read_bytes(), name


def test_sigmoid():
    session = ort.InferenceSession(get_example("sigmoid.onnx"))
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape) == ("x", "tensor(float)", [3, 4, 5])
    assert (y.name, y.type, y.shape) == ("y", "tensor(float)", [3, 4, 5])
    data = np.linspace(-9, 9, 60, dtype=np.float32).reshape(3, 4, 5)
    (found,) = session.run(["y"], {"x": data})
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-data)), rtol=1e-5, atol=1e-7)


def test_mul_1():
    session = ort.InferenceSession(get_example("mul_1.onnx"))
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape) == ("X", "tensor(float)", [3, 2])
    assert (y.name, y.type, y.shape) == ("Y", "tensor(float)", [3, 2])
    data = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    (found,) = session.run(None, {"X": data})
    np.testing.assert_array_equal(found, [[1, 4], [9, 16], [25, 36]])


def test_logreg_iris():
    session = ort.InferenceSession(get_example("logreg_iris.onnx"))
    (features,), (label, chances) = session.get_inputs(), session.get_outputs()
    assert (features.name, features.type) == ("float_input", "tensor(float)")
    assert features.shape == [3, 2]
    assert (label.name, label.type, label.shape) == ("label", "tensor(int64)", [3])
    assert (chances.name, chances.shape) == ("probabilities", [])
    assert chances.type == "seq(map(int64,tensor(float)))"
    flowers = np.array([[5.1, 3.5], [6.2, 2.2], [7.7, 3.0]], np.float32)
    labels, probabilities = session.run(None, {"float_input": flowers})
    assert labels.dtype == np.int64 and labels.shape == (3,)
    assert isinstance(probabilities, list)
    for row in probabilities:
        assert list(row) == [0, 1, 2]
        assert all(type(key) is int and type(value) is float for key, value in row.items())
        assert sum(row.values()) == pytest.approx(1, abs=1e-3)
    if OURS:
        assert labels.tolist() == [0, 1, 2]
        expected = [[0.7947, 0.0238, 0.1815], [0.0040, 0.7770, 0.2190], [0.0068, 0.4599, 0.5333]]
        found = [[row[key] for key in range(3)] for row in probabilities]
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_logreg_iris_is_like_the_original():
    """Programs compare with the probabilities that onnxruntime's example has."""
    session = ort.InferenceSession(get_example("logreg_iris.onnx"))
    points = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    labels, probabilities = session.run(None, {"float_input": points})
    assert labels.tolist() == [0, 0, 0]
    expected = [
        [0.9505997, 0.02783417, 0.02156602],
        [0.99749708, 5.62999e-05, 0.00244667],
        [0.99973112, 1.2e-07, 0.00026869],
    ]
    found = [[row[key] for key in range(3)] for row in probabilities]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
