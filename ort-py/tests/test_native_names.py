"""Methods of the native classes that programs reach through `_sess`, `_ortvalue` and `_tensor`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from harness import CPU, C, Gives, Raises, case, check, f32, ort, session, table

HOST, CUDA = C.OrtDevice(0, 0, 0), C.OrtDevice(1, 0, 0x10DE, 0)
NO_CUDA = Raises("RuntimeError", "CUDA|cuda|session.create_ortvalue_from_shape_and_type")
X = f32(1, 2)
VALUES = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
PLACES = np.array([[0, 1], [0, 1]], np.int32)


def native(name: str = "scale") -> Any:
    """A native session."""
    return session(name)._sess


# The names.

NAMES = {
    "": "copy_tensors get_all_opkernel_def get_registered_ep_kernel_defs is_dlpack_uint8_tensor"
    " pack_fp4_weights_for_cuda_moe_gemm quantize_matmul_bnb4 quantize_qdq_matmul_4bits",
    "InferenceSession": "create_ortvalue_from_shape_and_onnx_type"
    " create_ortvalue_from_shape_and_type end_profiling get_provider_graph_assignment_info"
    " get_provider_options get_providers get_profiling_start_time_ns get_tuning_results"
    " initialize_session input_epdevices input_meminfos inputs_meta"
    " is_webgpu_graph_capture_enabled model_meta output_meminfos outputs_meta"
    " overridable_initializers release_captured_graph run run_async run_with_iobinding"
    " run_with_ort_values run_with_ortvaluevector session_options set_ep_dynamic_options"
    " set_tuning_results webgpu_context_id",
    "OrtValue": "_is_webgpu_buffer as_sparse_tensor data_ptr data_type device_name element_type"
    " from_dlpack has_value is_sparse_tensor is_tensor is_tensor_sequence numpy"
    " ort_value_from_sparse_tensor ortvalue_from_numpy ortvalue_from_numpy_with_onnx_type"
    " ortvalue_from_shape_and_onnx_type ortvalue_from_shape_and_onnx_type_for_memory_info"
    " ortvalue_from_shape_and_type ortvalue_from_shape_and_type_for_memory_info shape"
    " tensor_size_in_bytes to_dlpack update_inplace",
    "SparseTensor": "blocksparse_from_numpy data_type dense_shape device_name format"
    " get_blocksparse_data get_coo_data get_csrc_data sparse_coo_from_numpy"
    " sparse_csr_from_numpy to_cuda values",
    "OrtMemType": "CPU CPU_INPUT CPU_OUTPUT DEFAULT",
}


@table("owner, names", [case(owner or "module", owner, names) for owner, names in NAMES.items()])
def test_names(owner: str, names: str) -> None:
    """What the original's classes have."""
    found = getattr(C, owner) if owner else C
    assert [name for name in names.split() if not hasattr(found, name)] == []


@table(
    "read, expected",
    [
        case("tuning", lambda s: s.get_tuning_results(), Gives([])),
        case("set_tuning", lambda s: s.set_tuning_results([], True), Gives(None)),
        case("capture", lambda s: s.is_webgpu_graph_capture_enabled(), Gives(False)),
        case("context", lambda s: s.webgpu_context_id(), Gives(-1)),
        case("release", lambda s: s.release_captured_graph(-1), Gives(None)),
        case("no_options", lambda s: s.set_ep_dynamic_options({}),
             Raises("RuntimeError", "No options were provided")),
        case("options", lambda s: s.set_ep_dynamic_options({"a": "b"}), Gives(None)),
        case("option_list", lambda s: s.set_ep_dynamic_options([]), Raises("TypeError")),
        case("device", lambda s: [d.ep_name for d in s.input_epdevices], Gives([CPU])),
        case("cpu_memory", lambda _: (int(C.OrtMemType.CPU), repr(C.OrtMemType.CPU)),
             Gives((-1, "<OrtMemType.CPU_OUTPUT: -1>"))),
        case("build", lambda _: "Build Info" in ort.get_build_info(), Gives(True)),
    ],
)  # fmt: skip
def test_session_says(read: Any, expected: Any) -> None:
    """What a native session says of itself."""
    check(expected, lambda: read(native()))


