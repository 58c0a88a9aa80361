"""IO binding."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from more_deviations import check
from more_models import A, Raises, native, row, run_program, session, value
from more_models import package  # noqa: F401  (the fixture `ort`)

F = np.float32
SQUARES = (A * A).tolist()
ONES, FIVES = np.ones(2, F), np.full(2, 5, F)


def bound(prepare: Any, model: str = "square") -> Any:
    """Returns a call: the outputs of a run with what `prepare(binding, ort)` bound."""

    def call(ort: ModuleType) -> Any:
        opened = session(ort, model)
        binding = opened.io_binding()
        prepare(binding, ort)
        assert opened.run_with_iobinding(binding) is None
        return [o.tolist() for o in binding.copy_outputs_to_cpu()]

    return call


def with_array(make: Any, model: str = "square") -> Any:
    """Returns a call: the outputs with `make(ort)` bound by `bind_cpu_input`."""

    def prepare(binding: Any, ort: ModuleType) -> None:
        binding.bind_cpu_input("x", make(ort))
        binding.bind_output("y")

    return bound(prepare, model)


NOT_AN_ARRAY = Raises("RuntimeError", "Unable to create OrtValue from the given python object")
DTYPE = Raises("RuntimeError", "Error in execution: .*Unexpected input data type")
RANK = Raises("RuntimeError", "Error in execution: .*Invalid rank for input: x Got: 1 Expected: 2")
DIMS = Raises("RuntimeError", "Error in execution: .*Got invalid dimensions for input: x")

ARRAYS = [
    row("array", with_array(lambda o: A), [SQUARES]),
    row("fortran", with_array(lambda o: np.asfortranarray(A)), [SQUARES]),
    row("reversed", with_array(lambda o: A[::-1]), [SQUARES[::-1]]),
    row("strided", with_array(lambda o: np.repeat(A, 2, axis=1)[:, ::2]), [SQUARES]),
    row("broadcast", with_array(lambda o: np.broadcast_to(F(2), (2, 3))), [[[4] * 3] * 2]),
    row("empty", with_array(lambda o: np.zeros((0, 3), F)), [[]]),
    row("big_endian", with_array(lambda o: A.astype(">f4")), [SQUARES]),
    row("double", with_array(lambda o: A.astype(float)), DTYPE),
    row("int64", with_array(lambda o: A.astype(np.int64)), DTYPE),
    row("strings_for_floats", with_array(lambda o: np.array(["a"])), DTYPE),
    row("rank", with_array(lambda o: A[0]), RANK),
    row("dimension", with_array(lambda o: A[:, :2].copy()), DIMS),
    row("list", with_array(lambda o: A.tolist()), [SQUARES]),
    row("tuple", with_array(lambda o: tuple(A.tolist())), NOT_AN_ARRAY),
    row("none", with_array(lambda o: None), NOT_AN_ARRAY),
    row("number", with_array(lambda o: 1.0), NOT_AN_ARRAY),
    row("ort_value", with_array(lambda o: value(o, A)), NOT_AN_ARRAY),
    row("strings", with_array(lambda o: np.array(["a", "b"], object), "strings"), [["a", "b"]]),
    row("scalar", with_array(lambda o: np.array(3, F), "square_scalar"), [9]),
]


@pytest.mark.parametrize(("call", "expected"), ARRAYS)
def test_bind_cpu_input(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def pointer(device: Any = "cpu", dtype: Any = F, shape: Any = (2, 3), ptr: Any = None) -> Any:
    """Returns a call: the outputs with the memory of `A` bound by its address."""

    def prepare(binding: Any, ort: ModuleType) -> None:
        binding.bind_input("x", device, 0, dtype, shape, A.ctypes.data if ptr is None else ptr)
        binding.bind_output("y")

    return bound(prepare)


NO_DEVICE = Raises("Exception", "Unsupported device type: foo")

POINTERS = [
    row("class", pointer(), [SQUARES]),
    row("dtype", pointer(dtype=np.dtype(F)), [SQUARES]),
    row("name", pointer(dtype="float32"), [SQUARES]),
    row("code", pointer(dtype="f4"), [SQUARES]),
    row("onnx", pointer(dtype=1), [SQUARES]),
    row("double", pointer(dtype=float, shape=[1, 3]), DTYPE),
    row("bfloat16", pointer(dtype=16), DTYPE),
    row("unknown_onnx", pointer(dtype=99),
        Raises("RuntimeError", "tensor type 99 is not supported")),
    row("nonsense", pointer(dtype="foo"), Raises("RuntimeError", "Not a valid numpy type")),
    row("onnx_string", pointer(dtype=8), Raises("RuntimeError", "non-string")),
    row("str_class", pointer(dtype=str), Raises("RuntimeError", "non-string")),
    row("list", pointer(shape=[2, 3]), [SQUARES]),
    row("array_shape", pointer(shape=np.array([2, 3])), [SQUARES]),
    row("range_shape", pointer(shape=range(2, 4)), [SQUARES]),
    row("part", pointer(shape=[1, 3]), [SQUARES[:1]]),
    row("no_rows", pointer(shape=[0, 3]), [[]]),
    row("rank", pointer(shape=[6]), RANK),
    row("dimension", pointer(shape=[3, 2]), DIMS),
    row("negative", pointer(shape=[-1, 3]), Raises("RuntimeError")),
    row("int_shape", pointer(shape=5), Raises("TypeError")),
    row("no_shape", pointer(shape=None), Raises("TypeError")),
    row("str_shape", pointer(shape=["a"]), Raises("TypeError")),
    row("float_shape", pointer(shape=[2.0, 3.0]), Raises("TypeError")),
    row("str_pointer", pointer(ptr="0"), Raises("TypeError")),
    row("unknown_device", pointer("foo"), NO_DEVICE),
    row("upper_device", pointer("CPU"), [SQUARES]),
    row("no_device", pointer(None), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), POINTERS)
def test_bind_input(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def to_device(*arguments: Any, **keywords: Any) -> Any:
    """Returns a call: the outputs with `bind_output("y", *arguments, **keywords)`."""

    def prepare(binding: Any, ort: ModuleType) -> None:
        binding.bind_cpu_input("x", A)
        binding.bind_output("y", *arguments, **keywords)

    return bound(prepare)


OUTPUTS = [
    row("name", to_device(), [SQUARES]),
    row("cpu", to_device("cpu"), [SQUARES]),
    row("id", to_device("cpu", 3), [SQUARES]),
    row("keywords", to_device(device_type="cpu", device_id=0, element_type=F, shape=(2, 3)),
        [SQUARES]),
    row("none_keywords",
        to_device(device_type="cpu", element_type=None, shape=None, buffer_ptr=None), [SQUARES]),
    row("shape_alone", to_device("cpu", 0, F, [9, 9]), [SQUARES]),
    row("unknown_device", to_device("foo"), NO_DEVICE),
    row("upper_device", to_device("CPU"), [SQUARES]),
    row("no_device", to_device(None), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), OUTPUTS)
def test_bind_output(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


@pytest.mark.parametrize("device", ["cuda", "gpu", "dml", "cann", "npu", "webgpu"])
def test_absent_device(ort: ModuleType, device: str):
    if set(ort.get_available_providers()) - {"AzureExecutionProvider", "CPUExecutionProvider"}:
        pytest.skip("this build has other devices")
    opened = session(ort, "square")
    with pytest.raises(RuntimeError):
        opened.io_binding().bind_input("x", device, 0, F, (2, 3), A.ctypes.data)
    binding = opened.io_binding()
    binding.bind_cpu_input("x", A)
    binding.bind_output("y", device)
    opened.run_with_iobinding(binding)
    out = binding.get_outputs()[0]
    assert out.device_name() == "cpu" and out.numpy().tolist() == SQUARES


def into(dtype: Any, shape: Any, size: int = 32) -> Any:
    """Returns a call: the caller's buffer after a run that was to write into it."""

    def call(ort: ModuleType) -> Any:
        buffer = np.zeros(size, F)

        def prepare(binding: Any, _: ModuleType) -> None:
            binding.bind_cpu_input("x", A)
            binding.bind_output("y", "cpu", 0, dtype, shape, buffer.ctypes.data)

        bound(prepare)(ort)
        return buffer[:6].tolist()

    return call


