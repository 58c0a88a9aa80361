"""Makes the models of the tests, and records what ONNX Runtime says and computes.

    python record.py LIBRARY

LIBRARY is ONNX Runtime's shared library, in its Python package. Writes `models/*.onnx`,
`errors.json` (code and text of each refusal), `editor.json` (those of models made by calls, and
results), `compile.json` (those of the compile API), `sparse.json` (those of sparse tensors),
`others.json`, `adapters/*.onnx_adapter` and `results.json` (outputs, as bytes in hex).
"""

import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto as T
from onnx import helper as h

HERE = Path(__file__).parent
SLOTS = re.findall(r"^    (\w+) (?:-|\w+)$", (HERE / "../../src/table.rs").read_text(), re.M)


EDITOR = re.findall(r"^    (\w+): slot", (HERE / "../../src/model_editor.rs").read_text(), re.M)


class Api:
    """The table of a library: functions by name, and statuses as (code, text)."""

    def __init__(self, library):
        library = ctypes.CDLL(library)
        library.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(library.OrtGetApiBase()[0])
        self.table = ctypes.cast(get_api(31), ctypes.POINTER(ctypes.c_void_p))
        self.editor = ctypes.cast(self.function("GetModelEditorApi")(), ctypes.POINTER(ctypes.c_void_p))

    def function(self, name, *types, result=ctypes.c_void_p):
        table, place = (self.editor, EDITOR.index(name)) if name in EDITOR else (self.table, SLOTS.index(name))
        return ctypes.CFUNCTYPE(result, *types)(table[place])

    def call(self, name, *arguments):
        types, values = [], []
        for value in arguments:
            kinds = {int: ctypes.c_int64, bytes: ctypes.c_char_p, bool: ctypes.c_bool}
            kind = kinds.get(type(value), ctypes.c_void_p)
            types.append(kind)
            values.append(value)
        return self.refused(self.function(name, *types)(*values))

    def refused(self, status):
        """The code and text of a status, which is released."""
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


class Editor:
    """Models made by calls, and what the calls say."""

    def __init__(self, api):
        self.api, self.call, self.make, self.refusal = api, api.call, api.make, api.refusal
        self.env = api.make("CreateEnv", 3, b"record")
        self.options = api.make("CreateSessionOptions")
        self.memory = api.make("CreateCpuMemoryInfo", 0, 0)

    def array(self, handles):
        return (ctypes.c_void_p * max(1, len(handles)))(*[handle and handle.value for handle in handles])

    def texts(self, texts):
        return (ctypes.c_char_p * max(1, len(texts)))(*[text.encode() for text in texts])

    def type(self, kind, dims):
        tensor = self.make("CreateTensorTypeAndShapeInfo")
        assert self.call("SetTensorElementType", tensor, kind) is None
        assert self.call("SetDimensions", tensor, (ctypes.c_int64 * len(dims))(*dims), len(dims)) is None
        return self.make("CreateTensorTypeInfo", tensor)

    def value(self, name, kind, dims):
        return self.make("CreateValueInfo", name.encode(), self.type(kind, dims))

    def node(self, operator, inputs, outputs, attributes=(), domain=""):
        return self.make("CreateNode", operator.encode(), domain.encode(), b"node", self.texts(inputs), len(inputs),
                         self.texts(outputs), len(outputs), self.array(attributes), len(attributes))

    def tensor(self, array, kind=T.FLOAT):
        sizes, data = (ctypes.c_int64 * array.ndim)(*array.shape), ctypes.c_void_p(array.ctypes.data)
        return self.make("CreateTensorWithDataAsOrtValue", self.memory, data, array.nbytes, sizes, array.ndim, kind)

    def owned(self):
        allocator, sizes = self.make("GetAllocatorWithDefaultOptions"), (ctypes.c_int64 * 1)(2)
        return self.make("CreateTensorAsOrtValue", allocator, sizes, 1, T.FLOAT)

    def model(self, opsets, graph):
        versions = (ctypes.c_int * max(1, len(opsets)))(*opsets.values())
        model = self.make("CreateModel", self.texts(opsets), versions, len(opsets))
        assert self.call("AddGraphToModel", model, graph) is None
        return model

    def graph(self, nodes, inputs=None, outputs=None):
        graph = self.make("CreateGraph")
        for node in nodes:
            assert self.call("AddNodeToGraph", graph, node) is None
        for function, values in {"SetGraphInputs": inputs, "SetGraphOutputs": outputs}.items():
            assert values is None or self.call(function, graph, self.array(values), len(values)) is None
        return graph

    def gemm(self, opsets, right="Y", domain=""):
        """A model of one product with a weight, which stays in our memory."""
        self.weight = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
        alpha = ctypes.c_float(2)
        attribute = self.make("CreateOpAttr", b"alpha", ctypes.byref(alpha), 1, 3)
        graph = self.graph([self.node("Gemm", ["X", right], ["Z"], [attribute], domain)],
                           [self.value("X", T.FLOAT, [3, 4])], [self.value("Z", T.FLOAT, [3, 8])])
        assert self.call("AddInitializerToGraph", graph, b"Y", self.tensor(self.weight), True) is None
        return self.model(opsets, graph)

    def change(self, opsets, inputs=True, domain=""):
        """A cast before the input of the model `add`."""
        to = ctypes.c_int64(T.FLOAT)
        attribute = self.make("CreateOpAttr", b"to", ctypes.byref(to), 1, 1)
        cast = self.node("Cast", ["i"], ["x"], [attribute], domain)
        return self.model(opsets, self.graph([cast], [self.value("i", T.INT64, [2, 3])] if inputs else None))

    def unfinished(self):
        model = (HERE / "models/add.onnx").read_bytes()
        return self.make("CreateModelEditorSessionFromArray", self.env, model, len(model), self.options)

    def run(self, session, name, value, output):
        outputs = (ctypes.c_void_p * 1)()
        status = self.call("Run", session, None, self.texts([name]), self.array([value]), 1, self.texts([output]), 1, outputs)
        return status, ctypes.c_void_p(outputs[0])

    def bytes(self, value, count):
        data = self.make("GetTensorData", value)
        return ctypes.string_at(data, count).hex()


