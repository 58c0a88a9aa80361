"""Ray Serve: requests of single rows run in batches, within the memory that Ray was told."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from conftest import pixels
from ort_runtime.ray_serve import application
from ray import serve

REQUESTS = 200


@pytest.fixture(scope="module")
def handle(model: Path) -> Iterator[Any]:
    """Starts two replicas."""
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"port": 18_765})
    yield serve.run(application(model, memory="256 MiB", replicas=2, wait_s=0.05))
    serve.shutdown()
    ray.shutdown()


def test_rows_are_those_of_one_process(handle: Any, expected: np.ndarray) -> None:
    rows = pixels(np.arange(REQUESTS))
    answers = [handle.remote({"pixels": row}) for row in rows]
    found = np.stack([answer.result()["scores"] for answer in answers])
    np.testing.assert_allclose(found, expected[:REQUESTS], rtol=1e-5, atol=1e-7)


def test_http(handle: Any, expected: np.ndarray) -> None:
    body = json.dumps({"pixels": pixels(np.arange(4))[3].tolist()}).encode()
    with urllib.request.urlopen("http://127.0.0.1:18765/", body) as answer:
        found = json.load(answer)
    np.testing.assert_allclose(found["scores"], expected[3], rtol=1e-5, atol=1e-7)


def test_a_row_that_does_not_fit_is_an_error_of_its_own(handle: Any, expected: np.ndarray) -> None:
    rows = pixels(np.arange(3))
    good = [handle.remote({"pixels": row}) for row in rows]
    bad = [
        handle.remote({"pixels": rows[0][:9]}),
        handle.remote({"pixels": "text"}),
        handle.remote({"image": rows[0]}),
        handle.remote(7),
    ]
    found = np.stack([answer.result()["scores"] for answer in good])
    np.testing.assert_allclose(found, expected[:3], rtol=1e-5, atol=1e-7)
    texts = ["256", "could not convert", "the batch has no column pixels", "an object of columns"]
    for answer, text in zip(bad, texts, strict=True):
        with pytest.raises(Exception, match=text):
            answer.result()


def test_ray_knows_the_memory_of_the_plan(handle: Any, model: Path) -> None:
    from ort_runtime.ray import Predictor

    options = Predictor.options(model, memory="256 MiB")
    taken = ray.cluster_resources()["memory"] - ray.available_resources()["memory"]
    assert taken == pytest.approx(2 * options["memory"], rel=1e-3)
    with pytest.raises(MemoryError, match="raise the limit to at least"):
        application(model, memory="192 MiB")
