"""Execution providers: arguments, fallback, queries."""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from harness import CPU, PACKAGE, C, Gives, Raises, case, check, ort, session, table

#: A known name that no build of ours and no CPU wheel has.
ABSENT_NAME = "TensorrtExecutionProvider"
X = np.zeros((1, 3), np.float32)
ONE = np.ones((1, 3), np.float32)
ABSENT = (
    r"Specified provider '{}' is not in available provider names\. ?"
    "Available providers: '.*CPUExecutionProvider'"
)
CONFIGURED = (
    "Specified 'providers'/'provider_options' when creating InferenceSession but SessionOptions has "
    "already been configured with providers"
)
WELL_KNOWN = {
    "CUDAExecutionProvider",
    "WebGpuExecutionProvider",
    "CoreMLExecutionProvider",
    "DmlExecutionProvider",
    "OpenVINOExecutionProvider",
    "TensorrtExecutionProvider",
}
DUPLICATE = "Duplicate provider 'CPUExecutionProvider' encountered, ignoring"


def made(**arguments: Any) -> list[str]:
    return ort.InferenceSession(models.path("add_one"), **arguments).get_providers()


def cases(fallback: int) -> list[Any]:
    """The arguments, with and without fallback; only a name that nobody knows tells them apart."""
    right = {
        "none": {"providers": None},
        "empty": {"providers": []},
        "empty_tuple": {"providers": ()},
        "list": {"providers": [CPU]},
        "tuple": {"providers": (CPU,)},
        "deque": {"providers": collections.deque([CPU])},
        "pair": {"providers": [(CPU, {})]},
        "pair_with_options": {"providers": [(CPU, {"a": 1})]},
        "parallel_lists": {"providers": [CPU], "provider_options": [{}]},
        "parallel_with_options": {"providers": [CPU], "provider_options": [{"a": 1}]},
        "parallel_tuples": {"providers": (CPU,), "provider_options": ({},)},
        "options_alone": {"provider_options": [{}]},
    }
    warned = {
        "known_but_absent": ({"providers": [ABSENT_NAME]}, [ABSENT.format(ABSENT_NAME)]),
        "absent_then_cpu": ({"providers": [ABSENT_NAME, CPU]}, [ABSENT.format(ABSENT_NAME)]),
        "cpu_then_absent": ({"providers": [CPU, ABSENT_NAME]}, [ABSENT.format(ABSENT_NAME)]),
        "absent_pair": ({"providers": [(ABSENT_NAME, {"device_id": 0}), CPU]}, [ABSENT.format(ABSENT_NAME)]),
        "two_absent": (
            {"providers": [ABSENT_NAME, "MIGraphXExecutionProvider"]},
            [ABSENT.format(ABSENT_NAME), ABSENT.format("MIGraphXExecutionProvider")],
        ),
        "duplicate": ({"providers": [CPU, CPU]}, [DUPLICATE]),
        "duplicate_pair": ({"providers": [CPU, (CPU, {"a": 1})]}, [DUPLICATE]),
    }
    wrong = {
        "set": ({"providers": {CPU}}, "'providers' should be a sequence"),
        "dict": ({"providers": {CPU: {}}}, "'providers' should be a sequence"),
        "array": ({"providers": np.array([CPU])}, "'providers' should be a sequence"),
        "list_pair": ({"providers": [[CPU, {}]]}, r"must be either strings or \(string, dict\) tuples"),
        "int_name": ({"providers": [3]}, r"must be either strings or \(string, dict\) tuples"),
        "none_name": ({"providers": [None]}, r"must be either strings or \(string, dict\) tuples"),
        "one_tuple": ({"providers": [(CPU,)]}, r"must be either strings or \(string, dict\) tuples"),
        "three_tuple": ({"providers": [(CPU, {}, 1)]}, r"must be either strings or \(string, dict\) tuples"),
        "pair_of_int": ({"providers": [(CPU, 3)]}, r"must be either strings or \(string, dict\) tuples"),
        "lengths_differ": (
            {"providers": [CPU], "provider_options": [{}, {}]},
            "'providers' and 'provider_options' should be the same length if both are given",
        ),
        "no_options": (
            {"providers": [CPU], "provider_options": []},
            "'providers' and 'provider_options' should be the same length if both are given",
        ),
        "options_dict": (
            {"providers": [CPU], "provider_options": {"a": 1}},
            "'provider_options' should be a sequence",
        ),
        "options_of_int": ({"providers": [CPU], "provider_options": [3]}, "'provider_options' values must be dicts"),
        "options_twice": (
            {"providers": [(CPU, {})], "provider_options": [{}]},
            "Only string values for 'providers' are supported if 'provider_options' is given",
        ),
    }
    rows = [case(n, {**a, "enable_fallback": fallback}, Gives([CPU])) for n, a in right.items()]
    rows += [
        case(n, {**a, "enable_fallback": fallback}, Gives([CPU], warns=w)) for n, (a, w) in warned.items()
    ]
    rows += [
        case(n, {**a, "enable_fallback": fallback}, Raises("ValueError", t)) for n, (a, t) in wrong.items()
    ]
    for label, name in (("unknown", "FooExecutionProvider"), ("other_case", "cpuexecutionprovider")):
        warning = [ABSENT.format(name)]
        failure = Raises("RuntimeError", f"Unknown Provider Type: {name}", warns=warning)
        arguments = {"providers": [name], "enable_fallback": fallback}
        rows.append(case(label, arguments, Gives([CPU], warns=warning) if fallback else failure))
    return rows


