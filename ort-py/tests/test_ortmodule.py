"""`ORTModule`: a transparent wrapper, its options, its policies and its report."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("the original's ORTModule is a package of its own", allow_module_level=True)

from ort_runtime.torch import NotEnoughMemory, StepPlan  # noqa: E402
from ort_runtime.training import is_ortmodule_available  # noqa: E402
from ort_runtime.training.ortmodule import (  # noqa: E402
    DebugOptions,
    LogLevel,
    ORTModule,
    ORTModuleFallbackException,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from torch_models import Forms, Language, Recurrent, mlp, reals, resnet, tokens  # noqa: E402

LEVEL, CONFIG = "ORTMODULE_MEMORY_OPT_LEVEL", "ORTMODULE_MEMORY_OPT_CONFIG"
POLICY = "ORTMODULE_FALLBACK_POLICY"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets compiled graphs and what the environment says."""
    torch._dynamo.reset()
    for name in (LEVEL, CONFIG, POLICY, "ORTMODULE_LOG_LEVEL", "ORTMODULE_SAVE_ONNX_PATH"):
        monkeypatch.delenv(name, raising=False)


def module() -> Any:
    """A transformer of two layers."""
    torch.manual_seed(0)
    return Language(causal=True)


def losses(called: Any, steps: int = 4) -> list[float]:
    """Trains a module."""
    optimizer = torch.optim.SGD(called.parameters(), 0.005)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = called(*tokens(2, 12)(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_is_available():
    assert is_ortmodule_available()


def test_trains_as_eager_torch_does():
    expected = losses(module())
    found = losses(ORTModule(module()))
    assert max(abs(one - other) for one, other in zip(found, expected)) <= 1e-4


SAME: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda m: list(m.state_dict()),
    "parameters": lambda m: [id(value) for value in m.parameters()],
    "named_parameters": lambda m: [name for name, _ in m.named_parameters()],
    "buffers": lambda m: [id(value) for value in m.buffers()],
    "named_buffers": lambda m: [name for name, _ in m.named_buffers()],
    "children": lambda m: [id(one) for one in m.children()],
    "named_children": lambda m: [name for name, _ in m.named_children()],
    "modules": lambda m: [id(one) for one in m.modules()],
    "named_modules": lambda m: [name for name, _ in m.named_modules()],
    "get_parameter": lambda m: id(m.get_parameter("inner.weight")),
    "get_buffer": lambda m: id(m.get_buffer("calls")),
    "get_submodule": lambda m: id(m.get_submodule("inner")),
    "attribute": lambda m: id(m.inner),
    "signature": lambda m: inspect.signature(m.forward),
    "training": lambda m: m.training,
}


@pytest.mark.parametrize("name", SAME)
def test_shows_the_module_inside(name: str):
    inside = Forms()
    assert SAME[name](ORTModule(inside)) == SAME[name](inside)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "eval": (lambda m: m.eval(), lambda inside: not inside.training),
    "train": (lambda m: m.train(False), lambda inside: not inside.training),
    "double": (lambda m: m.double(), lambda inside: inside.inner.weight.dtype == torch.float64),
    "to": (lambda m: m.to(torch.float64), lambda inside: inside.inner.bias.dtype == torch.float64),
    "apply": (
        lambda m: m.apply(lambda one: setattr(one, "seen", True)),
        lambda inside: inside.seen and inside.inner.seen,
    ),
    "requires_grad_": (
        lambda m: m.requires_grad_(False),
        lambda inside: not inside.inner.weight.requires_grad,
    ),
    "register_buffer": (
        lambda m: m.register_buffer("added", torch.ones(1)) or m,
        lambda inside: "added" in dict(inside.named_buffers()),
    ),
    "register_parameter": (
        lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))) or m,
        lambda inside: "more" in dict(inside.named_parameters()),
    ),
    "load_state_dict": (
        lambda m: m.load_state_dict({k: v * 0 for k, v in m.state_dict().items()}) and m,
        lambda inside: not inside.inner.weight.any(),
    ),
    "set attribute": (lambda m: setattr(m, "note", 7) or m, lambda inside: inside.note == 7),
    "delete attribute": (
        lambda m: (setattr(m, "note", 7), delattr(m, "note"), m)[2],
        lambda inside: not hasattr(inside, "note"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_the_module_inside(name: str):
    inside = Forms()
    wrapped = ORTModule(inside)
    change, holds = CHANGES[name]
    assert change(wrapped) is wrapped and wrapped.module is inside
    assert holds(inside)


COPIES = {"pickle": lambda m: pickle.loads(pickle.dumps(m)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str):
    wrapped = ORTModule(mlp())
    batch = reals(4, 16)(0)
    expected = wrapped(*batch)
    copied = COPIES[name](wrapped)
    assert isinstance(copied, ORTModule) and copied.module is not wrapped.module
    assert copied(*batch).item() == pytest.approx(expected.item(), abs=1e-6)


def test_modes_keep_two_graphs():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout())
    twin = copy.deepcopy(layers)
    wrapped = ORTModule(layers)
    x = torch.randn(6, 8)
    for mode in (True, False, True):
        wrapped.train(mode)
        twin.train(mode)
        torch.manual_seed(1)
        expected = twin(x)
        torch.manual_seed(1)
        torch.testing.assert_close(wrapped(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layers[1].running_var, twin[1].running_var)
    assert layers[1].num_batches_tracked == 2


def test_hooks_of_parameters_fire():
    wrapped = ORTModule(mlp())
    seen = []
    wrapped.get_parameter("layers.0.weight").register_hook(lambda slope: seen.append(slope.shape))
    wrapped(*reals(4, 16)(0)).backward()
    assert seen == [(32, 16)]


LEVELS = {"1": {LEVEL: "1"}, "2": {LEVEL: "2"}, "configuration": {CONFIG: "plan.json"}}


@pytest.mark.parametrize("name", LEVELS)
def test_levels_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(["BiasGelu+:1:-1", "LayerNormalization+:1:2"]))
    kept = []
    expected = losses(ORTModule(module()))
    for key, value in LEVELS[name].items():
        monkeypatch.setenv(key, value)
    torch._dynamo.reset()
    wrapped = ORTModule(module())
    assert losses(wrapped) == expected
    kept = wrapped._backend._partition
    assert any(cluster.applied for cluster in kept.clusters)
    if name == "configuration":
        applied = {cluster.id: cluster.applied for cluster in kept.clusters}
        assert applied["BiasGelu+"] == 2 and applied["LayerNormalization+"] == 2


BAD_ENVIRONMENT = {
    "level": ({LEVEL: "3"}, ValueError, "0, 1 or 2, not '3'"),
    "policy": ({POLICY: "FALLBACK_NEVER"}, ValueError, "not 'FALLBACK_NEVER'"),
    "log level": ({"ORTMODULE_LOG_LEVEL": "LOUD"}, ValueError, "not 'LOUD'"),
    "no file": ({CONFIG: "none.json"}, OSError, "none.json"),
    "no JSON": ({CONFIG: "text.json"}, ValueError, "text.json is not JSON"),
    "no array": ({CONFIG: "object.json"}, ValueError, "type must be array, but is dict"),
    "fields": ({CONFIG: "fields.json"}, ValueError, "three fields 'id:strategy:count'"),
    "numbers": ({CONFIG: "numbers.json"}, ValueError, "strategy and count are numbers"),
    "strategy": ({CONFIG: "strategy.json"}, ValueError, "strategy is 0, 1 or 2"),
}
FILES = {
    "text.json": "Gelu+:1:1",
    "object.json": "{}",
    "fields.json": '["Gelu+:1"]',
    "numbers.json": '["Gelu+:one:1"]',
    "strategy.json": '["Gelu+:3:1"]',
}


@pytest.mark.parametrize("name", BAD_ENVIRONMENT)
def test_bad_environment(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        Path(file).write_text(text)
    variables, error, text = BAD_ENVIRONMENT[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(error, match=text):
        ORTModule(mlp())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a function": (lambda: ORTModule(len), TypeError, "wraps a torch.nn.Module"),  # type: ignore[arg-type]
    "DataParallel": (
        lambda: ORTModule(torch.nn.DataParallel(mlp())),
        ORTModuleTorchModelException,
        "DistributedDataParallel",
    ),
    "options": (lambda: ORTModule(mlp(), 3), TypeError, "are DebugOptions, not int"),  # type: ignore[arg-type]
    "adding": (
        lambda: ORTModule(mlp()).add_module("x", torch.nn.Identity()),
        NotImplementedError,
        "adding modules",
    ),
    "level type": (lambda: DebugOptions(log_level=1), TypeError, "a LogLevel, not int"),  # type: ignore[arg-type]
    "prefix type": (
        lambda: DebugOptions(save_onnx=True, onnx_prefix=3),  # type: ignore[arg-type]
        TypeError,
        "a str, not int",
    ),
    "no prefix": (lambda: DebugOptions(save_onnx=True), ValueError, "must not be empty"),
    "no folder": (
        lambda: DebugOptions(save_onnx=True, onnx_prefix="a", save_path="/nowhere"),
        OSError,
        "/nowhere",
    ),
    "no attribute": (lambda: ORTModule(mlp()).nothing, AttributeError, "nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    action, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        action()


class Lacking(torch.nn.Module):
    """An operator that the table does not have."""

    def forward(self, x: Any) -> Any:
        """Returns a number."""
        return torch.special.bessel_j0(x).sum()


def test_policy_disable_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(POLICY, "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleONNXModelException, match="bessel_j0") as raised:
        ORTModule(Lacking())(torch.ones(3))
    assert isinstance(raised.value, ORTModuleFallbackException)


FALLBACKS = {"default": "", "torch": "FALLBACK_FORCE_TORCH_FORWARD|FALLBACK_UNSUPPORTED_DATA"}


@pytest.mark.parametrize("name", FALLBACKS)
def test_policy_runs_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    if FALLBACKS[name]:
        monkeypatch.setenv(POLICY, FALLBACKS[name])
    wrapped = ORTModule(Lacking())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [wrapped(torch.ones(3)) for _ in range(2)]
    assert found[1] == Lacking()(torch.ones(3))
    told = [str(one.message) for one in caught if "bessel_j0" in str(one.message)]
    assert len(told) == (name == "default")


def test_report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    with caplog.at_level(logging.INFO, "orttraining"):
        losses(ORTModule(module(), DebugOptions(log_level=LogLevel.DEVINFO)), 2)
    whole, insight = (record.getMessage() for record in caplog.records)
    for line in (
        "***** ONNX Runtime Training (ORTModule) is accelerating your model *****",
        "ORTModule is enabled with following features ON/OFF for [training] mode:",
        "Memory Optimizer  :  OFF  :  Enable with env ORTMODULE_MEMORY_OPT_LEVEL=1/2",
        "Configs",
        "BiasGelu+:1:-1",
    ):
        assert line in whole, whole
    # 2 sequences of 12 words, 4 * 32 features, 4 bytes, in 2 layers.
    (row,) = (line for line in whole.splitlines() if "BiasGelu+:1:-1" in line)
    assert row.split()[-3:] == ["2", f"{2 * 2 * 12 * 128 * 4:,}", str(2 * 2 * 12 * 128 * 4)], row
    assert "Recompute subgraph BiasGelu+\n       |  Status       : Enabled, actual applied" in insight
    assert "Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=" in insight


def test_saves_models(tmp_path: Path):
    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    wrapped = ORTModule(mlp(), options)
    wrapped(*reals(4, 16)(0)).backward()
    wrapped.eval()
    with torch.no_grad():
        wrapped(*reals(4, 16)(0))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "net_forward_model_training.onnx",
        "net_backward_model_training.onnx",
        "net_execution_model_inference.onnx",
    }
    onnx = pytest.importorskip("onnx")
    for name in names:
        assert onnx.load(tmp_path / name).graph.node


def test_a_memory_limit_is_kept_or_refused():
    batch, inside = reals(64, 16)(0), mlp()
    expected = ORTModule(inside)(*batch).item()
    torch._dynamo.reset()
    assert ORTModule(inside, memory_limit="64 MiB")(*batch).item() == expected
    torch._dynamo.reset()
    with pytest.raises(Exception, match="(?i)memory"):
        ORTModule(inside, memory_limit=1024)(*batch)


PLANNED: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "transformer": (module, tokens(6, 12)),
    "dropout": (lambda: Language(causal=False, drop=0.1), tokens(6, 12)),
    "perceptron": (mlp, reals(16, 16)),
    "resnet": (resnet, reals(4, 3, 64, 64)),
}


def saved_of(called: Any, module: Any, batch: Any) -> tuple[Any, list[Any]]:
    """Returns the loss, and what autograd keeps of the forward pass beside parameters and inputs."""
    others = {one.data_ptr() for one in (*module.parameters(), *module.buffers(), *batch)}
    kept: dict[int, Any] = {}

    def note(saved: Any) -> Any:
        if saved.data_ptr() not in others:
            kept[saved.data_ptr()] = saved.detach()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        return called(*batch), list(kept.values())


def measured(wrapped: Any, batch: Any) -> StepPlan:
    """Does a first step, and returns what it took."""
    graphs: dict[str, Any] = {}
    wrapped._backend.backend.on_compiled = graphs.setdefault
    loss, kept = saved_of(wrapped, wrapped, batch)
    kept_bytes = sum(saved.nbytes for saved in kept)
    # Masks are drawn by torch.
    drawn = sum(saved.nbytes for saved in kept if saved.dtype == torch.bool)
    kept.clear()
    loss.backward()
    forward, backward = (
        graphs[kind].session.memory_use()["activations_peak"] for kind in ("forward", "backward")
    )
    return StepPlan(wrapped.plan(batch).level, forward + drawn, kept_bytes, backward)


def test_level_0_keeps_a_quarter_less_than_eager_torch():
    batch = tokens(6, 12)(0)
    plain = Language(causal=False, drop=0.1)
    _, kept = saved_of(plain, plain, batch)
    eager = sum(saved.untyped_storage().nbytes() for saved in kept)
    assert ORTModule(plain).plan(batch).kept_bytes <= 0.75 * eager


@pytest.mark.parametrize("name", PLANNED)
def test_a_step_takes_what_is_planned(name: str):
    make, batch = PLANNED[name]
    wrapped = ORTModule(make(), memory_limit="1 GiB")
    planned = wrapped.plan(batch(0))
    assert planned == measured(wrapped, batch(0))
    assert wrapped.plan() == planned


def test_a_limit_chooses_the_level():
    free = ORTModule(Language(causal=True, layers=6))
    example = tokens(8, 48)(0)
    whole = free.plan(example)
    levels = []
    for limit in (whole.peak_bytes, whole.peak_bytes - 1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        wrapped = ORTModule(Language(causal=True, layers=6), memory_limit=limit)
        planned = wrapped.plan(example)
        assert planned.peak_bytes <= limit
        found = measured(wrapped, example)
        assert found == planned
        levels.append(planned.level)
    assert levels[0] == 0 < levels[1]


def test_a_limit_below_the_minimum_is_refused():
    example = tokens(8, 48)(0)
    with pytest.raises(NotEnoughMemory, match="at least [0-9]+ bytes") as raised:
        ORTModule(module(), memory_limit=1000).plan(example)
    minimum = raised.value.minimum
    with pytest.raises(NotEnoughMemory, match=f"at least {minimum} bytes"):
        ORTModule(module(), memory_limit=minimum - 1)(*example)
    torch._dynamo.reset()
    ORTModule(module(), memory_limit=minimum)(*example).backward()


def test_plans_other_sizes():
    wrapped = ORTModule(module())
    example = tokens(2, 12)(0)
    assert wrapped.plan(example, batch=8, seq=24) == wrapped.plan(tokens(8, 24)(0))
    budget = wrapped.plan(tokens(9, 12)(0)).peak_bytes
    assert wrapped.largest_batch(budget, example) == 9
    assert wrapped.largest_batch(budget - 1, example) == 8
    assert wrapped.largest_batch(100, example) is None


UNPLANNED: dict[str, tuple[Callable[[], Any], str]] = {
    "no inputs": (lambda: ORTModule(mlp()).plan(batch=2), "give the inputs of a call"),
    "no budget": (
        lambda: ORTModule(mlp()).largest_batch(inputs=reals(2, 16)(0)),
        "needs a budget",
    ),
    "no gradient": (
        lambda: ORTModule(mlp().requires_grad_(False)).plan(reals(2, 16)(0)),
        "nothing in the module requires a gradient",
    ),
    "two graphs": (lambda: ORTModule(Recurrent()).plan(tokens(4, 7)(0)), "more than one graph"),
    "no limit": (
        lambda: ORTModule(mlp(), memory_limit="much").plan(reals(2, 16)(0)),
        "memory_limit",
    ),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_what_cannot_be_planned(name: str):
    action, text = UNPLANNED[name]
    with pytest.raises(ValueError, match=text):
        action()


def test_a_graph_that_is_kept_runs_backward_again():
    wrapped, twin = ORTModule(module()), module()
    for called in (wrapped, twin):
        loss = called(*tokens(2, 12)(0))
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, found), (_, expected) in zip(wrapped.named_parameters(), twin.named_parameters()):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4, msg=name)
