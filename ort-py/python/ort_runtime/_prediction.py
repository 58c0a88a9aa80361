"""What the engines for many machines have in common: a model's session, its columns, its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import InferenceSession, SessionOptions
from ._search import largest_fitting

#: What a worker process of an engine takes with this package, NumPy, pandas and pyarrow, before it
#: has a model. An actor of Ray Data has 190 MiB before this package's code is read.
WORKER_BYTES = 240 << 20

#: The largest batch that is tried.
_MOST = 1 << 20

Array = npt.NDArray[Any]
Columns = Mapping[str, str] | Sequence[str] | None


def cache_folder() -> str:
    """Returns the folder of the user's compiled caches, as the XDG base directories have it."""
    home = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or home, "ort_runtime")


class Prediction:
    """A session that takes and gives columns of a batch.

    - `model`: a path, or the bytes of a model.
    - `inputs`: the column of each input; by default the columns have the inputs' names.
    - `outputs`: the outputs to compute, by default all; a mapping gives the column of each.
    - `threads`: the threads of a run. Engines start a worker for each core, so it is 1.
    - `memory_limit`: a hard limit of the session.
    - `cache_dir`: a folder in which workers of a machine share the packed weights; `None` for none.
    """

    def __init__(
        self,
        model: Any,
        *,
        inputs: Mapping[str, str] | None = None,
        outputs: Columns = None,
        providers: Sequence[Any] | None = None,
        threads: int = 1,
        memory_limit: int | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        options = SessionOptions()
        options.threads = threads
        if memory_limit is not None:
            options.memory_limit = memory_limit
        if cache_dir is not None:
            os.makedirs(cache_dir, mode=0o700, exist_ok=True)
            options.cache_dir = os.fspath(cache_dir)
        self.session = InferenceSession(model, options, providers=providers)
        names = [value.name for value in self.session.get_inputs()]
        self.inputs = {name: name for name in names} | dict(inputs or {})
        unknown = sorted(self.inputs.keys() - set(names))
        if unknown:
            raise ValueError(
                f"the model has no input {', '.join(unknown)}; it has {', '.join(names)}"
            )
        if outputs is None or not isinstance(outputs, Mapping):
            chosen = list(outputs or [value.name for value in self.session.get_outputs()])
            outputs = {name: name for name in chosen}
        self.outputs = dict(outputs)
        #: How often the inputs of a batch are in memory: twice if they are made from other arrays.
        self.input_copies = 1

    @property
    def dtypes(self) -> dict[str, str]:
        """The numpy type of each input, by column."""
        values = self.session.get_inputs()
        return {self.inputs[value.name]: _DTYPES.get(value.type, "float32") for value in values}

    @property
    def batch_dim(self) -> str | None:
        """The name of the first dimension of the first input, if it has one."""
        shape = self.session.get_inputs()[0].shape
        return shape[0] if shape and isinstance(shape[0], str) else None

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the columns of the outputs for columns of the inputs."""
        missing = [column for column in self.inputs.values() if column not in columns]
        if missing:
            raise KeyError(
                f"the batch has no column {', '.join(missing)}; it has {', '.join(columns)}"
            )
        feed = {name: _array(columns[column]) for name, column in self.inputs.items()}
        results = self.session.run(list(self.outputs), feed)
        return dict(zip(self.outputs.values(), results, strict=True))

    def bytes_of(self, batch_size: int, **dims: int) -> int:
        """Returns what a run of a batch takes beside an empty worker, from its plan alone."""
        sizes = dict(dims)
        if self.batch_dim is not None:
            sizes[self.batch_dim] = batch_size
        plan = self.session.plan(**sizes).to_dict()
        if plan["planned_bytes"] is None:
            raise ValueError(
                f"the memory of a batch is not known with the sizes {sizes} alone; give all that "
                f"the inputs have: {', '.join(sorted(self.dims()))}"
            )
        kinds = {kind: value["bytes"] for kind, value in plan["kinds"].items()}
        weights = sum(kinds[kind] for kind in kinds if kind.startswith("weights_"))
        inputs = sum(_bytes(value, sizes) for value in self.session.get_inputs())
        held = weights + kinds["outputs"] + self.input_copies * inputs
        return int(plan["planned_bytes"] + held)

    def dims(self) -> set[str]:
        """Returns the names of the dimensions of the inputs."""
        values = self.session.get_inputs()
        return {size for value in values for size in value.shape if isinstance(size, str)}

    def largest_batch(self, limit: int, fixed: int = WORKER_BYTES, /, **dims: int) -> int:
        """Returns the largest batch whose run takes at most `limit` bytes.

        `fixed` is what a worker takes beside them; only the error names it.
        """
        if self.batch_dim is None:
            return 1
        if self.bytes_of(1, **dims) > limit:
            raise MemoryError(
                f"a batch of 1 takes {self.bytes_of(1, **dims)} bytes beside an empty worker, and "
                f"{limit} are allowed; raise the limit to at least "
                f"{self.bytes_of(1, **dims) + fixed} bytes"
            )
        return largest_fitting(lambda batch: self.bytes_of(batch, **dims) <= limit, _MOST)


_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(float16)": "float16",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}


def _array(column: Any) -> Array:
    """Returns a column as an array: rows that are arrays themselves are stacked."""
    array = np.asarray(column)
    if array.dtype == object and array.size and isinstance(array.flat[0], (np.ndarray, list)):
        array = np.stack([np.asarray(row) for row in array])
    return array


def _bytes(value: Any, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of an input of these sizes."""
    elements = 1
    for size in value.shape:
        elements *= sizes.get(size, 1) if isinstance(size, str) else int(size)
    widths = {"tensor(double)": 8, "tensor(int64)": 8, "tensor(uint64)": 8}
    return elements * widths.get(value.type, 4)