@table("arguments, expected", cases(1))
def test_arguments(arguments: dict[str, Any], expected: Any) -> None:
    """`providers` and `provider_options`, with fallback on."""
    check(expected, lambda: made(**arguments))


@table("arguments, expected", cases(0))
def test_arguments_without_fallback(arguments: dict[str, Any], expected: Any) -> None:
    """The same with `enable_fallback=0`."""
    check(expected, lambda: made(**arguments))


@table(
    "make, expected",
    [
        case("plain_string", lambda: made(providers=CPU), Gives([CPU])),
        case("int", lambda: made(providers=3), Raises(("TypeError", "ValueError"))),
        case(
            "generator",
            lambda: made(providers=(p for p in [CPU])),
            Raises("ValueError", "'providers' should be a sequence"),
        ),
        case(
            "missing_file",
            lambda: ort.InferenceSession("/nofile", providers=[CPU]),
            Raises("NoSuchFile", "/nofile"),
        ),
        case(
            "faulty_model",
            lambda: ort.InferenceSession(models.path("cyclic"), providers=[CPU]),
            Raises("Fail"),
        ),
        case(
            "faulty_model_absent",
            lambda: ort.InferenceSession(models.path("cyclic"), providers=[ABSENT_NAME]),
            Raises("Fail", warns=[ABSENT.format(ABSENT_NAME)]),
        ),
        case(
            "options",
            lambda: ort.InferenceSession(models.path("add_one"), providers=[CPU]).get_provider_options(),
            Gives({CPU: {}}),
        ),
        case(
            "options_dropped",
            lambda: ort.InferenceSession(models.path("add_one"), providers=[(CPU, {"a": 1})]).get_provider_options(),
            Gives({CPU: {}}),
        ),
    ],
)
def test_making(make: Callable[[], Any], expected: Any) -> None:
    """More ways to say it, and model errors that no fallback hides."""
    check(expected, make)


def after(*calls: Callable[[Any], Any]) -> list[Any]:
    """Providers and a result once each call was made; the calls' errors are not looked at."""
    held = ort.InferenceSession(models.path("add_one"), providers=[CPU])
    for call in calls:
        try:
            call(held)
        except (ValueError, RuntimeError):
            pass
    return [held.get_providers(), *held.run(None, {"x": X})]


def changed(*arguments: Any) -> Any:
    held = ort.InferenceSession(models.path("add_one"), providers=[CPU])
    return held.set_providers(*arguments)


