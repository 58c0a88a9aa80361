"""Ray: two nodes give what one process gives, keep to the memory told, and survive lost actors."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from conftest import ROWS, pixels
from ort_runtime.ray import Predictor, ShippedModel
from ray.cluster_utils import Cluster

#: What each of the two nodes of the cluster has.
NODE = {"num_cpus": 2, "memory": 1 << 30, "object_store_memory": 100 << 20}


def with_pixels(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the inputs of a batch of ids."""
    return {"pixels": pixels(batch["id"])}


class Measured(Predictor):
    """Reports the process and the most bytes that it had resident."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = super().__call__(batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        rows = len(batch["id"])
        return {**result, "process": np.full(rows, os.getpid()), "peak": np.full(rows, peak)}


class Mortal(Predictor):
    """Kills its own process in the middle of the work, twice in all."""

    def __init__(self, model: Any, *, marks: str, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._marks = Path(marks)
        self._batches = 0

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._batches += 1
        if self._batches == 3 and len(list(self._marks.iterdir())) < 2:
            (self._marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def scores(rows: list[dict[str, Any]]) -> np.ndarray:
    """Returns the scores in the order of the ids, each of which is there once."""
    rows = sorted(rows, key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    return np.stack([row["scores"] for row in rows])


def test_two_nodes_give_what_one_process_gives(
    nodes: Cluster, model: Path, expected: np.ndarray
) -> None:
    options = Predictor.options(
        model, memory="256 MiB", concurrency=2, preprocess=with_pixels, keep=["id"]
    )
    rows = ray.data.range(ROWS).map_batches(Measured, **options).take_all()
    np.testing.assert_allclose(scores(rows), expected, rtol=1e-5, atol=1e-7)
    assert options["memory"] <= 256 << 20
    assert max(row["peak"] for row in rows) <= options["memory"]


def test_rows_of_lost_actors_are_computed_again(
    nodes: Cluster, model: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    options = Predictor.options(
        model, batch_size=64, concurrency=2, preprocess=with_pixels, keep=["id"]
    )
    options["fn_constructor_kwargs"]["marks"] = str(tmp_path)
    rows = ray.data.range(ROWS).map_batches(Mortal, **options).take_all()
    np.testing.assert_allclose(scores(rows), expected, rtol=1e-5, atol=1e-7)
    assert len(list(tmp_path.iterdir())) == 2, "two actors were killed"


def test_what_does_not_fit_is_refused_before_an_actor_starts(model: Path) -> None:
    with pytest.raises(MemoryError, match="a batch of 1 takes .* raise the limit to at least"):
        Predictor.options(model, memory="192 MiB", ship=False)
    with pytest.raises(MemoryError, match="at most .* fit"):
        Predictor.options(model, memory="260 MiB", batch_size=1 << 18, ship=False)
    with pytest.raises(ValueError, match="no input image; it has pixels"):
        Predictor.options(model, inputs={"image": "x"}, ship=False)


def test_shipped_models_that_nobody_opens_are_removed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda content: content)
    names = {name: tmp_path / f"{name * 64}.onnx" for name in "abc"}
    others = [tmp_path / "mine.onnx", tmp_path / f"{'a' * 64}.weights"]
    long_ago = time.time() - 40 * 24 * 3600
    for path in (*names.values(), *others):
        path.write_bytes(b"old")
        os.utime(path, (long_ago, long_ago))
    content = model.read_bytes()
    # One that is used is as new.
    ShippedModel(b"old", "b" * 64, 3).file(str(tmp_path))
    made = ShippedModel(content, "d" * 64, len(content)).file(str(tmp_path))
    assert Path(made).read_bytes() == content
    kept = [names["b"], Path(made)]
    marks = [path.with_name(f"{path.name}.used") for path in kept]
    assert {*tmp_path.iterdir()} == {*kept, *marks, *others}


def test_a_model_that_other_actors_open_is_not_changed(
    model: Path, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda content: content)
    content = model.read_bytes()
    shipped = ShippedModel(content, "d" * 64, len(content))
    first = Predictor(shipped, cache_dir=str(tmp_path))
    Predictor(shipped, cache_dir=str(tmp_path))
    # A session looks at its file now and then.
    time.sleep(1.1)
    found = first({"pixels": pixels(np.arange(8))})["scores"]
    np.testing.assert_allclose(found, expected[:8], rtol=1e-5, atol=1e-7)
