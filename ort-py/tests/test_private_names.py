"""Names outside the public ones that packages import, and the low-level session."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from more_deviations import check
from more_models import A, Raises, data, native, row, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)

F = np.float32
SQUARES = (A * A).tolist()

MODULES = [
    "capi", "capi._pybind_state", "capi.onnxruntime_pybind11_state",
    "capi.onnxruntime_inference_collection", "capi.onnxruntime_validation",
    "capi.build_and_package_info", "capi._ld_preload", "backend", "backend.backend",
    "backend.backend_rep", "datasets",
]


@pytest.mark.parametrize("name", MODULES)
def test_module(ort: ModuleType, name: str):
    found = importlib.import_module(f"{ort.__name__}.{name}")
    assert found.__name__ == f"{ort.__name__}.{name}"


#: What packages import from the native module, and what the API listing names there.
NATIVE = """
    Fail InvalidArgument NoSuchFile NoModel EngineError RuntimeException InvalidProtobuf ModelLoaded
    NotImplemented InvalidGraph EPFail ModelLoadCanceled ModelRequiresCompilation NotFound
    DeviceReset AdapterFormat ArenaExtendStrategy ExecutionMode ExecutionOrder
    GraphOptimizationLevel InferenceSession LoraAdapter ModelCompiler ModelMetadata NodeArg
    OrtAllocatorType OrtArenaCfg OrtCompileApiFlags OrtDevice OrtDeviceMemoryType OrtEpAssignedNode
    OrtEpAssignedSubgraph OrtEpContextData OrtEpContextDataBuffer OrtEpDevice
    OrtExecutionProviderDevicePolicy OrtExternalInitializerInfo OrtHardwareDevice
    OrtHardwareDeviceType OrtMemType OrtMemoryInfo OrtMemoryInfoDeviceType OrtSparseFormat
    OrtSyncStream OrtValue OrtValueVector RunOptions SessionIOBinding SessionOptions
    SparseBlockSparseView SparseCooView SparseCsrView SparseTensor copy_tensors
    create_and_register_allocator create_and_register_allocator_v2 disable_telemetry_events
    enable_telemetry_events get_all_operator_schema get_all_opkernel_def get_all_providers
    get_available_providers get_build_info get_default_session_options get_device get_ep_devices
    get_registered_ep_kernel_defs get_session_initializer get_version_string has_collective_ops
    is_dlpack_uint8_tensor kNextPowerOfTwo kSameAsRequested opkernel quantize_matmul_2bits
    quantize_matmul_4bits quantize_matmul_8bits quantize_matmul_bnb4 quantize_qdq_matmul_2bits
    quantize_qdq_matmul_4bits register_execution_provider_library schemadef
    set_default_logger_severity set_default_logger_verbosity set_global_thread_pool_sizes set_seed
    unregister_execution_provider_library
""".split()


@pytest.mark.parametrize("name", NATIVE)
def test_native_name(ort: ModuleType, name: str):
    reexported = importlib.import_module(f"{ort.__name__}.capi._pybind_state")
    assert getattr(reexported, name) is getattr(native(ort), name)


COLLECTION = """
    AdapterFormat IOBinding InferenceSession ModelCompiler OrtDevice OrtDeviceVendorId OrtValue
    SparseTensor copy_tensors
""".split()


@pytest.mark.parametrize("name", COLLECTION)
def test_collection_name(ort: ModuleType, name: str):
    assert getattr(ort, name) is getattr(collection(ort), name)


def collection(ort: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ort.__name__}.capi.onnxruntime_inference_collection")


#: Native classes and functions that the package shows as they are.
SAME = """
    ExecutionMode ExecutionOrder GraphOptimizationLevel LoraAdapter ModelMetadata NodeArg
    OrtAllocatorType OrtArenaCfg OrtCompileApiFlags OrtDeviceMemoryType OrtEpDevice
    OrtHardwareDevice OrtHardwareDeviceType OrtMemType OrtMemoryInfo OrtMemoryInfoDeviceType
    OrtSparseFormat
    OrtExternalInitializerInfo RunOptions SessionIOBinding SessionOptions get_all_providers
    get_available_providers get_device set_seed set_default_logger_severity
