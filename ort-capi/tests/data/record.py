"""Makes the models of the tests, and records what ONNX Runtime says and computes.

    python record.py LIBRARY

LIBRARY is ONNX Runtime's shared library, in its Python package. Writes `models/*.onnx`,
`errors.json` (code and text of each refusal) and `results.json` (outputs, as bytes in hex).
"""

import ctypes
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto as T
from onnx import helper as h

HERE = Path(__file__).parent
SLOTS = re.findall(r"^    (\w+) (?:-|\w+)$", (HERE / "../../src/table.rs").read_text(), re.M)


class Api:
    """The table of a library: functions by name, and statuses as (code, text)."""

    def __init__(self, library):
        library = ctypes.CDLL(library)
        library.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(library.OrtGetApiBase()[0])
        self.table = ctypes.cast(get_api(31), ctypes.POINTER(ctypes.c_void_p))

    def function(self, name, *types, result=ctypes.c_void_p):
        return ctypes.CFUNCTYPE(result, *types)(self.table[SLOTS.index(name)])

    def call(self, name, *arguments):
        types, values = [], []
        for value in arguments:
            kind = {int: ctypes.c_int64, bytes: ctypes.c_char_p}.get(type(value), ctypes.c_void_p)
            types.append(kind)
            values.append(value)
        status = self.function(name, *types)(*values)
        if not status:
            return None
        code = self.function("GetErrorCode", ctypes.c_void_p, result=ctypes.c_int)(status)
        text = self.function("GetErrorMessage", ctypes.c_void_p, result=ctypes.c_char_p)(status)
        self.function("ReleaseStatus", ctypes.c_void_p, result=None)(status)
        return code, text.decode()

    def make(self, name, *arguments):
        """Calls a function whose last argument is the result."""
        made = ctypes.c_void_p()
        status = self.call(name, *arguments, ctypes.byref(made))
        assert status is None, (name, status)
        return made

    def refusal(self, name, *arguments):
        return self.call(name, *arguments, ctypes.byref(ctypes.c_void_p()))


def model(nodes, inputs, outputs, **arguments):
    graph = h.make_graph(nodes, "graph", inputs, outputs, arguments.pop("initializers", []))
    imports = [h.make_opsetid("", 21), h.make_opsetid("ai.onnx.ml", 3)]
    made = h.make_model(graph, opset_imports=imports, ir_version=10, **arguments)
    onnx.checker.check_model(made)
    return made


def info(name, kind, shape):
    return h.make_tensor_value_info(name, kind, shape)


def models():
    add = h.make_node("Add", ["x", "x"], ["y"])
    yield "add", model([add], [info("x", T.FLOAT, [2, 3])], [info("y", T.FLOAT, [2, 3])])
    yield "add_3", model([add], [info("x", T.FLOAT, [3])], [info("y", T.FLOAT, [3])])
    for number in range(1, 24):
        kind = h.make_node("Identity", ["x"], ["y"])
        ports = [info(name, number, ["n", 3]) for name in "xy"]
        yield f"identity_{number}", model([kind], ports[:1], ports[1:])
    yield "two", two()
    add_scalar = h.make_node("Add", ["x", "s"], ["y"])
    yield "scalar", model([add_scalar], [info("x", T.FLOAT, [3]), info("s", T.FLOAT, [])], [info("y", T.FLOAT, [3])])
    split = h.make_node("SplitToSequence", ["x"], ["y"], axis=0, keepdims=1)
    sequence = h.make_tensor_sequence_value_info("y", T.FLOAT, None)
    yield "sequence", model([split], [info("x", T.FLOAT, ["n", 2])], [sequence])
    for name, labels in {"ints": {"classlabels_int64s": [7, 3]}, "strings": {"classlabels_strings": ["b", "a"]}}.items():
        zipped = h.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", **labels)
        key = T.INT64 if name == "ints" else T.STRING
        kind = h.make_sequence_type_proto(h.make_map_type_proto(key, h.make_tensor_type_proto(T.FLOAT, [])))
        yield f"map_{name}", model([zipped], [info("x", T.FLOAT, ["n", 2])], [h.make_value_info("y", kind)])


