"""The optimizers for torch, checked against those of `torch.optim` and against the papers."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("onnxruntime has no optimizers for torch", allow_module_level=True)

from ort_runtime.torch import optim  # noqa: E402
from ort_runtime.training.ortmodule import ORTModule  # noqa: E402
from torch_models import mlp  # noqa: E402

STEPS = 10
SHAPES = [(4, 5), (7,), (2, 3, 4), (), (300, 3)]


def parameters(dtype: Any = torch.float32, shapes: Any = SHAPES) -> list[Any]:
    """Returns parameters of several ranks."""
    random = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradients(trained: list[Any], step: int) -> None:
    """Sets gradients from tiny to large, some of them 0."""
    random = torch.Generator().manual_seed(100 + step)
    for parameter in trained:
        shape = parameter.shape
        sizes = 10.0 ** torch.randint(-3, 2, shape, generator=random)
        drawn = torch.randn(shape, generator=random, dtype=torch.float64) * sizes
        drawn.view(-1)[2:3] = 0.0
        parameter.grad = drawn.to(parameter.dtype)


def train(optimizer: Any, steps: int = STEPS, first: int = 0) -> None:
    """Does steps with learning rates of their own."""
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    for step in range(first, first + steps):
        gradients(trained, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step % 3)
        optimizer.step()


def near(found: list[Any], expected: list[Any], tolerance: float) -> None:
    """Compares parameters."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.data, other.data, rtol=tolerance, atol=tolerance)


# References: from torch, and from the papers.


class Written(torch.optim.Optimizer):
    """An optimizer written down in torch's operations: a function of one parameter."""

    def __init__(self, params: Any, rule: Callable[..., None], **settings: Any) -> None:
        super().__init__(params, {"lr": 1e-3, **settings})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if parameter.numel():
                    self._rule(parameter, parameter.grad, state, group)


def moments(g: Any, m: Any, v: Any, group: Any, number: int) -> tuple[Any, Any]:
    """Updates the moments, and returns them without their bias."""
    beta1, beta2 = group["betas"]
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return m / (1 - beta1**number), v / (1 - beta2**number)


def lamb(x: Any, g: Any, state: Any, group: Any) -> None:
    """You et al. 2020, algorithm 2, with a trust ratio of 10 at most."""
    m = state.setdefault("m", torch.zeros_like(x))
    v = state.setdefault("v", torch.zeros_like(x))
    first, second = moments(g, m, v, group, state["step"])
    update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * x
    norm, update_norm = x.double().norm().item(), update.double().norm().item()
    ratio = min(norm / update_norm, 10.0) if norm > 0 and update_norm > 0 else 1.0
    x.add_(update, alpha=-group["lr"] * ratio)


