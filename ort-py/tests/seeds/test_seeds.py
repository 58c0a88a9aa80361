"""The code samples of the documents this product was asked for from.

Each folder has a document and its code, one file per sample, as written but for blanks at the ends
of lines: `test_files_are_as_written` checks that. Reading a sample, the tests change the package in
its imports and nothing else. What a document leaves to its reader (`dataset`, `test_inference`, a
session made by an earlier sample) is put into the namespace first.

With `ORT_PACKAGE=onnxruntime` the samples run against the original; those that fail there have the
exception and the reason in `Sample.original`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import re
import sys
import textwrap
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

PACKAGE = os.environ.get("ORT_PACKAGE", "ort_runtime")
OURS = PACKAGE == "ort_runtime"
HERE = Path(__file__).parent
ort = importlib.import_module(PACKAGE)

Names = dict[str, Any]

#: Two layers over the mean of each channel; the same numbers in every run.
WEIGHTS = [
    np.random.default_rng(1).standard_normal(shape, np.float32) / 8
    for shape in [(3, 1024), (1024, 10)]
]


@dataclass(frozen=True)
class Sample:
    """A sample that runs.

    Attributes:
        check: looks at the names after the sample ran.
        setup: adds the names that the document leaves to its reader.
        needs: what has to be there: a module below the package, or "CUDA".
        original: the exception with which onnxruntime 1.31.1 ends, and why; None if it runs there.
    """

    check: Callable[[Names], None]
    setup: Callable[[Names], None] = lambda names: None
    needs: str = ""
    original: tuple[type[BaseException], str] | None = None


def write_model(path: str) -> None:
    """Writes `input` [batch, 3, 224, 224] -> `output` [batch, 10]: mean, matmul, relu, matmul."""
    node, helper = onnx.helper.make_node, onnx.helper
    sizes = ["batch", 3, 224, 224]
    graph = helper.make_graph(
        [
            node("GlobalAveragePool", ["input"], ["mean"], "mean"),
            node("Flatten", ["mean"], ["flat"], "flat"),
            node("MatMul", ["flat", "w0"], ["hidden"], "first"),
            node("Relu", ["hidden"], ["active"], "relu"),
            node("MatMul", ["active", "w1"], ["output"], "second"),
        ],
        "classifier",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", 10])],
        [onnx.numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(WEIGHTS)],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), path)


def write_large_activations(path: str) -> None:
    """Writes `input` [batch, 1] -> `output` [batch, batch] with 1 MiB of activation per row.

    The last matmul mixes the rows, so no part of the batch can run alone.
    """
    node, helper = onnx.helper.make_node, onnx.helper
    graph = helper.make_graph(
        [
            node("Tile", ["input", "repeats"], ["rows"]),
            node("Sin", ["rows"], ["waves"]),
            node("Transpose", ["waves"], ["columns"], perm=[1, 0]),
            node("MatMul", ["waves", "columns"], ["output"]),
        ],
        "large",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", "batch"])],
        [onnx.numpy_helper.from_array(np.array([1, 2**18]), "repeats")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), path)


def images(batch: int = 1) -> np.ndarray:
    """Returns random images of the model's input shape."""
    return np.random.default_rng(batch).standard_normal((batch, 3, 224, 224), np.float32)


def expected(data: np.ndarray) -> np.ndarray:
    """Returns what the model computes, by numpy."""
    mean = data.mean(axis=(2, 3), dtype=np.float64).astype(np.float32)
    return np.maximum(mean @ WEIGHTS[0], 0) @ WEIGHTS[1]


def close(found: np.ndarray, data: np.ndarray, tolerance: float = 1e-4) -> None:
    """Checks an output of the model."""
    reference = expected(data)
    assert found.shape == reference.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, reference, atol=tolerance * np.abs(reference).max())


def runs(session: Any, tolerance: float = 1e-4) -> None:
    """Checks that a session computes the model for two batch sizes."""
    for batch in (2, 1):
        data = images(batch)
        (found,) = session.run(None, {"input": data})
        close(found, data, tolerance)


# What the documents leave to their readers.


def with_ort(names: Names) -> None:
    """The document's first import."""
    names["ort"] = ort


def with_numpy(names: Names) -> None:
    """An import that the document leaves out."""
    names["np"] = np


def with_options(names: Names) -> None:
    """The options of the first sample."""
    with_ort(names)
    names["session_options"] = ort.SessionOptions()