""".split()


@pytest.mark.parametrize("name", SAME)
def test_public_name_is_native(ort: ModuleType, name: str):
    assert getattr(ort, name) is getattr(native(ort), name)


#: Classes that the package wraps.
WRAPPED = "AdapterFormat InferenceSession ModelCompiler OrtDevice OrtValue SparseTensor".split()


@pytest.mark.parametrize("name", WRAPPED)
def test_public_class_wraps(ort: ModuleType, name: str):
    assert getattr(ort, name) is not getattr(native(ort), name)
    assert getattr(ort, name).__module__ == collection(ort).__name__


ATTRIBUTES = [
    row("model_path", lambda s: s._model_path, None),
    row("model_bytes", lambda s: s._model_bytes, data("square")),
    row("providers", lambda s: s._providers, ["CPUExecutionProvider"]),
    row("provider_options", lambda s: s._provider_options, {"CPUExecutionProvider": {}}),
    row("inputs_meta", lambda s: [i.name for i in s._inputs_meta], ["x"]),
    row("outputs_meta", lambda s: [i.name for i in s._outputs_meta], ["y"]),
    row("overridable", lambda s: s._overridable_initializers, []),
    row("model_meta", lambda s: s._model_meta.graph_name, "square"),
    row("enable_fallback", lambda s: bool(s._enable_fallback), True),
    row("fallback_providers", lambda s: s._fallback_providers, ["CPUExecutionProvider"]),
    row("profiling_start", lambda s: s._profiling_start_time_ns, 0),
    row("native", lambda s: type(s._sess).__name__, "InferenceSession"),
    row("native_inputs", lambda s: [i.name for i in s._sess.inputs_meta], ["x"]),
    row("options", lambda s: type(s._sess_options).__name__, "SessionOptions"),
    row("tuning", lambda s: s.get_tuning_results(), []),
    row("set_tuning", lambda s: s.set_tuning_results([]), None),
    row("dynamic_options", lambda s: s.set_ep_dynamic_options({"a": "b"}), None),
    row("captured_graph", lambda s: s.release_captured_graph(), None),
    row("assignment", lambda s: s.get_provider_graph_assignment_info(),
        Raises("Fail", "session.record_ep_graph_assignment_info")),
]


@pytest.mark.parametrize(("read", "expected"), ATTRIBUTES)
def test_session_attribute(request: Any, ort: ModuleType, read: Any, expected: Any):
    check(request, ort, lambda o: read(session(o, "square")), expected)


def test_assignment(ort: ModuleType):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    (part,) = session(ort, "square", options).get_provider_graph_assignment_info()
    assert part.ep_name == "CPUExecutionProvider"
    assert [(n.domain, n.op_type) for n in part.get_nodes()] == [("", "Mul")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [row("chain", "chain", ["Mul", "Relu"]), row("branches", "branches", ["Relu", "Neg", "If"])],
)
def test_assignment_of_each_node(ort: ModuleType, name: str, expected: list[str]):
    """Nodes of the model, whatever they are fused to, those of branches before theirs."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    parts = session(ort, name, options).get_provider_graph_assignment_info()
    assert {part.ep_name for part in parts} == {"CPUExecutionProvider"}
    assert [[node.op_type for node in part.get_nodes()] for part in parts] == [[op] for op in expected]


#: Nodes of a graph, their names at level disabled, and those from level basic on.
ASSIGNED = [
    row("folded", "[sum] d = Add(c, c) [last] y = Add(x, d)", ["sum", "last"], ["last"]),
    row("identity", "[same] d = Identity(x) [last] y = Neg(d)", ["same", "last"], ["last"]),
    row("shape", "[shape] s = Shape(x) [zeros] z = ConstantOfShape(s) [last] y = Add(x, z)",
        ["shape", "zeros", "last"], ["last"]),
    row("none_folded", "[first] d = Neg(x) [last] y = Add(d, c)", ["first", "last"], ["first", "last"]),
    row("unnamed", "d = Neg(x) [named] e = Abs(d) y = Exp(e)", ["", "named", ""], ["", "named", ""]),
    row("label_of_another", "[Exp_2] d = Neg(x) [Neg_0] e = Abs(d) y = Tanh(e)",
        ["Exp_2", "Neg_0", ""], ["Exp_2", "Neg_0", ""]),
    row("unnamed_folded", "d = Add(c, c) y = Add(x, d)", ["", ""], [""]),
]


@pytest.mark.parametrize("level", [0, 1, 2, 99])
@pytest.mark.parametrize(("nodes", "unoptimized", "optimized"), ASSIGNED)
def test_assignment_at_level(
    ort: ModuleType, nodes: str, unoptimized: list[str], optimized: list[str], level: int
):
    """Nodes that are computed while loading are not assigned; names are the model's."""
    head = '<ir_version: 10, opset_import: ["" : 20]>\nmain (float[2] x) => (float[2] y)'
    model = onnx.parser.parse_model(f"{head} <float[2] c = {{1, 2}}> {{{nodes}}}")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel(level)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    opened = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    parts = opened.get_provider_graph_assignment_info()
    assert [[node.name for node in part.get_nodes()] for part in parts] == [
        [name] for name in (optimized if level else unoptimized)
    ]


