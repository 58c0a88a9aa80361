"""The parts of gpu_run.py that measure time: models beside PyTorch's, single operators beside what the card can do.

Ours is timed with inputs and outputs on the device (`cuda_models times`), each sample several runs up to the moment when the device is
done, as PyTorch is timed with CUDA events: with and without `enable_cuda_graph`, of which the faster counts. What `ort bench` takes,
which copies from the host and back in each run, stands beside it.
"""

from gpu_machine import OF_IMAGES, OWN_KERNELS, Failed, Machine, Report, Skipped
from gpu_torch import Torch

# Ours may take so many times as long as the fastest of PyTorch's.
MOST_RATIO = 1.0
LEAST_OF_MATMUL = 0.80
LEAST_OF_COPY = 0.85
# The mode with CUDA graphs is the fastest where launches take long, and takes no longer to compile than the default one.
COMPILE_MODES = ["reduce-overhead"]

SPEED = [
    ("resnet50", {"batch": 1}),
    ("resnet50", {"batch": 32}),
    ("bert_base", {"batch": 1, "seq": 128}),
    ("bert_base", {"batch": 8, "seq": 128}),
    ("bert_base", {"batch": 32, "seq": 128}),
    ("gpt2_small_kv", {"batch": 1, "seq": 128, "past": 0, "total": 128}),
    ("gpt2_small_kv", {"batch": 1, "seq": 1, "past": 128, "total": 129}),
]
# Where the channels of images lie.
LAYOUTS = [("", []), (", channels last", ["prefer_nhwc=1"])]
QUICK_SPEED = [("tiny", {"batch": 2, "seq": 5})]

# Operators that memory bounds: sizes, and how many times the bytes of the first input they read and write at least.
MOVED = {"op_add": 3, "op_layernorm": 2, "op_softmax": 2}
# Many times what a cache holds.
ROWS, COLUMNS = 32768, 4096
PRODUCT = 4096


def ours(machine: Machine, name: str, dims: dict, options: list = OWN_KERNELS) -> dict:
    """What `cuda_models times` says of the faster way, with and without CUDA graphs."""
    command = [machine.program("cuda_models"), "times", machine.model(name), "--seconds", machine.seconds]
    command += [f"{dim}={size}" for dim, size in dims.items()]
    command += [word for option in options for word in ("--option", option)]
    ways = [machine.json([*command, "--option", f"enable_cuda_graph={graphs}"]) for graphs in (0, 1)]
    best = min(ways, key=lambda way: way["median_ms"])
    return {**best, "without_graphs_ms": ways[0]["median_ms"], "with_graphs_ms": ways[1]["median_ms"]}


def bench(machine: Machine, name: str, dims: dict) -> float:
    """The median that `ort bench` says, in milliseconds."""
    command = [machine.program("ort"), "bench", machine.model(name), "--ep", "cuda", "--ep", "cpu", "--json"]
    command += ["--seconds", machine.seconds]
    command += [word for option in OWN_KERNELS for word in ("--ep-option", f"cuda.{option}")]
    command += [word for dim, size in dims.items() for word in ("--dim", f"{dim}={size}")]
    return machine.json(command)["median_ms"]


def opened(machine: Machine):
    """PyTorch, or why there is none to compare with."""
    try:
        return Torch(machine.seconds), ""
    except Skipped as why:
        return None, str(why)


def speed(machine: Machine, report: Report) -> None:
    torch, why = opened(machine)
    for name, dims in QUICK_SPEED if machine.quick else SPEED:
        what = f"speed {name} {' '.join(f'{dim} {size}' for dim, size in dims.items() if dim != 'total')}"
        times = {kind: {} for kind in ("float16", "float32")}
        for kind, model in (("float16", f"{name}_f16"), ("float32", name)):
            for layout, options in LAYOUTS if name in OF_IMAGES else LAYOUTS[:1]:
                case = (f"{what} {kind}{layout}", model, dims, options, times[kind])
                report.attempt(case[0], lambda case=case: own_kernels(machine, report, *case))
                case = (f"{what} {kind}{layout}, libraries", *case[1:])
                report.attempt(case[0], lambda case=case: with_libraries(machine, report, *case))
        case = (f"{what} float16, best", name, dims, times["float16"])
        report.attempt(case[0], lambda case=case: beside(report, *case, torch, why))


def own_kernels(
    machine: Machine, report: Report, what: str, name: str, dims: dict, options: list, times: dict
) -> None:
    found = ours(machine, name, dims, OWN_KERNELS + options)
    times[what] = found["median_ms"]
    if not options:
        found["bench_ms"] = bench(machine, name, dims)
    report.add(what, in_words(found), **found)