def editor_errors(e):
    graph, info = e.make("CreateGraph"), e.value("v", T.FLOAT, [1])
    plain = e.type(T.FLOAT, [1])
    yield "value without a name", e.refusal("CreateValueInfo", b"", plain)
    yield "value without a type", e.refusal("CreateValueInfo", b"v", None)
    yield "value of a sequence", e.refusal("CreateValueInfo", b"v", e.make("CreateSequenceTypeInfo", plain))
    yield "dimension -2", e.call("SetDimensions", e.make("CreateTensorTypeAndShapeInfo"), (ctypes.c_int64 * 1)(-2), 1)
    yield "input twice", e.call("SetGraphInputs", graph, e.array([info, info]), 2)
    yield "null input", e.call("SetGraphInputs", graph, e.array([None]), 1)
    assert e.call("SetGraphInputs", graph, e.array([info]), 1) is None
    yield "input that is an output", e.call("SetGraphOutputs", graph, e.array([info]), 1)
    node = e.node("Relu", ["v"], ["w"])
    assert e.call("AddNodeToGraph", graph, node) is None
    yield "node twice", e.call("AddNodeToGraph", graph, node)
    yield "null node", e.call("AddNodeToGraph", graph, None)
    weight = e.owned()
    assert e.call("AddInitializerToGraph", graph, b"a", weight, False) is None
    yield "initializer of a known name", e.call("AddInitializerToGraph", graph, b"a", e.owned(), False)
    yield "initializer twice", e.call("AddInitializerToGraph", graph, b"b", weight, False)
    yield "small initializer", e.call("AddInitializerToGraph", graph, b"c", e.owned(), True)
    yield "null initializer", e.call("AddInitializerToGraph", graph, b"c", None, False)
    model = e.model({"": 18}, graph)
    yield "second graph", e.call("AddGraphToModel", model, e.make("CreateGraph"))
    yield "no operator sets", e.refusal("CreateSessionFromModel", e.env, e.gemm({}), e.options)
    yield "missing value", e.refusal("CreateSessionFromModel", e.env, e.gemm({"": 18}, "missing"), e.options)
    session, input = e.unfinished(), e.tensor(np.zeros((2, 3), np.float32))
    yield "unused domain", e.refusal("SessionGetOpsetForDomain", session, b"unused")
    yield "run too early", e.run(session, "x", input, "y")[0]
    yield "other operator set", e.call("ApplyModelToModelEditorSession", session, e.change({"": 11}))
    yield "written input", e.call("ApplyModelToModelEditorSession", e.unfinished(), e.change({}, False))
    assert e.call("FinalizeModelEditorSession", session, e.options, None) is None
    yield "change too late", e.call("ApplyModelToModelEditorSession", session, e.change({}))
    for number in [0, 7, 8, 9]:
        yield f"attribute of type {number}", e.refusal("CreateOpAttr", b"a", None, 0, number)
    ints = e.make("CreateOpAttr", b"a", (ctypes.c_int64 * 2)(1, 2), 2, 2)
    size = ctypes.c_size_t()
    for what, number in {"ints": 2, "a float": 3, "a graph": 7}.items():
        yield f"memory for {what}", e.call("ReadOpAttr", ints, number, None, 0, ctypes.byref(size))
    memory = ctypes.create_string_buffer(8)
    yield "no int", e.call("ReadOpAttr", ints, 1, memory, 8, ctypes.byref(size))
    yield "no float", e.call("ReadOpAttr", ints, 3, memory, 8, ctypes.byref(size))
    yield "no tensor", e.refusal("OpAttr_GetTensorAttributeAsOrtValue", ints)


