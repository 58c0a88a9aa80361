"""The bars of quantize_bench.py that are no metric of one model: plans, times, budgets, reports and equal bytes.

A check takes the bench and its bar, and yields the rows of the table.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DIGITS = Path(__file__).parents[2] / "ort-train" / "tests" / "data"


def planned(bench, model: Path, arguments: list[str]) -> int:
    """The bytes of a run's values at the peak."""
    return json.loads(bench.checked("plan", model, *arguments, "--json").output)["peak_bytes"]


def megabytes(value: float) -> str:
    return f"{value / 1e6:.3f} MB"


def plan_of_other(bench, bar: dict):
    """What our engine needs for a model that onnxruntime.quantization wrote."""
    other = planned(bench, bench.other(bar).path, bar["dims"])
    floats = planned(bench, bench.model(bar["model"]), bar["dims"])
    most = bar.get("most", floats)
    yield {"what": bar["what"], "limit": f"<= {megabytes(most)}", "ours": megabytes(other), "met": other <= most}


def plan_of_weights(bench, bar: dict):
    """A product whose weight is only dequantized needs no float copy of it."""
    size = 2048
    for name, tensor, attributes in (("int8", TensorProto.INT8, {"axis": 1}), ("int4", TensorProto.INT4, {"axis": 0, "block_size": 32})):
        codes = np.random.default_rng(5).integers(-7, 8, (size, size))
        scales = np.full((size // 32, size) if name == "int4" else size, 0.01, np.float32)
        nodes = [
            helper.make_node("DequantizeLinear", ["codes", "scales"], ["weight"], **attributes),
            helper.make_node("MatMul", ["x", "weight"], ["y"]),
        ]
        ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [1, size]) for end in ("x", "y")]
        weights = [
            helper.make_tensor("codes", tensor, [size, size], codes.flatten()),
            numpy_helper.from_array(scales, "scales"),
        ]
        graph = helper.make_graph(nodes, "product", ends[:1], ends[1:], weights)
        path = bench.place(f"{bar['bar']}_{name}")
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
        peak = planned(bench, path, [])
        yield {
            "what": f"{bar['what']}, {name}",
            "limit": f"<= {megabytes(bar['most'])}",
            "ours": megabytes(peak),
            "met": peak <= bar["most"],
        }


def speed(bench, bar: dict):
    """Our quantized model against our float one, in turn; the least time of each counts."""
    models = {"float": bench.model(bar["model"]), "static": bench.ours(bar).path}
    times = {name: [] for name in models}
    for _ in range(3):
        for name, model in models.items():
            run = bench.checked("bench", model, *bar["dims"], "--threads", "1", "--seconds", "2", "--json")
            times[name].append(json.loads(run.output)["min_ms"])
    fastest = {name: min(found) for name, found in times.items()}
    flags = Path("/proc/cpuinfo").read_text()
    least = 1.8 if re.search(r"avx512_vnni|avx_vnni", flags) else 1.3
    ratio = fastest["float"] / fastest["static"]
    yield {"what": f"{bar['what']}: {fastest['float']:.2f} ms to", "limit": f">= {least} x", "ours": f"{ratio:.2f} x", "met": ratio >= least}


def gptq_gain(bench, bar: dict):
    """How much noisier rounding to nearest is than GPTQ, at the same bits."""
    noises = []
    for method in ("rtn", "gptq"):
        part = {**bar, "ours": [*bar["ours"], "--method", method], "limits": [{"metric": "noise"}]}
        noises.append(bench.metrics(part, bench.ours(part))["noise"])
    ratio = noises[0] / noises[1]
    yield {"what": f"{bar['what']}: {noises[0]:.4f} to {noises[1]:.4f}", "limit": f">= {bar['least']} x", "ours": f"{ratio:.2f} x", "met": ratio >= bar["least"]}


def budget(bench, bar: dict):
    """Matrices of a size half-way between uniform 4 and 8 bits."""
    floats = bench.ours({**bar, "ours": [*bar["ours"], "--mode", "int4"]})
    matrices = sum(row["bytes_after"] for row in floats.report["layers"] if row["kept"] is None)
    limit = floats.path.stat().st_size - matrices + bar["matrices"]
    found = bench.ours({**bar, "ours": [*bar["ours"], "--budget", str(limit)]})
    share, noise = found.path.stat().st_size / limit, found.report["checked"]["relative_error"] ** 2
    yield {"what": f"{bar['what']}: share of the budget", "limit": "0.97 to 1", "ours": f"{share:.4f}", "met": 0.97 <= share <= 1}
    yield {"what": f"{bar['what']}: noise", "limit": f"<= {bar['most']}", "ours": f"{noise:.5f}", "met": noise <= bar["most"]}


