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

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray as _ray

from ._prediction import WORKER_BYTES, Array, Columns, Prediction, cache_folder
from .capi._fields import to_size

__all__ = ["Predictor"]

# A model whose weights are in other files has nothing but nodes.
_LARGEST_WITHOUT_WEIGHTS = 256 << 20

# Models that were shipped, by their digests, and how long they are kept after their last use.
_SHIPPED = re.compile(r"[0-9a-f]{64}\.onnx")
_MARK = ".used"
_UNUSED_SECONDS = 30 * 24 * 3600

Transform = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Predictor:
    """An actor class that runs a model on batches of columns.

    A batch is a dict of arrays; the result has the columns that `keep` names and those of the
    outputs. `model` is a path that all nodes have, bytes, or what `options` shipped: the actors of
    a node map one file. `preprocess` makes the inputs of a batch.
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
        if isinstance(model, ShippedModel):
            model = model.file(settings.get("cache_dir") or cache_folder())
        self._prediction = Prediction(model, **settings)
        self._preprocess = preprocess
        self._keep = keep

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the columns of a batch's results."""
        inputs = batch if self._preprocess is None else self._preprocess(batch)
        return {name: batch[name] for name in self._keep} | self._prediction(inputs)

    def row(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """Returns one row as arrays, of the types that the model's inputs have."""
        dtypes = self._prediction.dtypes
        return {name: np.asarray(value, dtypes.get(name)) for name, value in values.items()}

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

        - `memory` bounds an actor, process and shipped model included. The batch is the largest that
          the plan allows within it, and Ray is told the bytes of that plan, so that it places no
          more actors on a node than fit. Without `memory`, `batch_size` (1) decides.
          With `preprocess`, the inputs of a batch count twice, for what they are made from.
        - `dims` has the sizes of dimensions other than the batch.
        - `ship` puts the model into the object store once; without it, `model` is a path that each
          node has. A model with external data is not shipped.
        - `cache_dir` is where the actors of a node share a shipped model and packed weights: by
          default a folder of the user's caches.

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
        prediction.input_copies = 1 if preprocess is None else 2
        sizes = dict(dims or {})
        is_shipped = ship and (isinstance(path, bytes) or not _has_external_data(path))
        # The actor that writes the file of a node has the model in the object store resident, too.
        fixed = WORKER_BYTES + (_size_of(path) if is_shipped else 0)
        if memory is not None:
            limit = to_size(memory, "memory") or 0
            most = prediction.largest_batch(limit - fixed, fixed, **sizes)
            if batch_size is not None and batch_size > most:
                needed = prediction.bytes_of(batch_size, **sizes) + fixed
                raise MemoryError(
                    f"a batch of {batch_size} takes {needed} bytes and {limit} are allowed; at most "
                    f"{most} fit"
                )
            batch_size = batch_size or most
        batch_size = batch_size or 1
        shipped = ShippedModel.of(path) if is_shipped else path
        return {
            "fn_constructor_args": (shipped,),
            "fn_constructor_kwargs": {**settings, "preprocess": preprocess, "keep": tuple(keep)},
            "batch_size": batch_size,
            "batch_format": "numpy",
            "concurrency": concurrency,
            "num_cpus": threads,
            "memory": prediction.bytes_of(batch_size, **sizes) + fixed,
        }


@dataclass(frozen=True)
class ShippedModel:
    """A model in the object store, of which each node makes a file.

    Attributes:
        content: a reference to an array of its bytes.
        digest: the name of the file.
        size: the bytes of the model.
    """

    content: Any
    digest: str
    size: int

    @staticmethod
    def of(model: str | bytes) -> ShippedModel:
        """Puts a model into the object store."""
        if isinstance(model, bytes):
            array = np.frombuffer(model, np.uint8)
        else:
            array = np.fromfile(model, np.uint8)
        digest = hashlib.sha256(array.data).hexdigest()
        return ShippedModel(_ray.put(array), digest, array.nbytes)

    def file(self, folder: str) -> str:
        """Returns the file of this node, which the first actor writes."""
        path = os.path.join(folder, f"{self.digest}.onnx")
        if not (os.path.isfile(path) and os.path.getsize(path) == self.size):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(_ray.get(self.content))
            # Other actors see a whole file, or none.
            os.replace(file.name, path)
            _remove_unused(folder)
        # The time of use is that of a file of its own: sessions watch that of the model.
        Path(f"{path}{_MARK}").touch()
        return path


def _remove_unused(folder: str) -> None:
    """Removes the models that no actor has opened for a month. Where one is mapped, its pages stay."""
    oldest = time.time() - _UNUSED_SECONDS
    for path in filter(lambda path: _SHIPPED.fullmatch(path.name), Path(folder).iterdir()):
        mark = path.with_name(f"{path.name}{_MARK}")
        # Other actors remove files, too.
        with contextlib.suppress(OSError):
            if (mark if mark.exists() else path).stat().st_mtime < oldest:
                path.unlink()
                mark.unlink()


def _size_of(model: str | bytes) -> int:
    return len(model) if isinstance(model, bytes) else os.path.getsize(model)


def _has_external_data(path: str) -> bool:
    """Returns whether a model has weights in other files.

    A model with such weights is small. Its field names the file behind the key `location`.
    """
    if os.path.getsize(path) > _LARGEST_WITHOUT_WEIGHTS:
        return False
    with open(path, "rb") as file:
        return b"\x0a\x08location" in file.read()
