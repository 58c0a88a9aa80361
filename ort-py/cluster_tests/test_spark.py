"""Spark: two executors give what one process gives, also after one was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROWS, pixels
from ort_runtime.spark import map_in_pandas, memory_overhead, predict_batch_udf, ship
from pyspark.sql import SparkSession

MASTER = "local-cluster[2,1,1024]"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """Starts two executors of one core each."""
    builder = SparkSession.builder.master(MASTER).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executorEnv.PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    session = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "500").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def ordered(frame: pd.DataFrame) -> np.ndarray:
    """Returns the scores in the order of the ids, each of which is there once."""
    frame = frame.sort_values("id")
    assert list(frame["id"]) == list(range(ROWS))
    return np.stack([np.asarray(row) for row in frame["scores"]])


def rows_of(part: Any) -> dict[str, np.ndarray]:
    """Returns the inputs of rows of ids."""
    return {"pixels": pixels(part["id"].to_numpy())}


def test_a_frame_is_mapped(spark: SparkSession, model: Path, expected: np.ndarray) -> None:
    run = map_in_pandas(ship(spark, model), batch_size=128, keep=["id"], preprocess=rows_of)
    frame = spark.range(ROWS).mapInPandas(run, "id long, scores array<float>").toPandas()
    np.testing.assert_allclose(ordered(frame), expected, rtol=1e-5, atol=1e-7)


def test_a_column_is_predicted(spark: SparkSession, model: Path, expected: np.ndarray) -> None:
    ids = np.arange(ROWS)
    data = pd.DataFrame({"id": ids, "pixels": list(pixels(ids))})
    frame = spark.createDataFrame(data, "id long, pixels array<float>").repartition(4)
    width = [data["pixels"][0].shape[0]]
    score = predict_batch_udf(
        ship(spark, model), return_type="array<float>", batch_size=64, input_tensor_shapes=[width]
    )
    found = frame.select("id", score("pixels").alias("scores")).toPandas()
    np.testing.assert_allclose(ordered(found), expected, rtol=1e-5, atol=1e-7)


def test_rows_of_a_killed_executor_are_computed_again(
    spark: SparkSession, model: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    run = map_in_pandas(ship(spark, model), batch_size=128, keep=["id"], preprocess=rows_of)
    mark = str(tmp_path / "killed")

    def mortal(frames: Iterator[Any]) -> Iterator[Any]:
        for number, frame in enumerate(run(frames)):
            if number == 2 and not os.path.exists(mark):
                open(mark, "x").close()
                # The executor is the parent of the daemon that forks Python's workers.
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            yield frame

    frame = spark.range(ROWS).mapInPandas(mortal, "id long, scores array<float>").toPandas()
    assert os.path.exists(mark)
    np.testing.assert_allclose(ordered(frame), expected, rtol=1e-5, atol=1e-7)


def test_the_overhead_grows_with_workers_and_batches(model: Path) -> None:
    one = memory_overhead(model, batch_size=1, workers=1)
    assert memory_overhead(model, batch_size=1, workers=3) == 3 * one
    # A row has its pixels, its hidden layer and its scores.
    more = memory_overhead(model, batch_size=101, workers=1) - one
    assert 100 * 4 * (256 + 512) <= more <= 100 * 4 * (256 + 2 * 512 + 64)