def bounds(bench, bar: dict):
    """A bound that cannot be kept says the least size; one on the error holds on the written file."""
    model, calibration = bench.model(bar["model"]), bench.data(bar["task"]) / "calibration"
    run = bench.run("quantize", model, bench.place("S3_budget"), "--budget", "1MB")
    says = bool(re.search(r"at its fewest bits it has \d+ bytes, of which '", run.errors))
    yield {"what": "--budget 1MB", "limit": "exit 1, least size", "ours": f"exit {run.code}", "met": run.code == 1 and says, "note": run.errors.strip().replace("\n", "; ")[:160]}
    for error in ("0.05", "0.01"):
        path = bench.place(f"S3_error_{error}")
        report = json.loads(bench.checked("quantize", model, path, "--error", error, "--data", calibration, "--json").output)
        measured = report["checked"]["relative_error"]
        larger = [round_["measured_error"] for round_ in report["search"]["rounds"] if not round_["holds"]]
        yield {
            "what": f"--error {error}: measured; models that were too small",
            "limit": f"<= {error}",
            "ours": f"{measured:.5f}; {', '.join(f'{found:.5f}' for found in larger) or 'none'}",
            "met": measured <= float(error) and all(found > float(error) for found in larger),
        }


def report(bench, bar: dict):
    """The report has each layer once, and the sizes and the plan of the file that was written."""
    made = bench.ours(bar)
    layers = made.report["layers"]
    quantized = [row for row in layers if row["kept"] is None]
    excluded = [row for row in layers if row["kept"]]
    yield {"what": f"{bar['what']}: layers with a fate", "limit": f"= {len(layers)}", "ours": f"{len(quantized)} + {len(excluded)}", "met": len(quantized) + len(excluded) == len(layers) > 0}
    model = onnx.load(made.path)
    tensors = sum(size_of_weights(model.graph.initializer).values())
    listed = sum(row["bytes_after"] for row in quantized)
    yield {"what": f"{bar['what']}: bytes of layers", "limit": f"= {tensors:,}", "ours": f"{listed:,}", "met": tensors == listed}
    peak, plan = made.report["checked"]["planned_peak"], planned(bench, made.path, bar.get("dims") or last_sample(bench, bar))
    yield {"what": f"{bar['what']}: predicted peak", "limit": f"= {plan:,}", "ours": f"{peak:,}", "met": peak == plan}


def last_sample(bench, bar: dict) -> list[str]:
    """The one that is compared if none is held out."""
    return ["--inputs", str(sorted((bench.data(bar["task"]) / "calibration").glob("*.npz"))[-1])]


def size_of_weights(tensors) -> dict[str, int]:
    """The bytes of each quantized weight, with its scales and zero points."""
    codes = re.compile(r"(.*?)(_quantized|_Q[248])$")
    weights = {found[1] for tensor in tensors if (found := codes.match(tensor.name))}
    sizes = dict.fromkeys(weights, 0)
    for tensor in tensors:
        base = re.sub(r"(_quantized|_Q[248])?(_scales?|_zero_points?|_quantized|_Q[248])$", "", tensor.name)
        if base in sizes:
            sizes[base] += numpy_helper.to_array(tensor).nbytes
    return sizes


def equal_bytes(bench, bar: dict):
    """The file depends neither on threads, nor on the order of samples, nor on the processor."""
    model, calibration = bench.model(bar["model"]), bench.data(bar["task"]) / "calibration"
    backwards = bench.out / "backwards"
    shutil.rmtree(backwards, ignore_errors=True)
    backwards.mkdir()
    paths = sorted(calibration.glob("*.npz"))
    for path, other in zip(paths, reversed(paths)):
        (backwards / path.name).symlink_to(other.resolve())
    for arguments in bar["variants"]:
        data = ["--data", calibration, "--held-out", "0"] if "static" in arguments else []
        ways = {
            "1 thread": (["--threads", "1"], data, {}),
            "2 threads": (["--threads", "2"], data, {}),
            "AVX2": (["--threads", "2"], data, {"ORT_ISA": "avx2"}),
        }
        if data:
            ways["samples backwards"] = (["--threads", "2"], ["--data", backwards, "--held-out", "0"], {})
        contents = {}
        for name, (threads, samples, variables) in ways.items():
            path = bench.place("D1")
            bench.checked("quantize", model, path, *arguments, *threads, *samples, environment={**os.environ, **variables})
            contents[name] = path.read_bytes()
        first = contents["1 thread"]
        differ = [name for name, content in contents.items() if content != first]
        yield {
            "what": f"{bar['what']}, {' '.join(arguments)}",
            "limit": "equal",
            "ours": "equal" if not differ else "differs with " + ", ".join(differ),
            "met": not differ,
        }


def half_precision(bench, bar: dict):
    """True float16 arithmetic: both models run in our engine."""
    made = bench.ours(bar)
    samples = bench.data(bar["task"]) / bar.get("samples", "calibration")
    run = bench.checked("quantize", bench.model(bar["model"]), made.path, "--compare", "--data", samples, "--samples", "1000", "--json")
    outputs = json.loads(run.output)["outputs"]
    found = {
        "cosine": (1 - max(output["relative_error"] for output in outputs) ** 2) ** 0.5,
        "largest_difference": outputs[0]["largest_difference"],
        "same_largest": 100 * outputs[0]["same_largest"],
    }[bar["metric"]]
    words, met = (f">= {bar['least']}", found >= bar["least"]) if "least" in bar else (f"<= {bar['most']}", found <= bar["most"])
    yield {"what": f"{bar['what']}: {bar['metric']}", "limit": words, "ours": f"{found:.7g}", "met": met}


CHECKS = {check.__name__: check for check in (plan_of_other, plan_of_weights, speed, gptq_gain, budget, bounds, report, equal_bytes, half_precision)}
