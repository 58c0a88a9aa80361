"""One process that runs a part of a job, started by `test_jobs.py`.

usage: alone.py JOB FIRST LAST BATCH

Waits for a line on standard input when it is ready. Prints when it began and ended.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from jobs import JOBS
from ort_runtime._prediction import Prediction, cache_folder


def main() -> None:
    """Runs the rows of the command line."""
    job, first, last, batch = JOBS[sys.argv[1]], *map(int, sys.argv[2:])
    prediction = Prediction(job.path, threads=1, cache_dir=cache_folder())
    ids = np.arange(first, last)
    prediction(job.inputs(ids[:batch]))
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.time()
    for start in range(0, len(ids), batch):
        part = ids[start : start + batch]
        job.reduce(prediction(job.inputs(part))[job.output], part)
    print(began, time.time(), flush=True)


if __name__ == "__main__":
    main()
