"""Batch inference on Ray: an actor for `Dataset.map_batches`, and what to tell Ray of it.

Needs the package `ray`. Example::

    import ray
    from ort_runtime.ray import Predictor

    images = ray.data.read_numpy("images/")
    options = Predictor.options("model.onnx", memory="1 GiB", concurrency=8)
    print(options["batch_size"], options["memory"])   # known before an actor starts
    images.map_batches(Predictor, **options).write_parquet("scores/")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray as _ray

from ._prediction import WORKER_BYTES, Array, Columns, Prediction, cache_folder
from .capi._fields import to_size

__all__ = ["Predictor"]

# A model whose weights are in other files has nothing but nodes.
_LARGEST_WITHOUT_WEIGHTS = 256 << 20

Transform = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Predictor:
    """An actor class that runs a model on batches of columns.

    A batch is a dict of arrays; the result has the columns that `keep` names and those of the
    outputs. `model` is a path that all nodes have, bytes, or a reference to bytes in Ray's object
    store, which the actors of a node read in place. `preprocess` makes the inputs of a batch.
    Other arguments are those of `Predictor.options`.
    """

    def __init__(
        self,
        model: Any,
        *,
        preprocess: Transform | None = None,
        keep: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        if isinstance(model, _ray.ObjectRef):
            model = memoryview(_ray.get(model))
        self._prediction = Prediction(model, **settings)
        self._preprocess = preprocess
        self._keep = keep

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the columns of a batch's results."""
        inputs = batch if self._preprocess is None else self._preprocess(batch)
        return {name: batch[name] for name in self._keep} | self._prediction(inputs)

    @staticmethod
    def options(
        model: str | os.PathLike[str] | bytes,
        *,
        memory: int | str | None = None,
        batch_size: int | None = None,
        dims: Mapping[str, int] | None = None,
        concurrency: int | tuple[int, int] = 1,
        threads: int = 1,
        ship: bool = True,
        preprocess: Transform | None = None,
        keep: Sequence[str] = (),
        inputs: Mapping[str, str] | None = None,
        outputs: Columns = None,
        providers: Sequence[Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Returns the keyword arguments of `Dataset.map_batches(Predictor, ...)`.

        - `memory` bounds an actor, process included. The batch is the largest that the plan allows
          within it, and Ray is told the bytes of that plan, so that it places no more actors on a
          node than fit. Without `memory`, `batch_size` (1) decides.
        - `dims` has the sizes of dimensions other than the batch.
        - `ship` puts the model into the object store once; without it, `model` is a path that each
          node has. A model with external data is not shipped.
        - `cache_dir` is where the actors of a node share packed weights: by default a folder of the
          user's caches.

        What does not fit is refused here with the bytes that it needs.
        """
        path = model if isinstance(model, bytes) else os.fspath(model)
        settings: dict[str, Any] = {
            "inputs": inputs,
            "outputs": outputs,
            "providers": providers,
            "threads": threads,
            "cache_dir": cache_folder() if cache_dir is None else os.fspath(cache_dir),
        }
        prediction = Prediction(path, **settings)
        sizes = dict(dims or {})
        if memory is not None:
            limit = to_size(memory, "memory") or 0
            most = prediction.largest_batch(limit - WORKER_BYTES, **sizes)
            if batch_size is not None and batch_size > most:
                needed = prediction.bytes_of(batch_size, **sizes) + WORKER_BYTES
                raise MemoryError(
                    f"a batch of {batch_size} takes {needed} bytes and {limit} are allowed; at most "
                    f"{most} fit"
                )
            batch_size = batch_size or most
        batch_size = batch_size or 1
        return {
            "fn_constructor_args": (_shipped(path) if ship else path,),
            "fn_constructor_kwargs": {**settings, "preprocess": preprocess, "keep": tuple(keep)},
            "batch_size": batch_size,
            "batch_format": "numpy",
            "concurrency": concurrency,
            "num_cpus": threads,
            "memory": prediction.bytes_of(batch_size, **sizes) + WORKER_BYTES,
        }


def _shipped(model: str | bytes) -> Any:
    """Puts a model into the object store, unless its weights are in other files."""
    if isinstance(model, bytes):
        return _ray.put(np.frombuffer(model, np.uint8))
    if _has_external_data(model):
        return model
    return _ray.put(np.fromfile(model, np.uint8))


def _has_external_data(path: str) -> bool:
    """Returns whether a model has weights in other files.

    A model with such weights is small. Its field names the file behind the key `location`.
    """
    if os.path.getsize(path) > _LARGEST_WITHOUT_WEIGHTS:
        return False
    with open(path, "rb") as file:
        return b"\x0a\x08location" in file.read()


