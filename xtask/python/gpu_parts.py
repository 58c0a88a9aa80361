"""The parts of gpu_run.py that need no PyTorch: tests, conformance, models, memory, exits."""

import ctypes
import json
import math
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from gpu_machine import OF_IMAGES, OWN_KERNELS, Failed, Machine, Report, needs

# Node cases that run on the device alone, at least.
LEAST_ALONE = 1600
# A broken context is the fault of one case; those after it run again in a process of their own, so often at most.
MOST_PROCESSES = 40
# |device - CPU| as a part of the largest |CPU| of an output.
TOLERANCE = {"": 1e-3, "_f16": 5e-3}
# Beside the arena the driver has the code of the kernels, and what it needs itself.
BESIDE_ARENA = 256 << 20
EXITS = 200
# So many names stand in a row.
MOST_NAMED = 5
# Tests at once: each has a context of its own on one device, and many cores would open one for each.
TEST_THREADS = 8
# Characters of the message of a test that failed.
LONGEST_MESSAGE = 600

# The sizes of each model that is compared.
MODELS = {
    "resnet50": {"batch": 2},
    "mobilenet_v2": {"batch": 2},
    "mobilenet_v3_large": {"batch": 2},
    "efficientnet_b0": {"batch": 2},
    "convnext_tiny": {"batch": 2},
    "minilm_l6": {"batch": 3, "seq": 128},
    "bert_base": {"batch": 2, "seq": 128},
    "gpt2_small_kv": {"batch": 2, "seq": 5, "past": 59, "total": 64},
    "whisper_tiny_enc": {},
}
QUICK_MODELS = {"tiny": {"batch": 2, "seq": 5}}


def tests(machine: Machine, report: Report) -> None:
    programs = machine.test_programs()
    for program in programs[:1] if machine.quick else programs:
        report.attempt(f"tests {program.name}", lambda program=program: run_tests(machine, report, program))


def run_tests(machine: Machine, report: Report, program) -> None:
    """Tests that fail run once more, each in a process of its own: a context that one of them breaks is broken for all others."""
    done = machine.run([program, f"--test-threads={TEST_THREADS}"], check=False)
    found = re.search(r"test result: .*?(\d+) passed; (\d+) failed", done.stdout)
    if not found:
        ended = f"; together they ended with {done.returncode}: {done.stderr.strip()[-200:]}"
        names = re.findall(r"^(\S+): test$", machine.run([program, "--list"]).stdout, re.M)
        passed, suspects = 0, names
    else:
        ended, passed = "", int(found[1])
        suspects = list(dict.fromkeys(re.findall(r"^test (\S+) \.\.\. FAILED$", done.stdout, re.M)))
    alone = {name: machine.run([program, "--exact", name], check=False) for name in suspects}
    failed = {name: failure(own, name) for name, own in alone.items() if own.returncode != 0}
    # What fails beside others and passes alone says something, too.
    beside = {name: failure(done, name) for name in suspects if found and name not in failed}
    for word, whys in (("WRONG", failed), ("BESIDE OTHERS", beside)):
        for name, why in whys.items():
            print(f"  {word} {name}: {why}")
    passed += len(suspects) - len(failed)
    result = f"{passed} passed, {len(failed)} failed{named(list(failed))}"
    if len(failed) < len(suspects):
        result += f"; {len(suspects) - len(failed)} of the passed ones only in a process of their own"
    report.judge(f"tests {program.name}", f"{result}{ended}", "0 failed", not failed and passed > 0, wrong=failed, beside=beside)


def failure(done: subprocess.CompletedProcess, name: str) -> str:
    """What a test says that failed: its own message, of a long one both ends; without one, how its process ended."""
    own = rf"^---- {re.escape(name)} stdout ----\n(.*?)\n(?:note: run with|\nfailures:|\n---- )"
    found = re.search(own, done.stdout, re.M | re.S)
    said = found[1].strip() if found else f"ended with {done.returncode}: {done.stderr.strip()}"
    half = LONGEST_MESSAGE // 2
    return said if len(said) <= LONGEST_MESSAGE else f"{said[:half]} ... {said[-half:]}"