# Values.


def made(shape: Any, element: Any, device: Any = HOST) -> Any:
    value = C.OrtValue.ortvalue_from_shape_and_onnx_type(shape, element, device)
    return value.shape(), value.data_type()


@table(
    "call, expected",
    [
        case("float", lambda: made([2, 3], 1), Gives(([2, 3], "tensor(float)"))),
        case("bfloat16", lambda: made([2], 16), Gives(([2], "tensor(bfloat16)"))),
        case("int4", lambda: made([3], 22), Gives(([3], "tensor(int4)"))),
        case("string", lambda: made([2], 8), Raises("RuntimeError", "non-string")),
        case("unknown", lambda: made([2], 99), Raises("RuntimeError", "tensor type 99 is not supported")),
        case("undefined", lambda: made([2], 0), Raises("RuntimeError", "tensor type 0 is not supported")),
        case("negative", lambda: made([-1], 1), Raises("RuntimeError")),
        case("numpy_type", lambda: made([2], np.float32), Raises("TypeError")),
        case("cuda", lambda: made([2], 1, CUDA), NO_CUDA),
        case("no_webgpu",
             lambda: C.OrtValue.ortvalue_from_shape_and_onnx_type([2], 1, HOST)._is_webgpu_buffer(),
             Gives(False)),
        case("of_session",
             lambda: native().create_ortvalue_from_shape_and_onnx_type([2], 7, HOST).data_type(),
             Gives("tensor(int64)")),
        case("of_session_cuda",
             lambda: native().create_ortvalue_from_shape_and_onnx_type([2], 7, CUDA),
             Raises("RuntimeError", r"No session allocator found for Device:\[DeviceType:1 "
                    r"MemoryType:0 VendorId:4318 DeviceId:0 Alignment:0\]")),
        case("of_session_cuda_type",
             lambda: native().create_ortvalue_from_shape_and_type([2], np.float32, CUDA),
             Raises("RuntimeError", "No session allocator found for Device")),
        case("public_cuda",
             lambda: session("scale").create_ortvalue_from_shape_and_type([2], np.float32, "cuda"),
             Raises("RuntimeError", "No session allocator found for Device.*VendorId:4318")),
    ],
)  # fmt: skip
def test_value_of_shape(call: Any, expected: Any) -> None:
    """Values by shape and ONNX's number of a type."""
    check(expected, call)


# Runs.


def vector(*arrays: np.ndarray) -> Any:
    """A native vector of values over arrays."""
    values = C.OrtValueVector()
    for array in arrays:
        values.push_back(ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)
    return values


def run_on(feeds: Any, names: Any = ("y",), fetches: Any = None, feed_names: Any = ("x",)) -> Any:
    """The results of a run on vectors, by the native session and by the one around it."""
    options = ort.RunOptions()
    both = []
    for owner in (native(), session("scale")):
        out = vector(*(fetches or ()))
        owner.run_with_ortvaluevector(options, list(feed_names), feeds, list(names), out, [HOST] * len(names))
        both.append([value.numpy().tolist() for value in out])
    assert both[0] == both[1]
    return both[0]