NEEDS_BOTH = Raises("ValueError", "`element_type` and `shape` are to be provided")
BAD_SHAPE = Raises("RuntimeError", "Error in execution: ")

BUFFERS = [
    row("written", into(F, (2, 3)), (A * A).ravel().tolist()),
    row("onnx", into(1, [2, 3]), (A * A).ravel().tolist()),
    row("no_shape", into(F, None), NEEDS_BOTH),
    row("no_type", into(None, [2, 3]), NEEDS_BOTH),
    row("neither", into(None, None), NEEDS_BOTH),
    row("larger", into(F, [3, 3]), BAD_SHAPE),
    row("smaller", into(F, [1, 3]), BAD_SHAPE),
    row("rank", into(F, [6]),
        Raises("RuntimeError", "Invalid rank for output: y Got: 1 Expected: 2")),
    row("dtype", into(np.int32, [2, 3]), Raises("RuntimeError", "Unexpected output data type")),
]


@pytest.mark.parametrize(("call", "expected"), BUFFERS)
def test_output_buffer(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def output_value(array: np.ndarray) -> Any:
    """Returns a call: an OrtValue after a run that was to write into it."""

    def call(ort: ModuleType) -> Any:
        out = value(ort, array.copy())

        def prepare(binding: Any, _: ModuleType) -> None:
            binding.bind_ortvalue_input("x", value(ort, A))
            binding.bind_ortvalue_output("y", out)

        bound(prepare)(ort)
        return out.numpy().tolist()

    return call


VALUES = [
    row("written", output_value(np.zeros((2, 3), F)), SQUARES),
    row("larger", output_value(np.zeros((4, 3), F)), BAD_SHAPE),
    row("rank", output_value(np.zeros(6, F)), Raises("RuntimeError", "Invalid rank for output: y")),
    row("dtype", output_value(np.zeros((2, 3), np.int32)),
        Raises("RuntimeError", "Unexpected output data type")),
    row("input", bound(lambda b, o: (b.bind_ortvalue_input("x", value(o, A)), b.bind_output("y"))),
        [SQUARES]),
    row("input_dtype",
        bound(lambda b, o: (b.bind_ortvalue_input("x", value(o, A.astype(int))),
                            b.bind_output("y"))), DTYPE),
    row("input_array", lambda o: session(o, "square").io_binding().bind_ortvalue_input("x", A),
        Raises("AttributeError")),
]


@pytest.mark.parametrize(("call", "expected"), VALUES)
def test_ort_value(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def two(*outputs: str, inputs: str = "ab") -> Any:
    """Returns a call: sum and difference of ones and fives, bound in the given order."""

    def prepare(binding: Any, ort: ModuleType) -> None:
        for name in inputs:
            binding.bind_cpu_input(name, {"a": ONES, "b": FIVES}[name])
        for name in outputs:
            binding.bind_output(name)

    return bound(prepare, "two")


SUM, DIFFERENCE = [6, 6], [-4, -4]
MISSING = Raises("RuntimeError", "Error in execution: .*Missing Input")

ORDERS = [
    row("model_order", two("s", "d"), [SUM, DIFFERENCE]),
    row("other_order", two("d", "s"), [DIFFERENCE, SUM]),
    row("one", two("d"), [DIFFERENCE]),
    row("again", two("d", "s", "d"), [DIFFERENCE, SUM]),
    row("no_output", two(), [SUM, DIFFERENCE]),
    row("no_input", two("s", inputs=""), MISSING),
    row("one_input", two("s", inputs="a"), MISSING),
    row("inputs_swapped", two("d", inputs="ba"), [DIFFERENCE]),
]


@pytest.mark.parametrize(("call", "expected"), ORDERS)
def test_order(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def on_binding(use: Any) -> Any:
    """Returns a call: `use(binding)` of a new binding."""
    return lambda ort: use(session(ort, "square").io_binding())


NAMES = [
    row("cpu_input", on_binding(lambda b: b.bind_cpu_input("zz", A)),
        Raises("RuntimeError", "Failed to find NodeArg with name: zz")),
    row("input", on_binding(lambda b: b.bind_input("zz", "cpu", 0, F, [2, 3], A.ctypes.data)),
        Raises("RuntimeError", "Failed to find input name in the mapping: zz")),
    row("output_bound", on_binding(lambda b: b.bind_output("zz")), None),
    row("output_run",
        bound(lambda b, o: (b.bind_cpu_input("x", A), b.bind_output("zz"))),
        Raises("RuntimeError", "Error in execution: .*Invalid output name: ?zz")),
    row("outputs_at_first", on_binding(lambda b: b.get_outputs()), []),
    row("copies_at_first", on_binding(lambda b: b.copy_outputs_to_cpu()), []),
    row("synchronize_inputs", on_binding(lambda b: b.synchronize_inputs()), None),
    row("synchronize_outputs", on_binding(lambda b: b.synchronize_outputs()), None),
    row("clear_inputs", on_binding(lambda b: b.clear_binding_inputs()), None),
    row("clear_outputs", on_binding(lambda b: b.clear_binding_outputs()), None),
    row("no_session", lambda o: o.IOBinding(None), Raises("AttributeError")),
    row("class", on_binding(lambda b: type(b).__name__), "IOBinding"),
    row("native", on_binding(lambda b: type(b._iobinding).__name__), "SessionIOBinding"),
    row("constructor", lambda o: type(o.IOBinding(session(o, "square"))) is o.IOBinding, True),
]


@pytest.mark.parametrize(("call", "expected"), NAMES)
def test_name(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def ready(ort: ModuleType, array: np.ndarray = A) -> tuple[Any, Any]:
    """Returns a session and a binding of it with input and output bound."""
    opened = session(ort, "square")
    binding = opened.io_binding()
    binding.bind_cpu_input("x", array)
    binding.bind_output("y")
    return opened, binding


def test_outputs(ort: ModuleType):
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    outputs = binding.get_outputs()
    assert type(outputs) is list and type(outputs[0]) is ort.OrtValue
    assert outputs[0].numpy().tolist() == SQUARES
    vector = binding.get_outputs_as_ortvaluevector()
    assert type(vector) is native(ort).OrtValueVector and len(vector) == 1


def test_copies_are_fresh(ort: ModuleType):
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    first, second = binding.copy_outputs_to_cpu()[0], binding.copy_outputs_to_cpu()[0]
    first[:] = -1
    assert first.flags.writeable and first.ctypes.data != second.ctypes.data
    assert second.tolist() == SQUARES
    assert binding.get_outputs()[0].numpy().tolist() == SQUARES


def test_array_changed_in_place(ort: ModuleType):
    array = A.copy()
    opened, binding = ready(ort, array)
    opened.run_with_iobinding(binding)
    address = binding.get_outputs()[0].data_ptr()
    array[:] = 2
    opened.run_with_iobinding(binding)
    out = binding.get_outputs()[0]
    assert out.data_ptr() == address and out.numpy().tolist() == [[4] * 3] * 2


def test_input_bound_again(ort: ModuleType):
    opened, binding = ready(ort)
    binding.bind_cpu_input("x", A + 1)
    opened.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == ((A + 1) ** 2).tolist()


def test_array_is_kept(ort: ModuleType):
    array = np.full((2, 3), 3, F)
    alive = weakref.ref(array)
    opened, binding = ready(ort, array)
    del array
    gc.collect()
    assert alive() is not None
    opened.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == [[9] * 3] * 2


def test_output_that_does_not_fit(ort: ModuleType):
    opened, binding = ready(ort)
    array = np.zeros((2, 3), F)
    alive = weakref.ref(array)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(array))
    opened.run_with_iobinding(binding)
    assert array.tolist() == SQUARES
    del array
    bad = ort.OrtValue.ortvalue_from_numpy(np.ones((4, 5), F))
    binding.bind_ortvalue_output("y", bad)
    gc.collect()
    assert alive() is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Got invalid dimensions for output: y"):
            opened.run_with_iobinding(binding)
        assert [o.tolist() for o in binding.copy_outputs_to_cpu()] == [[[1] * 5] * 4]
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(np.zeros((2, 3), F)))
    opened.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == SQUARES


def test_output_outlives_binding(ort: ModuleType):
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    seen = binding.get_outputs()[0].numpy()
    del opened, binding
    gc.collect()
    assert seen.tolist() == SQUARES


def test_binding_outlives_session(ort: ModuleType):
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    del opened
    gc.collect()
    assert binding.copy_outputs_to_cpu()[0].tolist() == SQUARES


def test_output_as_next_input(ort: ModuleType):
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    out = binding.get_outputs()[0]
    binding.clear_binding_outputs()
    binding.bind_ortvalue_input("x", out)
    binding.bind_output("y")
    opened.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == (A**4).tolist()


def test_one_buffer_for_both(ort: ModuleType):
    array = A.copy()
    opened = session(ort, "square")
    binding = opened.io_binding()
    binding.bind_input("x", "cpu", 0, F, array.shape, array.ctypes.data)
    binding.bind_output("y", "cpu", 0, F, array.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)
    assert array.tolist() == SQUARES


def test_sequence_output(ort: ModuleType):
    opened = session(ort, "pair")
    binding = opened.io_binding()
    binding.bind_cpu_input("a", ONES)
    binding.bind_cpu_input("b", FIVES)
    binding.bind_output("y")
    opened.run_with_iobinding(binding)
    assert [v.tolist() for v in binding.copy_outputs_to_cpu()[0]] == [[1, 1], [5, 5]]


def larger_batch(ort: ModuleType) -> Any:
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    binding.bind_cpu_input("x", np.ones((5, 3), F))
    opened.run_with_iobinding(binding)
    return binding.get_outputs()[0].shape()


def larger_batch_after_clearing(ort: ModuleType) -> Any:
    opened, binding = ready(ort)
    opened.run_with_iobinding(binding)
    binding.bind_cpu_input("x", np.ones((5, 3), F))
    binding.clear_binding_outputs()
    binding.bind_output("y")
    opened.run_with_iobinding(binding)
    return binding.get_outputs()[0].shape()


def cleared_outputs(ort: ModuleType) -> Any:
    opened, binding = ready(ort)
    binding.clear_binding_outputs()
    opened.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0].tolist()


def cleared_inputs(ort: ModuleType) -> None:
    opened, binding = ready(ort)
    binding.clear_binding_inputs()
    opened.run_with_iobinding(binding)


def in_a_loop(ort: ModuleType) -> Any:
    opened = session(ort, "square")
    binding = opened.io_binding()
    sums = []
    for n in (1, 3, 2):
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        binding.bind_cpu_input("x", np.full((n, 3), n, F))
        binding.bind_output("y")
        opened.run_with_iobinding(binding)
        sums.append(float(binding.copy_outputs_to_cpu()[0].sum()))
    return sums


def options_run(options: Any) -> Any:
    """Returns a call: a run with the run options that `options(ort)` makes."""

    def call(ort: ModuleType) -> Any:
        opened, binding = ready(ort)
        opened.run_with_iobinding(iobinding=binding, run_options=options(ort))
        return binding.copy_outputs_to_cpu()[0].tolist()

    return call


def terminated(ort: ModuleType) -> Any:
    options = ort.RunOptions()
    options.terminate = True
    return options


def foreign(ort: ModuleType) -> None:
    session(ort, "square").run_with_iobinding(ready(ort)[1])


def low_level(ort: ModuleType) -> Any:
    opened = session(ort, "square")
    binding = native(ort).SessionIOBinding(opened._sess)
    binding.bind_input("x", A)
    binding.bind_output("y", ort.OrtDevice.make("cpu", 0)._get_c_device())
    opened._sess.run_with_iobinding(binding, None)
    return [o.tolist() for o in binding.copy_outputs_to_cpu()], len(binding.get_outputs())


RUNS = [
    row("larger_batch", larger_batch, [5, 3]),
    row("larger_batch_after_clearing", larger_batch_after_clearing, [5, 3]),
    row("cleared_outputs", cleared_outputs, SQUARES),
    row("cleared_inputs", cleared_inputs, MISSING),
    row("in_a_loop", in_a_loop, [3, 81, 24]),
    row("no_options", options_run(lambda o: None), SQUARES),
    row("options", options_run(lambda o: o.RunOptions()), SQUARES),
    row("terminated", options_run(terminated), Raises("RuntimeError", "Exiting due to terminate")),
    row("foreign", foreign,
        Raises("ValueError", "IOBinding must be used with the session that created it")),
    row("no_binding", lambda o: session(o, "square").run_with_iobinding(None),
        Raises("AttributeError")),
    row("native", low_level, ([SQUARES], 1)),
]


@pytest.mark.parametrize(("call", "expected"), RUNS)
def test_run(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


BEFORE = """
b = ort.InferenceSession('square.onnx').io_binding()
b.bind_output('y')
o = b.get_outputs()[0]
try:
    print({})
except RuntimeError:
    print('RuntimeError')
"""

BEFORE_RUN = [
    row("copy", "b.copy_outputs_to_cpu()", "RuntimeError"),
    row("data_type", "o.data_type()", "RuntimeError"),
    row("has_value", "o.has_value()", "False"),
    row("is_tensor", "o.is_tensor()", "False"),
    row("is_tensor_sequence", "o.is_tensor_sequence()", "False"),
    row("shape", "o.shape()", "RuntimeError"),
    row("numpy", "o.numpy()", "RuntimeError"),
    row("data_ptr", "o.data_ptr()", "RuntimeError"),
    row("element_type", "o.element_type()", "RuntimeError"),
    row("device_name", "o.device_name()", "RuntimeError"),
    row("size", "o.tensor_size_in_bytes()", "RuntimeError"),
]


@pytest.mark.parametrize(("code", "expected"), BEFORE_RUN)
def test_before_run(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    program = BEFORE.format(code)
    check(request, ort, lambda o: run_program(o, tmp_path, program, "square"), expected)


AFTER_FAILURE = """
s = ort.InferenceSession('square.onnx')
x = np.full((1, 3), 2, np.float32)
b = s.io_binding()
try:
    b.bind_input('x', 'dml', 0, np.float32, x.shape, x.ctypes.data)
except RuntimeError:
    b.bind_cpu_input('x', x)
    b.bind_output('y')
    s.run_with_iobinding(b)
    print(b.copy_outputs_to_cpu()[0].sum())
"""


def test_bind_after_failure(request: Any, ort: ModuleType, tmp_path: Path):
    check(request, ort, lambda o: run_program(o, tmp_path, AFTER_FAILURE, "square"), "12.0")