def with_session(names: Names) -> None:
    """The session of an earlier sample, and inputs for it."""
    with_options(names)
    names["session"] = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    names["inputs"] = {"input": images()}
    names["reference"] = weakref.ref(names["session"])


def with_dataset(names: Names) -> None:
    """Inputs whose batch sizes differ."""
    with_session(names)
    names["dataset"] = [images(1), images(2), images(1)]


def with_binding(names: Names) -> None:
    """A binding with an input and an output."""
    with_session(names)
    binding = names["io_binding"] = names["session"].io_binding()
    binding.bind_cpu_input("input", images())
    binding.bind_output("output")


def with_limited_memory(names: Names) -> None:
    """An inference that needs 2 MiB or more per row, and 12 MiB of memory."""
    write_large_activations("large.onnx")
    info = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # Sessions use it only if they ask for it, so the other tests are not limited.
    ort.create_and_register_allocator(info, ort.OrtArenaCfg(12 << 20, -1, -1, -1))
    options = ort.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = ort.InferenceSession("large.onnx", options, providers=["CPUExecutionProvider"])
    names["sizes"] = []

    def test_inference(batch_size: int) -> None:
        session.run(None, {"input": np.ones((batch_size, 1), np.float32)})
        names["sizes"].append(batch_size)

    names["test_inference"] = test_inference


def with_cuda(names: Names) -> None:
    """A session and a binding on a CUDA device."""
    with_numpy(names)
    names["session"] = ort.InferenceSession("model.onnx", providers=["CUDAExecutionProvider"])
    names["io_binding"] = names["session"].io_binding()
    names["output_shape"] = (1, 10)


def with_process_memory(names: Names) -> None:
    """psutil, or the part of it that the sample uses."""
    with_session(names)
    if importlib.util.find_spec("psutil") is None:

        def resident(_: Any) -> types.SimpleNamespace:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            return types.SimpleNamespace(rss=pages * os.sysconf("SC_PAGE_SIZE"))

        process = type("Process", (), {"__init__": lambda self, pid: None, "memory_info": resident})
        names["stand_in"] = types.SimpleNamespace(Process=process, __name__="psutil")


def with_torch_memory(names: Names) -> None:
    """torch, or the functions of it that the sample calls if there is no CUDA device."""
    with_session(names)
    if not has_cuda():
        counters = ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated")
        cuda = types.SimpleNamespace(**dict.fromkeys(counters, lambda: 0))
        names["stand_in"] = types.SimpleNamespace(cuda=cuda, __name__="torch")


def with_quantization(names: Names) -> None:
    """Names of the quantization package that the document does not import."""
    quantization = importlib.import_module(f"{PACKAGE}.quantization")
    names["QuantType"] = quantization.QuantType
    names["quantize_dynamic"] = quantization.quantize_dynamic


def with_torch_module(names: Names) -> None:
    """A transformer in torch, under the names that the documents give it."""
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 32, activation="gelu", batch_first=True, norm_first=True
    )
    # More than one layer, so that there is something between layers to keep.
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    names["build_model"] = lambda: model
    names["pt_model"] = model
    names["ORTModule"] = importlib.import_module(f"{PACKAGE}.training.ortmodule").ORTModule
    names["torch"] = torch
    Path("mem_opt.json").write_text('["BiasGelu+:1:-1"]', encoding="utf-8")


def with_training(names: Names) -> None:
    """A module that trains in this runtime, its data, and what else the loop reads."""
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    torch.manual_seed(0)
    wrap = importlib.import_module(f"{PACKAGE}.training.ortmodule").ORTModule
    names["model"] = wrap(torch.nn.Linear(4, 1))
    names["before"] = names["model"].weight.detach().clone()
    names["train_loader"] = [(torch.ones(2, 4), torch.ones(2, 1)) for _ in range(8)]
    names["criterion"] = torch.nn.MSELoss()
    names.update(learning_rate=0.1, num_epochs=2, device="cpu")


# What has to hold afterwards.