@table(
    "act, expected",
    [
        case("nothing", lambda: changed(), Gives(None)),
        case("cpu", lambda: changed([CPU]), Gives(None)),
        case("empty", lambda: changed([]), Gives(None)),
        case("pair", lambda: changed([(CPU, {})]), Gives(None)),
        case("parallel", lambda: changed([CPU], [{}]), Gives(None)),
        case(
            "absent",
            lambda: changed([ABSENT_NAME]),
            Gives(None, warns=[ABSENT.format(ABSENT_NAME)]),
        ),
        case(
            "unknown",
            lambda: changed(["Foo"]),
            Raises("RuntimeError", "Unknown Provider Type: Foo", warns=[ABSENT.format("Foo")]),
        ),
        case(
            "lengths_differ",
            lambda: changed([CPU], [{}, {}]),
            Raises("ValueError", "should be the same length"),
        ),
        case(
            "set",
            lambda: changed({CPU}),
            Raises("ValueError", "'providers' should be a sequence"),
        ),
        case("runs_after", lambda: after(lambda s: s.set_providers([CPU])), Gives([[CPU], ONE])),
        case(
            "runs_after_wrong",
            lambda: after(lambda s: s.set_providers([CPU], [{}, {}])),
            Gives([[CPU], ONE]),
        ),
        case(
            "runs_after_absent",
            lambda: after(lambda s: s.set_providers([ABSENT_NAME])),
            Gives([[CPU], ONE], warns=[ABSENT.format(ABSENT_NAME)]),
        ),
        case(
            "runs_after_unknown",
            lambda: after(lambda s: s.set_providers(["Foo"])),
            Gives([[CPU], ONE], warns=[ABSENT.format("Foo")]),
        ),
        case("plain_string", lambda: changed(CPU), Gives(None)),
    ],
)
def test_set_providers(act: Callable[[], Any], expected: Any) -> None:
    """Providers of a session that exists."""
    check(expected, act)


def switches() -> list[bool]:
    held = ort.InferenceSession(models.path("add_one"))
    seen = [held._enable_fallback]
    held.disable_fallback()
    seen.append(held._enable_fallback)
    held.enable_fallback()
    return [*seen, held._enable_fallback]


@table(
    "read, expected",
    [
        case(
            "available_is_a_list",
            lambda: type(ort.get_available_providers()) is list,
            Gives(True),
        ),
        case("cpu_is_last", lambda: ort.get_available_providers()[-1], Gives(CPU)),
        case(
            "available_is_fresh",
            lambda: ort.get_available_providers() is ort.get_available_providers(),
            Gives(False),
        ),
        case(
            "available_native",
            lambda: C.get_available_providers() == ort.get_available_providers(),
            Gives(True),
        ),
        case(
            "all_has_available",
            lambda: set(ort.get_available_providers()) <= set(ort.get_all_providers()),
            Gives(True),
        ),
        case(
            "all_has_known",
            lambda: WELL_KNOWN <= set(ort.get_all_providers()),
            Gives(True),
        ),
        case("all_ends_with_cpu", lambda: ort.get_all_providers()[-1], Gives(CPU)),
        case("device", lambda: type(ort.get_device()) is str, Gives(True)),
        case("fallback_switches", switches, Gives([True, False, True])),
        case(
            "fallback_argument",
            lambda: ort.InferenceSession(models.path("add_one"), enable_fallback=0)._enable_fallback,
            Gives(False),
        ),
    ],
)
def test_queries(read: Callable[[], Any], expected: Any) -> None:
    """What is there."""
    check(expected, read)


def added(name: str, *given: Any) -> list[bool]:
    held = ort.SessionOptions()
    before = held.has_providers()
    held.add_provider(name, *given)
    return [before, held.has_providers()]


def with_added(**arguments: Any) -> list[str]:
    held = ort.SessionOptions()
    held.add_provider(CPU, {})
    return ort.InferenceSession(models.path("add_one"), held, **arguments).get_providers()


def by_devices() -> list[Any]:
    held = ort.SessionOptions()
    held.add_provider_for_devices(cpu_devices(), {})
    return [held.has_providers(), ort.InferenceSession(models.path("add_one"), held).get_providers()]


