"""Devices, memory infos and arenas."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from more_deviations import check
from more_models import NO_CRASH, Raises, native, row, run_program, session
from more_models import package  # noqa: F401  (the fixture `ort`)

NVIDIA, MICROSOFT, HUAWEI, AMD = 4318, 5140, 6629, 4098


def made(*arguments: Any, **keywords: Any) -> Any:
    """Returns a call: type, id, kind of memory and vendor of `OrtDevice.make(...)`."""

    def call(ort: ModuleType) -> Any:
        d = ort.OrtDevice.make(*arguments, **keywords)
        return d.device_type(), d.device_id(), int(d.device_mem_type()), d.device_vendor_id()

    return call


UNSUPPORTED = "Unsupported device type: "

DEVICES = [
    row("cpu", made("cpu", 0), (0, 0, 0, 0)),
    row("cuda", made("cuda", 0), (1, 0, 0, NVIDIA)),
    row("cann", made("cann", 0), (3, 0, 0, HUAWEI)),
    row("dml", made("dml", 0), (1, 0, 0, MICROSOFT)),
    row("webgpu", made("webgpu", 0), (1, 0, 0, 0)),
    row("gpu", made("gpu", 0), (1, 0, 0, 0)),
    row("npu", made("npu", 0), (3, 0, 0, 0)),
    row("second", made("cuda", 1), (1, 1, 0, NVIDIA)),
    row("vendor", made("gpu", 0, NVIDIA), (1, 0, 0, NVIDIA)),
    row("other_vendor", made("cuda", 0, AMD), (1, 0, 0, AMD)),
    row("keywords", made(ort_device_name="cpu", device_id=3, vendor_id=-1), (0, 3, 0, 0)),
    row("upper", made("CPU", 0), (0, 0, 0, 0)),
    row("unknown", made("foo", 0), Raises("Exception", UNSUPPORTED + "foo")),
    row("tpu", made("tpu", 0), Raises("Exception", UNSUPPORTED + "tpu")),
    row("nothing", made("", 0), Raises("Exception", UNSUPPORTED)),
    row("none", made(None, 0), Raises("TypeError")),
    row("number", made(1, 0), Raises("TypeError")),
    row("id_str", made("cpu", "0"), Raises("TypeError")),
    row("no_id", made("cpu"), Raises("TypeError")),
]


@pytest.mark.parametrize(("call", "expected"), DEVICES)
def test_make(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def low_level(*arguments: Any) -> Any:
    """Returns a call: type, kind of memory, id and vendor of `C.OrtDevice(...)`."""

    def call(ort: ModuleType) -> Any:
        d = native(ort).OrtDevice(*arguments)
        return d.device_type(), int(d.mem_type()), d.device_id(), d.vendor_id()

    return call


NATIVE = [
    row("three", low_level(0, 0, 0), (0, 0, 0, 0)),
    row("gpu", low_level(1, 0, 0), (1, 0, 0, 0)),
    row("four", low_level(1, 0, NVIDIA, 2), (1, 0, 2, NVIDIA)),
    row("pinned", low_level(1, 5, NVIDIA, 2), (1, 5, 2, NVIDIA)),
    row("two", low_level(0, 0), Raises("TypeError")),
    row("one", low_level(0), Raises("TypeError")),
    row("name", low_level("cpu", 0, 0), Raises("TypeError")),
    row("cpu", lambda o: native(o).OrtDevice.cpu(), 0),
    row("cuda", lambda o: native(o).OrtDevice.cuda(), 1),
    row("gpu_number", lambda o: native(o).OrtDevice.gpu(), 1),
    row("webgpu", lambda o: native(o).OrtDevice.webgpu(), 1),
    row("fpga", lambda o: native(o).OrtDevice.fpga(), 2),
    row("cann", lambda o: native(o).OrtDevice.cann(), 3),
    row("npu", lambda o: native(o).OrtDevice.npu(), 3),
    row("dml", lambda o: native(o).OrtDevice.dml(), 4),
    row("memory", lambda o: native(o).OrtDevice.default_memory(), 0),
    row("wrap", lambda o: o.OrtDevice(native(o).OrtDevice(0, 0, 0)).device_type(), 0),
    row("wrap_number", lambda o: o.OrtDevice(1), Raises("ValueError", "needs to be of type")),
    row("unwrap", lambda o: type(o.OrtDevice.make("cpu", 0)._get_c_device()) is native(o).OrtDevice,
        True),
]


@pytest.mark.parametrize(("call", "expected"), NATIVE)
def test_native(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


VENDORS = [
    ("NONE", 0), ("AMD", AMD), ("NVIDIA", NVIDIA), ("ARM", 5045), ("MICROSOFT", MICROSOFT),
    ("HUAWEI", HUAWEI), ("QUALCOMM", 20803), ("INTEL", 32902),
]


@pytest.mark.parametrize(("name", "number"), [row(n, n, v) for n, v in VENDORS])
def test_vendor(ort: ModuleType, name: str, number: int):
    assert ort.OrtDeviceVendorId[name] == number
    assert ort.OrtDevice.make("gpu", 0, ort.OrtDeviceVendorId[name]).device_vendor_id() == number


def of_info(info: Any) -> Any:
    kind = (int(info.allocator_type), info.device_id, int(info.mem_type))
    return info.name, *kind, int(info.device_mem_type), info.device_vendor_id


def info(name: Any, allocator: str, number: Any, memory: str) -> Any:
    """Returns a call: the fields of an OrtMemoryInfo."""

    def call(ort: ModuleType) -> Any:
        kinds = (getattr(ort.OrtAllocatorType, allocator), getattr(ort.OrtMemType, memory))
        return of_info(ort.OrtMemoryInfo(name, kinds[0], number, kinds[1]))

    return call


def info_v2(name: str, device: str, vendor: int, number: int, memory: str, align: int,
            allocator: str) -> Any:
    """Returns a call: the fields of an OrtMemoryInfo made by `create_v2`."""

    def call(ort: ModuleType) -> Any:
        device_type = getattr(ort.OrtMemoryInfoDeviceType, device)
        memory_type = getattr(ort.OrtDeviceMemoryType, memory)
        kind = getattr(ort.OrtAllocatorType, allocator)
        return of_info(
            ort.OrtMemoryInfo.create_v2(
                name, device_type, vendor, number, memory_type, align, kind
            )
        )

    return call


def cpu_info(ort: ModuleType) -> Any:
    arena = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    return ort.OrtMemoryInfo("Cpu", arena, 0, ort.OrtMemType.DEFAULT)


ARENA, DEVICE = "ORT_ARENA_ALLOCATOR", "ORT_DEVICE_ALLOCATOR"

INFOS = [
    row("arena", info("Cpu", ARENA, 0, "DEFAULT"), ("Cpu", 1, 0, 0, 0, 0)),
    row("device", info("Cpu", DEVICE, 0, "CPU_INPUT"), ("Cpu", 0, 0, -2, 0, 0)),
    row("invalid", info("Cpu", "INVALID", 0, "CPU_OUTPUT"), ("Cpu", -1, 0, -1, 0, 0)),
    row("cuda", info("Cuda", ARENA, 1, "DEFAULT"), ("Cuda", 1, 1, 0, 0, NVIDIA)),
    row("pinned", info("CudaPinned", ARENA, 0, "CPU"), ("CudaPinned", 1, 0, -1, 5, NVIDIA)),
    row("dml", info("DML", ARENA, 0, "DEFAULT"), ("DML", 1, 0, 0, 0, MICROSOFT)),
    row("unknown", info("foo", ARENA, 0, "DEFAULT"), Raises("RuntimeError", "not supported")),
    row("nothing", info("", ARENA, 0, "DEFAULT"), Raises("RuntimeError", "not supported")),
    row("id_str", info("Cpu", ARENA, "0", "DEFAULT"), Raises("TypeError")),
    row("name_number", info(1, ARENA, 0, "DEFAULT"), Raises("TypeError")),
    row("one_argument", lambda o: o.OrtMemoryInfo("Cpu"), Raises("TypeError")),
    row("v2", info_v2("x", "GPU", NVIDIA, 2, "DEFAULT", 0, DEVICE), ("x", 0, 2, 0, 0, NVIDIA)),
    row("v2_host", info_v2("x", "GPU", NVIDIA, 0, "HOST_ACCESSIBLE", 64, ARENA),
        ("x", 1, 0, -1, 5, NVIDIA)),
    row("v2_cpu", info_v2("Cpu", "CPU", 0, 0, "DEFAULT", 0, ARENA), ("Cpu", 1, 0, 0, 0, 0)),
    row("read_only", lambda o: setattr(cpu_info(o), "name", "x"), Raises("AttributeError")),
    row("misspelt", lambda o: setattr(cpu_info(o), "nmae", "x"), Raises("AttributeError")),
]


@pytest.mark.parametrize(("call", "expected"), INFOS)
def test_memory_info(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


def test_session_memory_infos(ort: ModuleType):
    opened = session(ort, "two")
    inputs, outputs = opened.get_input_memory_infos(), opened.get_output_memory_infos()
    assert len(inputs) == 2 and len(outputs) == 2
    assert {(i.device_id, int(i.mem_type)) for i in [*inputs, *outputs]} == {(0, 0)}
    assert len(opened.get_input_epdevices()) == 2


FIELDS = [
    "max_mem", "arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk",
    "initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes",
]


def config(*arguments: Any) -> Any:
    """Returns a call: the six fields of an OrtArenaCfg."""

    def call(ort: ModuleType) -> Any:
        cfg = ort.OrtArenaCfg(*arguments)
        return [getattr(cfg, f) for f in FIELDS]

    return call


def assigned(field: str, given: Any) -> Any:
    """Returns a call: a field of an OrtArenaCfg after it was set."""

    def call(ort: ModuleType) -> Any:
        cfg = ort.OrtArenaCfg({})
        setattr(cfg, field, given)
        return getattr(cfg, field)

    return call


def strategy(ort: ModuleType) -> Any:
    return config(1, native(ort).kSameAsRequested, 2, 3)(ort)


CONFIGS = [
    row("four", config(1, 0, -1, -1), [1, 0, -1, -1, -1, -1]),
    row("unset", config(0, -1, -1, -1), [0, -1, -1, -1, -1, -1]),
    row("empty", config({}), [0, -1, -1, -1, -1, -1]),
    row("one_key", config({"max_mem": 5}), [5, -1, -1, -1, -1, -1]),
    row("six_keys", config({f: i + 1 for i, f in enumerate(FIELDS)}), [1, 2, 3, 4, 5, 6]),
    row("strategy", strategy, [1, 1, 2, 3, -1, -1]),
    row("unknown_key", config({"foo": 1}),
        Raises("RuntimeError", "Invalid OrtArenaCfg option: foo")),
    row("str_value", config({"max_mem": "5"}), Raises("RuntimeError")),
    row("negative_key", config({"max_mem": -1}), Raises("RuntimeError")),
    row("negative", config(-1, 0, 0, 0), Raises("TypeError")),
    row("str", config("a", 0, 0, 0), Raises("TypeError")),
    row("one_number", config(1), Raises("TypeError")),
    row("nothing", config(), Raises("TypeError")),
    row("set", assigned("max_mem", 77), 77),
    row("set_strategy", assigned("arena_extend_strategy", 1), 1),
    row("set_str", assigned("max_mem", "a"), Raises("TypeError")),
    row("misspelt", assigned("max_memm", 1), Raises("AttributeError")),
    row("next_power", lambda o: int(native(o).kNextPowerOfTwo), 0),
    row("as_requested", lambda o: int(native(o).kSameAsRequested), 1),
    row("members", lambda o: sorted(native(o).ArenaExtendStrategy.__members__),
        ["kNextPowerOfTwo", "kSameAsRequested"]),
]


@pytest.mark.parametrize(("call", "expected"), CONFIGS)
def test_arena_config(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)


INFO = (
    "info = ort.OrtMemoryInfo('Cpu', ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0,"
    " ort.OrtMemType.DEFAULT)\n"
)
RUN = """
options = ort.SessionOptions()
options.add_session_config_entry('session.use_env_allocators', '{}')
s = ort.InferenceSession('wide.onnx', options)
def go(n):
    try:
        return s.run(None, {{'x': np.ones((n, 1000), np.float32)}})[0].shape[0]
    except Exception as e:
        return type(e).__name__
