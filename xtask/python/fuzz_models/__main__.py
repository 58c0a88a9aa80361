"""Runs random models in every configuration of the runtime and compares with the standard's
reference.

usage: python fuzz_models --runner PROGRAM --work DIR [--seed N] [--first N] [--step N] [--count N] [--seconds S]
       [--only FAMILY]... [--keep DIR] [--findings N] [--without-limits]

Case k of a seed is the same whoever makes it: workers take cases `first`, `first + step`, and so on below `count`. Prints
one JSON object for each case, `case`, `family`, `outcome`, and `problem` and `folder` of one that fails, which is reduced
first. `--list` prints the names of the families.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from case import Case, write_finding
from draw import Draw
from evaluate import expect
from families import FAMILIES
from graph import Builder, Unfit
from reduce import reduced
from runner import Runner

# A family that draws what does not fit draws again.
ATTEMPTS = 30


def family_of(seed: int, number: int, names: list[str]) -> str:
    return Draw([seed, number]).weighted({name: FAMILIES[name].weight for name in names})


def made(seed: int, number: int, family: str) -> Case:
    """The case of a number. Its draws follow from the numbers alone."""
    for attempt in range(ATTEMPTS):
        draw = Draw([seed, number, attempt])
        builder = Builder(draw)
        try:
            FAMILIES[family].make(builder)
            model = builder.model()
        except Unfit:
            continue
        return Case(model, builder.feeds(), builder.exact, float(np.round(draw.rng.random(), 3)))
    raise Unfit(f"{family}: nothing in {ATTEMPTS} attempts")


def run_case(given: argparse.Namespace, number: int, runner: Runner, found: int) -> dict:
    family = family_of(given.seed, number, given.only or list(FAMILIES))
    try:
        case = made(given.seed, number, family)
        case.share = None if given.without_limits else case.share
        expected = expect(case.model, case.feeds, case.exact)
    except Unfit as problem:
        return {"case": number, "family": family, "outcome": "undrawn", "problem": str(problem)}
    except Exception as problem:
        # The whole model in double precision is more than its nodes one by one: some of them refuse
        # that.
        return {"case": number, "family": family, "outcome": "undrawn", "problem": f"{type(problem).__name__}: {problem}"}
    verdict = runner.verdict(case, expected)
    report = {"case": number, "family": family, **verdict}
    if verdict["outcome"] in ("right", "unsupported") or found >= given.findings:
        return report
    case, verdict = reduced(case, verdict, runner)
    folder = given.keep / f"{family}_{given.seed}_{number}"
    only = "".join(f" --only {name}" for name in given.only)
    heading = f"`cargo xtask fuzz-models --seed {given.seed} --first {number} --count 1{only}`, reduced:"
    write_finding(folder, case, expect(case.model, case.feeds, case.exact), verdict, heading)
    return {**report, **verdict, "folder": str(folder)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runner")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", action="append", default=[], choices=list(FAMILIES))
    parser.add_argument("--keep", type=Path, default=Path("findings"))
    parser.add_argument("--findings", type=int, default=20)
    parser.add_argument("--without-limits", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print(*FAMILIES, sep="\n")
        return
    end = time.monotonic() + given.seconds if given.seconds else None
    runner, found = Runner(given.runner, given.work), 0
    try:
        for number in range(given.first, given.count, given.step):
            if end is not None and time.monotonic() > end:
                break
            report = run_case(given, number, runner, found)
            found += "folder" in report
            print(json.dumps(report), flush=True)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
