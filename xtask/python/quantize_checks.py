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
        # A single number has no largest.
        "same_largest": 100 * (outputs[0]["same_largest"] or 0),
    }[bar["metric"]]
    words, met = (f">= {bar['least']}", found >= bar["least"]) if "least" in bar else (f"<= {bar['most']}", found <= bar["most"])
    yield {"what": f"{bar['what']}: {bar['metric']}", "limit": words, "ours": f"{found:.7g}", "met": met}


def sum_of_errors(bench, bar: dict):
    """The squared errors of single weights add up to that of all together."""
    model, calibration = bench.model(bar["model"]), bench.data(bar["task"]) / "calibration"
    # The samples on which a search replaces weights: evenly spread.
    paths = sorted(calibration.glob("*.npz"))[: bar["samples"]]
    chosen = bench.out / "spread"
    shutil.rmtree(chosen, ignore_errors=True)
    chosen.mkdir()
    for index in range(16):
        path = paths[index * len(paths) // 16]
        (chosen / path.name).symlink_to(path.resolve())
    for bits in (4, 8):
        common = ["--exclude", "op:Gather", "--mode", f"int{bits}"]
        searched = [*common, "--budget", "1GB", "--exact-errors", "--data", calibration, "--samples", len(paths), "--held-out", "0"]
        search = json.loads(bench.checked("quantize", model, bench.place("S1"), *searched, "--json").output)["search"]
        single = sum(
            precision["relative_error"] ** 2
            for weight in search["weights"]
            for precision in weight["precisions"]
            if (precision["bits"], precision["block"]) == (bits, 32)
        )
        path = bench.place(f"S1_{bits}")
        bench.checked("quantize", model, path, *common, "--no-protect-last", "--dim", "batch=1", "--dim", "seq=32")
        run = bench.checked("quantize", model, path, "--compare", "--data", chosen, "--json")
        together = json.loads(run.output)["checked"]["relative_error"] ** 2
        ratio = single / together
        yield {
            "what": f"{bar['what']}, {bits} bits: {single:.3g} for {together:.3g}",
            "limit": "0.85 to 1.15",
            "ours": f"{ratio:.3f}",
            "met": 0.85 <= ratio <= 1.15,
        }


def relative_difference(found: list, expected: list) -> float:
    """The largest of those of the outputs."""
    worst = 0.0
    for left, right in zip(found, expected):
        if right.dtype.kind == "f":
            left, right = left.astype(np.float64), right.astype(np.float64)
            worst = max(worst, float(np.linalg.norm(left - right) / max(np.linalg.norm(right), 1e-30)))
    return worst


def moved_by_rounding(path: Path, feeds: dict, options) -> float:
    """How much ONNX Runtime's own outputs change with the inputs and normalizations, by what a sum of a thousand terms is rounded: a
    value at the edge of two codes then has the other one, and what follows differs. Two correct runtimes differ as much."""
    import onnxruntime

    expected = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)
    model, worst = onnx.load(path), 0.0
    for factor in (1 + 2.0**-20, 1 - 2.0**-20):
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        scaled = {node.input[1] for node in moved.graph.node if node.op_type.endswith("Normalization")}
        for tensor in moved.graph.initializer:
            if tensor.name in scaled and tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
        session = onnxruntime.InferenceSession(moved.SerializeToString(), options, providers=["CPUExecutionProvider"])
        floats = {name: value * np.float32(factor) if value.dtype == np.float32 else value for name, value in feeds.items()}
        worst = max(worst, relative_difference(session.run(None, floats), expected))
    return worst


def files_of_all_modes(bench, bar: dict):
    """Every file is valid, loads in ONNX Runtime and here, and both compute the same without rewrites, as far as rounding lets two
    runtimes."""
    import onnxruntime

    model, folder = bench.model(bar["model"]), bench.data(bar["task"]) / "calibration"
    sample = sorted(folder.glob("*.npz"))[-1]
    feeds = dict(np.load(sample))
    feeds.pop("truth", None)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    for arguments in bar["variants"]:
        path = bench.place("C2")
        arguments = [argument.replace("{calibration}", str(folder)) for argument in arguments]
        data = [] if "--data" in arguments else ["--inputs", sample]
        bench.checked("quantize", model, path, *arguments, *data)
        fault, worst = "", 0.0
        # ONNX Runtime computes float16 in float32 on CPUs, and so keeps digits that the type has not.
        most = 2e-3 if "fp16" in arguments else 1e-5
        try:
            onnx.checker.check_model(str(path), full_check=True)
            theirs = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)
            out = bench.out / "C2.npz"
            bench.checked("run", path, "--inputs", sample, "--opt-level", "disabled", "--outputs", out)
            ours = list(np.load(out).values())
            worst = relative_difference(ours, theirs)
            if worst > most:
                # A margin, because which values are at an edge is chance.
                most = max(most, 2 * moved_by_rounding(path, feeds, options))
        except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            fault = str(error).strip().splitlines()[0][:160]
        except onnxruntime.capi.onnxruntime_pybind11_state.OnnxRuntimeException as error:
            fault = str(error).strip().splitlines()[0][:160]
        yield {
            "what": f"{bar['what']}, {' '.join(arguments[:2])}{' qoperator' if 'qoperator' in arguments else ''}",
            "limit": f"valid, <= {most:g}",
            "ours": fault or f"valid, {worst:.2g}",
            "met": not fault and worst <= most,
        }