def editor_results(e):
    session = e.make("CreateSessionFromModel", e.env, e.gemm({"ai.onnx": 18}), e.options)
    input = np.arange(12, dtype=np.float32).reshape(3, 4)
    status, output = e.run(session, "X", e.tensor(input), "Z")
    assert status is None, status
    yield "gemm", {"input": input.tobytes().hex(), "output": e.bytes(output, 96)}
    session = e.unfinished()
    assert e.call("ApplyModelToModelEditorSession", session, e.change({})) is None
    assert e.call("FinalizeModelEditorSession", session, e.options, None) is None
    input = np.arange(6, dtype=np.int64).reshape(2, 3)
    status, output = e.run(session, "i", e.tensor(input, T.INT64), "y")
    assert status is None, status
    yield "cast", {"input": input.tobytes().hex(), "output": e.bytes(output, 24)}


COMPILE = re.findall(r"(?:entry|slot)\((?:ModelCompilationOptions_)?(\w+)\),", (HERE / "../../src/compile_api.rs").read_text())


def compile_errors(api):
    """What the compile API refuses."""
    table = ctypes.cast(api.function("GetCompileApi")(), ctypes.POINTER(ctypes.c_void_p))
    env, session = api.make("CreateEnv", 3, b"record"), api.make("CreateSessionOptions")
    allocator, memory, size = api.make("GetAllocatorWithDefaultOptions"), ctypes.c_void_p(), ctypes.c_size_t()
    place, length = ctypes.byref(memory), ctypes.byref(size)

    def call(name, *arguments):
        kinds = {int: ctypes.c_size_t, bytes: ctypes.c_char_p}
        types = [kinds.get(type(value), ctypes.c_void_p) for value in arguments]
        return api.refused(ctypes.CFUNCTYPE(ctypes.c_void_p, *types)(table[COMPILE.index(name)])(*arguments))

    def options():
        made = ctypes.c_void_p()
        assert call("CreateModelCompilationOptionsFromSessionOptions", env, session, ctypes.byref(made)) is None
        return made

    empty, model = options(), options()
    content = (HERE / "models/two.onnx").read_bytes()
    assert call("SetInputModelFromBuffer", model, content, len(content)) is None
    yield "no input", call("CompileModel", env, empty)
    yield "empty input path", call("SetInputModelPath", empty, b"")
    yield "null input", call("SetInputModelFromBuffer", empty, None, 0)
    yield "input of no bytes", call("SetInputModelFromBuffer", empty, b"x", 0)
    yield "null model", call("SetInputModel", empty, None)
    yield "empty output path", call("SetOutputModelPath", empty, b"")
    yield "null output memory", call("SetOutputModelBuffer", empty, allocator, None, length)
    yield "null output size", call("SetOutputModelBuffer", empty, allocator, place, None)
    yield "null allocator", call("SetOutputModelBuffer", empty, None, place, length)
    yield "empty initializers path", call("SetOutputModelExternalInitializersFile", empty, b"", 1)
    yield "null write function", call("SetOutputModelWriteFunc", empty, None, None)
    yield "null location function", call("SetOutputModelGetInitializerLocationFunc", empty, None, None)
    yield "level 55", call("SetGraphOptimizationLevel", empty, 55)
    yield "empty folder", call("SetEpContextBinaryInformation", empty, b"", b"x")
    yield "empty name", call("SetEpContextBinaryInformation", empty, b"/folder/", b"")
    yield "folder without end", call("SetEpContextBinaryInformation", empty, b"/folder", b"x")
    yield "no output", call("CompileModel", env, model)
    assert call("SetInputModelPath", empty, b"/nonexistent.onnx") is None
    yield "absent input", call("CompileModel", env, empty)
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.onnx"
        known.touch()
        assert call("SetOutputModelPath", model, f"{folder}/none/out.onnx".encode()) is None
        absent = call("CompileModel", env, model)
        yield "absent folder", (absent[0], absent[1].replace(folder, "FOLDER"))
        assert call("SetOutputModelPath", model, str(known).encode()) is None
        assert call("SetFlags", model, 2) is None
        replaced = call("CompileModel", env, model)
        yield "known file", (replaced[0], replaced[1].replace(folder, "FOLDER"))
        assert call("SetFlags", model, 1) is None
        yield "nothing compiled", call("CompileModel", env, model)
    assert call("SetFlags", model, 0) is None
    assert call("SetOutputModelBuffer", model, allocator, place, length) is None
    assert call("SetInputModelFromBuffer", model, b"garbage!", 8) is None
    yield "garbage", call("CompileModel", env, model)