def trains(level: int, config: bool = False) -> Callable[[Names], None]:
    """Returns a check that a module trains with a level, with or without a configuration.

    Samples that wrap none set the environment for one.
    """

    def check(names: Names) -> None:
        wrap = importlib.import_module(f"{PACKAGE}.training.ortmodule").ORTModule
        if isinstance(names.get("configuration"), list):
            Path("mem_opt.json").write_text(json.dumps(names["configuration"]), encoding="utf-8")
            os.environ["ORTMODULE_MEMORY_OPT_CONFIG"] = "mem_opt.json"
        model = names.get("model") or wrap(names["build_model"]())
        assert isinstance(model, wrap)
        assert model._environment.level == level and bool(model._environment.config) == config
        loss = model(names["torch"].ones(2, 5, 16)).square().mean()
        loss.backward()
        assert all(value.grad is not None for value in model.parameters())
        partition = model._backend._partition
        applied = sum(cluster.applied for cluster in partition.clusters)
        asked = {request.id for request in model._backend.backend.recompute.requests}
        known = {cluster.id for cluster in partition.clusters}
        assert (applied > 0) == bool(level or asked & known), (asked, known)

    return check


def accumulates_gradients(names: Names) -> None:
    """The optimizer moved the weights."""
    assert not names["torch"].equal(names["model"].weight, names["before"])




def session_runs(names: Names) -> None:
    """The sample made a session."""
    runs(names["session"])


def options_make_a_session(names: Names) -> None:
    """The options that the sample changed are good for a session."""
    options = names["session_options"]
    assert options.enable_cpu_mem_arena is True and options.enable_mem_pattern is True
    runs(ort.InferenceSession("model.onnx", options))


def cuda_options_are_taken(names: Names) -> None:
    """A session takes the provider, or says that it is not there and runs on the CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = ort.InferenceSession("model.onnx", names["session_options"])
    runs(session)
    assert session.get_providers()[-1] == "CPUExecutionProvider"
    if "CUDAExecutionProvider" not in session.get_providers():
        assert any("CUDAExecutionProvider" in str(w.message) for w in [*caught, *names["warned"]])


def provider_options_are_taken(names: Names) -> None:
    """The dictionary is good as options of the CUDA provider."""
    providers = [("CUDAExecutionProvider", names["cuda_options"]), "CPUExecutionProvider"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs(ort.InferenceSession("model.onnx", providers=providers))


def zero_copy_outputs(names: Names) -> None:
    """The bound output is there."""
    (found,) = names["outputs"]
    close(found, names["input_array"])


def gpu_outputs(names: Names) -> None:
    """The output on the device is the CPU's."""
    (found,) = names["io_binding"].copy_outputs_to_cpu()
    close(found, names["input_tensor"].cpu().numpy(), 1e-3)


def memory_is_profiled(names: Names) -> None:
    """The function that the sample defines prints three numbers."""
    names["profile_memory"](names["session"], images(), "input")
    printed = names["printed"]()
    assert re.fullmatch(r"(\w+: -?\d+\.\d\d MB\n){3}", printed), printed


def gpu_memory_is_profiled(names: Names) -> None:
    """The function that the sample defines prints two numbers."""
    names["profile_gpu_memory"](names["session"], images(), "input")
    printed = names["printed"]()
    assert re.fullmatch(r"(\w+: \d+\.\d\d MB\n){2}", printed), printed


def optimized_model_is_saved(names: Names) -> None:
    """A session of the options writes a model that computes the same."""
    runs(ort.InferenceSession("model.onnx", names["session_options"]))
    runs(ort.InferenceSession("optimized.onnx"))


def largest_batch_is_found(names: Names) -> None:
    """The loop ends without a traceback, and the session lives on."""
    lines = names["printed"]().splitlines()
    assert lines[0] == "Batch size 1: OK"
    assert lines[-1].endswith(": OOM") and len(lines) == len(names["sizes"]) + 1
    names["test_inference"](1)


def last_outputs(names: Names) -> None:
    """The outputs of the last run over the dataset are complete."""
    (found,) = names["outputs"]
    close(found, names["dataset"][-1])


def batch_is_halved(names: Names) -> None:
    """The number is what integer division gives."""
    assert names["batch_size"] == 4


def quantized(file: str) -> Callable[[Names], None]:
    """Returns a check that `file` is smaller and computes nearly the same."""

    def check(names: Names) -> None:
        sizes = [os.path.getsize(name) for name in (file, "model.onnx")]
        assert sizes[0] < 0.5 * sizes[1], sizes
        runs(ort.InferenceSession(file), 0.05)

    return check


def outputs_are_released(names: Names) -> None:
    """The name is gone; the session still runs."""
    assert "outputs" not in names
    session_runs(names)


def bindings_are_cleared(names: Names) -> None:
    """The binding takes new values."""
    binding = names["io_binding"]
    data = images(2)
    binding.bind_cpu_input("input", data)
    binding.bind_output("output")
    names["session"].run_with_iobinding(binding)
    close(binding.copy_outputs_to_cpu()[0], data)