print(go(1), go(10000), go(1))
"""
REGISTER = "ort.create_and_register_allocator(info, ort.OrtArenaCfg({}, -1, -1, -1))\n"
REGISTER_V2 = (
    "ort.create_and_register_allocator_v2({!r}, info, {{}}, ort.OrtArenaCfg(4 << 20, -1, -1, -1))\n"
)
POOLS = "ort.set_global_thread_pool_sizes(2, 1)\n"
SQUARE = """
options = ort.SessionOptions()
options.use_per_session_threads = {}
try:
    s = ort.InferenceSession('square.onnx', options)
    print(s.run(None, {{'x': np.full((1, 3), 2, np.float32)}})[0].sum())
except Exception as e:
    print(type(e).__name__)
"""

PROGRAMS = [
    row("limit", INFO + REGISTER.format("4 << 20") + RUN.format(1), "1 Fail 1"),
    row("limit_not_used", INFO + REGISTER.format("4 << 20") + RUN.format(0), "1 10000 1"),
    row("no_limit", INFO + REGISTER.format(0) + RUN.format(1), "1 10000 1"),
    row("no_config", INFO + "ort.create_and_register_allocator(info, None)\n" + RUN.format(1),
        "1 10000 1"),
    row("limit_v2", INFO + REGISTER_V2.format("CPUExecutionProvider") + RUN.format(1), "1 Fail 1"),
    row("unknown_v2", INFO + REGISTER_V2.format("Foo"), "exit 1"),
    row("registered_twice", INFO + REGISTER.format(0) * 2 + "print('ok')", "ok"),
    row("not_an_info", "ort.create_and_register_allocator(3, 4)", "exit 1"),
    row("global_pool", POOLS + SQUARE.format(False), "12.0"),
    row("global_pool_own_threads", POOLS + SQUARE.format(True), "12.0"),
    row("global_pool_twice", POOLS * 2, "exit 1"),
    row("global_pool_keywords",
        "print(ort.set_global_thread_pool_sizes(intra_op_num_threads=1, inter_op_num_threads=1))",
        "None"),
    row("global_pool_default", "print(ort.set_global_thread_pool_sizes())", "None"),
    row("global_pool_str", "ort.set_global_thread_pool_sizes('1')", "exit 1"),
    row("impossible_device", "from {package}.capi import _pybind_state as C\nC.OrtDevice(9, 9, 9)",
        NO_CRASH),
]


@pytest.mark.parametrize(("code", "expected"), PROGRAMS)
def test_program(request: Any, ort: ModuleType, tmp_path: Path, code: str, expected: Any):
    code = code.replace("{package}", ort.__name__)
    check(request, ort, lambda o: run_program(o, tmp_path, code, "wide", "square"), expected)


def external(*arguments: Any) -> Any:
    """Returns a call: the fields of an OrtExternalInitializerInfo."""

    def call(ort: ModuleType) -> Any:
        made_info = ort.OrtExternalInitializerInfo(*arguments)
        return made_info.filepath, made_info.file_offset, made_info.byte_size

    return call


EXTERNAL = [
    row("fields", external("a", 1, 2), ("a", 1, 2)),
    row("path_number", external(1, 1, 2), Raises("TypeError")),
    row("few", external("a"), Raises("TypeError")),
    row("read_only",
        lambda o: setattr(o.OrtExternalInitializerInfo("a", 1, 2), "filepath", "b"),
        Raises("AttributeError")),
]


@pytest.mark.parametrize(("call", "expected"), EXTERNAL)
def test_external_initializer_info(request: Any, ort: ModuleType, call: Any, expected: Any):
    check(request, ort, call, expected)