NAMES = ["CUDAExecutionProvider", "CPUExecutionProvider"]
CUDA, CPU = NAMES


def normalized(providers: Any, options: Any) -> Any:
    """Returns a call: what `check_and_normalize_provider_args` makes of the arguments."""

    def call(ort: ModuleType) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return collection(ort).check_and_normalize_provider_args(providers, options, NAMES)

    return call


SEQUENCE = Raises("ValueError", "should be a sequence")
LENGTHS = Raises("ValueError", "should be the same length")
TUPLES = Raises("ValueError", r"must be either strings or \(string, dict\) tuples")

PROVIDERS = [
    row("none", normalized(None, None), ([], [])),
    row("empty", normalized([], None), ([], [])),
    row("none_with_options", normalized(None, [{}]), ([], [])),
    row("name", normalized([CPU], None), ([CPU], [{}])),
    row("names", normalized(NAMES, None), (NAMES, [{}, {}])),
    row("tuple", normalized([(CUDA, {"device_id": 1})], None), ([CUDA], [{"device_id": "1"}])),
    row("mixed", normalized([(CUDA, {"a": True}), CPU], None), (NAMES, [{"a": "True"}, {}])),
    row("parallel", normalized([CUDA], [{"a": 1}]), ([CUDA], [{"a": "1"}])),
    row("tuple_of_names", normalized((CPU,), None), ([CPU], [{}])),
    row("duplicate", normalized([CPU, CPU], None), ([CPU], [{}])),
    row("unknown", normalized(["Foo"], None), (["Foo"], [{}])),
    row("lengths", normalized([CPU], [{}, {}]), LENGTHS),
    row("no_names", normalized([], [{}]), LENGTHS),
    row("tuple_and_options", normalized([(CPU, {})], [{}]),
        Raises("ValueError", "Only string values for 'providers' are supported")),
    row("short_tuple", normalized([(CUDA,)], None), TUPLES),
    row("no_dict", normalized([(CUDA, 3)], None), TUPLES),
    row("number", normalized([3], None), TUPLES),
    row("set", normalized({CPU}, None), SEQUENCE),
    row("options_dict", normalized([CUDA], {"a": 1}), SEQUENCE),
    row("options_number", normalized([CUDA], [3]), Raises("ValueError", "values must be dicts")),
    row("str", normalized(CPU, None), ([CPU], [{}])),
]


