"""Measures what quantized models are worth, ours and those of onnxruntime.quantization, against the bars of a table.

usage: python quantize_bench.py BARS.json ORT MODELS OUT [--only BAR...] [--without-other]

BARS.json lists {bar, what, task, model, ours, other, limits}: `ours` are arguments of `ort quantize`, where {calibration} stands for the
samples of the task, `other` options of quantize_other.py or a list of them, of which the best result counts, and a limit is
{metric, least | most | below_float | above_float | times_float}. Instead of
`ours` and `limits` a bar may have `check`, a function of quantize_checks.py, with its `options`. A metric is one of
quantize_scores.py, or seconds, peak (bytes over those of a start), over_plan (the peak without that of a run), file, relative_error.

Prints one JSON object a line: {bar, what, limit, ours, other, met, note}; numbers and verdict are null for what was left out, and the
note says why. The table with `--only` measures these bars alone. Models of a run are left in OUT.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import onnx
import quantize_checks
from quantize_data import GPT_WINDOW, GPT_WORDS, Missing, make
from quantize_scores import SCORES, score

# Runs a command and prints what `wait4` says of it: its own peak, without that of this larger process.
LAUNCHER = """
import os, sys, time
start = time.perf_counter()
child = os.fork()
if child == 0:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(child, 0)
with open(sys.argv[1], "w") as out:
    print(time.perf_counter() - start, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), file=out)