def named(names: list) -> str:
    """The first of these, for a row."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f": {', '.join(names[:MOST_NAMED])}{more}" if names else ""


def conformance(machine: Machine, report: Report) -> None:
    cases = machine.unpacked("cases")
    lines = (machine.here / "conformance_cuda.ignore").read_text().splitlines()
    listed = {line.split("#")[0].strip().removeprefix("node/") for line in lines}
    left = sorted(path.name for path in cases.iterdir())
    if machine.quick:
        left = [name for name in left if name.startswith("test_add")]
    count, wrong, alone, passed, known = len(left), [], 0, 0, 0
    for _ in range(MOST_PROCESSES):
        outcomes = run_cases(machine, cases, left)
        while left and left[0] in outcomes:
            name = left.pop(0)
            is_passed, text = outcomes[name]
            passed += is_passed
            alone += is_passed and text == "device"
            known += not is_passed and name in listed
            if not is_passed and name not in listed:
                wrong.append((name, text))
                if "context is broken" in text:
                    break
        else:
            if left:
                wrong.append((left.pop(0), "the process died"))
        if not left:
            break
    wrong += [(name, "not run") for name in left]
    for name, why in wrong:
        print(f"  WRONG {name}: {why[:300]}")
    report.judge(
        "conformance",
        f"{passed} of {count} pass, {known} fail as listed, {len(wrong)} otherwise{named([name for name, _ in wrong])}",
        "0 otherwise",
        not wrong,
        wrong=wrong,
    )
    bound = 1 if machine.quick else LEAST_ALONE
    report.judge("conformance, device alone", str(alone), f">= {bound:,}", alone >= bound)


def run_cases(machine: Machine, cases, names: list) -> dict:
    """What became of the cases, by name, in one process; those that it did not get to are missing."""
    chosen = machine.work / "chosen"
    shutil.rmtree(chosen, ignore_errors=True)
    chosen.mkdir()
    for name in names:
        (chosen / name).symlink_to(cases / name)
    said = machine.run([machine.program("cuda_cases"), chosen], check=False).stdout.splitlines()
    if any(line.startswith("NONE ") for line in said):
        raise Failed(said[0])
    lines = (re.match(r"(PASS|FAIL) ([^:\s]+): ?(.*)", line) for line in said)
    return {found[2]: (found[1] == "PASS", found[3]) for found in lines if found}


def models(machine: Machine, report: Report) -> None:
    needs("numpy")
    for name, dims in (QUICK_MODELS if machine.quick else MODELS).items():
        for kind, tolerance in TOLERANCE.items():
            case = (name + kind, dims, tolerance)
            report.attempt(f"model {name}{kind}", lambda case=case: compare(machine, report, *case))


def compare(machine: Machine, report: Report, name: str, dims: dict, tolerance: float) -> None:
    import numpy as np

    model, files = machine.model(name), machine.work / "outputs"
    files.mkdir(exist_ok=True)
    inputs = files / "inputs.npz"
    made = made_inputs(name.removesuffix("_f16"), dims)
    np.savez(inputs, **made)
    outputs, on_device = {}, ["--ep", "cuda", "--ep", "cpu", "--ep-option"]
    places = {"cpu": ["--ep", "cpu"], "device": [*on_device, "cuda.use_tf32=0"], "tf32": [*on_device, "cuda.use_tf32=1"]}
    if name.endswith("_f16"):
        del places["tf32"]
    if name.removesuffix("_f16") in OF_IMAGES:
        places["channels last"] = [*places["device"], "--ep-option", "cuda.prefer_nhwc=1"]
    for place, providers in places.items():
        command = [machine.program("ort"), "run", model, "--outputs", files / f"{place}.npz", *providers]
        command += ["--inputs", inputs] if made else []
        if place != "cpu":
            command += [word for option in OWN_KERNELS for word in ("--ep-option", f"cuda.{option}")]
        command += [word for dim, size in dims.items() for word in ("--dim", f"{dim}={size}")]
        machine.run(command)
        outputs[place] = dict(np.load(files / f"{place}.npz"))
    for place in [place for place in outputs if place != "cpu"]:
        worst, where = worst_of(outputs[place], outputs["cpu"])
        result = f"{worst:.1e} of the largest value{f' ({where})' if where and len(outputs['cpu']) > 1 else ''}"
        if place == "tf32":
            # Factors of eleven bits: how far a model's outputs are apart says its depth, so that there is no bound.
            report.judge(f"model {name}, TF32", result, "no NaN", not math.isnan(worst), worst=worst)
        else:
            of = f", {place}" if place != "device" else ""
            report.judge(f"model {name}{of}", result, f"<= {tolerance:.0e}", worst <= tolerance, worst=worst)


def worst_of(actual: dict, expected: dict) -> tuple:
    """The largest difference of outputs, and of which one."""
    worst, where = 0.0, ""
    for output, values in expected.items():
        apart = difference(actual[output], values)
        # Not `apart > worst`: a NaN must win.
        if not apart <= worst:
            worst, where = apart, output
    return worst, where


def difference(actual, expected) -> float:
    """As a part of the largest expected value; what the CPU has no finite values for says nothing."""
    import numpy as np

    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("nan")
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(expected).all():
        raise Failed("the CPU's own outputs are not finite")
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def made_inputs(name: str, dims: dict) -> dict:
    """The integer inputs of language models; what is not here `ort run` makes up."""
    import numpy as np

    if "seq" not in dims or name == "tiny":
        return {}
    shape, rng = (dims["batch"], dims["seq"]), np.random.default_rng(0)
    ids, mask = rng.integers(0, 1000, shape), np.ones((dims["batch"], dims.get("total", dims["seq"])), np.int64)
    if "past" in dims:
        positions = np.broadcast_to(np.arange(dims["past"], dims["total"]), shape)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": np.ascontiguousarray(positions)}
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}


class DriverMemory:
    """How much less memory the driver says is free than at first, on the first device, whoever took it."""

    def __init__(self, machine: Machine):
        self.library, self.most, self.is_done = ctypes.CDLL(machine.driver), 0, threading.Event()
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failed(f"{name}: the driver's error {code}")

    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuCtxSetCurrent", self.context)
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def watch(self) -> None:
        begin = self.free()
        self.thread = threading.Thread(target=self.follow, args=(begin,))
        self.thread.start()

    def follow(self, begin: int) -> None:
        while not self.is_done.wait(0.001):
            self.most = max(self.most, begin - self.free())

    def end(self) -> int:
        """The most that was taken since `watch`."""
        self.is_done.set()
        self.thread.join()
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)
        return self.most


def memory(machine: Machine, report: Report) -> None:
    if machine.quick:
        cases = [("tiny", 256 << 10, 20, ["batch=1..64", "seq=1..64"])]
    else:
        # The largest of these shapes do not fit: those runs are to be refused, and the next ones to go on.
        cases = [
            ("minilm_l6", 512 << 20, 1000, ["batch=1..32", "seq=1..384"]),
            ("resnet50_f16", 256 << 20, 1000, ["batch=1..48"]),
        ]
    for case in cases:
        report.attempt(f"memory {case[0]}", lambda case=case: shapes(machine, report, *case))


def shapes(machine: Machine, report: Report, name: str, limit: int, runs: int, dims: list) -> None:
    command = [machine.program("cuda_models"), "shapes", machine.model(name), *dims, "--runs", runs, "--wait"]
    command += [word for option in [f"gpu_mem_limit={limit}", *OWN_KERNELS] for word in ("--option", option)]
    driver = DriverMemory(machine)
    words, pipe = [str(word) for word in command], subprocess.PIPE
    child = subprocess.Popen(words, env=machine.environment(), text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    is_open = child.stdout.readline().strip() == "open"
    driver.watch()
    said, problem = child.communicate("\n" if is_open else None)
    taken = driver.end()
    if child.returncode != 0:
        raise Failed(f"ended with {child.returncode}: {problem.strip()[-300:]}")
    found = json.loads(said.splitlines()[-1])
    mib = 1 << 20
    report.judge(
        f"memory {name}, {found['ran'] + found['refused']} random shapes",
        f"arena {found['peak_bytes'] / mib:.4g} MiB, {found['refused']} runs refused",
        f"<= {limit / mib:.4g} MiB, some run",
        found["peak_bytes"] <= limit and found["ran"] > 0,
        **found,
    )
    if taken > 0:
        bound = limit + BESIDE_ARENA
        report.judge(
            f"memory {name}, as the driver counts",
            f"{taken / mib:.1f} MiB",
            f"<= {bound / mib:.0f} MiB",
            taken <= bound,
        )


def exits(machine: Machine, report: Report) -> None:
    count = 5 if machine.quick else EXITS
    command = [machine.program("ort"), "run", machine.model("tiny"), "--ep", "cuda", "--ep", "cpu", "--dim", "seq=7"]
    begin = time.monotonic()
    with ThreadPoolExecutor(1 if machine.quick else 4) as pool:
        statuses = list(pool.map(lambda _: machine.run(command, check=False).returncode, range(count)))
    seconds = (time.monotonic() - begin) / count
    bad = sorted({status for status in statuses if status != 0})
    result = f"{statuses.count(0)} with status 0{f', others {bad}' if bad else ''}, one every {seconds:.2f} s"
    report.judge(f"exits of {count} processes", result, f"all {count}", not bad)
