"""Model serving on Ray Serve: a deployment whose batches and memory are from the model's plan.

Needs `ray[serve]`. Example::

    from ray import serve
    from ort_runtime.ray_serve import application

    handle = serve.run(application("model.onnx", memory="1 GiB", replicas=4))
    scores = handle.remote({"pixels": pixels}).result()["scores"]    # one row

A request over HTTP is a JSON object of columns, and so is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request

from ._prediction import Array
from .ray import Predictor

__all__ = ["Server", "application"]

Row = Mapping[str, Any]


class Server:
    """A replica: requests are single rows, which run in batches.

    A row has a value for each column, without the axis of the batch. Rows of the same shapes run
    together. A row that the model refuses is an error of that request alone.
    """

    def __init__(
        self, model: Any, settings: Mapping[str, Any], batch_size: int, wait_s: float
    ) -> None:
        self._predictor = Predictor(model, **settings)
        self._batched.set_max_batch_size(batch_size)
        self._batched.set_batch_wait_timeout_s(wait_s)

    async def __call__(self, request: Row | Request) -> Any:
        """Returns the columns of a row's results: arrays, or lists over HTTP."""
        is_http = isinstance(request, Request)
        row: Any = await request.json() if isinstance(request, Request) else request
        if not isinstance(row, Mapping):
            raise TypeError(f"a request is an object of columns, not a {type(row).__name__}")
        found = await self._batched(row)
        if isinstance(found, Exception):
            raise found
        return {name: value.tolist() for name, value in found.items()} if is_http else found

    @serve.batch
    async def _batched(self, rows: list[Row]) -> list[Any]:
        results: list[Any] = [None] * len(rows)
        alike: dict[Any, list[int]] = {}
        columns: dict[int, dict[str, Array]] = {}
        for place, row in enumerate(rows):
            try:
                columns[place] = self._predictor.row(row)
            except (TypeError, ValueError) as problem:
                results[place] = problem
                continue
            shapes = tuple(sorted((name, value.shape) for name, value in columns[place].items()))
            alike.setdefault(shapes, []).append(place)
        for places in alike.values():
            made = self._run([columns[place] for place in places])
            for place, result in zip(places, made, strict=True):
                results[place] = result
        return results

    def _run(self, rows: Sequence[Mapping[str, Array]]) -> list[Any]:
        """Returns the results of rows of the same shapes, or their error for each."""
        try:
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            found = self._predictor(batch)
        except Exception as problem:
            return [problem] * len(rows)
        return [{name: value[at] for name, value in found.items()} for at in range(len(rows))]


def application(
    model: Any,
    *,
    replicas: int | str = 1,
    wait_s: float = 0.01,
    name: str = "ort_runtime",
    **settings: Any,
) -> serve.Application:
    """Returns an application for `serve.run`.

    - `replicas` is their number, or "auto".
    - `wait_s` is the longest that a row waits for others of its batch.
    - The other arguments are those of `Predictor.options`: with `memory`, a batch is the largest
      that the plan of a replica allows. Ray is told the bytes of that plan.

    Raises:
        MemoryError: a batch of 1 takes more memory.
    """
    options = Predictor.options(model, **settings)
    batch_size = options["batch_size"]
    deployment = serve.deployment(
        name=name,
        num_replicas=replicas,
        # One batch runs while the next one fills.
        max_ongoing_requests=2 * batch_size,
        ray_actor_options={"num_cpus": options["num_cpus"], "memory": options["memory"]},
    )(Server)
    (shipped,) = options["fn_constructor_args"]
    return deployment.bind(shipped, options["fn_constructor_kwargs"], batch_size, wait_s)