"""


@dataclass
class Run:
    """What a command did."""

    seconds: float
    peak: int
    code: int
    output: str
    errors: str


@dataclass
class Quantized:
    """A model that was written, with what its making took."""

    path: Path
    seconds: float
    peak: int
    report: dict = field(default_factory=dict)


class Bench:
    def __init__(self, ort: Path, models: Path, out: Path):
        self.ort, self.models, self.out = ort, models, out
        self.made = {}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, *arguments, environment: dict | None = None) -> Run:
        """Runs `ort`."""
        usage = self.out / "usage"
        command = [sys.executable, "-S", "-E", "-c", LAUNCHER, usage, self.ort, *arguments]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        seconds, peak, code = usage.read_text().split()
        return Run(float(seconds), int(peak), int(code), done.stdout, done.stderr)

    def checked(self, *arguments, environment: dict | None = None) -> Run:
        run = self.run(*arguments, environment=environment)
        if run.code:
            raise RuntimeError(f"ort {arguments[0]} failed: {run.errors.strip()}")
        return run

    @cache
    def start(self) -> int:
        """The peak of a process that does nothing."""
        return self.checked("--version").peak

    def data(self, task: str) -> Path:
        folder = self.out / "data" / task
        make(task, folder, self.models)
        return folder

    def model(self, name: str) -> Path:
        if name == "digits":
            return self.trained_digits()
        if name == "gpt":
            return self.trained_gpt()
        path = self.models / f"{name}.onnx"
        if not path.exists():
            raise Missing(f"{path.name} is not there")
        return path

    def trained_digits(self) -> Path:
        trained = self.out / "digits.onnx"
        if not trained.exists():
            folder = quantize_checks.DIGITS
            self.checked("train", folder / "digits.onnx", "--data", folder / "digits.npz", "--save", trained)
        return trained

    def trained_gpt(self) -> Path:
        """Smaller than usual, so that its training takes minutes."""
        trained, start = self.out / "gpt.onnx", self.out / "gpt_start.onnx"
        data = self.data("gpt") / "training.npz"
        if not trained.exists() or trained.stat().st_mtime < data.stat().st_mtime:
            width, layers = 128, 2
            onnx.save(quantize_checks.random_gpt(width, layers, GPT_WORDS, GPT_WINDOW, is_start=True), start)
            flags = ["--epochs", "1", "--batch", "8", "--lr", "0.003", "--schedule", "cosine", "--freeze", "mask"]
            self.checked("train", start, "--data", data, *flags, "--save", trained)
        return trained

    def place(self, name: str) -> Path:
        """Where the next file of this name goes."""
        path = self.out / "quantized" / f"{name}.onnx"
        path.parent.mkdir(exist_ok=True)
        return path

    def ours(self, bar: dict) -> Quantized:
        arguments = [argument.replace("{calibration}", self.calibration(bar)) for argument in bar["ours"]]
        key = json.dumps([bar["model"], arguments])
        if key not in self.made:
            path = self.place(f"{bar['bar']}_ours_{len(self.made)}")
            run = self.checked("quantize", self.model(bar["model"]), path, *arguments, "--json")
            self.made[key] = Quantized(path, run.seconds, run.peak - self.start(), json.loads(run.output))
        return self.made[key]

    def calibration(self, bar: dict) -> str:
        return str(self.data(bar["task"]) / "calibration") if bar.get("task") else ""

    def other(self, bar: dict) -> Quantized:
        """The only model of onnxruntime.quantization that the bar has."""
        return self.other_by(bar, bar["other"])

    def other_by(self, bar: dict, options: dict) -> Quantized:
        key = json.dumps([bar["model"], options])
        if key not in self.made:
            path, script = self.place(f"{bar['bar']}_other_{len(self.made)}"), Path(__file__).with_name("quantize_other.py")
            command = [sys.executable, "-B", script, self.model(bar["model"]), path]
            command += [self.calibration(bar), json.dumps(options)]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            found = json.loads(done.stdout.splitlines()[-1])
            self.made[key] = Quantized(path, found["seconds"], found["peak"])
        return self.made[key]

    def best_others(self, bar: dict) -> tuple[dict, list[str]]:
        """For each metric with a limit the best result of onnxruntime.quantization; what failed."""
        given = bar.get("other") or []
        best, faults = {}, []
        for options in given if isinstance(given, list) else [given]:
            try:
                found = self.metrics(bar, self.other_by(bar, options))
            except (RuntimeError, OSError) as error:
                faults.append(f"onnxruntime.quantization fails: {error}")
                continue
            for limit in bar["limits"]:
                name = limit["metric"]
                better = max if {"least", "below_float"} & limit.keys() else min
                if name in found:
                    best[name] = better(best.get(name, found[name]), found[name])
        return best, faults

    def metrics(self, bar: dict, made: Quantized) -> dict:
        data = made.path.with_name(made.path.name + ".data")
        found = {"seconds": made.seconds, "peak": made.peak, "file": made.path.stat().st_size}
        found["file"] += data.stat().st_size if data.exists() else 0
        if checked := made.report.get("checked"):
            found["relative_error"] = checked["relative_error"]
            found["over_plan"] = made.peak - (checked["planned_peak_before"] or 0)
        task = bar.get("task")
        if task in SCORES and any(limit["metric"] not in found for limit in bar["limits"]):
            found |= score(task, self.data(task), self.model(bar["model"]), made.path)
        return found


def say(bar: dict, what: str, limit: str = "", ours=None, other=None, met=None, note: str = "") -> None:
    """Prints a row."""
    row = {"bar": bar["bar"], "what": what, "limit": limit, "ours": ours, "other": other, "met": met, "note": note}
    print(json.dumps(row), flush=True)


def judged(limit: dict, metrics: dict) -> tuple[str, bool]:
    """The limit in words, and whether it is kept."""
    value, name = metrics[limit["metric"]], limit["metric"]
    if "least" in limit:
        return f">= {shown(name, limit['least'])}", value >= limit["least"]
    if "most" in limit:
        return f"<= {shown(name, limit['most'])}", value <= limit["most"]
    expected = metrics[f"float_{name}"]
    if "times_float" in limit:
        return f"<= {shown(name, expected)} x {limit['times_float']}", value <= expected * limit["times_float"]
    if "below_float" in limit:
        return f">= {shown(name, expected)} - {limit['below_float']}", value >= expected - limit["below_float"]
    return f"<= {shown(name, expected)} + {limit['above_float']}", value <= expected + limit["above_float"]


def shown(metric: str, value: float) -> str:
    if metric in ("peak", "file", "over_plan"):
        return f"{value / 1e6:.2f} MB"
    return f"{value:.2f} s" if metric == "seconds" else f"{value:.6g}"


def measure(bench: Bench, bar: dict, with_other: bool) -> None:
    ours = bench.metrics(bar, bench.ours(bar))
    other, faults = bench.best_others(bar) if with_other else ({}, [])
    note = "; ".join(faults)
    for limit in bar["limits"]:
        name = limit["metric"]
        words, met = judged(limit, ours)
        theirs = shown(name, other[name]) if name in other else None
        say(bar, f"{bar['what']}: {name}", words, shown(name, ours[name]), theirs, met, note)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("bars", "ort", "models", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--without-other", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.ort, given.models, given.out)
    for bar in json.loads(given.bars.read_text()):
        if given.only and bar["bar"] not in given.only:
            continue
        start = time.perf_counter()
        try:
            if "check" in bar:
                for row in quantize_checks.CHECKS[bar["check"]](bench, bar):
                    say(bar, **row)
            else:
                measure(bench, bar, not given.without_other)
        except Missing as reason:
            say(bar, bar["what"], note=f"left out: {reason}")
        except RuntimeError as error:
            say(bar, bar["what"], met=False, note=str(error))
        print(f"{bar['bar']}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