def session_is_gone(names: Names) -> None:
    """Nothing keeps the session."""
    assert "session" not in names
    gc.collect()
    assert names["reference"]() is None


def outputs_of_random_images(names: Names) -> None:
    """The output is that of the sample's own random input."""
    (found,) = names["outputs"]
    close(found, names["input_data"])


def half_precision_runs(names: Names) -> None:
    """Results are within what 16-bit products allow, whether the machine has them or not."""
    assert names["sess_options"].enable_fp16 is True
    runs(names["sess"], 1e-2)


SAMPLES = {
    "onnxruntime_memory/memory_arenas.py": Sample(
        lambda names: (session_runs(names), options_make_a_session(names))
    ),
    "onnxruntime_memory/limiting_gpu_memory.py": Sample(
        cuda_options_are_taken,
        with_options,
        original=(AttributeError, "SessionOptions has no append_execution_provider"),
    ),
    "onnxruntime_memory/arena_next_power_of_two.entry": Sample(provider_options_are_taken),
    "onnxruntime_memory/arena_same_as_requested.entry": Sample(provider_options_are_taken),
    "onnxruntime_memory/zero_copy.py": Sample(zero_copy_outputs, with_ort),
    "onnxruntime_memory/gpu_zero_copy.py": Sample(gpu_outputs, with_cuda, needs="CUDA"),
    "onnxruntime_memory/track_memory.py": Sample(memory_is_profiled, with_process_memory),
    "onnxruntime_memory/gpu_memory_profiling.py": Sample(gpu_memory_is_profiled, with_torch_memory),
    "onnxruntime_memory/quantization.py": Sample(
        quantized("model_quantized.onnx"), with_quantization, needs="quantization"
    ),
    "onnxruntime_memory/graph_optimization.py": Sample(optimized_model_is_saved, with_options),
    "onnxruntime_memory/enable_memory_patterns.py": Sample(options_make_a_session, with_options),
    "onnxruntime_memory/batch_sizes.py": Sample(
        largest_batch_is_found,
        with_limited_memory,
        original=(ort.capi._pybind_state.Fail, "its errors are not RuntimeErrors"),
    ),
    "onnxruntime_memory/limit_gpu_growth.py": Sample(provider_options_are_taken),
    "onnxruntime_memory/reuse_sessions.py": Sample(last_outputs, with_dataset),
    "onnxruntime_memory/reuse_binding.py": Sample(
        last_outputs,
        with_dataset,
        original=(RuntimeError, "a run with no bound output is refused"),
    ),
    "onnxruntime_memory/halve_batch.py": Sample(
        batch_is_halved, lambda names: names.update(batch_size=8)
    ),
    "onnxruntime_memory/gpu_mem_limit.entry": Sample(provider_options_are_taken),
    "onnxruntime_memory/quantized_model.py": Sample(
        quantized("model_q.onnx"), with_quantization, needs="quantization"
    ),
    "onnxruntime_memory/release_outputs.py": Sample(outputs_are_released, with_session),
    "onnxruntime_memory/clear_bindings.py": Sample(bindings_are_cleared, with_binding),
    "onnxruntime_memory/destroy_session.py": Sample(session_is_gone, with_session),
    "cuda_out_of_memory/batch_size.py": Sample(outputs_of_random_images, with_numpy),
    "cuda_out_of_memory/fp16.py": Sample(
        half_precision_runs, original=(AttributeError, "SessionOptions has no enable_fp16")
    ),
}

#: Samples of training, with the level and whether there is a configuration.
TRAINED = {
    "onnxruntime_memory/layerwise_recompute.py": (1, False),
    "onnxruntime_memory/optimization_levels.sh": (2, False),
    "onnxruntime_memory/discover_plans.py": (0, False),
    "onnxruntime_memory/configuration.json": (0, True),
    "onnxruntime_memory/apply_configuration.sh": (0, True),
    "onnxruntime_memory/apply_configuration.py": (0, False),
    "onnxruntime_memory/all_bias_gelu.json": (0, True),
    "onnxruntime_memory/first_dropout.json": (0, True),
    "onnxruntime_memory/several_subgraphs.json": (0, True),
    "onnxruntime_memory/compromised.json": (0, True),
    "onnxruntime_memory/debug_information.py": (0, False),
    "onnxruntime_memory/enable_optimizer.sh": (1, False),
    "memory_recomputation/manual_selection.sh": (0, True),
    "memory_recomputation/manual_selection.json": (0, True),
}
NO_ORTMODULE = (ModuleNotFoundError, "ORTModule is a package of its own")
SAMPLES |= {
    file: Sample(trains(*what), with_torch_module, needs="torch", original=NO_ORTMODULE)
    for file, what in TRAINED.items()
}
SAMPLES["cuda_out_of_memory/gradient_accumulation.py"] = Sample(
    accumulates_gradients, with_training, needs="torch", original=NO_ORTMODULE
)