@table(
    "call, expected",
    [
        case("run", lambda: run_on(vector(X)), Gives([[2.0, 4.0]])),
        case("twice", lambda: run_on(vector(X), ["y", "y"]), Gives([[2.0, 4.0], [2.0, 4.0]])),
        case("written", lambda: run_on(vector(X), fetches=[f32(0, 0)]), Gives([[2.0, 4.0]])),
        case("no_feed", lambda: run_on(vector()),
             Raises("InvalidArgument", "feed names has 1 elements, but feed has 0 elements")),
        case("two_feeds", lambda: run_on(vector(X, X)),
             Raises("InvalidArgument", "feed names has 1 elements, but feed has 2 elements")),
        case("more_fetches", lambda: run_on(vector(X), fetches=[f32(0, 0)] * 2),
             Raises("InvalidArgument", "fetch names has 1 elements, but fetch has 2 elements")),
        case("other_type", lambda: run_on(vector(X), fetches=[np.zeros(2, np.int64)]),
             Raises("InvalidArgument", r"Unexpected output data type. Actual: \(tensor\(int64\)\) , "
                    r"expected: \(tensor\(float\)\)")),
        case("other_shape", lambda: run_on(vector(X), fetches=[f32(0, 0, 0)]), Raises("InvalidArgument")),
        case("unknown_feed", lambda: run_on(vector(X), feed_names=["q"]),
             Raises("InvalidArgument", "Invalid input name: q")),
        case("unknown_fetch", lambda: run_on(vector(X), ["q"]),
             Raises("InvalidArgument", "Invalid output name:q")),
        case("no_fetch", lambda: run_on(vector(X), []),
             Raises("InvalidArgument", "At least one output should be requested")),
        case("no_fetch_but_a_value", lambda: run_on(vector(X), [], fetches=[f32(0, 0)]),
             Raises("InvalidArgument", "At least one output should be requested")),
        case("bytes", lambda: run_on(vector(X), [b"y"]), Gives([[2.0, 4.0]])),
        case("bytes_feed", lambda: run_on(vector(X), feed_names=[b"x"]), Gives([[2.0, 4.0]])),
        case("bytes_written", lambda: run_on(vector(X), [b"y"], fetches=[f32(0, 0)]),
             Gives([[2.0, 4.0]])),
        case("unknown_bytes", lambda: run_on(vector(X), [b"q"]),
             Raises("InvalidArgument", "Invalid output name:q")),
        case("text", lambda: native().run_with_ortvaluevector(
            ort.RunOptions(), ["x"], vector(X), "y", vector(), [HOST]), Raises("TypeError")),
    ],
)  # fmt: skip
def test_vector(call: Any, expected: Any) -> None:
    """Runs on vectors of values."""
    check(expected, call)


@table(
    "call, expected",
    [
        case("run", lambda: native().run([b"y"], {b"x": X}, None), Gives([X * 2])),
        case("values", lambda: [y.numpy() for y in native().run_with_ort_values(
            {b"x": ort.OrtValue.ortvalue_from_numpy(X)._ortvalue}, [b"y"], None)], Gives([X * 2])),
        case("unknown_feed", lambda: native().run(["y"], {b"q": X}, None),
             Raises("InvalidArgument", "Invalid input name: q")),
        case("not_utf8", lambda: native().run([b"\xff"], {"x": X}, None), Raises("UnicodeDecodeError")),
    ],
)  # fmt: skip
def test_names_of_bytes(call: Any, expected: Any) -> None:
    """The native session takes names as bytes."""
    check(expected, call)


def wait_for(names: Any, feed: Any, options: Any = None) -> Any:
    """What the callback of the native `run_async` is called with."""
    called, seen = threading.Event(), []

    def callback(*arguments: Any) -> None:
        seen.extend(arguments)
        called.set()

    assert native().run_async(names, feed, callback, "mine", options) is None
    assert called.wait(10)
    results, mine, error = seen
    return [result.tolist() for result in results], mine, error


@table(
    "call, expected",
    [
        case("run", lambda: wait_for(["y"], {"x": X}), Gives(([[2.0, 4.0]], "mine", ""))),
        case("options", lambda: wait_for(["y"], {"x": X}, ort.RunOptions()),
             Gives(([[2.0, 4.0]], "mine", ""))),
        case("unknown_input", lambda: wait_for(["y"], {"q": X}),
             Gives(([], "mine", "Invalid input name: q"))),
        case("unknown_output", lambda: wait_for(["q"], {"x": X})[2].replace(" ", ""),
             Gives("Invalidoutputname:q")),
        case("no_function", lambda: native().run_async(["y"], {"x": X}, 3, None, None),
             Raises("TypeError")),
        case("few", lambda: native().run_async(["y"], {"x": X}, print, None), Raises("TypeError")),
    ],
)  # fmt: skip
def test_async(call: Any, expected: Any) -> None:
    """The native `run_async`, whose arguments are all needed."""
    check(expected, call)