def calibration_of_gpt(bench, bar: dict):
    """The memory of a calibration does not hold the values of the samples."""
    width, layers, words, window = 256, 4, 1024, 128
    path, folder = bench.place("M3b_float"), bench.out / "windows"
    onnx.save(random_gpt(width, layers, words, window), path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    generator = np.random.default_rng(7)
    for index in range(64):
        np.savez(folder / f"{index:02}.npz", ids=generator.integers(0, words, (1, window)))
    arguments = ["--mode", "static", "--data", folder, "--held-out", "0", "--ranges", "percentile", "--smooth", "off"]
    run = bench.checked("quantize", path, bench.place("M3b"), *arguments)
    peak = run.peak - bench.start()
    yield {"what": f"{bar['what']}, {path.stat().st_size / 1e6:.1f} MB", "limit": f"<= {megabytes(bar['most'])}", "ours": megabytes(peak), "met": peak <= bar["most"]}


def random_gpt(width: int, layers: int, words: int, window: int, is_start: bool = False) -> onnx.ModelProto:
    """A decoder with learned positions and a causal mask, whose weights are noise. As the start of a training run it normalizes, and
    takes any batch."""
    generator, weights, nodes = np.random.default_rng(3), [], []
    batch = 0 if is_start else 1

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(generator.normal(0, 0.05, shape).astype(np.float32), name))
        return name

    def constant(name: str, value) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(op: str, inputs: list[str], output: str, **attributes) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    heads, size = 8, width // 8
    def norm_of(name: str) -> list[str]:
        if not is_start:
            return [weight(f"g{name}", width), weight(f"b{name}", width)]
        return [constant(f"g{name}", np.ones(width, np.float32)), constant(f"b{name}", np.zeros(width, np.float32))]

    split, joined = constant("split", [batch, window, heads, size]), constant("joined", [batch, window, width])
    mask = constant("mask", np.triu(np.full((window, window), -1e9, np.float32), 1))
    scale = constant("scale", np.float32(size**-0.5))
    value = add("Add", [add("Gather", [weight("words", words, width), "ids"], "embedded"), weight("positions", window, width)], "x0")
    for layer in range(layers):
        norm = norm_of(str(layer))
        normed = add("LayerNormalization", [value, *norm], f"n{layer}")
        parts = []
        for part, order in zip("qkv", ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])):
            product = add("MatMul", [normed, weight(f"{part}w{layer}", width, width)], f"{part}{layer}")
            shaped = add("Reshape", [product, split], f"{part}s{layer}")
            parts.append(add("Transpose", [shaped], f"{part}t{layer}", perm=order))
        scores = add("Mul", [add("MatMul", parts[:2], f"qk{layer}"), scale], f"s{layer}")
        shares = add("Softmax", [add("Add", [scores, mask], f"m{layer}")], f"p{layer}", axis=-1)
        mixed = add("Transpose", [add("MatMul", [shares, parts[2]], f"pv{layer}")], f"t{layer}", perm=[0, 2, 1, 3])
        mixed = add("Reshape", [mixed, joined], f"j{layer}")
        value = add("Add", [value, add("MatMul", [mixed, weight(f"ow{layer}", width, width)], f"o{layer}")], f"a{layer}")
        wide = add("MatMul", [add("LayerNormalization", [value, *norm], f"l{layer}"), weight(f"uw{layer}", width, 4 * width)], f"u{layer}")
        down = add("MatMul", [add("Relu", [wide], f"r{layer}"), weight(f"dw{layer}", 4 * width, width)], f"d{layer}")
        value = add("Add", [value, down], f"x{layer + 1}")
    add("MatMul", [value, weight("head", width, words)], "logits")
    rows = "batch" if is_start else 1
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [rows, window])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [rows, window, words])
    graph = helper.make_graph(nodes, "gpt", [ids], [logits], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CHECKS = {
    check.__name__: check
    for check in (
        plan_of_other,
        plan_of_weights,
        speed,
        gptq_gain,
        budget,
        bounds,
        report,
        equal_bytes,
        half_precision,
        sum_of_errors,
        files_of_all_modes,
        calibration_of_gpt,
    )
}