#: Samples that do not run yet, and the module they need. They are no passes.
NOT_YET = {
    "onnxruntime_memory/memory_arenas.cc": "the C++ interface",
}


def has_cuda() -> bool:
    """Returns whether torch and the package both see a CUDA device."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return False
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available()


def has_module(name: str) -> bool:
    """Returns whether the package has a submodule."""
    full = f"{PACKAGE}.{name}"
    try:
        return importlib.util.find_spec(full) is not None
    except ModuleNotFoundError:
        return False


def source(file: str) -> str:
    """Returns a sample as Python code of the package under test.

    An `.entry` is a line of a dictionary of provider options, a `.json` a configuration, and a
    `.sh` has lines that set the environment.
    """
    text = textwrap.dedent((HERE / file).read_text(encoding="utf-8"))
    if file.endswith(".entry"):
        return f"cuda_options = {{\n{text}}}\n"
    if file.endswith(".json"):
        return f"configuration = {text}"
    if file.endswith(".sh"):
        text = re.sub(r'^export (\w+)="?([^"\n]*)"?$', r'os.environ["\1"] = "\2"', text, flags=re.M)
        return f"import os\n{text}"
    return re.sub(r"^(import|from) onnxruntime\b", rf"\1 {PACKAGE}", text, flags=re.MULTILINE)


def execute(file: str, sample: Sample, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a sample and its check."""
    # Samples set variables, some of them as Python code does.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    sample.setup(names)
    stand_in = names.pop("stand_in", None)
    if stand_in is not None:
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(source(file), file, "exec", dont_inherit=True), names)
    names["warned"] = caught
    sample.check(names)


@pytest.fixture
def names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Names:
    """The namespace of a sample, in a folder that has `model.onnx`."""
    monkeypatch.chdir(tmp_path)
    write_model("model.onnx")
    return {"__name__": "__main__", "printed": lambda: capfd.readouterr().out}


@pytest.mark.parametrize("file", SAMPLES)
def test_sample(file: str, names: Names, monkeypatch: pytest.MonkeyPatch):
    sample = SAMPLES[file]
    if sample.needs == "CUDA":
        if not has_cuda():
            pytest.skip("needs torch and a CUDA device")
    elif sample.needs == "torch":
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed; `cargo xtask torch` adds it")
    elif sample.needs and not has_module(sample.needs):
        pytest.skip(f"not yet: needs {PACKAGE}.{sample.needs}")
    if OURS or sample.original is None:
        execute(file, sample, names, monkeypatch)
        return
    error, reason = sample.original
    with pytest.raises(error):
        execute(file, sample, names, monkeypatch)
    pytest.xfail(reason)


@pytest.mark.parametrize("file", NOT_YET)
def test_not_yet(file: str):
    pytest.skip(f"not yet: needs {NOT_YET[file]}")


def test_files_are_as_written():
    for file in [*SAMPLES, *NOT_YET]:
        document = (HERE / file).parent / "document.txt"
        text = (HERE / file).read_text(encoding="utf-8").rstrip("\n")
        assert text in document.read_text(encoding="utf-8"), file


def test_every_file_has_a_row():
    files = {path.relative_to(HERE).as_posix() for path in HERE.glob("*/*") if path.is_file()}
    files = {file for file in files if not file.endswith(("/document.txt", ".pyc"))}
    assert files == SAMPLES.keys() | NOT_YET.keys()


def test_every_block_is_a_file():
    """Each line of a document that is code by its look is in one of the files beside it."""
    code = re.compile(r"^\s*(import |from \w+ import|export |def |for |del |\w+ = |\w+\.\w+\(|\[$)")
    for document in HERE.glob("*/document.txt"):
        beside = [path for path in document.parent.iterdir() if path.name != document.name]
        files = "\n".join(path.read_text(encoding="utf-8") for path in beside if path.is_file())
        for line in document.read_text(encoding="utf-8").splitlines():
            if code.match(line):
                assert line.rstrip() in files, (document, line)
