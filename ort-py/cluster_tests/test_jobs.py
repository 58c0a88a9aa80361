"""Large jobs on two nodes of Ray and two executors of Spark.

Results are those of one process, also when workers are killed, and memory stays within what the
scheduler was told.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from jobs import JOBS, Job
from ort_runtime._prediction import Prediction
from ort_runtime.ray import Predictor
from ort_runtime.spark import map_in_pandas, ship

if not all(job.path.is_file() for job in JOBS.values()):
    pytest.skip("ORT_MODELS has no models; `cargo xtask cluster` makes them", allow_module_level=True)

#: What each of the two nodes of the cluster has.
NODE = {"num_cpus": 2, "memory": 1 << 30, "object_store_memory": 256 << 20}
#: What an actor may take, process included.
ACTOR = "512 MiB"


@functools.cache
def expected(name: str) -> np.ndarray:
    """Returns the results of a job from one process."""
    job = JOBS[name]
    prediction = Prediction(job.path, threads=os.cpu_count() or 1)
    parts = np.array_split(np.arange(job.rows), job.rows // 50)
    made = [job.reduce(prediction(job.inputs(ids))[job.output], ids) for ids in parts]
    return np.concatenate(made)


def compare(rows: Mapping[int, Any], wanted: np.ndarray) -> None:
    """Compares the result of each id, of which none is lost."""
    assert sorted(rows) == list(range(len(wanted)))
    found = np.stack([rows[number] for number in range(len(wanted))])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# Ray.


class Worker(Predictor):
    """Reduces its results, reports on itself, and kills itself twice in all if it has marks.

    Each batch has the process, its peak of resident memory, its node, and when it ran.
    """

    def __init__(self, model: Any, *, job: str, marks: str = "", **settings: Any) -> None:
        super().__init__(model, **settings)
        self._job, self._marks, self._batches = JOBS[job], marks, 0

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        import ray

        began = time.time()
        self._batches += 1
        if self._marks and self._batches == 3 and len(os.listdir(self._marks)) < 2:
            (Path(self._marks) / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ids = batch["id"]
        found = super().__call__(batch)
        facts = {
            "process": os.getpid(),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "node": ray.get_runtime_context().get_node_id(),
            "began": began,
            "ended": time.time(),
        }
        result = self._job.reduce(found[self._job.output], ids)
        return {"id": ids, "result": result} | {k: np.full(len(ids), v) for k, v in facts.items()}


def inputs_of(job: Job) -> Any:
    """Returns what makes the inputs of a batch of ids."""
    return lambda batch: job.inputs(batch["id"])


def run_on_ray(name: str, marks: str, rows: int, **settings: Any) -> tuple[Any, list[Any]]:
    """Runs the first rows of a job. Returns its options and its rows."""
    import ray

    job = JOBS[name]
    options = Predictor.options(
        job.path, concurrency=2, dims=job.dims, preprocess=inputs_of(job), **settings
    )
    options["fn_constructor_kwargs"] |= {"job": name, "marks": marks}
    return options, ray.data.range(rows).map_batches(Worker, **options).take_all()


@pytest.mark.parametrize("name", JOBS)
def test_ray(nodes: Any, name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    most = Predictor.options(job.path, memory=ACTOR, dims=job.dims, ship=False)["batch_size"]
    # Enough batches that actors are killed between them.
    options, rows = run_on_ray(name, str(tmp_path), job.rows, memory=ACTOR, batch_size=min(most, 25))
    compare({row["id"]: row["result"] for row in rows}, expected(name))
    assert len(list(tmp_path.iterdir())) == 2, "two actors were killed"
    peaks = {(row["node"], row["process"]): row["peak"] for row in rows}
    print(f"{name}: told {options['memory']}, peaks {sorted(peaks.values())}")
    assert max(peaks.values()) <= options["memory"] <= 512 << 20
    # Two actors at a time are on a node at most.
    assert sum(sorted(peaks.values())[-2:]) <= NODE["memory"]


ROWS = 1_500


def rate_alone(name: str, batch: int) -> float:
    """Returns the rows that two processes without an engine compute in a second."""
    half = [0, ROWS // 2, ROWS]
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "alone.py"), name, *map(str, part), str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in zip(half, half[1:])
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    times = [process.communicate()[0].split() for process in processes]
    return ROWS / (max(float(end) for _, end in times) - min(float(begin) for begin, _ in times))


def rate_on_ray(name: str, batch: int) -> float:
    """Returns the rows that two actors compute in a second, from the first batch on."""
    _, rows = run_on_ray(name, "", ROWS, batch_size=batch)
    return ROWS / (max(row["ended"] for row in rows) - min(row["began"] for row in rows))


@pytest.mark.parametrize("name", JOBS)
def test_two_actors_are_as_fast_as_two_processes(nodes: Any, name: str) -> None:
    rates: dict[str, list[float]] = {"alone": [], "ray": []}
    for _ in range(2):
        rates["alone"].append(rate_alone(name, 25))
        rates["ray"].append(rate_on_ray(name, 25))
    print(f"{name}: rows in a second {rates}")
    assert max(rates["ray"]) >= 0.9 * max(rates["alone"]), rates


# Spark.


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """Starts two executors of one core and 1 GiB each."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    builder = builder.config("spark.ui.enabled", "false")
    for name in ("PYTHONPATH", "XDG_CACHE_HOME", "ORT_MODELS"):
        builder = builder.config(f"spark.executorEnv.{name}", os.environ.get(name, ""))
    session = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "500").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def kill_executor() -> None:
    """Kills the parent of the daemon that forks Python's workers."""
    with open(f"/proc/{os.getppid()}/stat") as stat:
        os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)


@pytest.mark.parametrize("name", JOBS)
def test_spark(spark: Any, name: str, tmp_path: Path) -> None:
    job, mark = JOBS[name], tmp_path / "killed"

    def inputs(part: pd.DataFrame) -> dict[str, np.ndarray]:
        return job.inputs(part["id"].to_numpy())

    run = map_in_pandas(
        ship(spark, job.path), batch_size=50, keep=["id"], preprocess=inputs,
        outputs={job.output: "result"},
    )  # fmt: skip

    def mortal(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for number, frame in enumerate(run(frames)):
            if number == 2 and not mark.exists():
                mark.touch()
                kill_executor()
            ids = frame["id"].to_numpy()
            made = job.reduce(np.stack(list(frame["result"])), ids)
            yield pd.DataFrame({"id": ids, "result": list(made)})

    frame = spark.range(job.rows, numPartitions=8).mapInPandas(mortal, "id long, result array<float>")
    found = frame.toPandas()
    assert mark.exists(), "an executor was killed"
    compare(dict(zip(found["id"], map(np.asarray, found["result"]), strict=True)), expected(name))
