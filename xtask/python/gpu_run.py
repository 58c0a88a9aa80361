"""Runs what `cargo xtask gpu` packed, on a machine with an NVIDIA GPU, and prints one table of what was found.

The machine needs Python 3.10 and NVIDIA's driver, nothing else: no network, no Rust, no CUDA toolkit. What a part needs beyond that
(numpy; PyTorch with torchvision and transformers to compare with) may be missing: the row then says `skipped: ...`.

parts, in this order:
  tests        the provider's own tests
  conformance  the node cases of the package onnx, against the list of those known to fail, and how many run on the device alone
  models       every model in float32 and float16 on the device against the CPU; needs numpy
  speed        models beside PyTorch's eager and compiled ones in float16; needs torch, torchvision, transformers
  ceilings     a matrix product beside PyTorch's, and what memory bounds beside the card's own copying; needs torch
  memory       many random shapes within gpu_mem_limit
  exits        processes that end with status 0

examples:
  python3 run.py                                  all of it
  python3 run.py --only speed --seconds 3         one part, with longer timings
  python3 run.py --only tests --only exits        two parts
  python3 run.py --quick --driver emulator        whether this script works, without a GPU: the smallest models and sizes

The exit status is 1 where a bound is missed or something fails, 0 where what could run is within its bounds.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import gpu_parts
import gpu_speed
from gpu_machine import Machine, Report, Skipped, needs

PARTS = {
    "tests": gpu_parts.tests,
    "conformance": gpu_parts.conformance,
    "models": gpu_parts.models,
    "speed": gpu_speed.speed,
    "ceilings": gpu_speed.ceilings,
    "memory": gpu_parts.memory,
    "exits": gpu_parts.exits,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, metavar="PART", help="this part alone; may be repeated")
    add("--seconds", type=float, default=1.0, metavar="S", help="seconds of each timing [1]")
    add("--driver", default="libcuda.so.1", metavar="LIBRARY", help="the driver's library, or `emulator` [libcuda.so.1]")
    add("--out", type=Path, default=Path("results.json"), metavar="FILE", help="the rows as JSON [results.json]")
    add("--work", type=Path, default=Path("work"), metavar="FOLDER", help="for what is unpacked and filled [work]")
    add("--quick", action="store_true", help="the smallest models and sizes, and fewest runs")
    return parser.parse_args()


def about(machine: Machine) -> dict:
    """What the numbers were measured on. Without a device there is nothing to run: the program's own message says what is missing."""
    done = machine.run([machine.program("ort"), "providers"], check=False)
    found = {"machine": platform.platform(), "python": platform.python_version(), "providers": done.stdout.strip()}
    if done.returncode != 0:
        raise SystemExit(f"error: {machine.program('ort')} does not run here: {done.stderr.strip()}")
    for name in ["numpy", "torch", "torchvision", "transformers"]:
        try:
            found[name] = needs(name).__version__
        except Skipped as why:
            found[name] = str(why)
    return found


def main() -> None:
    given = arguments()
    machine = Machine(given)
    found = about(machine)
    print("\n".join(f"{name}: {value}" for name, value in found.items()), flush=True)
    report = Report(given.out, {**found, "arguments": json.loads(json.dumps(vars(given), default=str))})
    for name, part in PARTS.items():
        if not given.only or name in given.only:
            report.attempt(name, lambda part=part: part(machine, report))
    print(f"\n{report.table()}\n\nwritten to {given.out}")
    sys.exit(0 if report.is_fine() else 1)


if __name__ == "__main__":
    main()