def dynamic_map(signed: bool) -> Any:
    """The 8-bit numbers of Dettmers 2016, and of 2022 without a sign."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        numbers += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32)


def quantized(values: Any, signed: bool) -> Any:
    """Rounds each block of 256 to the nearest 8-bit number of its largest magnitude."""
    table, flat = dynamic_map(signed), values.reshape(-1).clone()
    for block in flat.split(256):
        scale = block.abs().max().float()
        if scale > 0:
            shares = (block.float() / scale)[:, None]
            block.copy_(table[(shares - table).abs().argmin(1)] * scale)
    return flat.view_as(values)


def adamw_8bit(x: Any, g: Any, state: Any, group: Any) -> None:
    """AdamW between whose steps the moments are quantized."""
    m = state.get("m", torch.zeros_like(x))
    v = state.get("v", torch.zeros_like(x))
    first, second = moments(g, m, v, group, state["step"])
    x.mul_(1 - group["lr"] * group["weight_decay"])
    x.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])
    state["m"], state["v"] = quantized(m, True), quantized(v, False)


OTHERS = {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.3}
EIGHT = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FACTORED = {"beta2_decay": -0.5, "eps": (0.001, 0.5), "d": 1.5, "weight_decay": 0.1}


def written(rule: Callable[..., None], **defaults: Any) -> Callable[..., Any]:
    """Returns what makes a written optimizer with defaults."""
    return lambda params, **settings: Written(params, rule, **{**defaults, **settings})


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {}),
    "AdamW, others": (optim.AdamW, torch.optim.AdamW, OTHERS),
    "Adafactor": (optim.Adafactor, torch.optim.Adafactor, {}),
    "Adafactor, others": (optim.Adafactor, torch.optim.Adafactor, FACTORED),
    "LAMB": (optim.LAMB, written(lamb, **{**EIGHT, "eps": 1e-6, "weight_decay": 0.0}), {}),
    "LAMB, others": (optim.LAMB, written(lamb), OTHERS),
    "AdamW8bit": (optim.AdamW8bit, written(adamw_8bit, **EIGHT), {}),
    "AdamW8bit, others": (optim.AdamW8bit, written(adamw_8bit), OTHERS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(name: str, dtype: Any):
    ours, theirs, settings = CASES[name]
    found, expected = parameters(dtype), parameters(dtype)
    train(ours(found, **settings))
    train(theirs(expected, **settings))
    # The learning rate is a float, also for parameters that are doubles.
    near(found, expected, 2e-5 if dtype is torch.float32 or "8bit" in name else 1e-7)


ALL: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "AdamW8bit": optim.AdamW8bit,
    "LAMB": optim.LAMB,
    "Adafactor": optim.Adafactor,
}


@pytest.mark.parametrize("name", ALL)
def test_a_saved_state_continues_with_the_same_bits(name: str):
    whole, parts = parameters(), parameters()
    train(ALL[name](whole))
    first = ALL[name](parts)
    train(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = ALL[name](parts)
    second.load_state_dict(torch.load(file))
    train(second, STEPS - 4, first=4)
    for one, other in zip(whole, parts):
        assert torch.equal(one, other)
    kinds = [{k: v.dtype for k, v in state.items()} for state in second.state.values()]
    assert kinds == [{k: v.dtype for k, v in state.items()} for state in first.state.values()]


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_states_of_torch_load_and_are_loaded(name: str):
    theirs, ours = getattr(torch.optim, name), ALL[name]
    expected = parameters()
    train(theirs(expected))
    for first, second in ((theirs, ours), (ours, theirs)):
        found = parameters()
        begun = first(found)
        train(begun, 4)
        rest = second(found)
        rest.load_state_dict(begun.state_dict())
        train(rest, STEPS - 4, first=4)
        near(found, expected, 2e-5)


def test_groups_have_settings_and_steps_of_their_own():
    # One parameter has no elements.
    found, expected = (parameters(shapes=[*SHAPES, (0, 4)]) for _ in range(2))

    def groups(trained: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": trained[:2], "weight_decay": 0.5},
            {"params": trained[2:], "betas": (0.5, 0.9)},
        ]

    made = [optim.AdamW(groups(found)), torch.optim.AdamW(groups(expected))]
    for trained, optimizer in zip((found, expected), made):
        for step in range(STEPS):
            gradients(trained, step)
            # Parameters without a gradient keep their values and their step counts.
            trained[step % len(trained)].grad = None
            optimizer.step()
    near(found, expected, 2e-5)
    added = [torch.nn.Parameter(torch.ones(3)) for _ in made]
    for trained, optimizer, one in zip((found, expected), made, added, strict=True):
        optimizer.add_param_group({"params": [one]})
        gradients([*trained, one], 50)
        optimizer.step()
    near([*found, added[0]], [*expected, added[1]], 2e-5)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda made: torch.optim.lr_scheduler.StepLR(made, 2, 0.5),
    "CosineAnnealingLR": lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, STEPS),
    # It changes the first beta, too.
    "OneCycleLR": lambda made: torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=STEPS),
}


def follow(make: Any, schedule: Callable[[Any], Any]) -> list[Any]:
    """Trains with a schedule. Returns the parameters."""
    trained = parameters()
    optimizer = make(trained, lr=0.05)
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        gradients(trained, step)
        optimizer.step()
        scheduler.step()
    return trained


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str):
    schedule = SCHEDULES[name]
    near(follow(optim.AdamW, schedule), follow(torch.optim.AdamW, schedule), 2e-5)


def train_scaled(make: Any, wrap: Callable[[Any], Any]) -> list[float]:
    """Trains with a scaled loss, accumulation, clipping, and one step that overflows."""
    torch.manual_seed(0)
    module = mlp()
    wrapped, optimizer = wrap(module), make(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    random, losses = torch.Generator().manual_seed(1), []
    for step in range(6):
        for _ in range(2):
            x = torch.randn(8, 16, generator=random)
            loss = wrapped(x, torch.randint(0, 10, (8,), generator=random)) / 2
            losses.append(loss.item())
            scaler.scale(loss).backward()
        if step == 3:
            next(module.parameters()).grad[0] = math.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def test_scaled_losses_accumulation_and_clipping():
    expected = train_scaled(torch.optim.AdamW, lambda module: module)
    found = train_scaled(optim.AdamW, ORTModule)
    assert max(abs(one - other) for one, other in zip(found, expected)) <= 1e-4


def test_closures_and_copies():
    trained = parameters()
    optimizer = copy.deepcopy(optim.AdamW(trained))
    copied = [one for group in optimizer.param_groups for one in group["params"]]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum((one**2).sum() for one in copied)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    near(trained, parameters(), 0.0)


def test_memory_that_is_not_contiguous():
    found, expected = (
        [torch.nn.Parameter(one.data.to(memory_format=torch.channels_last))]
        for (one,) in (parameters(shapes=[(6, 4, 3, 3)]), parameters(shapes=[(6, 4, 3, 3)]))
    )
    train(optim.Adafactor(found))
    train(torch.optim.Adafactor(expected))
    near(found, expected, 2e-5)
    assert found[0].is_contiguous(memory_format=torch.channels_last)


#: The bytes of the state of a matrix.
BYTES: dict[str, Callable[[int, int], int]] = {
    "AdamW": lambda rows, columns: 8 * rows * columns,
    "LAMB": lambda rows, columns: 8 * rows * columns,
    "AdamW8bit": lambda rows, columns: 2 * rows * columns + 2 * 4 * (rows * columns // 256),
    "Adafactor": lambda rows, columns: 4 * (rows + columns),
}


def resident() -> int:
    """Returns the bytes that the process has resident, which are its peak from here on."""
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    return status("VmRSS")


def status(key: str) -> int:
    """Returns a number of bytes of the process."""
    with open("/proc/self/status") as lines:
        (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("name", BYTES)
def test_steps_take_the_memory_of_the_state(name: str):
    rows, columns = 4096, 2048
    parameter = torch.nn.Parameter(torch.ones(rows, columns))
    parameter.grad = torch.full_like(parameter, 0.5)
    small = torch.nn.Parameter(torch.ones(3, 4))
    small.grad = torch.ones_like(small)
    optimizer = ALL[name]([{"params": [small]}, {"params": []}])
    optimizer.step()
    of_small = optimizer.state_bytes()
    optimizer.param_groups[1]["params"].append(parameter)
    before = resident()
    optimizer.step()
    optimizer.step()
    allowed = BYTES[name](rows, columns)
    assert optimizer.state_bytes() - of_small == allowed
    # A session, and pages of the heap: the parameter has 32 MiB.
    assert status("VmHWM") - before <= allowed + (4 << 20)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rate": (lambda: optim.AdamW(parameters(), lr=-1.0), "Invalid lr value: -1.0"),
    "beta": (
        lambda: optim.LAMB(parameters(), betas=(0.9, 1.0)),
        "Invalid beta parameter at index 1: 1.0",
    ),
    "decay": (lambda: optim.Adafactor(parameters(), beta2_decay=0.5), "beta2_decay should be <= 0"),
    "threshold": (lambda: optim.Adafactor(parameters(), d=0.0), "d should be > 0 but is: 0.0"),
    "type": (
        lambda: optim.AdamW(parameters(torch.bfloat16)),
        r"shape \[4, 5\] has type torch.bfloat16, and torch.float32 or torch.float64 is expected",
    ),
    "layout": (
        lambda: optim.AdamW([torch.nn.Parameter(torch.ones(2, 2).to_sparse())]),
        "updates dense tensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


LOADED: dict[str, tuple[Any, Any, str]] = {
    "another optimizer": (torch.optim.AdamW, optim.AdamW8bit, "needs first_codes"),
    "amsgrad": (
        lambda trained: torch.optim.AdamW(trained, amsgrad=True),
        optim.AdamW,
        "AdamW has no amsgrad",
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_states_that_do_not_fit(name: str):
    theirs, ours, text = LOADED[name]
    begun = theirs(parameters())
    train(begun, 1)
    with pytest.raises(ValueError, match=text):
        ours(parameters()).load_state_dict(begun.state_dict())


def test_sparse_gradients():
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    parameter.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        optim.AdamW([parameter]).step()