@pytest.mark.parametrize(("call", "expected"), PROVIDERS)
def test_provider_arguments(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize("providers", [row("unknown", ["Foo"]), row("duplicate", [CPU, CPU])])
def test_provider_warning(ort: ModuleType, providers: list[str]):
    with pytest.warns(UserWarning, match="is not in available provider names|Duplicate provider"):
        collection(ort).check_and_normalize_provider_args(providers, None, NAMES)


DEVICE_TYPES = [
    ("cpu", 0), ("cuda", 1), ("gpu", 1), ("webgpu", 1), ("cann", 3), ("npu", 3), ("dml", 4),
]


@pytest.mark.parametrize(("name", "number"), [row(n, n, v) for n, v in DEVICE_TYPES])
def test_device_type(ort: ModuleType, name: str, number: int):
    assert collection(ort).get_ort_device_type(name) == number


def test_unknown_device_type(ort: ModuleType):
    with pytest.raises(Exception, match="Unsupported device type: foo"):
        collection(ort).get_ort_device_type("foo")


def low_level(
    ort: ModuleType, providers: Any = (), options: Any = (), off: Any = frozenset()
) -> Any:
    """Returns an initialized native session."""
    made = native(ort).InferenceSession(native(ort).SessionOptions(), data("square"), False, False)
    made.initialize_session(list(providers), list(options), set(off))
    return made


def uninitialized(ort: ModuleType) -> Any:
    return native(ort).InferenceSession(native(ort).SessionOptions(), data("square"), False, False)


def ort_values(ort: ModuleType) -> Any:
    feed = {"x": value(ort, A)._ortvalue}
    out = low_level(ort).run_with_ort_values(feed, ["y"], None)
    return type(out).__name__, [v.numpy().tolist() for v in out]


LOW_LEVEL = [
    row("run", lambda o: low_level(o).run(["y"], {"x": A}, None)[0].tolist(), SQUARES),
    row("run_nothing", lambda o: low_level(o).run([], {"x": A}, None),
        Raises("InvalidArgument", "At least one output should be requested")),
    row("ort_values", ort_values, ("OrtValueVector", [SQUARES])),
    row("inputs", lambda o: [i.shape for i in low_level(o).inputs_meta], [["n", 3]]),
    row("outputs", lambda o: [i.name for i in low_level(o).outputs_meta], ["y"]),
    row("overridable", lambda o: low_level(o).overridable_initializers, []),
    row("meta", lambda o: low_level(o).model_meta.graph_name, "square"),
    row("providers", lambda o: low_level(o).get_providers(), [CPU]),
    row("provider_options", lambda o: low_level(o).get_provider_options(), {CPU: {}}),
    row("profiling", lambda o: low_level(o).end_profiling(), ""),
    row("profiling_start", lambda o: low_level(o).get_profiling_start_time_ns, 0),
    row("options", lambda o: type(low_level(o).session_options) is o.SessionOptions, True),
    row("memory_infos", lambda o: len(low_level(o).input_meminfos), 1),
    row("output_memory_infos", lambda o: len(low_level(o).output_meminfos), 1),
    row("cpu", lambda o: low_level(o, [CPU], [{}]).get_providers(), [CPU]),
    row("disabled", lambda o: low_level(o, [CPU], [{}], {"ConstantFolding"}).get_providers(),
        [CPU]),
    row("unknown_provider", lambda o: low_level(o, ["Foo"], [{}]),
        Raises("RuntimeError", "Unknown Provider Type: Foo")),
    row("too_early", lambda o: uninitialized(o).run(["y"], {"x": A}, None),
        Raises("Fail", "Session not initialized")),
    row("inputs_early", lambda o: [i.name for i in uninitialized(o).inputs_meta], ["x"]),
    row("list_of_disabled", lambda o: uninitialized(o).initialize_session([CPU], [{}], ["a"]),
        Raises("TypeError")),
    row("default_options", lambda o: type(native(o).get_default_session_options())
        is o.SessionOptions, True),
    row("initializer", lambda o: native(o).get_session_initializer() is not None, True),
]


@pytest.mark.parametrize(("call", "expected"), LOW_LEVEL)
def test_low_level(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


K, N, BLOCK = 64, 8, 16
MATRIX = np.random.default_rng(0).standard_normal((K, N)).astype(F)


def quantized(ort: ModuleType, bits: int, symmetric: bool, dtype: Any = F) -> np.ndarray:
    """Returns `MATRIX` quantized by blocks of rows and back."""
    blocks, levels = K // BLOCK, 1 << bits
    packed = np.zeros((N, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.zeros(N * blocks, dtype)
    zeros = np.zeros((N, (blocks * bits + 7) // 8), np.uint8)
    quantize = getattr(native(ort), f"quantize_matmul_{bits}bits")
    quantize(packed, MATRIX.astype(dtype), scales, zeros, BLOCK, N, K, symmetric)
    codes = unpacked(packed, bits).reshape(N, blocks, BLOCK).astype(F)
    points = unpacked(zeros, bits)[:, :blocks].astype(F)
    if symmetric:
        points[:] = levels // 2
    back = (codes - points[..., None]) * scales.reshape(N, blocks, 1).astype(F)
    return back.reshape(N, K).T


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes of a packed array, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [row("symmetric", True), row("asymmetric", False)])
@pytest.mark.parametrize("dtype", [row("float", F), row("half", np.float16)])
def test_quantize_matmul(ort: ModuleType, bits: int, symmetric: bool, dtype: Any):
    blocks = np.abs(MATRIX).reshape(K // BLOCK, BLOCK, N).max(1).repeat(BLOCK, 0)
    step = 2 * blocks / ((1 << bits) - 1) if not symmetric else blocks / (1 << (bits - 1))
    error = np.abs(quantized(ort, bits, symmetric, dtype) - MATRIX)
    assert (error <= 1.01 * step + 1e-2).all()


CALLS = [
    row("InferenceSession",
        "path_or_bytes sess_options providers provider_options kwargs"),
    row("InferenceSession.run", "output_names input_feed run_options"),
    row("InferenceSession.run_async",
        "output_names input_feed callback user_data run_options"),
    row("InferenceSession.run_with_iobinding", "iobinding run_options"),
    row("InferenceSession.run_with_ort_values", "output_names input_dict_ort_values run_options"),
    row("InferenceSession.run_with_ortvaluevector",
        "run_options feed_names feeds fetch_names fetches fetch_devices"),
    row("InferenceSession.set_providers", "providers provider_options"),
    row("InferenceSession.set_tuning_results", "results error_on_invalid"),
    row("IOBinding.bind_cpu_input", "name arr_on_cpu"),
    row("IOBinding.bind_input", "name device_type device_id element_type shape buffer_ptr"),
    row("IOBinding.bind_output", "name device_type device_id element_type shape buffer_ptr"),
    row("IOBinding.bind_ortvalue_input", "name ortvalue"),
    row("IOBinding.bind_ortvalue_output", "name ortvalue"),
    row("OrtValue.ortvalue_from_numpy", "numpy_obj device_type device_id vendor_id"),
    row("OrtValue.ortvalue_from_numpy_with_onnx_type", "data onnx_element_type"),
    row("OrtValue.ortvalue_from_shape_and_type",
        "shape element_type device_type device_id vendor_id memory_info"),
    row("OrtValue.from_dlpack", "data"),
    row("OrtValue.update_inplace", "data"),
    row("OrtDevice.make", "ort_device_name device_id vendor_id"),
    row("SparseTensor.sparse_coo_from_numpy", "dense_shape values coo_indices ort_device"),
    row("SparseTensor.sparse_csr_from_numpy",
        "dense_shape values inner_indices outer_indices ort_device"),
    row("ModelCompiler",
        "sess_options input_model_path_or_bytes embed_compiled_data_into_model"
        " external_initializers_file_path external_initializers_size_threshold flags"
        " graph_optimization_level get_initializer_location_func"),
    row("AdapterFormat", "adapter"),
    row("AdapterFormat.read_adapter", "file_path"),
    row("AdapterFormat.export_adapter", "file_path"),
    row("copy_tensors", "src dst stream"),
    row("preload_dlls", "cuda cudnn msvc directory"),
    row("print_debug_info", ""),
]


@pytest.mark.parametrize("parameters", CALLS)
def test_signature(request: Any, ort: ModuleType, parameters: str):
    found: Any = ort
    for part in request.node.callspec.id.split("."):
        found = getattr(found, part)
    names = [n for n in inspect.signature(found).parameters if n != "self"]
    assert names == parameters.split()


def test_find_spec(ort: ModuleType):
    assert importlib.util.find_spec(ort.__name__) is not None


def test_package_info(ort: ModuleType):
    info = importlib.import_module(f"{ort.__name__}.capi.build_and_package_info")
    assert info.package_name == ort.package_name


def labelled(**entries: str) -> bytes:
    """A model without nodes whose metadata has what compilers write for providers."""
    from onnx import helper

    made = helper.make_model(helper.make_graph([], "empty", [], []))
    texts = {f"ep_compatibility_info.{name}": text for name, text in entries.items()}
    helper.set_model_props(made, texts)
    return made.SerializeToString()


NO_MODEL = Raises("RuntimeError", "Protobuf parsing failed")

COMPATIBILITY = [
    row("found", (labelled(Other="1", Mine="v1 driver 2"), "Mine"), "v1 driver 2"),
    row("other", (labelled(Other="1"), "Mine"), None),
    row("none", (labelled(), "Mine"), None),
    row("no_model", (b"this is not a model", "Mine"), NO_MODEL),
    row("cut", (labelled(Mine="1")[:-1], "Mine"), NO_MODEL),
    row("no_bytes", (b"", "Mine"), Raises("RuntimeError", "Invalid argument provided to")),
    row("no_name", (labelled(), ""), Raises("RuntimeError", "Invalid argument provided to")),
]


@pytest.mark.parametrize(("arguments", "expected"), COMPATIBILITY)
def test_compatibility_info(
    request: Any, ort: ModuleType, tmp_path: Any, arguments: tuple[bytes, str], expected: Any
):
    model, name = arguments
    of_bytes = native(ort).get_compatibility_info_from_model_bytes
    check(request, ort, lambda _: of_bytes(model, name), expected)
    if model:
        path = tmp_path / "model.onnx"
        path.write_bytes(model)
        of_file = native(ort).get_compatibility_info_from_model
        check(request, ort, lambda _: of_file(str(path), name), expected)


@pytest.mark.parametrize(
    ("provider", "text"),
    [
        ("NoSuchProvider", "Cannot find execution provider NoSuchProvider"),
        ("CPUExecutionProvider", "CPUExecutionProvider does not support TunableOp"),
    ],
)
def test_tuning_results_are_refused(ort: ModuleType, provider: str, text: str):
    results = [{"ep": provider, "results": {}, "validators": {}}]
    with pytest.raises(RuntimeError, match=text):
        session(ort, "square").set_tuning_results(results, error_on_invalid=True)
    session(ort, "square").set_tuning_results(results)