def sparse_errors(api):
    """What filling sparse tensors refuses."""
    allocator, memory = api.make("GetAllocatorWithDefaultOptions"), api.make("CreateCpuMemoryInfo", 0, 0)
    longs = lambda values: (ctypes.c_int64 * max(1, len(values)))(*values)
    floats = (ctypes.c_float * 8)(1, 2, 3, 4, 5, 6, 7, 8)

    def fill(kind, dense, shape, *indices):
        value = api.make("CreateSparseTensorAsOrtValue", allocator, longs(dense), len(dense), T.FLOAT)
        arguments = []
        if kind == "BlockSparse":
            arguments = [longs(indices[0]), len(indices[0]), (ctypes.c_int32 * len(indices[1]))(*indices[1])]
        else:
            for places in indices:
                arguments += [longs(places), len(places)]
        return api.call(f"FillSparseTensor{kind}", value, memory, longs(shape), len(shape), floats, *arguments)

    yield "linear index too large", fill("Coo", [9, 9], [3], [2, 3, 81])
    yield "linear index below zero", fill("Coo", [9, 9], [3], [-1, 3, 8])
    yield "pair too large", fill("Coo", [9, 9], [3], [0, 2, 0, 9, 9, 0])
    yield "too few indices", fill("Coo", [9, 9], [3], [5, 3])
    yield "pairs of three dimensions", fill("Coo", [2, 2, 2], [3], [0, 0, 0, 1, 1, 1])
    yield "negative shape of values", fill("Coo", [9, 9], [-3], [1, 2, 3])
    yield "too few rows", fill("Csr", [3, 3], [3], [0, 1, 2], [0, 1, 3])
    yield "first row not at zero", fill("Csr", [3, 3], [3], [0, 1, 2], [1, 1, 2, 3])
    yield "last row too small", fill("Csr", [3, 3], [3], [0, 1, 2], [0, 1, 2, 2])
    yield "rows that go back", fill("Csr", [3, 3], [3], [0, 1, 2], [0, 2, 1, 3])
    yield "column too large", fill("Csr", [3, 3], [3], [0, 1, 3], [0, 1, 2, 3])
    yield "column below zero", fill("Csr", [3, 3], [3], [0, -1, 2], [0, 1, 2, 3])
    yield "too few columns", fill("Csr", [3, 3], [3], [0, 1], [0, 1, 2, 3])
    yield "rows of a vector", fill("Csr", [9], [3], [0, 1, 2], [0, 1, 2, 3])
    yield "rows without columns", fill("Csr", [3, 3], [0], [], [0, 0, 0, 0])
    yield "blocks of another number", fill("BlockSparse", [8, 16], [1, 2, 4], [2, 1], [0, 1])
    yield "block indices of one dimension", fill("BlockSparse", [8, 16], [2, 2, 2], [4], [0, 0, 0, 1])
    yield "block indices of one row", fill("BlockSparse", [8, 16], [2, 2, 2], [1, 2], [0, 0])
    yield "blocks of two dimensions", fill("BlockSparse", [8, 16], [2, 4], [2, 2], [0, 0, 0, 1])