# Sparse tensors.


def coo() -> Any:
    return C.SparseTensor.sparse_coo_from_numpy([3, 4], f32(1, 2, 3), np.array([0, 5, 11]), HOST)


def csr() -> Any:
    inner, outer = np.array([0, 1, 3]), np.array([0, 1, 2, 3])
    return C.SparseTensor.sparse_csr_from_numpy([3, 4], f32(1, 2, 3), inner, outer, HOST)


def blocks(values: Any = VALUES, places: Any = PLACES, shape: Any = (8, 8), device: Any = HOST) -> Any:
    return C.SparseTensor.blocksparse_from_numpy(list(shape), values, places, device)


def back(sparse: Any) -> Any:
    return C.OrtValue.ort_value_from_sparse_tensor(sparse).as_sparse_tensor()


FORMAT = C.OrtSparseFormat
NOT_COO, NOT_CSR, NOT_BLOCKS = (
    Raises("RuntimeError", f"This sparse tensor does not contain {name} format")
    for name in ("COO", r"CSR\(C\)", "BlockSparse")
)


@table(
    "call, expected",
    [
        case("coo", lambda: coo().get_coo_data().indices().tolist(), Gives([0, 5, 11])),
        case("csr_inner", lambda: csr().get_csrc_data().inner().tolist(), Gives([0, 1, 3])),
        case("csr_outer", lambda: csr().get_csrc_data().outer().tolist(), Gives([0, 1, 2, 3])),
        case("coo_of_csr", lambda: csr().get_coo_data(), NOT_COO),
        case("csr_of_coo", lambda: coo().get_csrc_data(), NOT_CSR),
        case("blocks_of_coo", lambda: coo().get_blocksparse_data(), NOT_BLOCKS),
        case("coo_of_blocks", lambda: blocks().get_coo_data(), NOT_COO),
        case("csr_of_blocks", lambda: blocks().get_csrc_data(), NOT_CSR),
        case("format_coo", lambda: coo().format == FORMAT.ORT_SPARSE_COO, Gives(True)),
        case("format_csr", lambda: csr().format == FORMAT.ORT_SPARSE_CSRC, Gives(True)),
        case("format_blocks", lambda: blocks().format == FORMAT.ORT_SPARSE_BLOCK_SPARSE, Gives(True)),
        case("blocks", lambda: blocks().values(), Gives(VALUES)),
        case("blocks_shape", lambda: blocks().dense_shape(), Gives([8, 8])),
        case("blocks_type", lambda: blocks().data_type(), Gives("sparse_tensor(float)")),
        case("blocks_1d", lambda: blocks(VALUES.ravel()), Raises("RuntimeError", "3-D shape")),
        case("blocks_places_1d", lambda: blocks(places=PLACES.ravel()), Raises("RuntimeError", "2-D shape")),
        case("blocks_count", lambda: blocks(places=np.zeros((2, 3), np.int32)),
             Raises("RuntimeError", "index blocks: 3 to be equal to values blocks: 2")),
        case("blocks_cuda", lambda: blocks(device=CUDA), Raises("RuntimeError")),
        case("device", lambda: (coo().device_name(), csr().device_name()), Gives(("Cpu", "Cpu"))),
        case("to_cuda", lambda: coo().to_cuda(CUDA), Raises("RuntimeError", "Cuda is not available")),
        case("csr_back", lambda: back(csr()).format == FORMAT.ORT_SPARSE_CSRC, Gives(True)),
        case("csr_back_inner", lambda: back(csr()).get_csrc_data().inner().tolist(), Gives([0, 1, 3])),
        case("blocks_back", lambda: back(blocks()).values(), Gives(VALUES)),
        case("value_of_blocks", lambda: C.OrtValue.ort_value_from_sparse_tensor(blocks()).data_type(),
             Gives("sparse_tensor(float)")),
        case("dense", lambda: ort.OrtValue.ortvalue_from_numpy(X).as_sparse_tensor(),
             Raises("RuntimeError", "does not contain SparseTensor")),
    ],
)  # fmt: skip
def test_sparse(call: Any, expected: Any) -> None:
    """Sparse tensors in the three formats."""
    check(expected, call)