def with_libraries(
    machine: Machine, report: Report, what: str, name: str, dims: dict, options: list, times: dict
) -> None:
    """The same with NVIDIA's libraries, where the machine has them; which they are is in the row."""
    options = options + ([f"library_path={machine.libraries}"] if machine.libraries else [])
    found = ours(machine, name, dims, options)
    present = {library: where for library, where in found["libraries"].items() if not where.startswith("none")}
    if not present:
        why = "; ".join(f"{library}: {where}" for library, where in found["libraries"].items())
        raise Skipped(f"no library: {why}")
    times[what] = found["median_ms"]
    beside = ", ".join(f"{library} {where}" for library, where in found["libraries"].items())
    report.add(what, f"{time_of(found)}; {beside}", **found)


def time_of(found: dict) -> str:
    graphs = "with graphs" if found["with_graphs_ms"] <= found["without_graphs_ms"] else "without graphs"
    return f"{found['median_ms']:.3f} ms {graphs}"


def in_words(found: dict) -> str:
    host = f"{found['nodes_on_host']} nodes on the host" if found["nodes_on_host"] else ""
    bench = f"{found['bench_ms']:.3f} from host to host" if "bench_ms" in found else ""
    beside = ", ".join(part for part in (bench, host) if part)
    return f"{time_of(found)}{f' ({beside})' if beside else ''}"


def beside(report: Report, what: str, name: str, dims: dict, times: dict, torch, why: str) -> None:
    """The fastest of our ways against the fastest of PyTorch's."""
    if not times:
        raise Failed("none of our ways has a time")
    way, time = min(times.items(), key=lambda each: each[1])
    ours, bound = f"{time:.3f} ms ({way.removeprefix('speed ')})", f"<= {MOST_RATIO:.1f} of the best"
    if torch is None:
        report.add(what, ours, bound, f"skipped: {why}")
        return
    try:
        others = torch.times(name, dims, COMPILE_MODES)
    except Skipped as missing:
        report.add(what, ours, bound, f"skipped: {missing}")
        return
    known = {way: time for way, time in others.items() if isinstance(time, float)}
    for way, problem in others.items():
        if way not in known:
            print(f"  PyTorch {way}: {problem}", flush=True)
    if not known:
        raise Failed(f"PyTorch runs nothing: {others}")
    ratio = time / min(known.values())
    beside = ", ".join(f"{way} {time:.3f}" for way, time in known.items())
    report.judge(what, f"{ours}; {beside}: {ratio:.2f}", bound, ratio <= MOST_RATIO, ratio=ratio, torch=others)


def ceilings(machine: Machine, report: Report) -> None:
    torch, why = opened(machine)
    report.attempt("product", lambda: product(machine, report, torch, why))
    rows, columns = (4, 4096) if machine.quick else (ROWS, COLUMNS)
    size = 2 * rows * columns
    bandwidth = torch.copy_bandwidth(size) if torch else None
    for name, times in MOVED.items():
        case = (name, rows, columns, times * size)
        report.attempt(name, lambda case=case: moved(machine, report, *case, bandwidth, why))


def product(machine: Machine, report: Report, torch, why: str) -> None:
    size = 64 if machine.quick else PRODUCT
    found = ours(machine, "op_matmul_f16", {"m": size, "n": size, "k": size})
    rate = 2 * size**3 / found["median_ms"] / 1e9
    what, bound = f"product of {size} x {size} x {size} float16", f">= {LEAST_OF_MATMUL:.0%} of torch.matmul"
    if torch is None:
        report.add(what, f"{rate:.3g} TFLOP/s", bound, f"skipped: {why}", tflops=rate)
        return
    other = 2 * size**3 / torch.matmul(size, size, size) / 1e9
    share = rate / other
    result = f"{rate:.1f} of {other:.1f} TFLOP/s: {share:.0%}"
    report.judge(what, result, bound, share >= LEAST_OF_MATMUL, tflops=rate, torch_tflops=other)


def moved(
    machine: Machine, report: Report, name: str, rows: int, columns: int, size: int, bandwidth: float | None, why: str
) -> None:
    # The columns of the normalization are its weights', and not to be chosen.
    dims = {"rows": rows} if name == "op_layernorm" else {"rows": rows, "columns": columns}
    found = ours(machine, f"{name}_f16", dims)
    rate = size / found["median_ms"] * 1e3
    what = f"{name.removeprefix('op_')} of {rows} x {columns} float16"
    bound = f">= {LEAST_OF_COPY:.0%} of a copy"
    if bandwidth is None:
        report.add(what, f"{rate / 1e9:.3g} GB/s", bound, f"skipped: {why}", bytes_per_second=rate)
        return
    share = rate / bandwidth
    result = f"{rate / 1e9:.0f} of {bandwidth / 1e9:.0f} GB/s: {share:.0%}"
    report.judge(what, result, bound, share >= LEAST_OF_COPY, bytes_per_second=rate, copy_bytes_per_second=bandwidth)