def other_errors(api):
    """What functions of other topics refuse."""
    env, options, threads = (api.make("CreateEnv", 3, b"record"), api.make("CreateSessionOptions"),
                             api.make("CreateThreadingOptions"))
    devices, count, number = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
    assert api.call("GetEpDevices", env, ctypes.byref(devices), ctypes.byref(count)) is None
    device = ctypes.c_void_p(ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0])
    model = (HERE / "models/add.onnx").read_bytes()
    session = api.make("CreateSessionFromArray", env, model, len(model), options)
    yield "opaque type", api.refusal("CreateOpaqueValue", b"d", b"t", b"data", 4)
    yield "set GPU", api.call("SetCurrentGpuDeviceId", 0)
    yield "get GPU", api.call("GetCurrentGpuDeviceId", ctypes.byref(number))
    yield "CANN options", api.refusal("CreateCANNProviderOptions")
    yield "oneDNN options", api.refusal("CreateDnnlProviderOptions")
    yield "ROCM options", api.refusal("CreateROCMProviderOptions")
    yield "empty affinity", api.call("SetGlobalIntraOpThreadAffinity", threads, b"")
    yield "long affinity", api.call("SetGlobalIntraOpThreadAffinity", threads, b"x" * 5000)
    yield "null affinity", api.call("SetGlobalIntraOpThreadAffinity", threads, None)
    yield "absent library", api.call("RegisterExecutionProviderLibrary", env, b"x", b"/nonexistent.so")
    yield "unknown library", api.call("UnregisterExecutionProviderLibrary", env, b"x")
    yield "stream of the CPU", api.refusal("CreateSyncStreamForEpDevice", device, None)
    yield "no recorded assignment", api.refusal("Session_GetEpGraphAssignmentInfo", session, ctypes.byref(count))
    yield "null weightless model", api.call("SessionOptionsSetWeightlessSourceModelBuffer", options, None, 0)
    yield "null environment options", api.refusal("CreateEnvWithOptions", None)


def adapters():
    """Adapters for the model `two`, and one that ONNX Runtime refuses."""
    (HERE / "adapters").mkdir(exist_ok=True)
    scale, scalar = np.float32([2, 3]), np.array(0.5, np.float32)
    for name, parameters in {"scale": {"scale": scale}, "unknown": {"scale": scale, "nope": scale},
                             "scalar": {"s": scalar}}.items():
        adapter = onnxruntime.AdapterFormat()
        values = {key: onnxruntime.OrtValue.ortvalue_from_numpy(value) for key, value in parameters.items()}
        adapter.set_parameters(values)
        adapter.set_adapter_version(255)
        adapter.export_adapter(str(HERE / f"adapters/{name}.onnx_adapter"))


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
    api = Api(sys.argv[1])
    refusals = lambda cases: {name: {"code": code, "text": text} for name, (code, text) in cases}
    write("errors.json", refusals(errors(api)))
    adapters()
    write("others.json", refusals(other_errors(api)))
    write("sparse.json", refusals(sparse_errors(api)))
    write("compile.json", refusals(compile_errors(api)))
    editor = Editor(api)
    write("editor.json", {"errors": refusals(editor_errors(editor)), "results": dict(editor_results(editor))})
    write("results.json", dict(results()))


def write(name, content):
    (HERE / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


main()
