"""Batch inference on Spark: a UDF over columns, and a function for `DataFrame.mapInPandas`.

Needs the package `pyspark`, and pandas and pyarrow, which it uses for both. Example::

    from ort_runtime.spark import predict_batch_udf, ship

    model = ship(spark, "model.onnx")                      # once to each node
    score = predict_batch_udf(model, return_type="array<float>", batch_size=64)
    frame.withColumn("scores", score("pixels"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._prediction import WORKER_BYTES, Columns, Prediction, cache_folder

__all__ = ["map_in_pandas", "memory_overhead", "predict_batch_udf", "ship"]


class ShippedModel:
    """A file that Spark has on each node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __fspath__(self) -> str:
        from pyspark import SparkFiles

        return str(SparkFiles.get(self.name))


def ship(spark: Any, model: str | os.PathLike[str]) -> ShippedModel:
    """Copies a model to each node once. Its workers map the file."""
    spark.sparkContext.addFile(os.fspath(model))
    return ShippedModel(os.path.basename(os.fspath(model)))


# A worker process of Spark runs many tasks, which share its sessions.
_SESSIONS: dict[Any, Prediction] = {}


def _prediction(model: Any, settings: dict[str, Any]) -> Prediction:
    """Returns the prediction of this process, which is made at its first batch."""
    path = os.fspath(model)
    key = path, repr(sorted(settings.items(), key=lambda item: item[0]))
    if key not in _SESSIONS:
        _SESSIONS[key] = Prediction(path, **settings)
    return _SESSIONS[key]


def _settings(
    inputs: Mapping[str, str] | None,
    outputs: Columns,
    threads: int,
    memory_limit: int | str | None,
    cache_dir: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    return {
        "inputs": None if inputs is None else dict(inputs),
        "outputs": outputs,
        "threads": threads,
        "memory_limit": memory_limit,
        "cache_dir": cache_folder() if cache_dir is None else os.fspath(cache_dir),
    }


def predict_batch_udf(
    model: str | os.PathLike[str],
    *,
    return_type: Any,
    batch_size: int = 32,
    input_tensor_shapes: Sequence[Sequence[int] | None] | Mapping[int, Sequence[int]] | None = None,
    output: str | None = None,
    threads: int = 1,
    memory_limit: int | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Callable[..., Any]:
    """Returns a UDF that runs the model on columns, one for each input in the model's order.

    A column has a number in each row, or an array; `input_tensor_shapes` has the shape of a row
    where it is flat in the column, and `return_type` the type of a row's result, as for `pyspark.ml.functions.predict_batch_udf`. The UDF gives
    the first output, or the one that `output` names.
    """
    from pyspark.ml.functions import predict_batch_udf as batch_udf
    from pyspark.sql.types import DataType

    if isinstance(return_type, str):
        # The check of results takes no text.
        return_type = DataType.fromDDL(return_type)
    chosen = None if output is None else [output]
    settings = _settings(None, chosen, threads, memory_limit, cache_dir)

    def make_predict_fn() -> Callable[..., Any]:
        prediction = _prediction(model, settings)
        dtypes = prediction.dtypes
        result = next(iter(prediction.outputs.values()))

        def predict(*columns: Any) -> Any:
            given = zip(dtypes.items(), columns, strict=True)
            return prediction({name: np.asarray(c, dtype) for (name, dtype), c in given})[result]

        return predict

    return batch_udf(
        make_predict_fn,
        return_type=return_type,
        batch_size=batch_size,
        input_tensor_shapes=input_tensor_shapes,
    )


def map_in_pandas(
    model: str | os.PathLike[str],
    *,
    batch_size: int = 32,
    keep: Sequence[str] = (),
    preprocess: Callable[[Any], Mapping[str, Any]] | None = None,
    inputs: Mapping[str, str] | None = None,
    outputs: Columns = None,
    threads: int = 1,
    memory_limit: int | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns a function for `DataFrame.mapInPandas`.

    The result has the columns that `keep` names and those of the outputs, flat in each row.
    `preprocess` makes the inputs from rows of a pandas frame.
    """
    settings = _settings(inputs, outputs, threads, memory_limit, cache_dir)

    def predict(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd

        prediction = _prediction(model, settings)
        for frame in frames:
            for start in range(0, len(frame), batch_size):
                part = frame.iloc[start : start + batch_size]
                columns = preprocess(part) if preprocess else {n: part[n].to_numpy() for n in part}
                results = prediction(columns)
                made = {name: list(value.reshape(len(part), -1)) for name, value in results.items()}
                kept = {name: part[name].to_numpy() for name in keep}
                yield pd.DataFrame({**kept, **made})

    return predict


def memory_overhead(
    model: str | os.PathLike[str],
    *,
    batch_size: int,
    workers: int,
    **dims: int,
) -> int:
    """Returns the bytes that `spark.executor.memoryOverhead` needs for this model.

    `workers` is the number of tasks that an executor runs at once: `spark.executor.cores` over
    `spark.task.cpus`. The bytes are from the plan of a batch with these sizes of dimensions.
    Example: `f"{memory_overhead('model.onnx', batch_size=64, workers=4) >> 20}m"`.
    """
    prediction = Prediction(os.fspath(model))
    return workers * (prediction.bytes_of(batch_size, **dims) + WORKER_BYTES)
