"""Dask and joblib: a session is pickled to each worker, and gives what one process gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ort_runtime as ort
import pytest
from conftest import ROWS, pixels

PARTS = 8


@pytest.fixture
def session(model: Path) -> ort.InferenceSession:
    """Returns a session of one thread, as each worker has a core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options)


def split() -> list[np.ndarray]:
    """Returns the rows in parts."""
    return np.array_split(pixels(np.arange(ROWS)), PARTS)


def test_joblib(session: ort.InferenceSession, expected: np.ndarray) -> None:
    from joblib import Parallel, delayed

    run = delayed(session.run)
    found = Parallel(n_jobs=2)(run(None, {"pixels": part}) for part in split())
    np.testing.assert_allclose(np.concatenate([scores for (scores,) in found]), expected, rtol=1e-5)


def test_dask(session: ort.InferenceSession, expected: np.ndarray) -> None:
    import dask.array as da
    from distributed import Client, LocalCluster

    def scores(block: np.ndarray) -> np.ndarray:
        return session.run(None, {"pixels": block})[0]

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        rows = da.from_array(pixels(np.arange(ROWS)), chunks=(ROWS // PARTS, -1))
        found = rows.map_blocks(scores, dtype=np.float32, chunks=(ROWS // PARTS, 10)).compute()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