def cpu_devices() -> list[Any]:
    return [d for d in ort.get_ep_devices() if d.ep_name == CPU][:1]


def by_policy() -> list[str]:
    held = ort.SessionOptions()
    held.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_CPU)
    return ort.InferenceSession(models.path("add_one"), held).get_providers()


def by_delegate() -> list[Any]:
    calls: list[int] = []

    def choose(devices: Any, model: Any, runtime: Any, most: int) -> list[Any]:
        calls.append(len(devices))
        return [d for d in devices if d.ep_name == CPU][:1]

    held = ort.SessionOptions()
    held.set_provider_selection_policy_delegate(choose)
    providers = ort.InferenceSession(models.path("add_one"), held).get_providers()
    return [providers, calls == [len(ort.get_ep_devices())]]


def appended() -> list[str]:
    held = ort.SessionOptions()
    held.append_execution_provider(CPU, {})
    return ort.InferenceSession(models.path("add_one"), held).get_providers()


@table(
    "act, expected",
    [
        case("cpu", lambda: added(CPU, {}), Gives([False, True])),
        case("cpu_with_options", lambda: added(CPU, {"a": "1"}), Gives([False, True])),
        case(
            "unknown",
            lambda: added("FooExecutionProvider", {}),
            Raises("RuntimeError", "Unknown Provider Type: FooExecutionProvider"),
        ),
        case(
            "known_but_absent",
            lambda: added(ABSENT_NAME, {}),
            Raises("InvalidArgument", ABSENT_NAME),
        ),
        case("no_options", lambda: added(CPU), Raises("TypeError")),
        case("options_of_int", lambda: added(CPU, {"a": 1}), Raises("TypeError")),
        case("name_of_int", lambda: added(3, {}), Raises("TypeError")),
        case("used", lambda: with_added(), Gives([CPU])),
        case(
            "used_and_argument",
            lambda: with_added(providers=[CPU]),
            Gives(
                [CPU],
                warns=[CONFIGURED],
            ),
        ),
        case("devices", by_devices, Gives([True, [CPU]])),
        case(
            "no_devices",
            lambda: ort.SessionOptions().add_provider_for_devices([], {}),
            Raises("InvalidArgument", "Must provide one or more OrtEpDevice"),
        ),
        case("policy", by_policy, Gives([CPU])),
        case(
            "policy_int",
            lambda: ort.SessionOptions().set_provider_selection_policy("cpu"),
            Raises("TypeError"),
        ),
        case("delegate", by_delegate, Gives([[CPU], True])),
        case("append", appended, Gives([CPU])),
    ],
)
def test_options(act: Callable[[], Any], expected: Any) -> None:
    """Providers that SessionOptions carry."""
    check(expected, act)


def cpu_device() -> Any:
    return cpu_devices()[0]


def entry(key: str, **arguments: Any) -> Any:
    held = ort.SessionOptions()
    held.add_session_config_entry(key, "1")
    return ort.InferenceSession(models.path("add_one"), held, **arguments)


def assigned() -> list[Any]:
    parts = entry("session.record_ep_graph_assignment_info").get_provider_graph_assignment_info()
    return [[p.ep_name, [[n.name, n.op_type, n.domain] for n in p.get_nodes()]] for p in parts]


def memory_infos() -> list[Any]:
    held = session("two")
    infos = [*held.get_input_memory_infos(), *held.get_output_memory_infos()]
    return [len(infos), {i.device_id for i in infos} == {0}, {int(i.mem_type) for i in infos} == {0}]


