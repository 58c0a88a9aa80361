"""The functions of the package and what its backend permits."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import DEVIATIONS, check
from more_models import A, Raises, data, native, row
from more_models import package  # noqa: F401  (the fixture `ort`)

LISTED = [
    "CUDAExecutionProvider", "TensorrtExecutionProvider", "OpenVINOExecutionProvider",
    "CoreMLExecutionProvider", "DmlExecutionProvider", "WebGpuExecutionProvider",
    "QNNExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider",
]

FACTS = [
    row("version", lambda o: re.match(r"\d+\.\d+", o.__version__) is not None, True),
    row("version_type", lambda o: type(o.__version__), str),
    row("version_again", lambda o: o.version == o.__version__, True),
    row("version_string", lambda o: o.get_version_string() == o.__version__, True),
    row("author", lambda o: type(o.__author__), str),
    row("package_name", lambda o: o.package_name in ("onnxruntime", "ort_runtime", "ort-runtime"),
        True),
    row("cuda_version", lambda o: type(o.cuda_version), str),
    row("doc", lambda o: type(o.__doc__), str),
    row("no_import_error", lambda o: o.import_capi_exception, None),
    row("available_list", lambda o: type(o.get_available_providers()), list),
    row("available_cpu_last", lambda o: o.get_available_providers()[-1], "CPUExecutionProvider"),
    row("available_is_known",
        lambda o: set(o.get_available_providers()) <= set(o.get_all_providers()), True),
    row("all_known", lambda o: [p for p in LISTED if p not in o.get_all_providers()], []),
    row("all_cpu_last", lambda o: o.get_all_providers()[-1], "CPUExecutionProvider"),
    row("fresh_list", lambda o: o.get_available_providers() is o.get_available_providers(), False),
    row("device", lambda o: o.get_device() in ("CPU", "GPU"), True),
    row("build_info", lambda o: len(o.get_build_info()) > 0, True),
    row("collective_ops", lambda o: o.has_collective_ops(), False),
    row("enable_telemetry", lambda o: o.enable_telemetry_events(), None),
    row("disable_telemetry", lambda o: o.disable_telemetry_events(), None),
    row("preload", lambda o: o.preload_dlls(), None),
    row("preload_keywords",
        lambda o: o.preload_dlls(cuda=False, cudnn=False, msvc=False, directory=""), None),
    row("no_training_mode", lambda o: hasattr(o, "TrainingSession"), False),
]


@pytest.mark.parametrize(("call", "expected"), FACTS)
def test_fact(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


SEEDS = [
    row("zero", 0, None),
    row("negative", -5, None),
    row("int32", 2**31, None),
    row("int64", 2**63 - 1, None),
    row("numpy", np.int64(3), None),
    row("bool", True, None),
    row("float", 1.5, Raises("TypeError")),
    row("str", "1", Raises("TypeError")),
    row("none", None, Raises("TypeError")),
]


@pytest.mark.parametrize(("given", "expected"), SEEDS)
def test_set_seed(request: Any, ort: ModuleType, given: Any, expected: Any):
    check(request, ort, lambda o: o.set_seed(given), expected)


def test_debug_info(ort: ModuleType, capsys: pytest.CaptureFixture[str]):
    assert ort.print_debug_info() is None
    assert ort.__version__ in capsys.readouterr().out


LIBRARIES = [
    row("missing", lambda o: o.register_execution_provider_library("x", "/none/x.so"),
        Raises("Fail", "Failed to load library /none/x.so")),
    row("unknown", lambda o: o.unregister_execution_provider_library("x"),
        Raises("Fail", "was not registered")),
    row("one_argument", lambda o: o.register_execution_provider_library("x"), Raises("TypeError")),
    row("kernels", lambda o: native(o).get_registered_ep_kernel_defs(), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), LIBRARIES)
def test_provider_library(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def cpu_device(ort: ModuleType) -> Any:
    return next(d for d in ort.get_ep_devices() if d.ep_name == "CPUExecutionProvider")


EP_DEVICES = [
    row("class", lambda o: type(cpu_device(o)) is o.OrtEpDevice, True),
    row("vendor", lambda o: type(cpu_device(o).ep_vendor), str),
    row("metadata", lambda o: type(cpu_device(o).ep_metadata), dict),
    row("version", lambda o: cpu_device(o).ep_metadata["version"] == o.__version__, True),
    row("options", lambda o: cpu_device(o).ep_options, {}),
    row("device_class", lambda o: type(cpu_device(o).device) is o.OrtHardwareDevice, True),
    row("device_type", lambda o: cpu_device(o).device.type == o.OrtHardwareDeviceType.CPU, True),
    row("device_vendor", lambda o: type(cpu_device(o).device.vendor), str),
    row("device_vendor_id", lambda o: type(cpu_device(o).device.vendor_id), int),
    row("device_id", lambda o: type(cpu_device(o).device.device_id), int),
    row("device_metadata", lambda o: type(cpu_device(o).device.metadata), dict),
    row("stream", lambda o: cpu_device(o).create_sync_stream(), Raises("RuntimeError")),
    row("read_only", lambda o: setattr(cpu_device(o), "ep_name", "x"), Raises("AttributeError")),
    row("constructor", lambda o: o.OrtEpDevice(), Raises("TypeError")),
    row("no_node_arg", lambda o: o.NodeArg(), Raises("TypeError")),
    row("no_metadata", lambda o: o.ModelMetadata(), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), EP_DEVICES)
def test_ep_device(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def backend(ort: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ort.__name__}.backend")


NOT_PERMITTED = Raises("RuntimeError", "SessionOptions attribute '.*' is not permitted via")

#: Options of `prepare`: name, value of it, whether it is permitted.
SESSION_OPTIONS = [
    row("enable_cpu_mem_arena", lambda o: True, True),
    row("enable_mem_pattern", lambda o: True, True),
    row("enable_mem_reuse", lambda o: True, True),
    row("execution_mode", lambda o: o.ExecutionMode.ORT_SEQUENTIAL, True),
    row("execution_order", lambda o: o.ExecutionOrder.DEFAULT, True),
    row("graph_optimization_level", lambda o: o.GraphOptimizationLevel.ORT_ENABLE_ALL, True),
    row("inter_op_num_threads", lambda o: 1, True),
    row("intra_op_num_threads", lambda o: 1, True),
    row("log_severity_level", lambda o: 3, True),
    row("log_verbosity_level", lambda o: 0, True),
    row("logid", lambda o: "x", True),
    row("use_deterministic_compute", lambda o: True, True),
    row("use_per_session_threads", lambda o: True, True),
    row("unheard_of", lambda o: 1, True),
    row("enable_profiling", lambda o: False, NOT_PERMITTED),
    row("optimized_model_filepath", lambda o: "o.onnx", NOT_PERMITTED),
    row("profile_file_prefix", lambda o: "x", NOT_PERMITTED),
    row("register_custom_ops_library", lambda o: "x", NOT_PERMITTED),
    row("add_session_config_entry", lambda o: "x", NOT_PERMITTED),
    row("add_provider", lambda o: "x", NOT_PERMITTED),
    row("has_providers", lambda o: 1, NOT_PERMITTED),
    row("set_load_cancellation_flag", lambda o: 1, NOT_PERMITTED),
]


@pytest.mark.parametrize(("given", "expected"), SESSION_OPTIONS)
def test_backend_option(request: Any, ort: ModuleType, given: Any, expected: Any):
    name = request.node.callspec.id

    def call(o: ModuleType) -> bool:
        rep = backend(o).prepare(data("both"), **{name: given(o)})
        return [y.shape for y in rep.run(A)] == [(2, 3), (2, 3)]

    check(request, ort, call, expected)


BOTH = [(A * A).tolist(), (-A).tolist()]
RUN_OPTION = Raises("RuntimeError", "RunOptions attribute '.*' is not permitted via")


def rep_run(given: Any, **options: Any) -> Any:
    """Returns a call: what a prepared model makes of `given`."""
    return lambda o: [y.tolist() for y in backend(o).prepare(data("both")).run(given, **options)]


RUNS = [
    row("array", rep_run(A), BOTH),
    row("list", rep_run([A]), BOTH),
    row("log_severity_level", rep_run(A, log_severity_level=3), BOTH),
    row("log_verbosity_level", rep_run(A, log_verbosity_level=1), BOTH),
    row("logid", rep_run(A, logid="x"), BOTH),
    row("only_execute_path_to_fetches", rep_run(A, only_execute_path_to_fetches=True), BOTH),
    row("unheard_of", rep_run(A, foo=1), BOTH),
    row("terminate", rep_run(A, terminate=True), RUN_OPTION),
    row("add_run_config_entry", rep_run(A, add_run_config_entry="x"), RUN_OPTION),
    row("double", rep_run(A.astype(float)),
        Raises("InvalidArgument", "Unexpected input data type")),
    row("missing_file", lambda o: backend(o).prepare("zz.onnx"), Raises("NoSuchFile")),
]


@pytest.mark.parametrize(("call", "expected"), RUNS)
def test_backend_run(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize("device", ["cpu", "TPU", "foo", ""])
def test_backend_refuses_device(ort: ModuleType, device: str):
    assert not backend(ort).supports_device(device)
    with pytest.raises(RuntimeError, match=f"Incompatible device expected '{device}'"):
        backend(ort).prepare(data("both"), device)


def test_deviations_name_tests():
    """Each listed deviation names a test file and a function in it."""
    for key in DEVIATIONS:
        file, _, test = key.partition("::")
        source = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"\ndef {test.partition('[')[0]}(" in source, key