def two():
    """Two outputs, names of sizes, an input with a default, metadata."""
    nodes = [h.make_node("Mul", ["x", "scale"], ["scaled"]), h.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)]
    inputs = [info("x", T.FLOAT, ["batch", None, 2]), info("scale", T.FLOAT, [2])]
    outputs = [info("scaled", T.FLOAT, ["batch", None, 2]), info("sum", T.FLOAT, [])]
    scale = h.make_tensor("scale", T.FLOAT, [2], [1, 10])
    made = model(nodes, inputs, outputs, initializers=[scale], producer_name="a producer", domain="a.domain",
                 model_version=42, doc_string="a description")
    made.graph.doc_string = "of the graph"
    h.set_model_props(made, {"key": "value", "other": "ünï"})
    return made


def errors(api):
    env = api.make("CreateEnv", 2, b"record")
    options = api.make("CreateSessionOptions")
    allocator = api.make("GetAllocatorWithDefaultOptions")
    memory = api.make("CreateCpuMemoryInfo", 0, 0)
    add = (HERE / "models/add.onnx").read_bytes()
    session = api.make("CreateSessionFromArray", env, add, len(add), options)

    def tensor(array, kind, dims=None, call=api.make):
        dims = list(array.shape) if dims is None else dims
        sizes = (ctypes.c_int64 * len(dims))(*dims)
        data = ctypes.c_void_p(array.ctypes.data)
        return call("CreateTensorWithDataAsOrtValue", memory, data, array.nbytes, sizes, len(dims), kind)

    def run(inputs, outputs, given=()):
        array = lambda kind, values: (kind * max(1, len(values)))(*values)
        return api.call(
            "Run", session, None,
            array(ctypes.c_char_p, [name.encode() for name in inputs]),
            array(ctypes.c_void_p, [value and value.value for value in inputs.values()]), len(inputs),
            array(ctypes.c_char_p, [name.encode() for name in outputs]), len(outputs),
            array(ctypes.c_void_p, [value.value for value in given] or [None] * len(outputs)))

    arrays = [np.zeros(shape, kind) for shape, kind in
              [((2, 3), "float32"), ((2, 3), "float64"), ((3,), "float32"), ((2, 4), "float32")]]
    right, double, rank, size = (tensor(array, kind) for array, kind in zip(arrays, [1, 11, 1, 1]))
    yield "unknown input", run({"nope": right}, ["y"])
    yield "null input", run({"x": None}, ["y"])
    yield "unknown output", run({"x": right}, ["nope"])
    yield "no outputs", run({"x": right}, [])
    for what, value in {"type": double, "rank": rank, "size": size}.items():
        yield f"input of wrong {what}", run({"x": value}, ["y"])
        yield f"output of wrong {what}", run({"x": right}, ["y"], [value])
    yield "no such file", api.refusal("CreateSession", env, b"/nonexistent/model.onnx", options)
    yield "garbage bytes", api.refusal("CreateSessionFromArray", env, b"not a model", 11, options)
    yield "no bytes", api.refusal("CreateSessionFromArray", env, b"", 0, options)
    yield "buffer too small", tensor(arrays[0], 1, [4, 3], api.refusal)
    yield "negative size", tensor(arrays[0], 1, [-1, 3], api.refusal)
    yield "element type 16777215", tensor(arrays[0], 16777215, None, api.refusal)
    yield "level 55", api.call("SetSessionGraphOptimizationLevel", options, 55)
    yield "mode 7", api.call("SetSessionExecutionMode", options, 7)
    yield "empty key", api.call("AddSessionConfigEntry", options, b"", b"1")
    yield "long key", api.call("AddSessionConfigEntry", options, b"k" * 1025, b"1")
    yield "long value", api.call("AddSessionConfigEntry", options, b"k", b"v" * 8193)
    yield "number of a key", api.call("AddSessionConfigEntry", options, b"session.intra_op_num_threads", b"x")
    yield "flag of a key", api.call("AddSessionConfigEntry", options, b"session.enable_mem_pattern", b"x")
    yield "absent provider", api.call("SessionOptionsAppendExecutionProvider", options, b"QNN", None, None, 0)
    yield "CUDA options", api.refusal("CreateCUDAProviderOptions")
    yield "TensorRT options", api.refusal("CreateTensorRTProviderOptions")
    yield "memory info", api.refusal("CreateMemoryInfo", b"Nope", 0, 0, 0)
    yield "index of an input", api.refusal("SessionGetInputName", session, 7, allocator)
    yield "arena key", api.refusal("CreateArenaCfgV2", (ctypes.c_char_p * 1)(b"nope"), (ctypes.c_size_t * 1)(1), 1)
    yield "unregister", api.call("UnregisterAllocator", env, memory)
    sizes = (ctypes.c_int64 * 1)(2)
    strings = api.make("CreateTensorAsOrtValue", allocator, sizes, 1, 8)
    texts = (ctypes.c_char_p * 3)(b"a", b"bb", b"ccc")
    yield "too many strings", api.call("FillStringTensor", strings, texts, 3)
    assert api.call("FillStringTensor", strings, texts, 2) is None
    buffer, offsets = ctypes.create_string_buffer(8), (ctypes.c_size_t * 2)()
    yield "string buffer", api.call("GetStringTensorContent", strings, buffer, 2, offsets, 2)
    yield "string offsets", api.call("GetStringTensorContent", strings, buffer, 3, offsets, 1)
    yield "string index", api.refusal("GetStringTensorElementLength", strings, 9)
    yield "string element", api.call("GetStringTensorElement", strings, 1, 1, buffer)
    place = (ctypes.c_int64 * 2)(5, 0)
    yield "location", api.refusal("TensorAt", right, place, 2)
    yield "rank of a location", api.refusal("TensorAt", right, place, 1)
    for what, values, kind in [("no elements", [], 2), ("two types", [right, double], 2), ("one value", [right], 3),
                               ("float keys", [rank, rank], 3), ("matrices", [right, right], 3), ("kind 9", [right], 9)]:
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[value.value for value in values])
        yield f"value of {what}", api.refusal("CreateValue", pointers, len(values), kind)
    yield "count of a tensor", api.refusal("GetValueCount", right)
    yield "element of a tensor", api.refusal("GetValue", right, 0, allocator)
    binding = api.make("CreateIoBinding", session)
    yield "bound input", api.call("BindInput", binding, b"nope", right)