@table(
    "read, expected",
    [
        case("name", lambda: cpu_device().ep_name, Gives(CPU)),
        case("vendor", lambda: type(cpu_device().ep_vendor) is str, Gives(True)),
        case("options", lambda: cpu_device().ep_options, Gives({})),
        case("metadata", lambda: type(cpu_device().ep_metadata) is dict, Gives(True)),
        case(
            "device_type",
            lambda: cpu_device().device.type == ort.OrtHardwareDeviceType.CPU,
            Gives(True),
        ),
        case("device_vendor", lambda: type(cpu_device().device.vendor) is str, Gives(True)),
        case("device_vendor_id", lambda: type(cpu_device().device.vendor_id) is int, Gives(True)),
        case("device_id", lambda: cpu_device().device.device_id, Gives(0)),
        case("device_metadata", lambda: type(cpu_device().device.metadata) is dict, Gives(True)),
        case("one_cpu", lambda: [d.ep_name for d in ort.get_ep_devices()].count(CPU), Gives(1)),
        case(
            "of_inputs",
            lambda: [d.ep_name for d in session("two").get_input_epdevices()],
            Gives([CPU, CPU]),
        ),
        case("memory_infos", memory_infos, Gives([4, True, True])),
        case("assignment", assigned, Gives([[CPU, [["add", "Add", ""]]]])),
        case(
            "assignment_not_recorded",
            lambda: session("two").get_provider_graph_assignment_info(),
            Raises("Fail", "session.record_ep_graph_assignment_info"),
        ),
        case(
            "no_cpu_fallback",
            lambda: entry("session.disable_cpu_ep_fallback"),
            Raises("Fail", "fallback to CPU EP has been explicitly disabled"),
        ),
        case(
            "no_cpu_fallback_but_cpu",
            lambda: entry("session.disable_cpu_ep_fallback", providers=[CPU]),
            Raises("InvalidArgument", "Conflicting session configuration"),
        ),
        case("tuning_results", lambda: session("two").get_tuning_results(), Gives([])),
    ],
)
def test_devices(read: Callable[[], Any], expected: Any) -> None:
    """Devices, and where nodes went."""
    check(expected, read)


COLLECTION = importlib.import_module(f"{PACKAGE}.capi.onnxruntime_inference_collection")


def normalized(*arguments: Any) -> Any:
    return COLLECTION.check_and_normalize_provider_args(*arguments)


def device_number(name: str) -> int:
    return int(COLLECTION.get_ort_device_type(name))


@table(
    "act, expected",
    [
        case("none", lambda: normalized(None, None, ["A"]), Gives(([], []))),
        case("empty", lambda: normalized([], None, ["A"]), Gives(([], []))),
        case(
            "names",
            lambda: normalized(["A", "B"], None, ["A", "B"]),
            Gives((["A", "B"], [{}, {}])),
        ),
        case(
            "order",
            lambda: normalized(["B", "A"], None, ["A", "B"]),
            Gives((["B", "A"], [{}, {}])),
        ),
        case(
            "parallel",
            lambda: normalized(["A"], [{"x": 1}], ["A"]),
            Gives((["A"], [{"x": "1"}])),
        ),
        case(
            "pair_of_numbers",
            lambda: normalized([("A", {1: 2})], None, ["A"]),
            Gives((["A"], [{"1": "2"}])),
        ),
        case(
            "mixed",
            lambda: normalized(["A", ("B", {"k": True})], None, ["A", "B"]),
            Gives((["A", "B"], [{}, {"k": "True"}])),
        ),
        case(
            "duplicate",
            lambda: normalized(["A", "A"], None, ["A"]),
            Gives((["A"], [{}]), warns=["Duplicate provider 'A' encountered, ignoring"]),
        ),
        case(
            "lengths_differ",
            lambda: normalized(["A"], [{}, {}], ["A"]),
            Raises("ValueError", "should be the same length"),
        ),
        case("cpu", lambda: device_number("cpu"), Gives(0)),
        case("cuda", lambda: device_number("cuda"), Gives(1)),
        case("gpu", lambda: device_number("gpu"), Gives(1)),
        case("webgpu", lambda: device_number("webgpu"), Gives(1)),
        case("npu", lambda: device_number("npu"), Gives(3)),
        case("cann", lambda: device_number("cann"), Gives(3)),
        case("dml", lambda: device_number("dml"), Gives(4)),
        case(
            "unknown_device",
            lambda: device_number("foo"),
            Raises("Exception", "Unsupported device type: foo"),
        ),
    ],
)
def test_helpers(act: Callable[[], Any], expected: Any) -> None:
    """Module functions that other packages import."""
    check(expected, act)