# What is not the native module's.


@table(
    "call, expected",
    [
        case("linux", lambda: ort._get_nvidia_dll_paths(False, True, False)[0],
             Gives(("nvidia", "cublas", "lib", "libcublasLt.so.12"))),
        case("linux_cudnn", lambda: ort._get_nvidia_dll_paths(False, cuda=False),
             Gives([("nvidia", "cudnn", "lib", "libcudnn.so.9")])),
        case("windows", lambda: len(ort._get_nvidia_dll_paths(True)), Gives(12)),
        case("none", lambda: ort._get_nvidia_dll_paths(False, False, False), Gives([])),
        case("major", lambda: [ort._extract_cuda_major_version(v) for v in ("12.8", "13", "")],
             Gives(["12", "13", "12"])),
        case("cufft", lambda: [ort._get_cufft_version(v) for v in ("11", "12", "13")],
             Gives(["11", "11", "12"])),
        case("version", lambda: ort._get_package_version("numpy") == np.__version__, Gives(True)),
        case("no_version", lambda: ort._get_package_version("no-such-package"), Gives(None)),
        case("root", lambda: ort._get_package_root("numpy").name, Gives("numpy")),
        case("no_root", lambda: ort._get_package_root("no-such-package"), Gives(None)),
        case("plugin", lambda: ort._get_cuda_plugin_ep_library_path(), Gives(None)),
    ],
)  # fmt: skip
def test_private_function(call: Any, expected: Any) -> None:
    """Functions of the package that programs call to preload CUDA's libraries."""
    check(expected, call)


def test_fp4_weights() -> None:
    """Two rows of four elements, [0 1 2 3] and [4 5 6 7], become four columns of two."""
    packed = np.array([[0x10, 0x32], [0x54, 0x76]], np.uint8)
    made = C.pack_fp4_weights_for_cuda_moe_gemm(packed, 2, 4)
    assert made.dtype == np.uint8 and made.tolist() == [0x40, 0x51, 0x62, 0x73]


@table(
    "n, k, text",
    [case("odd", 3, 4, "must be even"), case("shape", 4, 4, "must have shape")],
)
def test_fp4_weights_refused(n: int, k: int, text: str) -> None:
    """Sizes that do not fit."""
    packed = np.zeros((2, 2), np.uint8)
    check(Raises("ValueError", text), lambda: C.pack_fp4_weights_for_cuda_moe_gemm(packed, n, k))


# Metadata.


def changed(**fields: Any) -> Any:
    opened = ort.InferenceSession(session("scale")._model_bytes, providers=[CPU])
    meta = opened.get_modelmeta()
    for name, value in fields.items():
        setattr(meta, name, value)
    return [getattr(opened.get_modelmeta(), name) for name in fields]


@table(
    "fields, expected",
    [
        case("version", {"version": 7}, Gives([7])),
        case("texts", {"producer_name": "a", "graph_name": "b", "domain": "c"}, Gives(["a", "b", "c"])),
        case("map", {"custom_metadata_map": {"a": "b"}}, Gives([{"a": "b"}])),
        case("version_text", {"version": "7"}, Raises("TypeError")),
        case("map_of_ints", {"custom_metadata_map": {1: 2}}, Raises("TypeError")),
    ],
)
def test_metadata_is_writable(fields: dict[str, Any], expected: Any) -> None:
    """The fields of a session's metadata can be set, which changes nothing else."""
    check(expected, lambda: changed(**fields))