def results():
    """Random elements of each type through Identity, and the model with two outputs."""
    random = np.random.default_rng(7)
    for number in range(1, 24):
        path = str(HERE / f"models/identity_{number}.onnx")
        try:
            onnxruntime.InferenceSession(path)
            supported = True
        except Exception:
            supported = False
        yield f"identity_{number}", {"supported": supported}
    x = random.standard_normal((2, 2, 2), dtype=np.float32)
    feeds = {
        "two": {"x": x},
        "two_scaled": {"x": x, "scale": np.float32([2, 3])},
        "scalar": {"x": np.float32([1, 2, 3]), "s": np.float32([0.5])},
    }
    for name, feed in feeds.items():
        session = onnxruntime.InferenceSession(str(HERE / f"models/{name.split('_')[0]}.onnx"))
        outputs = session.run(None, feed)
        yield name, {
            "inputs": {key: value.tobytes().hex() for key, value in feed.items()},
            "outputs": [output.tobytes().hex() for output in outputs],
        }


def main():
    (HERE / "models").mkdir(exist_ok=True)
    for name, made in models():
        onnx.save(made, HERE / f"models/{name}.onnx")
    recorded = {name: {"code": code, "text": text} for name, (code, text) in errors(Api(sys.argv[1]))}
    write("errors.json", recorded)
    write("results.json", dict(results()))


def write(name, content):
    (HERE / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


main()
